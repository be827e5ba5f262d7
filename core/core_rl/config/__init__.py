"""Configs: frozen records, read from YAML with dotted overrides. Nothing here imports torch."""
