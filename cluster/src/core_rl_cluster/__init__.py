"""Ranks of core-rl on many machines, as children of Ray actors: `RayHosts`."""

from core_rl_cluster.ray import RayHosts

__all__ = ["RayHosts"]

__version__ = "0.1.0"
