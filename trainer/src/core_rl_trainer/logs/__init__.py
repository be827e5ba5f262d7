"""Metrics, records and pages of a training run."""
