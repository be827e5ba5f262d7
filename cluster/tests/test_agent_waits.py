"""One limit for all that machines are waited for, however often agents are launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core_rl.distributed.authentication import new_key
from core_rl.errors import ClusterError
from core_rl_cluster import agent_hosts
from core_rl_cluster.agent_hosts import AgentHosts


class Slow(AgentHosts):
    """Each launch takes 280 s, and fails; after the third the hosts give up."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__(machines=1, address="127.0.0.1", wait_s=300.0)
        self.clock, self.limits = clock, list[float]()

    def _key(self) -> bytes:
        return new_key()

    def _launch(self, driver: str, key: bytes) -> None:
        self.limits.append(self.time_left())
        self.clock.now += 280.0

    def _check_launched(self) -> None:
        if len(self.limits) == 3:
            raise ClusterError("no machine came")
        self.launch_in_time("127.0.0.1:1", b"")

    def _end_launched(self) -> None:
        pass


def test_launches_share_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(agent_hosts, "time", SimpleNamespace(monotonic=lambda: clock.now))
    hosts = Slow(clock)
    with pytest.raises(ClusterError, match="no machine came"):
        hosts.open()
    # The first has all of wait_s, others what agents get that were launched late.
    assert hosts.limits == [300.0, 60.0, 60.0]
