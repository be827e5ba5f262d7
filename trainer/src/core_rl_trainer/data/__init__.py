"""Datasets of prompts, demonstrations and preferences."""
