"""Procedures that several checks share."""
