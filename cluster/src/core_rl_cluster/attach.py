"""Agents that are started elsewhere (`AttachHosts`), or on the driver's own machine (`RehearsalHosts`)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from core_rl.errors import ClusterError
from core_rl.launch.hosts import LOOPBACK
from core_rl.launch.process import signals_for_driver
from core_rl_cluster.agent_hosts import AGENT, AgentHosts
from core_rl_cluster.hello import KEY_VARIABLE, given_key

__all__ = ["ATTACH_PORT", "AttachHosts", "RehearsalHosts"]

logger = logging.getLogger(__name__)

ATTACH_PORT = 29700
"""The default port of the driver; that of torchrun is 29400."""


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


@dataclass(eq=False, repr=False)
class RehearsalHosts(AgentHosts):
    """Several machines in one: errors of agents and connections show before there is a cluster.

    Ranks alternate between the machines, so that already two ranks are on two of them. All share the devices of this
    machine; for the rest see `AgentHosts`.
    """

    machines: int = 2
    _: KW_ONLY
    address: str | None = LOOPBACK

    def __post_init__(self) -> None:
        super().__post_init__()
        self._agents: list[subprocess.Popen[bytes]] = []

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the agents, in the order of their machines."""
        return list(self._agents)

    def _launch(self, driver: str, key: bytes) -> None:
        environ = {**os.environ, KEY_VARIABLE: key.hex()}
        for number in range(self.machines):
            command = [sys.executable, *AGENT, "--driver", driver, "--machine", str(number), "--with-parent"]
            with signals_for_driver():
                agent = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE)
            self._agents.append(agent)

    def _check_launched(self) -> None:
        for number, agent in enumerate(self._agents):
            if (code := agent.poll()) is not None:
                raise ClusterError(
                    f"the agent of machine {number} ended with exit code {code}; see its output"
                )

    def _end_launched(self) -> None:
        for agent in self._agents:
            if agent.stdin is not None:
                agent.stdin.close()
        for agent in self._agents:
            agent.wait()
        self._agents.clear()

    def _places(self, machines: Sequence[int], devices: Sequence[int]) -> list[tuple[int, int]]:
        return [(machine, device) for device in devices for machine in machines]
