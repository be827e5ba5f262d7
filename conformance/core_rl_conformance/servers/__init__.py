"""Servers as engines under test: by their address, or started by a command."""
