"""The checks, grouped by topic. See `core_rl_conformance.catalogue` for how to add one."""
