"""One measurement in many frameworks, as docs/field.md shows it: ``python -m field FRAMEWORK``."""
