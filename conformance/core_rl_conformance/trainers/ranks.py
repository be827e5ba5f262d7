"""`RankTrainers`: a trainer in processes that the suite starts, one for each rank, as torchrun does."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from core_rl.errors import GroupError, RankDied, RankTimeout
from core_rl.launch.failures import Failure
from core_rl.launch.process import start_process
from core_rl.registry.objects import load_object
from core_rl.servers.process import bound
from core_rl_conformance.trainers.interface import MicroBatches, TrainerSetup, TrainSequence

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
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._reserved = ExitStack()
        """The port on which the first rank listens, for as long as there are ranks."""

    def build(self, setup: TrainerSetup) -> None:
        """Start the processes, where their number is another, and build in each."""
        if len(self._ranks) != setup.ranks:
            self.close()
            self._start(setup.ranks)
        self._call("build", [(setup,)] * setup.ranks)

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        """Build in one process."""
        if len(self._ranks) != 1:
            self.close()
            self._start(1)
        self._all("build_recipe", recipe, model_dir)

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """Each rank takes its stretch of ``sequences``."""
        size = -(-len(sequences) // len(self._ranks))
        parts = [list(sequences[size * rank : size * (rank + 1)]) for rank in range(len(self._ranks))]
        first, *others = self._call("train_batch", [(part, cut, apply) for part in parts])
        for rank, other in enumerate(others, 1):
            if not _same(first, other):
                raise GroupError(
                    f"train_batch() returned {first!r} on rank 0 and {other!r} on rank {rank}; reduce metrics, and "
                    "return the same on all ranks",
                    rank,
                )
        answer: Mapping[str, float] = first
        return answer

    def gradients(self) -> Mapping[str, Tensor]:
        """Full tensors of the first rank."""
        return self._tensors("gradients")

    def weights(self) -> Mapping[str, Tensor]:
        """Full tensors of the first rank."""
        return self._tensors("weights")

    def learning_rate(self) -> float:
        """Of the first rank."""
        return float(self._all("learning_rate")[0])

    def save(self, path: str) -> None:
        """All ranks write into one directory."""
        self._all("save", path)

    def load(self, path: str) -> None:
        """All ranks read it."""
        self._all("load", path)

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """Global batches, by the first rank."""
        batches: Sequence[Sequence[int]] = self._all("epoch", count, batch_size)[0]
        return batches

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(END_S)
            if process.is_alive():
                process.kill()
        self._ranks = []
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
        return self._call(method, [arguments] * len(self._ranks))

    def _call(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """The answers of all ranks."""
        for (_, connection), own in zip(self._ranks, arguments, strict=True):
            connection.send_bytes(pickle.dumps((method, own)))
        answers = self._answers(method)
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, Failure):
                if len(answers) < len(self._ranks):
                    self.close()  # the others wait for this rank
                raise answer.to_error(rank, len(arguments))
        return [answers[rank] for rank in range(len(self._ranks))]

    def _answers(self, method: str) -> dict[int, Any]:
        """The answers by rank: all of them, or the first ones if a rank fails and others never finish."""
        pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready and any(isinstance(answer, Failure) for answer in answers.values()):
                return answers
            if not ready:
                self.close()
                rank = min(pending.values())
                raise RankTimeout(f"rank {rank} did not answer {method}() within {self._timeout_s:g} s", rank)
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[call-overload]  # they are all ours
                answers[rank] = self._received(rank, method)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + END_S)
        return answers

    def _received(self, rank: int, method: str) -> Any:
        try:
            return pickle.loads(self._ranks[rank][1].recv_bytes())  # noqa: S301  a process that we started
        except EOFError as error:
            self.close()
            raise RankDied(f"rank {rank} ended during {method}()", rank) from error

    def _start(self, count: int) -> None:
        port = self._reserved.enter_context(bound("127.0.0.1", 0)).getsockname()[1]
        for rank in range(count):
            ours, theirs = Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            process = start_process(_serve, (theirs, self._factory, variables), f"trainer rank {rank}")
            theirs.close()
            self._ranks.append((process, ours))


def _serve(connection: Connection, factory: str, variables: Mapping[str, str]) -> None:
    """Answer calls until the suite closes its end of ``connection``."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    trainer: Any = None
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301  the suite sent it
        except EOFError:
            break
        try:
            if trainer is None:
                kind: Any = load_object(factory, "the trainer")
                trainer = kind()
            answer = getattr(trainer, method)(*arguments)
        except BaseException as error:  # noqa: BLE001  the process boundary: the suite raises it
            answer = Failure.of(error)
        connection.send_bytes(pickle.dumps(answer))
    if trainer is not None:
        trainer.close()


def _same(left: Any, right: Any) -> bool:
    if not (isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys()):
        return False
    return all(math.isclose(value, right[name], rel_tol=SAME, abs_tol=SAME) for name, value in left.items())
