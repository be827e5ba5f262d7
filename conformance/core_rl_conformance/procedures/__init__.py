"""What several checks do in the same way."""
