"""Metrics, records and the page of a run."""
