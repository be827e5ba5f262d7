"""Ranks as threads, processes that are killed, and damaged files, for the tests of checkpoints."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from core_rl.checkpoint.directory import open_checkpoint, write_checkpoint
from core_rl.distributed.comm import Comm

TIMEOUT_S = 60.0
"""Time limit of a rank for its peers, which only failing tests reach."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ThreadComm(Comm):
    """World of threads as ranks; a missing rank breaks the barrier."""

    number: int
    slots: list[Any]
    meeting: threading.Barrier

    @property
    def rank(self) -> int:
        return self.number

    @property
    def size(self) -> int:
        return len(self.slots)

    def gather(self, value: T) -> list[T]:
        self.slots[self.number] = value
        self.meeting.wait(TIMEOUT_S)
        values = list(self.slots)
        self.meeting.wait(TIMEOUT_S)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        return self.gather(value)[source]

    def sum(self, values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self.gather(values), strict=True)]

    def max(self, values: list[float]) -> list[float]:
        return [max(column) for column in zip(*self.gather(values), strict=True)]


def on_ranks(size: int, function: Callable[[Comm], Any]) -> list[Any]:
    """``function(world)`` on every rank; the result or the error of each."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def call(rank: int) -> Any:
        try:
            return function(ThreadComm(number=rank, slots=slots, meeting=barrier))
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def in_child(function: Callable[[], None]) -> int:
    """``function()`` in a forked process; its exit code, negative for a signal, 1 for an exception."""
    pid = os.fork()
    if pid == 0:
        code = 1
        # Garbage of the parent, such as objects with threads, is the parent's to destroy.
        gc.disable()
        try:
            # The threads of the parent's kernels are not in this process: a kernel would wait for them.
            torch.set_num_threads(1)
            function()
            code = 0
        except BaseException:  # noqa: BLE001  # the end of a process
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def killed_at(count: int, owner: Any, names: Sequence[str]) -> Iterator[None]:
    """Kill this process before call number ``count`` of any of ``owner``'s functions ``names``."""
    calls = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name))))
        yield


def save_text(path: str | Path, **files: str) -> None:
    """A checkpoint of small text files; ``a__b`` is the file ``b`` in the folder ``a``."""

    def write(directory: Path) -> None:
        for name, text in files.items():
            file = directory / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    write_checkpoint(str(path), write, Comm(), kind="text", state={"files": sorted(files)})


def load_text(path: str | Path) -> dict[str, str]:
    """Text that `save_text` saved."""
    with open_checkpoint(str(path), Comm(), kind="text") as directory:
        files = [file for file in directory.rglob("*") if file.is_file() and file.name != "manifest.json"]
        return {file.relative_to(directory).as_posix().replace("/", "__"): file.read_text() for file in files}


def hidden(folder: Path) -> list[str]:
    """Names of temporary and set-aside directories."""
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def remove(file: Path) -> None:
    """One kind of damage."""
    file.unlink()


def truncate(file: Path) -> None:
    """One kind of damage."""
    file.write_bytes(file.read_bytes()[:-1])


def flip_bit(file: Path) -> None:
    """One kind of damage: the lowest bit of the byte in the middle, which text survives."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = [remove, truncate, flip_bit]
