"""The checks, grouped by what they look at. See `core_rl_conformance.catalogue` for how to add one."""
