"""Environments of other libraries, behind `core_rl_trainer.environments.Environment`."""
