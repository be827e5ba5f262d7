"""`AttachHosts`: machines whose agents are started elsewhere."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from core_rl_cluster.agent_hosts import AgentHosts
from core_rl_cluster.key import given_key

__all__ = ["ATTACH_PORT", "AttachHosts"]

ATTACH_PORT = 29700
"""The default port of the driver; that of torchrun is 29400."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AttachHosts(AgentHosts):
    """Machines with agents that were started by hand, by ssh, ``torchrun`` or Kubernetes: `core-rl agent` on each.

    The driver and the agents know one key, which is in ``key_file``, or in the environment variable
    ``CORE_RL_CLUSTER_KEY``. For the rest see `AgentHosts`; ``port`` is fixed, since the agents have to know it.
    """

    _: KW_ONLY
    port: int = ATTACH_PORT
    key_file: str | Path | None = None

    def _key(self) -> bytes:
        return given_key(None if self.key_file is None else Path(self.key_file))

    def _launch(self, driver: str, key: bytes) -> None:
        logger.info(
            "waiting for %d machines; on each, start: core-rl agent --driver %s", self.machines, driver
        )

    def _check_launched(self) -> None:
        """Nothing is known about agents that others start."""

    def _end_launched(self) -> None:
        """Agents end by themselves when the driver lets them go."""
