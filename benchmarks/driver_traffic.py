"""Bytes and CPU seconds of the driver in a GRPO step of up to 1,024 ranks.

    python benchmarks/driver_traffic.py --ranks 8 64 --tokens 1000000

`EngineGroup` plans, splits, pickles, sends and collects as in a run. Each rank is a TCP connection to a single process,
which answers for all ranks. Seconds are CPU seconds of the driver; the bandwidth and the FLOP/s of a rank are assumed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from core_rl import EngineGroup, load_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.channel import Buffer, Channel
from core_rl.distributed.process_group import RankAddress
from core_rl.launch.hosts import Rank, Slot
from core_rl.launch.kept import KeptMessage
from core_rl.launch.messages import pack_reply
from core_rl.launch.remote import RankState
from core_rl.launch.remote import answer as answer_call
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.algorithms.objectives import PolicyLoss

PER_MACHINE = 8
FORWARD_PASSES = 2
"""Log-probs of the policy and of the reference."""
SMALL_CALLS = 4
"""`lr_scheduler_step`, `set_version`, `upload_weights`, and `progress` for a checkpoint."""
SEQUENCE_TOKENS = 4096
BUDGET = MicroBatchSpec(max_tokens=32_768)
LOSS = PolicyLoss(kl_coef=0.01).spec(temperature=1.0)
METRICS = {f"metric_{number}": 0.5 for number in range(24)}
"""Metrics, as many as the actor of a recipe reports."""
MODELS = {"8B": (8e9, 1), "70B": (70e9, 8)}
"""Parameters, and tensor-parallel ranks that share a shard of the batch."""


class Answers:
    """An engine whose calls cost nothing."""

    progress = None

    def __init__(self, _: EngineSpec, config: TrainEngineConfig) -> None:
        self._layout = config.layout

    def initialize(self, address: RankAddress, _: object) -> None:
        """Set the coordinates of this rank: tensor-parallel ranks are neighbours."""
        self.data_parallel_rank, within = divmod(address.rank, self._layout.tp)
        self.data_parallel_size, self.is_output_rank = self._layout.dp, within == 0

    def forward(self, batch: SequenceBatch, *_: object) -> ModelOutput:
        """Log-probs of the right length."""
        return ModelOutput(logprobs=torch.zeros(batch.num_tokens))

    def train_batch(self, *_: object) -> dict[str, float]:
        """Metrics."""
        return METRICS

    def destroy(self) -> None:
        """Nothing is left."""


def answer(sockets: Sequence[socket.socket]) -> None:
    """Take a call from every connection, then answer all calls, as ranks inside a collective do."""
    torch.set_num_threads(1)
    ranks = [(Channel(sock), defaultdict[int, RankState](RankState)) for sock in sockets]
    replies = [pack_reply(None) for _ in sockets]
    try:
        while True:
            for (channel, _), reply in zip(ranks, replies, strict=True):
                channel.send_parts(reply)
            replies = [answer_call(channel.receive_parts(), state) for channel, state in ranks]
    except (EOFError, OSError):
        return


class Clock:
    """Bytes, and CPU seconds until the first byte, until the last byte sent, and until the results."""

    sent = received = 0
    prepare_s = send_s = collect_s = 0.0
    first_send = last_send = 0.0

    def measure(self, call: Callable[[], object]) -> None:
        """Add ``call``, which sends once and collects once."""
        self.first_send = self.last_send = 0.0
        start = time.process_time()
        call()
        self.prepare_s += self.first_send - start
        self.send_s += self.last_send - self.first_send
        self.collect_s += time.process_time() - self.last_send

    def seconds(self, bandwidth: float) -> float:
        """Waiting time of the ranks at ``bandwidth`` bytes a second."""
        sending, collecting = self.sent / bandwidth, self.received / bandwidth
        return self.prepare_s + max(self.send_s, sending) + max(self.collect_s, collecting)


class CountingChannel(Channel):
    """A channel that counts bytes."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        super().__init__(sock)
        self._clock = clock

    def send_parts(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        self._clock.first_send = self._clock.first_send or time.process_time()
        super().send_parts(parts, deadline)
        self._clock.sent += sum(memoryview(part).nbytes for part in parts)

    def receive_parts(self, deadline: float | None = None) -> list[Buffer]:
        self._clock.last_send = self._clock.last_send or time.process_time()
        parts = super().receive_parts(deadline)
        self._clock.received += sum(memoryview(part).nbytes for part in parts)
        return parts


class FakeRank:
    """A rank without a process."""

    place, pid = "", 0

    def __init__(self, rank: int, machine: int, sock: socket.socket, clock: Clock) -> None:
        self.rank, self.machine = rank, machine
        self.channel: Channel = CountingChannel(sock, clock)
        self.sentinel = os.eventfd(0)
        self._clock = clock

    def keep(self, parts: Sequence[Buffer], _: float) -> KeptMessage:
        """Keep a message in memory, in place of a connection to another machine."""
        self._clock.first_send = self._clock.first_send or time.process_time()
        self._clock.sent += sum(memoryview(part).nbytes for part in parts)
        return KeptMessage.of(parts)

    def exit_reason(self) -> str:
        """No process."""
        return "closed its connection"

    def stacks(self, ask: bool = False) -> str:
        """No stacks."""
        return ""

    def wait(self, _: float) -> None:
        """No process."""

    def kill(self) -> None:
        """No process."""

    def release(self) -> None:
        """Close its descriptors."""
        self.channel.close()
        os.close(self.sentinel)


class FakeHosts:
    """Machines whose ranks are connections to one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process: Any = None

    def slots(self, count: int, *_: object) -> list[Slot]:
        """Places, one machine after the other."""
        return [Slot(n // PER_MACHINE, n % PER_MACHINE) for n in range(count)]

    def cores(self, _: int) -> int:
        """CPU cores of a machine."""
        return PER_MACHINE

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        """Start the process, which answers for all ranks."""
        with socket.create_server(("127.0.0.1", 0), backlog=len(ranks)) as server:
            pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in ranks]
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=answer, args=([far for _, far in pairs],), daemon=True)
        self._process.start()
        for near, far in pairs:
            far.close()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [
            FakeRank(number, slot.machine, near, self._clock)
            for (number, slot), (near, _) in zip(ranks, pairs, strict=True)
        ]

    def address_of(self, _: int) -> str:
        """Address of no use: these ranks open no store."""
        return "127.0.0.1"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


@contextmanager
def fake_group(ranks: int, tp: int) -> Iterator[tuple[EngineGroup, Clock]]:
    """A group of ``ranks``, each ``tp`` of which get the same part of a batch."""
    hosts = FakeHosts(clock := Clock())
    config = load_config("megatron")(
        model={"config": {}}, layout={"dp": ranks // tp, "tp": tp}, optimizer=None
    )
    group = EngineGroup("megatron", config, hosts=hosts, threads_per_rank=1, make_engine=Answers)
    group.rank_set._store_port = 0  # these ranks do not meet
    try:
        with group:
            yield group, clock
    finally:
        hosts.close()


@lru_cache(maxsize=1)
def make_batch(tokens: int) -> SequenceBatch:
    """The fields of a GRPO batch with a reference when it is trained on: skewed lengths, in groups of 8."""
    random = torch.Generator().manual_seed(0)
    count = max(8, tokens // SEQUENCE_TOKENS // 8 * 8)
    weights = torch.exp(0.8 * torch.randn(count, generator=random))
    lengths = (weights / weights.sum() * tokens).clamp(min=16).to(torch.int32)
    total = int(lengths.sum())
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
    floats = ("logprobs", "prox_logprobs", "ref_logprobs", "token_rewards", "advantages")
    return SequenceBatch(
        input_ids=torch.zeros(total, dtype=torch.long),
        cu_seqlens=bounds,
        tokens={
            "loss_mask": torch.ones(total, dtype=torch.bool),
            "versions": torch.zeros(total, dtype=torch.long),
            **{name: torch.zeros(total) for name in floats},
        },
        sequences={"rewards": torch.zeros(count), "group": torch.arange(count) // 8},
        meta={"stop_reason": ["stop"] * count},
    )


def measure(tokens: int, ranks: int, tp: int, repeats: int) -> Clock:
    """The cheapest of ``repeats`` steps, after a step for warming up."""
    batch, clocks = make_batch(tokens), list[Clock]()
    with fake_group(ranks, tp) as (group, clock):
        for _ in range(1 + repeats):
            vars(clock).clear()
            for _ in range(FORWARD_PASSES):
                clock.measure(lambda: group.forward(batch, BUDGET))
            clock.measure(lambda: group.train_batch(batch, LOSS, BUDGET))
            for _ in range(SMALL_CALLS):
                clock.measure(lambda: group.progress)
            clocks.append(copy(clock))
    return min(clocks[1:], key=lambda clock: clock.seconds(1e12))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 64, 512, 1024))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1_000_000, 16_000_000))
    parser.add_argument("--flops", type=float, default=400e12, help="model FLOP/s of a rank")
    parser.add_argument("--gbits", type=float, default=25.0, help="bandwidth of the driver, in Gbit/s")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        title=f"driver of a GRPO step, {arguments.gbits:g} Gbit/s, {arguments.flops / 1e12:g} TFLOP/s a rank"
    )
    for column in (
        "model",
        "ranks",
        "tokens",
        "sent, MB",
        "received, MB",
        "CPU s: prepare",
        "send",
        "collect",
    ):
        table.add_column(column, justify="right")
    table.add_column("in all, s", justify="right")
    table.add_column("% of the step", justify="right")
    cases = list(product(arguments.tokens, arguments.ranks, MODELS.items()))
    for tokens, ranks, (model, (parameters, tp)) in track(cases, description="measuring"):
        clock = measure(tokens, ranks, tp, arguments.repeats)
        # 6 FLOPs for a parameter and token to train, 2 for each forward pass.
        step_s = (6 + 2 * FORWARD_PASSES) * parameters * tokens / (ranks * arguments.flops)
        driver_s = clock.seconds(arguments.gbits * 1e9 / 8)
        cells = [f"{clock.sent / 1e6:,.0f}", f"{clock.received / 1e6:,.0f}"]
        cells += [f"{value:.3f}" for value in (clock.prepare_s, clock.send_s, clock.collect_s, driver_s)]
        table.add_row(
            model, f"{ranks:,}", f"{tokens:,}", *cells, f"{100 * driver_s / (driver_s + step_s):.2f}"
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
