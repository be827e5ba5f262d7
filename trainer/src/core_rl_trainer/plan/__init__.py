"""The plan of a run: everything that follows from its recipe, decided once."""
