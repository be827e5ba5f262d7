"""A driver to be killed: ``python cluster_driver.py MOMENT``, which it prints: ``in a call`` or ``starting``."""

from __future__ import annotations

import sys
import threading

import group_support as support

from core_rl_cluster import RayHosts


def main(moment: str) -> None:
    with RayHosts(2, 1, wait_s=60.0, lease_s=10.0) as hosts:
        if moment == "starting":  # actors are there, and ranks are not
            print_line(moment)
        with support.echo_group(support.SPEC, support.config(dp=2), timeout_s=300, hosts=hosts) as group:
            if moment == "in a call":
                threading.Timer(0.5, print_line, (moment,)).start()
            group.run(support.hold_interpreter_lock)


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
