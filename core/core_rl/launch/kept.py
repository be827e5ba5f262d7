"""A message for several ranks of one machine, in memory that all of them map: it travels to the machine once.

The memory has no name in any file system. It is there while its owner keeps it, or a rank uses it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from core_rl.distributed.channel import Buffer
from core_rl.errors import GroupError

ALIGNMENT = 64
"""Alignment of each buffer in bytes."""


@dataclass(frozen=True)
class Reference:
    """Location of a message in memory of another process on the machine."""

    path: str
    sizes: tuple[int, ...]

    def open(self) -> list[memoryview]:
        """The buffers of the message, copied on write.

        Raises `GroupError` where the memory cannot be reached.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise GroupError(
                f"the memory with the arguments cannot be opened: {error}; the ranks of a machine run as one user, and "
                "see each other in /proc"
            ) from error
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(descriptor, _total(self.sizes), flags=mmap.MAP_PRIVATE, prot=access)
        finally:
            os.close(descriptor)
        return _views(memoryview(memory), self.sizes)


class KeptMessage:
    """A message in memory that this process keeps until `close`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Memory for buffers of these ``sizes`` in bytes; raises ``OSError`` where there is none."""
        self._descriptor = os.memfd_create("core-rl message")
        try:
            os.ftruncate(self._descriptor, _total(sizes))
            self._memory = mmap.mmap(self._descriptor, _total(sizes))
        except BaseException:
            os.close(self._descriptor)
            raise
        self.buffers = _views(memoryview(self._memory), sizes)
        """To be filled."""
        self.reference = Reference(f"/proc/{os.getpid()}/fd/{self._descriptor}", tuple(sizes))

    @classmethod
    def of(cls, parts: Sequence[Buffer]) -> KeptMessage:
        """A copy of ``parts``; raises ``OSError``."""
        message = cls([memoryview(part).nbytes for part in parts])
        for buffer, part in zip(message.buffers, parts, strict=True):
            buffer[:] = memoryview(part).cast("B")
        return message

    def close(self) -> None:
        """Keep it no longer; ranks that opened it still have it."""
        for buffer in self.buffers:
            buffer.release()
        self.buffers.clear()
        self._memory.close()
        os.close(self._descriptor)


def can_keep() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")


def _ends(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))


def _total(sizes: Sequence[int]) -> int:
    return max([1, *_ends(sizes)])  # no memory of no bytes can be mapped


def _views(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    starts = [0, *_ends(sizes)]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
