"""A kit for engines over Hugging Face models: building, packed attention, heads, optimizer."""
