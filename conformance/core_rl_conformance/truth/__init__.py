"""What a check expects: the oracle, the plain model's errors, and the tolerance that follows."""
