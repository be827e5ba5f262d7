"""Bytes and CPU seconds of the driver in a GRPO step of up to 1,024 ranks.

    python benchmarks/driver_traffic.py
    python benchmarks/driver_traffic.py --ranks 64 --tokens 1000000 16000000 --share-prefixes

`EngineGroup` plans, splits, pickles, sends and collects as in a run. Each rank is a TCP connection to a single process,
which answers for all ranks. Seconds are CPU seconds of the driver; the bandwidth and the FLOP/s of a rank are assumed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from common.measure import figures_table, show
from common.options import options, read
from rich.progress import track

from core_rl import EngineGroup, load_config
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.channel import Buffer, Channel
from core_rl.launch.hosts import SharedMessage, Slot
from core_rl.launch.kept import KeptMessage
from core_rl.launch.messages import pack_reply
from core_rl.launch.remote import RankState
from core_rl.launch.remote import answer as answer_call
from core_rl_trainer.algorithms.objectives import PolicyLoss

PER_MACHINE = 8
FORWARD_PASSES, SMALL_CALLS = 2, 4
"""Log-probs of policy and reference; `lr_scheduler_step`, `set_version`, `upload_weights` and `progress`."""
PROMPT = 1024
"""Tokens that a group of sequences shares."""
LOSS = PolicyLoss(kl_coef=0.01).spec(temperature=1.0)
MODELS = {"8B": (8e9, 1), "70B": (70e9, 8)}
"""Parameters, and tensor-parallel ranks that share a shard of the batch."""
COLUMNS = ("model", "ranks", "tokens", "sent, MB", "received, MB", "CPU s: prepare", "send", "collect",
           "in all, s", "% of the step")  # fmt: skip


def make_engine(_: object, config: Any) -> Any:
    """Return an engine whose calls cost nothing; tensor-parallel ranks are neighbours."""
    engine = SimpleNamespace(progress=None, destroy=lambda: None)

    def initialize(address: Any, _: object) -> None:
        engine.data_parallel_rank, within = divmod(address.rank, config.layout.tp)
        engine.data_parallel_size, engine.is_output_rank = config.layout.dp, within == 0

    engine.initialize = initialize
    engine.forward = lambda batch, *_: ModelOutput(logprobs=torch.zeros(batch.num_tokens))
    engine.train_batch = lambda *_: {f"metric_{number}": 0.5 for number in range(24)}
    return engine


def answer(sockets: Sequence[socket.socket]) -> None:
    """Take a call from every connection, then answer all calls, as ranks inside a collective do."""
    torch.set_num_threads(1)
    ranks = [(Channel(sock), defaultdict[int, RankState](RankState)) for sock in sockets]
    replies = [pack_reply(None) for _ in sockets]
    try:
        while True:
            for (channel, _), reply in zip(ranks, replies, strict=True):
                channel.send(reply)
            replies = [answer_call(channel.receive(), state) for channel, state in ranks]
    except (EOFError, OSError):
        return


class Clock:
    """Bytes, and CPU seconds until the first byte, until the last byte sent, and until the results."""

    sent = received = 0
    prepare_s = send_s = collect_s = first_send = last_send = 0.0

    def measure(self, call: Callable[[], object]) -> None:
        """Add ``call``, which sends once and collects once."""
        self.first_send = self.last_send = 0.0
        start = time.process_time()
        call()
        self.prepare_s += self.first_send - start
        self.send_s += self.last_send - self.first_send
        self.collect_s += time.process_time() - self.last_send

    def count_sent(self, parts: Sequence[Buffer]) -> None:
        """Add the bytes of a message."""
        self.sent += sum(memoryview(part).nbytes for part in parts)

    def seconds(self, bandwidth: float) -> float:
        """Waiting time of the ranks at ``bandwidth`` bytes a second."""
        sending, collecting = self.sent / bandwidth, self.received / bandwidth
        return self.prepare_s + max(self.send_s, sending) + max(self.collect_s, collecting)


class CountingChannel(Channel):
    """A channel that counts bytes."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        super().__init__(sock)
        self._clock = clock

    def send(self, parts: Sequence[Buffer], deadline: float | None = None) -> None:
        self._clock.first_send = self._clock.first_send or time.process_time()
        super().send(parts, deadline)
        self._clock.count_sent(parts)

    def receive(self, deadline: float | None = None) -> list[Buffer]:
        self._clock.last_send = self._clock.last_send or time.process_time()
        parts = super().receive(deadline)
        self._clock.received += sum(memoryview(part).nbytes for part in parts)
        return parts


def fake_rank(rank: int, machine: int, sock: socket.socket, clock: Clock) -> Any:
    """Return a rank without a process."""
    channel, sentinel = CountingChannel(sock, clock), os.eventfd(0)

    def keep(parts: Sequence[Buffer], _: float) -> SharedMessage:
        clock.first_send = clock.first_send or time.process_time()
        clock.count_sent(parts)
        message = KeptMessage.of(parts)
        return message.reference, message.close

    return SimpleNamespace(
        rank=rank, machine=machine, channel=channel, sentinel=sentinel, place="", pid=0, keep=keep,
        exit_reason=lambda: "closed its connection", stacks=lambda **_: "", wait=lambda _: None, kill=lambda: None,
        release=lambda: (channel.close(), os.close(sentinel)),
    )  # fmt: skip


@contextmanager
def fake_group(ranks: int, tp: int) -> Iterator[tuple[EngineGroup, Clock]]:
    """A group of ``ranks``, each ``tp`` of which get the same shard of a batch; one process answers for all."""
    clock, processes = Clock(), list[Any]()

    def start(slots: Sequence[tuple[int, Slot]]) -> list[Any]:
        with socket.create_server(("127.0.0.1", 0), backlog=len(slots)) as server:
            pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in slots]
        fork = multiprocessing.get_context("fork")
        processes.append(fork.Process(target=answer, args=([far for _, far in pairs],), daemon=True))
        processes[0].start()
        for near, far in pairs:
            far.close()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return [fake_rank(n, s.machine, near, clock) for (n, s), (near, _) in zip(slots, pairs, strict=True)]

    places = [Slot(n // PER_MACHINE, n % PER_MACHINE) for n in range(ranks)]
    hosts: Any = SimpleNamespace(
        slots=lambda *_: places,
        cores=lambda _: PER_MACHINE,
        start=start,
        address_of=lambda _: "127.0.0.1",
        driver_address="127.0.0.1",
    )
    layout = {"dp": ranks // tp, "tp": tp}
    config = load_config("megatron")(model={"config": {}}, layout=layout, optimizer=None)
    group = EngineGroup("megatron", config, hosts=hosts, threads_per_rank=1, make_engine=make_engine)
    group.rank_set._store_port = 0  # these ranks do not meet
    try:
        with group:
            yield group, clock
    finally:
        processes[0].kill()
        processes[0].join()


def make_batch(tokens: int) -> SequenceBatch:
    """The fields of a GRPO batch with a reference when it is trained on: skewed lengths, in groups of 8."""
    random = torch.Generator().manual_seed(0)
    count = max(8, tokens // 4096 // 8 * 8)
    weights = torch.exp(0.8 * torch.randn(count, generator=random))
    lengths = (weights / weights.sum() * tokens).clamp(min=16).to(torch.int32)
    total = int(lengths.sum())
    floats = ("logprobs", "prox_logprobs", "ref_logprobs", "token_rewards", "advantages")
    prompts = torch.arange(count // 8).repeat_interleave(8)
    rows = [torch.randint(2**17, (length,), generator=random) for length in lengths.tolist()]
    for row, prompt in zip(rows, prompts.tolist(), strict=True):
        row[:PROMPT] = prompt
    return SequenceBatch(
        input_ids=torch.cat(rows),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)]),
        tokens={
            "loss_mask": torch.ones(total, dtype=torch.bool),
            "versions": torch.zeros(total, dtype=torch.long),
            **{name: torch.zeros(total) for name in floats},
        },
        sequences={"rewards": torch.zeros(count), "group": prompts},
        meta={"stop_reason": ["stop"] * count},
    )


def measure(batch: SequenceBatch, ranks: int, tp: int, budget: MicroBatchSpec, repeats: int) -> Clock:
    """The cheapest of ``repeats`` steps, after a step for warming up."""
    clocks = list[Clock]()
    with fake_group(ranks, tp) as (group, clock):
        for _ in range(1 + repeats):
            vars(clock).clear()
            fresh = replace(batch)  # its order of prefixes is not sorted yet
            for _ in range(FORWARD_PASSES):
                clock.measure(partial(group.forward, fresh, budget))
            clock.measure(partial(group.train_batch, fresh, LOSS, budget))
            for _ in range(SMALL_CALLS):
                clock.measure(lambda: group.progress)
            clocks.append(copy(clock))
    return min(clocks[1:], key=lambda clock: clock.seconds(1e12))


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 64, 512, 1024))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1_000_000, 16_000_000))
    parser.add_argument("--flops", type=float, default=400e12, help="model FLOP/s of a rank")
    parser.add_argument("--gbits", type=float, default=25.0, help="bandwidth of the driver, in Gbit/s")
    parser.add_argument(
        "--share-prefixes", action="store_true", help="plan for engines that compute prompts once"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = read(parser, {"ranks": [8, 64], "tokens": [100_000], "repeats": 1})
    torch.set_num_threads(1)
    assumed = f"{arguments.gbits:g} Gbit/s, {arguments.flops / 1e12:g} TFLOP/s a rank"
    table = figures_table(COLUMNS, title=f"driver of a GRPO step, {assumed}")
    budget = MicroBatchSpec(max_tokens=32_768, share_prefixes=arguments.share_prefixes)
    batches = {tokens: make_batch(tokens) for tokens in arguments.tokens}
    cases = list(product(arguments.tokens, arguments.ranks, MODELS.items()))
    for tokens, ranks, (model, (parameters, tp)) in track(cases, description="measuring"):
        clock = measure(batches[tokens], ranks, tp, budget, arguments.repeats)
        # 6 FLOPs for a parameter and token to train, 2 for each forward pass.
        step_s = (6 + 2 * FORWARD_PASSES) * parameters * tokens / (ranks * arguments.flops)
        driver_s = clock.seconds(arguments.gbits * 1e9 / 8)
        cells = [
            model,
            *(f"{value:,.0f}" for value in (ranks, tokens, clock.sent / 1e6, clock.received / 1e6)),
        ]
        cells += [f"{value:.3f}" for value in (clock.prepare_s, clock.send_s, clock.collect_s, driver_s)]
        table.add_row(*cells, f"{100 * driver_s / (driver_s + step_s):.2f}")
    show(table)


if __name__ == "__main__":
    main()
