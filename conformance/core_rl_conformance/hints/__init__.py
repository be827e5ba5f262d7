"""Hints on a failure: known shapes of errors, each in a sentence."""
