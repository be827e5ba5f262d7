"""A driver to be killed: ``python cluster_driver.py KIND MACHINES RANKS_PER_MACHINE MOMENT``, which it prints.

The moments are ``in a call`` and ``starting``, when agents are there and ranks are not.
"""

from __future__ import annotations

import sys
import threading

import group_support as support
from cluster_hosts import LEASE_S, make_hosts

from core_rl.launch.group import EngineGroup
from core_rl_cluster.agent_hosts import AgentHosts

__all__ = ["main"]


def main(kind: str, machines: int, ranks_per_machine: int, moment: str) -> None:
    hosts = make_hosts(kind, machines, ranks_per_machine, LEASE_S)
    if moment == "starting":
        assert isinstance(hosts, AgentHosts)
        hosts.open()
        print_line(moment)
    config = support.config(dp=machines * ranks_per_machine)
    group: EngineGroup
    with support.echo_group(support.SPEC, config, timeout_s=300, hosts=hosts) as group:
        if moment == "in a call":
            threading.Timer(0.5, print_line, (moment,)).start()
        group.run(support.hold_interpreter_lock)


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
