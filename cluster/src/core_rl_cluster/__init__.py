"""Ranks of core-rl on many machines, by an agent on each: `SlurmHosts`, `RayHosts` and `AttachHosts`."""

from core_rl_cluster.agent_hosts import AgentHosts
from core_rl_cluster.attach import AttachHosts, RehearsalHosts
from core_rl_cluster.ray import RayHosts
from core_rl_cluster.slurm import SlurmHosts

__all__ = ["AgentHosts", "AttachHosts", "RayHosts", "RehearsalHosts", "SlurmHosts"]

__version__ = "0.1.0"
