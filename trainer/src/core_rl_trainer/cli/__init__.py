"""The command `core-rl train`."""
