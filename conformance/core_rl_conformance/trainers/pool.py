"""The trainers that a session keeps from check to check, one object for each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor

from core_rl.backend.meta import FinetuneSpec
from core_rl.distributed.process_group import RankAddress
from core_rl.errors import CoreRLError, EngineBroken, GroupError
from core_rl.launch.hosts import LocalHosts
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool
from core_rl.registry.objects import load_object
from core_rl.servers.process import bound
from core_rl_conformance.trainers.interface import MicroBatches, Trainer, TrainerSetup, TrainSequence
from core_rl_conformance.trainers.spec import TrainerSpec

ENGINE = 0
SAME = 1e-6
"""Relative difference of a metric between ranks: their own sums may round apart."""
END_S = 10.0


class RankTrainers:
    """The same calls on all ranks, each with its part of the batch; the answer is the first rank's.

    Raises the error of a rank, `RankDied`, `RankTimeout`, and `GroupError` where ranks give different metrics, or where
    the first one gives none.
    """

    def __init__(self, factory: str, timeout_s: float) -> None:
        self._factory = factory
        self._timeout_s = timeout_s
        self._pool: RankPool | None = None
        self._size = 0
        """Ranks that have a trainer."""
        self._reserved = ExitStack()
        """The port on which the first rank listens, for as long as there are ranks."""

    def build(self, setup: TrainerSetup) -> None:
        """Start the processes, where their number is another, and build in each."""
        self._start(setup.ranks)
        self._all("build", setup)

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        self._start(1)
        self._all("build_recipe", recipe, model_dir)

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """Each rank takes its stretch of ``sequences``."""
        size = -(-len(sequences) // self._size)
        parts = [list(sequences[size * rank : size * (rank + 1)]) for rank in range(self._size)]
        answers = self._call("train_batch", [(part, cut, apply) for part in parts])
        first: Mapping[str, float] = answers[0]
        for rank, other in enumerate(answers[1:], 1):
            if not _same(first, other):
                raise GroupError(
                    f"train_batch() returned {first!r} on rank 0 and {other!r} on rank {rank}; reduce metrics, and "
                    "return the same on all ranks",
                    rank,
                )
        return first

    def gradients(self) -> Mapping[str, Tensor]:
        """Full tensors of the first rank."""
        return self._tensors("gradients")

    def weights(self) -> Mapping[str, Tensor]:
        """Full tensors of the first rank."""
        return self._tensors("weights")

    def learning_rate(self) -> float:
        return float(self._all("learning_rate")[0])

    def save(self, path: str) -> None:
        self._all("save", path)

    def load(self, path: str) -> None:
        self._all("load", path)

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """Global batches, by the first rank."""
        batches: Sequence[Sequence[int]] = self._all("epoch", count, batch_size)[0]
        return batches

    def close(self) -> None:
        if self._pool is not None:
            if self._size and self._pool.is_idle:
                with suppress(CoreRLError):  # of a trainer that cannot close: its process ends all the same
                    self._pool.call(Call(ENGINE, "destroy"), [()] * self._size, END_S)
            self._pool.close()
        self._pool, self._size = None, 0
        self._reserved.close()

    def _tensors(self, method: str) -> Mapping[str, Tensor]:
        answers = self._all(method)
        if not answers[0]:
            filled = [rank for rank, answer in enumerate(answers) if answer]
            raise GroupError(
                f"{method}() returned nothing on rank 0, and tensors on {filled}; return them on rank 0"
            )
        tensors: Mapping[str, Tensor] = answers[0]
        return tensors

    def _all(self, method: str, *arguments: object) -> list[Any]:
        return self._call(method, [()] * self._size, *arguments)

    def _call(self, method: str, per_rank: Sequence[tuple[object, ...]], *arguments: object) -> list[Any]:
        """The answers of all ranks to ``method`` with the rank's own arguments, and ``arguments`` behind them."""
        if self._pool is None:
            raise GroupError(f"{method}() needs ranks; call build() first")
        return self._pool.call(Call(ENGINE, method, arguments), per_rank, self._timeout_s)

    def _start(self, count: int) -> None:
        """Have ``count`` ranks: new ones, unless the present ones wait for a call."""
        if self._size == count and self._pool is not None and self._pool.is_idle:
            return
        self.close()
        port = self._reserved.enter_context(bound("127.0.0.1", 0)).getsockname()[1]
        hosts = LocalHosts()
        self._pool = RankPool(hosts)
        self._pool.grow(hosts.slots(count, None, None))
        self._call("prepare", [()] * count, 1, _RankTrainer, self._factory, port)
        addresses = [RankAddress(rank=rank, world_size=count) for rank in range(count)]
        self._call("initialize", [(address,) for address in addresses], None)
        self._size = count


class _RankTrainer:
    """The trainer of one rank, in the place of an engine; it meets the others at ``port``, as torchrun has it."""

    data_parallel_rank, data_parallel_size, is_output_rank = 0, 1, True

    def __init__(self, factory: str, port: int) -> None:
        self._factory, self._port = factory, port

    def initialize(self, addr: RankAddress, _ft_spec: FinetuneSpec | None) -> None:
        rank, size = str(addr.rank), str(addr.world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port))
        kind: Any = load_object(self._factory, "the trainer")
        self._trainer: Trainer = kind()

    def destroy(self) -> None:
        self._trainer.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _same(left: Any, right: Any) -> bool:
    if not (isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys()):
        return False
    return all(math.isclose(value, right[name], rel_tol=SAME, abs_tol=SAME) for name, value in left.items())


CALLS = ("build", "train_batch", "weights", "close")
"""Methods that every trainer needs."""


class TrainerPool:
    """Trainers by the name of their spec; each is built anew for each check."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._trainers: dict[str, Trainer] = {}

    def build(self, spec: TrainerSpec, setup: TrainerSetup) -> Trainer:
        """The trainer of ``spec``, built with ``setup``. Raises `EngineBroken` for a factory that makes none."""
        if spec.name not in self._trainers:
            self._trainers[spec.name] = make_trainer(spec, self._timeout_s)
        trainer = self._trainers[spec.name]
        trainer.build(setup)
        return trainer

    def discard(self, name: str) -> None:
        """Close the trainer ``name``, which may be in an unknown state."""
        trainer = self._trainers.pop(name, None)
        if trainer is not None:
            trainer.close()

    def close(self) -> None:
        for name in list(self._trainers):
            self.discard(name)


def make_trainer(spec: TrainerSpec, timeout_s: float) -> Trainer:
    """The trainer of ``spec``, not built. Raises `EngineBroken` for a factory that makes none."""
    origin = f"trainer {spec.name!r}"
    factory = load_object(spec.factory, origin)
    if not isinstance(factory, type):
        raise EngineBroken(f"{origin}: factory {spec.factory!r} is {factory!r}; name a class")
    if absent := [name for name in CALLS if not callable(getattr(factory, name, None))]:
        raise EngineBroken(
            f"{origin}: {spec.factory!r} has no method {', '.join(absent)}; see the Trainer protocol"
        )
    if spec.processes == "each rank":
        return RankTrainers(spec.factory, timeout_s)
    trainer: Trainer = factory()
    return trainer
