"""A new engine to start from: what ``core-rl new-engine`` writes."""
