"""Training loops and what they are made of."""
