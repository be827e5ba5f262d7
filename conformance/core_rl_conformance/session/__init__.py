"""The suite as a pytest session: what is run, what became of it, what is printed."""
