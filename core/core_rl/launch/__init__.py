"""Ranks in processes of their own, driven from one: `core_rl.launch.group.EngineGroup`."""
