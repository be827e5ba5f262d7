"""The driver's part of a GRPO step at up to 1,024 ranks: bytes, seconds, and its share of the step.

    python benchmarks/driver_traffic.py
    python benchmarks/driver_traffic.py --page docs/scaling.md

The driver is the real one: `EngineGroup` plans, splits, pickles, sends and collects. Its ranks are connections
over TCP to one process that answers for all of them at the same time. Seconds are CPU seconds of the driver, so
ranks and other programs do not count. Bandwidth and the time of a step are assumptions: both are arguments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from core_rl import EngineGroup
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.channel import Buffer, Channel
from core_rl.launch.messages import pack_reply, unpack_call
from core_rl.launch.pool import RankPool
from core_rl.launch.remote import RankInfo
from core_rl.launch.worker import RankState
from core_rl_trainer.algorithms.policy_loss import PolicyLoss

RANKS = (8, 64, 512, 1024)
TOKENS = (1_000_000, 16_000_000)
PER_MACHINE = 8
NETWORKS = {"25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8}
LIMIT = 0.03
"""The share of a step from which on the driver is in the way."""
FORWARD_PASSES = 2
"""Log-probs of the policy and of the reference."""
SMALL_CALLS = 4
"""`lr_scheduler_step`, `set_version`, `upload_weights`, and `progress` for a checkpoint."""
READ_BY_LOSS = ("loss_mask", "logprobs", "prox_logprobs", "ref_logprobs", "advantages")
SEQUENCE_TOKENS = 4096
BUDGET = MicroBatchSpec(max_tokens=32_768)
LOSS = PolicyLoss(kl_coef=0.01).spec(temperature=1.0)
METRICS = {f"metric_{number}": 0.5 for number in range(24)}
"""As many numbers as the actor of a recipe reports."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, and the tensor-parallel ranks that all get the same part of the batch."""

    title: str
    parameters: float
    tp: int


MODELS = (Model(title="8B", parameters=8e9, tp=1), Model(title="70B", parameters=70e9, tp=8))


# ------------------------------------------------------- ranks: one process that answers for all


class Answers:
    """An engine whose calls cost nothing."""

    progress = None

    def __init__(self, is_output_rank: bool) -> None:
        self.is_output_rank = is_output_rank

    def forward(self, batch: SequenceBatch, *_: object) -> ModelOutput:
        """Log-probs of the right length."""
        return ModelOutput(logprobs=torch.zeros(batch.num_tokens))

    def train_batch(self, *_: object) -> dict[str, float]:
        """Metrics."""
        return METRICS


def answer(sockets: Sequence[socket.socket], outputs: Sequence[bool]) -> None:
    """Take a call from every connection, then answer them all, as ranks do that a collective holds together."""
    torch.set_num_threads(1)
    channels = [Channel(sock) for sock in sockets]
    states = [RankState(engine=Answers(is_output)) for is_output in outputs]
    try:
        while True:
            replies = [_reply(channel, state) for channel, state in zip(channels, states, strict=True)]
            for channel, reply in zip(channels, replies, strict=True):
                channel.send_parts(reply)
    except (EOFError, OSError):
        return


def _reply(channel: Channel, state: RankState) -> list[Buffer]:
    _, fn, arguments = unpack_call(channel.receive_parts())
    return pack_reply(fn(state, *arguments))


def on_connection(fn: Callable[..., Any], engine: Answers, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The result of one rank for each of ``calls``."""
    return [fn(engine, *call) for call in calls]


# ----------------------------------------------------------------------- the driver and its clock


@dataclass(kw_only=True)
class Cost:
    """Bytes and CPU seconds of a call, or of several."""

    sent: int = 0
    received: int = 0
    prepare_s: float = 0.0
    """Planning, splitting and pickling."""
    send_s: float = 0.0
    collect_s: float = 0.0
    """Waiting, unpickling, and putting outputs in order."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def seconds(self, bandwidth: float) -> float:
        """With a network of ``bandwidth`` bytes a second; ranks wait all the while."""
        return (
            self.prepare_s
            + max(self.send_s, self.sent / bandwidth)
            + max(self.collect_s, self.received / bandwidth)
        )


class Clock:
    """Marks of CPU time in the present call."""

    def __init__(self) -> None:
        self.cost = Cost()
        self.first_send = self.last_send = 0.0

    def measure(self, call: Callable[[], object]) -> Cost:
        """The cost of ``call``, which sends once and collects once."""
        self.cost, self.first_send = Cost(), 0.0
        start = time.process_time()
        call()
        end = time.process_time()
        self.cost.prepare_s = self.first_send - start
        self.cost.send_s = self.last_send - self.first_send
        self.cost.collect_s = end - self.last_send
        return self.cost


class CountingChannel(Channel):
    """A channel that counts bytes."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        super().__init__(sock)
        self._clock = clock

    def send_parts(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        self._clock.first_send = self._clock.first_send or time.process_time()
        super().send_parts(parts, deadline)
        self._clock.cost.sent += sum(memoryview(part).nbytes for part in parts)
        self._clock.last_send = time.process_time()

    def receive_parts(self, deadline: float | None = None) -> list[Buffer]:
        parts = super().receive_parts(deadline)
        self._clock.cost.received += sum(memoryview(part).nbytes for part in parts)
        return parts


class FakeRank:
    """What a pool needs of a rank that lives."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank, self.channel, self.pid = rank, channel, 0
        self.sentinel = os.eventfd(0)

    def wait(self, _timeout_s: float) -> bool:
        """It has no process."""
        return True

    def kill(self) -> None:
        """It has no process."""

    def release(self) -> None:
        """Close its descriptors."""
        self.channel.close()
        os.close(self.sentinel)


class FakeRankSet:
    """Ranks of one engine, which are never closed by themselves."""

    def __init__(self, pool: RankPool, infos: list[RankInfo]) -> None:
        self.pool, self.infos = pool, infos

    def check_open(self, _: int) -> None:
        """It is."""

    def engine(self, _: int) -> list[RankInfo]:
        """The ranks."""
        return self.infos


class FakeGroup(EngineGroup):
    """A group whose ranks are connections: one for each rank, or one for several, which gets equal arguments once."""

    def __init__(self, pool: RankPool, infos: list[RankInfo], ranks_per_connection: int) -> None:
        self.timeout_s, self._engine_id = 600.0, 0
        self._ranks: Any = FakeRankSet(pool, infos)
        self.ranks_per_connection = ranks_per_connection

    def call_ranks(
        self, name: str, fn: Callable[..., Any], per_rank: Sequence[tuple[object, ...]]
    ) -> list[Any]:
        if self.ranks_per_connection == 1:
            return super().call_ranks(name, fn, per_rank)
        width = self.ranks_per_connection
        chunks = [{id(args): args for args in per_rank[i : i + width]} for i in range(0, len(per_rank), width)]
        calls = [(list(chunk.values()),) for chunk in chunks]
        replies = super().call_ranks(name, partial(on_connection, fn), calls)
        results: dict[int, Any] = {}
        for chunk, found in zip(chunks, replies, strict=True):
            results |= zip(chunk, found, strict=True)
        return [results[id(args)] for args in per_rank]


@contextmanager
def fake_group(ranks: int, tp: int, ranks_per_connection: int) -> Iterator[tuple[FakeGroup, Clock]]:
    """A group of ``ranks``, each ``tp`` of which get the same part of a batch."""
    infos = [
        RankInfo(data_parallel_rank=r // tp, data_parallel_size=ranks // tp, is_output_rank=r % tp == 0)
        for r in range(ranks)
    ]
    firsts = infos[::ranks_per_connection]
    with socket.create_server(("127.0.0.1", 0), backlog=len(firsts)) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in firsts]
    outputs = [info.is_output_rank or ranks_per_connection > 1 for info in firsts]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=answer, args=([far for _, far in pairs], outputs), daemon=True)
    process.start()
    clock, pool = Clock(), RankPool()
    for number, (near, far) in enumerate(pairs):
        far.close()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pool._ranks.append(FakeRank(number, CountingChannel(near, clock)))
    try:
        yield FakeGroup(pool, infos, ranks_per_connection), clock
    finally:
        process.kill()
        process.join()
        pool.close(0.0)


# ------------------------------------------------------------------------------------------ a step


def make_batch(tokens: int) -> SequenceBatch:
    """The fields of a GRPO batch with a reference when it is trained on: sequences of a skewed length, in groups of 8."""
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


def step(group: FakeGroup, clock: Clock, batch: SequenceBatch, read_only: bool) -> dict[str, Cost]:
    """The cost of the calls of one step; with ``read_only``, an update sends what its loss reads."""
    trained = batch.only(READ_BY_LOSS) if read_only else batch
    forward = sum_of(clock.measure(lambda: group.forward(batch, BUDGET)) for _ in range(FORWARD_PASSES))
    update = clock.measure(lambda: group.train_batch(trained, LOSS, BUDGET))
    small = sum_of(clock.measure(lambda: group.progress) for _ in range(SMALL_CALLS))
    return {"forward": forward, "update": update, "small": small}


def sum_of(costs: Iterator[Cost]) -> Cost:
    """All of them."""
    return sum(costs, Cost())


@dataclass(frozen=True, kw_only=True)
class Design:
    """A way to send."""

    title: str
    ranks_per_connection: int = 1
    read_only: bool = False


DESIGNS = (
    Design(title="a copy for each rank (today)"),
    Design(title="a copy for each machine", ranks_per_connection=PER_MACHINE),
    Design(title="a tree: a copy for each 8 machines", ranks_per_connection=8 * PER_MACHINE),
    Design(
        title="a copy for each machine, of what the loss reads",
        ranks_per_connection=PER_MACHINE,
        read_only=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    model: Model
    ranks: int
    tokens: int
    design: Design
    calls: dict[str, Cost]

    @property
    def cost(self) -> Cost:
        """Of the whole step."""
        return sum_of(iter(self.calls.values()))

    def step_s(self, flops: float) -> float:
        """Seconds of the ranks: 6 FLOPs for a parameter and token to train, 2 for each forward pass."""
        work = (6 + 2 * FORWARD_PASSES) * self.model.parameters * self.tokens
        return work / (self.ranks * flops)

    def share(self, flops: float, bandwidth: float) -> float:
        """The driver's part of the step."""
        own = self.cost.seconds(bandwidth)
        return own / (own + self.step_s(flops))


def measure(model: Model, ranks: int, tokens: int, design: Design, repeats: int) -> Case:
    """The cheapest of ``repeats`` steps, after one that counts for nothing."""
    batch = make_batch(tokens)
    with fake_group(ranks, model.tp, min(ranks, design.ranks_per_connection)) as (group, clock):
        found = [step(group, clock, batch, design.read_only) for _ in range(1 + repeats)][1:]
    best = {name: min((calls[name] for calls in found), key=lambda cost: cost.seconds(1e12)) for name in found[0]}
    return Case(model=model, ranks=ranks, tokens=tokens, design=design, calls=best)


# ----------------------------------------------------------------------------------------- the page


def traffic_table(cases: Sequence[Case]) -> list[str]:
    """Bytes and CPU seconds of a step as it is."""
    lines = [
        "| model | ranks | tokens | sent, MB | received, MB | CPU s: prepare | send | collect | small calls |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        if case.design is not DESIGNS[0]:
            continue
        large = case.calls["forward"] + case.calls["update"]
        small = case.calls["small"]
        lines.append(
            f"| {label(case)} | {large.sent / 1e6:,.0f} | {large.received / 1e6:,.0f} | {large.prepare_s:.3f} | "
            f"{large.send_s:.3f} | {large.collect_s:.3f} | {small.seconds(1e12):.3f} |"
        )
    return lines


def share_table(cases: Sequence[Case], flops: float, network: str) -> list[str]:
    """The share of a step, for each design."""
    lines = [
        f"| model | ranks | tokens | step, s | {' | '.join(design.title for design in DESIGNS)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(DESIGNS)}",
    ]
    rows: dict[str, list[Case]] = {}
    for case in cases:
        rows.setdefault(label(case), []).append(case)
    for name, found in rows.items():
        cells = " | ".join(percent(case.share(flops, NETWORKS[network])) for case in found)
        lines.append(f"| {name} | {found[0].step_s(flops):,.2f} | {cells} |")
    return lines


def label(case: Case) -> str:
    """The first cells of a row."""
    return f"{case.model.title}, `tp = {case.model.tp}` | {case.ranks:,} | {case.tokens // 1_000_000}M"


def percent(share: float) -> str:
    """Bold above the limit."""
    text = f"{100 * share:.2f} %"
    return f"**{text}**" if share > LIMIT else text


def report(cases: Sequence[Case], flops: float) -> str:
    """The tables, with their assumptions."""
    sequence = f"sequences of {SEQUENCE_TOKENS:,} tokens on average, {FORWARD_PASSES} forward passes and one update"
    parts = [
        [f"A GRPO step: {sequence}. CPU seconds of the driver on {platform.machine()}, TCP on one machine, "
         f"torch {torch.__version__}."],
        traffic_table(cases),
    ]
    for network in NETWORKS:
        parts.append(
            [f"The driver's share of a step at {network}, ranks of {flops / 1e12:,.0f} TFLOP/s each, bold above "
             f"{LIMIT:.0%}:"]
        )
        parts.append(share_table(cases, flops, network))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def write_page(page: Path, text: str) -> None:
    """Replace the figures of ``page``."""
    marks = "<!-- figures: driver_traffic.py -->\n", "<!-- end of figures -->"
    pattern = re.compile(f"({re.escape(marks[0])}).*?({re.escape(marks[1])})", re.DOTALL)
    old = page.read_text(encoding="utf-8")
    new, count = pattern.subn(lambda found: f"{found[1]}\n{text}\n{found[2]}", old)
    if not count:
        raise SystemExit(f"{page} has no {marks[0].strip()}")
    page.write_text(new, encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--flops", type=float, default=400e12, help="model FLOP/s of a rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path, help="write the figures into this page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for model in MODELS:
        for ranks in arguments.ranks:
            for tokens in arguments.tokens:
                for design in DESIGNS:
                    cases.append(measure(model, ranks, tokens, design, arguments.repeats))
                    print(f"{label(cases[-1])} | {design.title}: {cases[-1].cost}", flush=True)
    text = report(cases, arguments.flops)
    print(text)
    if arguments.page:
        write_page(arguments.page, text)


if __name__ == "__main__":
    main()
