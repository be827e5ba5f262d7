"""The version of core-rl."""

__version__ = "0.1.0"
