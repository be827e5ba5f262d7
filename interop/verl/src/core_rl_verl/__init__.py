"""verl's FSDP engine and losses as black boxes for core-rl's conformance suite."""
