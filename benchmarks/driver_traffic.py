"""The driver's part of a GRPO step at up to 1,024 ranks: bytes, seconds, and its share of the step.

    python benchmarks/driver_traffic.py
    python benchmarks/driver_traffic.py --page docs/scaling.md

The driver is the real one: `EngineGroup` plans, splits, pickles, sends and collects. Its hosts are not: each rank is a
connection over TCP to one process, which answers for all of them at the same time. Seconds are CPU seconds of the
driver, so ranks and other programs do not count. Bandwidth and the FLOP/s of a rank are assumptions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from core_rl import EngineGroup, load_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.channel import Buffer, Channel
from core_rl.distributed.process_group import RankAddress
from core_rl.launch import pool
from core_rl.launch.hosts.base import Rank, Slot
from core_rl.launch.kept import KeptMessage
from core_rl.launch.messages import pack_reply
from core_rl.launch.remote import RankState
from core_rl.launch.remote import answer as answer_call
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.algorithms.policy_loss import PolicyLoss

RANKS = (8, 64, 512, 1024)
TOKENS = (1_000_000, 16_000_000)
FEW_TOKENS = 1_000_000
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

    def __init__(self, _: EngineSpec, config: TrainEngineConfig) -> None:
        self._layout = config.layout

    def initialize(self, address: RankAddress, _: object) -> None:
        """Take a place: tensor-parallel ranks are neighbours."""
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
    """Take a call from every connection, then answer them all, as ranks do that a collective holds together."""
    torch.set_num_threads(1)
    channels = [Channel(sock) for sock in sockets]
    states: list[dict[int, RankState]] = [defaultdict(RankState) for _ in sockets]
    replies = [pack_reply(None) for _ in sockets]
    try:
        while True:
            for channel, reply in zip(channels, replies, strict=True):
                channel.send_parts(reply)
            replies = [
                answer_call(channel.receive_parts(), state)
                for channel, state in zip(channels, states, strict=True)
            ]
    except (EOFError, OSError):
        return


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
        self.cost, self.first_send, self.last_send = Cost(), 0.0, 0.0
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

    def receive_parts(self, deadline: float | None = None) -> list[Buffer]:
        self._clock.last_send = self._clock.last_send or time.process_time()
        parts = super().receive_parts(deadline)
        self._clock.cost.received += sum(memoryview(part).nbytes for part in parts)
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
        """The machine is this one, so that memory stands for the connection to it."""
        self._clock.first_send = self._clock.first_send or time.process_time()
        self._clock.cost.sent += sum(memoryview(part).nbytes for part in parts)
        return KeptMessage.of(parts)

    def exit_reason(self) -> str:
        """It has no process."""
        return "closed its connection"

    def stacks(self, ask: bool = False) -> str:
        """It has none."""
        return ""

    def wait(self, _: float) -> None:
        """It has no process."""

    def kill(self) -> None:
        """It has no process."""

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
        return [
            Slot(machine=n // PER_MACHINE, device=n % PER_MACHINE, cores=PER_MACHINE) for n in range(count)
        ]

    def start(self, ranks: Sequence[tuple[int, Slot]]) -> list[Rank]:
        """Start the process, which says hello for all ranks."""
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
        """Nobody asks there."""
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
    group._ranks._store_port = 0  # these ranks do not meet
    try:
        with group:
            yield group, clock
    finally:
        hosts.close()


# ------------------------------------------------------------------------------------------ a step


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


def step(group: EngineGroup, clock: Clock, batch: SequenceBatch, read_only: bool) -> dict[str, Cost]:
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
    ranks_per_message: int = 1
    keeps: bool = True
    read_only: bool = False


COPY_FOR_RANK = Design(title="a copy for each rank", keeps=False)
TODAY = Design(title="equal arguments once for each machine (today)")
DESIGNS = (
    COPY_FOR_RANK,
    TODAY,
    Design(title="one message for each machine, which cuts it", ranks_per_message=PER_MACHINE),
    Design(title="the same, with what the loss reads", ranks_per_message=PER_MACHINE, read_only=True),
    Design(title="a tree: one message for each 8 machines", ranks_per_message=8 * PER_MACHINE),
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
    pool.can_keep = lambda: design.keeps
    messages = max(1, ranks // design.ranks_per_message)
    # A machine that cuts its message is one receiver.
    with fake_group(messages, model.tp if design.ranks_per_message == 1 else 1) as (group, clock):
        found = [step(group, clock, batch, design.read_only) for _ in range(1 + repeats)][1:]
    best = {
        name: min((calls[name] for calls in found), key=lambda cost: cost.seconds(1e12)) for name in found[0]
    }
    return Case(model=model, ranks=ranks, tokens=tokens, design=design, calls=best)


# ----------------------------------------------------------------------------------------- the page


def traffic_table(cases: Sequence[Case], network: str) -> list[str]:
    """Bytes and CPU seconds of a step as it is."""
    lines = [
        "| model | ranks | tokens | sent, MB | received, MB | CPU s: prepare | send | collect | small calls | "
        f"in all at {network}, s | which is {LIMIT:.0%} of a step of, s |",
        f"|{' --- |' * 11}",
    ]
    for case in cases:
        if case.design is not TODAY:
            continue
        large, own = case.calls["forward"] + case.calls["update"], case.cost.seconds(NETWORKS[network])
        lines.append(
            f"| {label(case)} | {large.sent / 1e6:,.0f} | {large.received / 1e6:,.0f} | {large.prepare_s:.3f} | "
            f"{large.send_s:.3f} | {large.collect_s:.3f} | {case.calls['small'].seconds(1e12):.3f} | {own:.2f} | "
            f"{own * (1 - LIMIT) / LIMIT:.1f} |"
        )
    return lines


def share_table(cases: Sequence[Case], flops: float, network: str) -> list[str]:
    """The share of a step, for each design."""
    lines = [
        f"| model | ranks | tokens | step, s | {' | '.join(design.title for design in DESIGNS)} |",
        f"|{' --- |' * (4 + len(DESIGNS))}",
    ]
    rows: dict[str, dict[str, Case]] = {}
    for case in cases:
        rows.setdefault(label(case), {})[case.design.title] = case
    for name, found in rows.items():
        shares = [
            found[design.title].share(flops, NETWORKS[network]) if design.title in found else None
            for design in DESIGNS
        ]
        cells = " | ".join("" if share is None else percent(share) for share in shares)
        lines.append(f"| {name} | {next(iter(found.values())).step_s(flops):,.2f} | {cells} |")
    return lines


def limit_table(cases: Sequence[Case], flops: float) -> list[str]:
    """From how many ranks on each design is above the limit."""
    lines = [
        f"| model | tokens | network | {' | '.join(design.title for design in DESIGNS)} |",
        f"|{' --- |' * (3 + len(DESIGNS))}",
    ]
    for model, tokens, network in product(MODELS, sorted({case.tokens for case in cases}), NETWORKS):
        cells = []
        for design in DESIGNS:
            found = [
                case for case in cases if (case.model, case.tokens, case.design) == (model, tokens, design)
            ]
            above = [case.ranks for case in found if case.share(flops, NETWORKS[network]) > LIMIT]
            largest = max((case.ranks for case in found), default=0)
            cells.append(f"{min(above):,} ranks" if above else f"not at {largest:,}" if found else "")
        lines.append(f"| {model.title} | {tokens // 1_000_000}M | {network} | {' | '.join(cells)} |")
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
    sequence = (
        f"sequences of {SEQUENCE_TOKENS:,} tokens on average, {FORWARD_PASSES} forward passes and one update"
    )
    cases = sorted(cases, key=lambda case: (case.model.parameters, case.ranks, case.tokens))
    parts = [
        [
            f"A GRPO step: {sequence}. CPU seconds of the driver on {platform.machine()}, TCP on one machine, "
            f"torch {torch.__version__}."
        ],
        traffic_table(cases, next(iter(NETWORKS))),
        [f"The driver takes more than {LIMIT:.0%} of a step, of those that were measured, from"],
        limit_table(cases, flops),
    ]
    for network in NETWORKS:
        parts.append(
            [
                f"The driver's share of a step at {network}, ranks of {flops / 1e12:,.0f} TFLOP/s each, bold above "
                f"{LIMIT:.0%}:"
            ]
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
    cases: list[Case] = []
    # What costs most comes last, and the page has what there is: a run that is cut short leaves a page.
    chosen = list(product(arguments.tokens, arguments.ranks, MODELS, DESIGNS))
    for tokens, ranks, model, design in track(chosen, description="measuring"):
        # A step with many tokens takes long enough to be measured once.
        repeats = max(1, min(arguments.repeats, FEW_TOKENS * arguments.repeats // tokens))
        cases.append(measure(model, ranks, tokens, design, repeats))
        text = report(cases, arguments.flops)
        if arguments.page:
            write_page(arguments.page, text)
    Console(width=200).print(text, markup=False, highlight=False)


if __name__ == "__main__":
    main()
