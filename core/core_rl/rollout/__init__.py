"""Rollouts: requests, workflows that turn samples into batches, and the executor that runs them."""
