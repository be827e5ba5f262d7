"""TRL's trainers as black boxes for core-rl's conformance suite."""
