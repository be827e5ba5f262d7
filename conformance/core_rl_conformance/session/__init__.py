"""The suite as a pytest session: cases, outcomes, and the printed summary."""
