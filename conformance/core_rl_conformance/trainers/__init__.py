"""Whole trainers as black boxes: their own loss, cut into micro-batches, scale, schedule and loop are judged."""
