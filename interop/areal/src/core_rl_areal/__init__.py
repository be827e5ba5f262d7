"""AReaL's FSDP engine as a black box for core-rl's conformance suite."""
