"""Rollout workflows: single-turn, multi-turn, greedy baseline."""
