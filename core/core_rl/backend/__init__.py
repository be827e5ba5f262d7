"""Interfaces that a plugin implements: backends, protocols, and the records they exchange with the core."""
