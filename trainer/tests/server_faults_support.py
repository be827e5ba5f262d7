"""Faults of real servers with requests in flight, which a stopped process holds until the test lets go of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from server_stub import wait_for
from server_training_support import (
    MISMATCH,
    Published,
    publishing,
    recording,
    require_each_once,
    run,
    servers_of,
)

from core_rl.data.batch import SequenceBatch
from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.server import Server
from core_rl_oracle.oracle import Oracle
from core_rl_trainer.run.online import OnlineLearner
from core_rl_trainer.run.rollouts import Rollouts

LIMIT_S, HANG_S = 120.0, 300.0
STOPPED_S, RUNNING_S = 0.2, 0.05
"""Parts of a period of a slow server."""


@dataclass
class Faults:
    """The faults of a run, by the step at whose beginning each server is stopped."""

    by_step: Mapping[int, Fault]
    in_flight: int
    """Requests that a stopped server has before its fault."""
    owners: Mapping[str, Server] = field(default_factory=dict)
    """Servers with the processes, by address; by default the run's engine has launched them."""
    happened: list[str] = field(default_factory=list)
    """The names of the faults, in their order."""
    problems: list[BaseException] = field(default_factory=list)
    """Errors of threads."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set at the step after the fault."""
    syncing: threading.Event = field(default_factory=threading.Event)
    """Set when the first weight sync after the stop begins."""
    stopped: Server | None = None
    """The server that was stopped before the next request was sent to it."""
    armed: bool = False

    def owner(self, server: Server) -> Server:
        """The server with the process of ``server``."""
        return self.owners.get(server.address, server)

    def signal(self, server: Server, number: signal.Signals) -> None:
        """Send a signal to the process of ``server`` and all its children."""
        process = self.owner(server).process
        assert process is not None
        os.killpg(process.pid, number)

    def stop_if_armed(self, server: Server) -> None:
        """Stop ``server``, to which a request is about to be sent."""
        if self.armed:
            self.armed = False
            self.signal(server, signal.SIGSTOP)
            self.stopped = server

    def run(self, step: int, servers: tuple[Server, ...]) -> None:
        """Wait until requests are in flight on a stopped server, and have its fault happen."""
        try:
            wait_for(lambda: self.stopped is not None, LIMIT_S)
            stopped, fault = self.stopped, self.by_step[step]
            assert stopped is not None
            wait_for(lambda: stopped.in_flight >= self.in_flight, LIMIT_S)
            fault(self, stopped, [server for server in servers if server is not stopped])
            self.happened.append(fault.__name__)
        except BaseException as error:
            self.problems.append(error)
            if self.stopped is not None:
                self.signal(self.stopped, signal.SIGCONT)
            raise


Fault = Callable[[Faults, Server, list[Server]], None]


def killed(faults: Faults, server: Server, others: list[Server]) -> None:
    """Kill ``server``; the engine replaces it."""
    faults.signal(server, signal.SIGKILL)
    wait_for(lambda: not server.ready, LIMIT_S)


def hung(faults: Faults, server: Server, others: list[Server]) -> None:
    """Leave ``server`` stopped; the engine replaces it."""
    wait_for(lambda: not server.ready, HANG_S)


def stalled(faults: Faults, server: Server, others: list[Server]) -> None:
    """Continue ``server`` when a weight sync has begun, or the others have nothing left to do."""
    wait_for(lambda: faults.syncing.is_set() or not any(other.in_flight for other in others), LIMIT_S)
    assert server.in_flight >= faults.in_flight
    faults.signal(server, signal.SIGCONT)


def slow(faults: Faults, server: Server, others: list[Server]) -> None:
    """Let ``server`` compute a fifth of the time until the next fault or the end."""
    while not faults.ended.wait(STOPPED_S):
        faults.signal(server, signal.SIGCONT)
        faults.ended.wait(RUNNING_S)
        faults.signal(server, signal.SIGSTOP)
    faults.signal(server, signal.SIGCONT)


def restarted(faults: Faults, server: Server, others: list[Server]) -> None:
    """Stop and start ``server`` as its owner, of whom the engine knows nothing."""
    owner = faults.owner(server)
    assert owner.process is not None and owner.start is not None
    owner.process.stop()
    wait_for(lambda: not server.ready, LIMIT_S)
    owner.process = owner.start()


@contextmanager
def happening(faults: Faults) -> Iterator[Faults]:
    """Runs have ``faults``."""
    threads: list[threading.Thread] = []
    busy, inner, publish = Server.busy, Rollouts.training_batch, OnlineLearner.sync

    @contextmanager
    def trapped(server: Server) -> Iterator[ServedAdapter]:
        with busy(server) as adapter:
            faults.stop_if_armed(server)
            yield adapter

    def beset(rollouts: Rollouts, step: int, prompts: Any) -> SequenceBatch:
        if step in faults.by_step:
            faults.ended.clear()
            faults.syncing.clear()
            faults.stopped, faults.armed = None, True
            threads.append(threading.Thread(target=faults.run, args=(step, servers_of(rollouts.engine))))
            threads[-1].start()
        batch = inner(rollouts, step, prompts)
        if step in faults.by_step:
            wait_for(lambda: faults.stopped is not None, LIMIT_S)
        if threads and step not in faults.by_step:
            faults.ended.set()
            threads.pop().join(LIMIT_S)
        return batch

    def synced(loop: OnlineLearner, version: int) -> None:
        faults.syncing.set()
        publish(loop, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnlineLearner, "sync", synced)
        patch.setattr(Server, "busy", trapped)
        patch.setattr(Rollouts, "training_batch", beset)
        yield faults
    assert not threads and not faults.problems


def check_faulty_run(
    recipe: Mapping[str, Any], by_step: Mapping[int, Fault], owners: Mapping[str, Server] | None = None
) -> Published:
    """Train an asynchronous run with faults, which loses no completion and uses none twice."""
    steps, group = recipe["steps"], recipe["rollout"]["group_size"]
    faults = Faults(by_step, group, owners or {})
    with (
        publishing(Path(recipe["output_dir"]).parent) as published,
        recording() as batches,
        happening(faults),
    ):
        rows = run(recipe)
    assert faults.happened == [fault.__name__ for fault in by_step.values()]
    assert published.versions == list(range(steps + 1)), "each server had the weights of each version"
    assert [row["version"] for row in rows] == list(range(1, steps + 1))
    assert max(row["staleness_max"] for row in rows) == recipe["rollout"]["max_head_offpolicyness"]
    require_each_once(batches, group)
    require_versions(batches, published)
    return published


def require_versions(batches: list[SequenceBatch], published: Published) -> None:
    """The log-probs of all sampled tokens are those of the weights whose version the tokens carry."""
    for batch in batches:
        for version in batch["versions"][batch.loss_mask].unique().tolist():
            of_version = batch.loss_mask & (batch["versions"] == version)
            expected = _logprobs(Oracle(published.exported(version)), batch)
            errors = (expected - batch["logprobs"].double())[of_version].abs()
            assert float(errors.max()) <= MISMATCH, f"tokens of version {version}"


def _logprobs(oracle: Oracle, batch: SequenceBatch) -> torch.Tensor:
    """Log-probs of the tokens of ``batch``, float64 ``[T]``; 0 for the first of a sequence."""
    parts = []
    for row in batch.input_ids.split(batch.lengths):
        with torch.no_grad():
            logits = oracle.model(input_ids=row[None]).logits[0, :-1].double()
        selected = torch.log_softmax(logits, -1).gather(1, row[1:, None]).squeeze(1)
        parts.append(torch.cat([selected.new_zeros(1), selected]))
    return torch.cat(parts)
