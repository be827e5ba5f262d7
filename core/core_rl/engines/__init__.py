"""What an engine is: its spec, its discovery, and the interfaces that a plugin fills in."""
