"""A rank, an agent, a machine, its cable or the driver fails: seconds until it shows, and what is left.

    python benchmarks/cluster_failures.py
    python benchmarks/cluster_failures.py --kinds attach --losses rank cable --page docs/many-machines.md

Machines are pretend ones (Linux namespaces, so it needs root), with real Slurm and real Ray on them: those of the tests
on several machines. What was measured is kept in a file, and the table is made from all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.page import write_figures
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "core" / "cluster_tests"), str(ROOT / "core" / "tests")]

import cluster_functions as functions  # noqa: E402
import cluster_losses as losses  # noqa: E402
from cluster_hosts import Cluster, cluster_of  # noqa: E402

from core_rl.errors import RankDied  # noqa: E402
from core_rl.launch.group import EngineGroup  # noqa: E402
from core_rl.launch.hosts.base import Hosts  # noqa: E402

KINDS = ("attach", "slurm", "ray")
EVENTS = {
    "rank": "`kill -9` of a rank",
    "agent": "`kill -9` of the agent of a machine",
    "machine": "a machine loses its power",
    "cable": "a machine loses its network",
    "driver": "`kill -9` of the driver",
}
LEASE_S = 5.0
LIMIT_S = 60.0
"""After which what is still there counts as left."""
SETTLE_S = 0.5
"""For a call to be under way on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one failure did."""

    kind: str
    loss: str
    seen_s: float | None
    """Until the driver's call raised; None for a driver that is gone."""
    gone_s: float
    """Until nothing was left that should not be."""
    left: list[str]
    """What was left after `LIMIT_S`."""
    load: float
    """Processes that ran or waited for a core, in the last minute."""


def trials(kind: str, loss: str, times: int) -> Iterator[Trial]:
    """``times`` failures of one sort."""
    consumed = loss in ("machine", "cable")
    machines = 1 + times if consumed else 2
    with (
        tempfile.TemporaryDirectory(prefix="core-rl-") as folder,
        cluster_of(kind, machines, Path(folder)) as cluster,
    ):
        if loss == "driver":
            yield from (driver_killed(cluster) for _ in range(times))
        elif loss == "agent":
            for _ in range(times):
                yield from group_losses(cluster, loss, [1])
        else:
            yield from group_losses(cluster, loss, range(1, machines) if consumed else [1] * times)


def driver_killed(cluster: Cluster) -> Trial:
    """A driver is killed while ranks on two machines work for it."""
    with losses.driver_at(cluster, "in a call") as driver:
        start = time.monotonic()
        driver.kill()
        gone_s, left = time_until_gone(driver.left, start)
    time_until_gone(cluster.left, start)  # Slurm's own processes, before the next trial
    return Trial(
        kind=cluster.kind, loss="driver", seen_s=None, gone_s=gone_s, left=left, load=os.getloadavg()[0]
    )


def group_losses(cluster: Cluster, loss: losses.Loss, victims: Any) -> Iterator[Trial]:
    """Failures of the machines ``victims``, one after the other, each in a group of that machine and the first."""
    needed = max(victims) + 1
    hosts = cluster.hosts(needed, 1, LEASE_S)
    try:
        with losses.group_on(hosts, range(needed)) as group:
            group.run(functions.host_name)  # all fork servers have done their imports
        for victim in victims:
            yield group_loss(cluster, hosts, loss, victim)
    finally:
        hosts.close()
    time_until_gone(cluster.left, time.monotonic())


def group_loss(cluster: Cluster, hosts: Hosts, loss: losses.Loss, victim: int) -> Trial:
    """One failure during a call."""
    before = set(cluster.left())
    group: EngineGroup
    with losses.group_on(hosts, [0, victim]) as group:
        group.run(functions.host_name)
        start: list[float] = []

        def lose() -> None:
            start.append(time.monotonic())
            losses.lose(cluster, group, 1, victim, loss)

        threading.Timer(SETTLE_S, lose).start()
        try:
            group.run(functions.wait, LIMIT_S)
        except RankDied:
            seen_s = time.monotonic() - start[0]

    def left() -> Mapping[int, str]:
        whole = {} if loss == "rank" else losses.ours(cluster.left([victim]))
        return whole | {pid: line for pid, line in cluster.left([0, victim]).items() if pid not in before}

    gone_s, still = time_until_gone(left, start[0])
    return Trial(
        kind=cluster.kind, loss=loss, seen_s=seen_s, gone_s=gone_s, left=still, load=os.getloadavg()[0]
    )


def time_until_gone(left: Callable[[], Mapping[int, str]], start: float) -> tuple[float, list[str]]:
    """Seconds from ``start`` until ``left()`` is empty, and what it is after `LIMIT_S`."""
    while (found := left()) and time.monotonic() - start < LIMIT_S:
        time.sleep(0.01)
    return time.monotonic() - start, list(found.values())


# ----------------------------------------------------------------------------------------- the table


def table(found: list[Trial]) -> str:
    """The figures as Markdown."""
    loads = [trial.load for trial in found]
    lines = [
        f"Pretend machines on one with {os.cpu_count()} cores ({platform.machine()}), next to other programs: load "
        f"{min(loads):.0f} to {max(loads):.0f}. A lease of {LEASE_S:g} s. Seconds: median, and the longest.",
        "",
        "| what fails | hosts | times | until the driver's error, s | until nothing is left, s | left |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for loss, words in EVENTS.items():
        for kind in KINDS:
            if rows := [trial for trial in found if (trial.kind, trial.loss) == (kind, loss)]:
                seen = [trial.seen_s for trial in rows if trial.seen_s is not None]
                left = sorted({line for trial in rows for line in trial.left})
                cells = [words, f"`{kind}`", str(len(rows)), spread(seen), spread([t.gone_s for t in rows])]
                lines.append(f"| {' | '.join(cells)} | {', '.join(left) or 'nothing'} |")
    return "\n".join(lines)


def spread(seconds: list[float]) -> str:
    """Median and maximum."""
    return f"{median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--losses", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument(
        "--record", type=Path, default=Path("cluster_failures.jsonl"), help="what was measured"
    )
    parser.add_argument("--page", type=Path, help="write the table into this page")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        for loss in arguments.losses:
            for trial in trials(kind, loss, arguments.times):
                with arguments.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
    lines = arguments.record.read_text(encoding="utf-8").splitlines()
    text = table([Trial(**json.loads(line)) for line in lines])
    if arguments.page:
        write_figures(arguments.page, Path(__file__).name, text)
    Console(width=200).print(text, markup=False, highlight=False)


if __name__ == "__main__":
    main()
