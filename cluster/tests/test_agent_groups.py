"""Groups whose ranks run under agents: as local ones; lost ranks name their machine and leave nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import group_support as support
import pytest

from core_rl.errors import BatchError, ClusterError, ConfigError, GroupError, RankDied, RankTimeout
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import LocalHosts, Slot
from core_rl_cluster.agent_hosts import AGENT
from core_rl_cluster.attach import AttachHosts, RehearsalHosts
from core_rl_cluster.hello import KEY_VARIABLE

LONG_LEASE_S = 300.0
"""Nothing that a test sees at once waits for it."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[RehearsalHosts]:
    with RehearsalHosts(machines=2, ranks_per_machine=2, lease_s=LONG_LEASE_S) as opened:
        yield opened


def group_on(hosts: RehearsalHosts, machines: list[int] | None = None, **degrees: int) -> EngineGroup:
    return support.echo_group(
        support.SPEC, support.config(**degrees), timeout_s=120, hosts=hosts, machines=machines
    )


@pytest.mark.nightly
def test_ranks_are_on_both_machines(hosts: RehearsalHosts) -> None:
    with group_on(hosts, dp=2) as group:
        assert group.run(support.whoami) == [(0,), (1,)]
        parents = group.run(support.starter_pid)
        assert parents == [agent.pid for agent in hosts.agents]
        group.initialize(config=support.config(dp=4))
        assert group.run(support.whoami) == [(0,), (1,), (2,), (3,)]
        assert group.run(support.starter_pid) == [agent.pid for agent in hosts.agents] * 2


def test_machines_can_be_chosen(hosts: RehearsalHosts) -> None:
    with group_on(hosts, machines=[1], dp=2) as group:
        assert set(group.run(support.starter_pid)) == {hosts.agents[1].pid}


def test_groups_share_machines(hosts: RehearsalHosts) -> None:
    with group_on(hosts, dp=2) as first, group_on(hosts, dp=2) as second:
        assert first.run(support.whoami) == second.run(support.whoami) == [(0,), (1,)]
        assert not set(first.pids) & set(second.pids)


def test_errors_name_the_machine(hosts: RehearsalHosts) -> None:
    with group_on(hosts, dp=2) as group:
        with pytest.raises(BatchError, match="7 tokens too many") as caught:
            group.run(support.fail, (1,), BatchError("7 tokens too many"))
        assert f"rank 1 of 2 on {hosts.found[1].hostname} (machine 1)" in "\n".join(caught.value.__notes__)
        assert group.run(support.whoami) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("SIGKILL", r"was killed by SIGKILL \(out of memory"),
        ("_exit", "ended with exit code 3"),
        ("SIGSEGV", "was killed by SIGSEGV"),
    ],
)
def test_ended_ranks_are_named(hosts: RehearsalHosts, how: str, reason: str) -> None:
    with group_on(hosts, dp=2) as group:
        pids = group.pids
        with pytest.raises(RankDied, match=rf"rank 1 on .* \(machine 1\) {reason}.* during die") as caught:
            group.run(support.die, how)
        assert ("in die" in caught.value.traceback) == (how == "SIGSEGV")
        assert not support.survivors(pids)
        group.restart()
        group.initialize()
        assert group.run(support.whoami) == [(0,), (1,)]


def test_stacks_come_from_all_machines(hosts: RehearsalHosts) -> None:
    with group_on(hosts, dp=2) as group:
        group.timeout_s = 1.0
        with pytest.raises(RankTimeout, match="did not answer hang") as caught:
            group.run(support.hang)
        assert caught.value.traceback.count("in hang") == 2


@pytest.mark.nightly
def test_a_lost_agent_is_a_lost_machine() -> None:
    with RehearsalHosts(machines=2, lease_s=LONG_LEASE_S) as hosts, group_on(hosts, dp=2) as group:
        pids = group.pids
        hosts.agents[1].kill()
        with pytest.raises(
            RankDied, match=r"rank 1 on .* \(machine 1\) was lost with the agent of its machine"
        ):
            group.run(support.hang)
        assert not support.survivors(pids)
        with pytest.raises(ClusterError, match=r"machine 1 \(.*\) was lost with the agent.*Start an agent"):
            group.restart()
        with pytest.raises(GroupError, match="this group has ended"):
            group.run(support.whoami)


@pytest.mark.nightly
def test_silent_machines_end_after_their_lease() -> None:
    """Stopped agents and drivers send nothing and close nothing, as with a cut cable."""
    with RehearsalHosts(machines=2, lease_s=1.0) as hosts, group_on(hosts, dp=2) as group:
        hosts.agents[1].send_signal(signal.SIGSTOP)
        pids = group.pids
        try:
            with pytest.raises(
                RankDied, match=r"with its machine, from which nothing came for 1 s during hang"
            ):
                group.run(support.hang)
        finally:
            hosts.agents[1].send_signal(signal.SIGCONT)
        assert not support.survivors(pids)


SILENT_DRIVER = """
import signal, os, sys
sys.path[:0] = {path!r}
import group_support as support
from core_rl_cluster.attach import RehearsalHosts

if __name__ == "__main__":
    hosts = RehearsalHosts(machines=2, lease_s={lease_s})
    hosts.open()
    group = support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120, hosts=hosts)
    group.initialize()
    print(*group.pids, *[agent.pid for agent in hosts.agents], flush=True)
    group.run(support.hang)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "lease_s"),
    [(signal.SIGKILL, LONG_LEASE_S), pytest.param(signal.SIGSTOP, 1.0, marks=pytest.mark.nightly)],
    ids=["killed", "silent"],
)
def test_nothing_outlives_the_driver(tmp_path: Path, how: signal.Signals, lease_s: float) -> None:
    script = tmp_path / "driver.py"
    script.write_text(SILENT_DRIVER.format(path=sys.path, lease_s=lease_s))
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 4
        driver.send_signal(how)
        assert not support.survivors(pids[:2])
        # A stopped parent leaves its children as zombies, which have ended all the same.
        support.eventually(lambda: not any(_runs(pid) for pid in pids[2:]))
    finally:
        driver.kill()
        driver.wait()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_early_ends_of_agents_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_rl_cluster.attach.AGENT", ("-c", "raise SystemExit(7)"))
    with pytest.raises(ClusterError, match="the agent of machine 0 ended with exit code 7"):
        RehearsalHosts(machines=1).open()


def test_fewer_machines_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = RehearsalHosts(machines=2, wait_s=5.0)
    hosts.fewest = 1
    launch = hosts._launch

    def launch_one(driver: str, key: bytes) -> None:
        hosts.machines = 1
        launch(driver, key)
        hosts.machines = 2

    monkeypatch.setattr(hosts, "_launch", launch_one)
    with hosts:
        assert [info.number for info in hosts.found] == [0]
        with pytest.raises(ConfigError, match=r"machines = \[0, 1\]: there are \[0\]"):
            hosts.slots(1, [0, 1], None)


@pytest.mark.nightly
def test_staying_agents_serve_the_next_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    first = AttachHosts(1, port=0, address="127.0.0.1")
    agents: list[subprocess.Popen[bytes]] = []

    def launch(driver: str, _key: bytes) -> None:
        agents.append(subprocess.Popen([sys.executable, *AGENT, "--driver", driver, "--stay"]))

    monkeypatch.setattr(first, "_launch", launch)
    try:
        with first:
            assert first._listener is not None
            port = int(first._listener.endpoint.rpartition(":")[2])
            pid = first.found[0].pid
        with AttachHosts(1, port=port, address="127.0.0.1") as second:
            assert second.found[0].pid == pid
            with support.echo_group(support.SPEC, support.config(dp=1), timeout_s=120, hosts=second) as group:
                assert group.run(support.starter_pid) == [pid]
    finally:
        agents[0].kill()
        agents[0].wait()


# ------------------------------------------------------------------------ places


@pytest.mark.parametrize(
    ("count", "machines", "devices", "expected"),
    [
        (2, None, None, [0, 1]),
        (2, [0], [5, 4], [5, 4]),
        (2, [1], None, r"machines = \[1\]: there is one machine, 0"),
        (2, None, [3], r"devices = \[3\] for 2 ranks; name a different one for each rank"),
        (2, None, [3, 3], r"devices = \[3, 3\] for 2 ranks"),
    ],
)
def test_places_on_this_machine(
    count: int, machines: list[int] | None, devices: list[int] | None, expected: list[int] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            LocalHosts().slots(count, machines, devices)
    else:
        actual = LocalHosts().slots(count, machines, devices)
        assert actual == [Slot(0, device) for device in expected]


@pytest.mark.parametrize(
    ("count", "machines", "devices", "expected"),
    [
        (3, None, None, [(0, 0), (1, 0), (0, 1)]),
        (2, [1], [6, 4], [(1, 6), (1, 4)]),
        (5, None, None, r"a layout of 5 ranks, and machines \[0, 1\] have places for 4, 2 each"),
        (2, [1, 1], None, r"machines = \[1, 1\]: there are \[0, 1\]; name each of them"),
        (1, [2], None, r"machines = \[2\]: there are \[0, 1\]"),
        (2, None, [0, 0], r"devices = \[0, 0\]; name different devices"),
    ],
)
def test_places_on_machines(
    hosts: RehearsalHosts,
    count: int,
    machines: list[int] | None,
    devices: list[int] | None,
    expected: list[tuple[int, int]] | str,
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            hosts.slots(count, machines, devices)
    else:
        assert [(slot.machine, slot.device) for slot in hosts.slots(count, machines, devices)] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"machines": 0}, "machines = 0; it must be positive"),
        ({"ranks_per_machine": 0}, "ranks_per_machine = 0"),
        ({"lease_s": 0.0}, "lease_s = 0.0; it must be positive"),
        ({"wait_s": -1.0}, "wait_s = -1.0"),
    ],
)
def test_invalid_hosts_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RehearsalHosts(**fields)  # type: ignore[arg-type]


def test_more_ranks_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_rl_cluster.agent_hosts.most_open_files", lambda: 1024)
    with pytest.raises(
        ConfigError, match="128 machines with 8 ranks each need 3456 open files.*limit is 1024"
    ):
        RehearsalHosts(machines=128, ranks_per_machine=8).open()


def test_colocated_groups_refuse_hosts() -> None:
    with (
        support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120) as group,
        pytest.raises(ConfigError, match="hosts, machines, devices and threads_per_rank belong to the proc"),
    ):
        support.echo_group(
            support.SPEC, support.config(dp=2), colocate_with=group, hosts=LocalHosts(), timeout_s=120
        )
