"""Memory that was freed and that the C library keeps."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back_freed"]

LEAST = 128 * 2**20
"""Less than this is left to the C library, in bytes."""


class _Usage(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def give_back_freed() -> None:
    """Return the pages of freed blocks to the system, where there are many; does nothing without glibc.

    glibc keeps what is freed below a block in use, of blocks up to 32 MiB (M_MMAP_THRESHOLD in mallopt(3)): after a
    step, as much as the gradients of a model, and on equal ranks not equally much.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return
    library.mallinfo2.restype = _Usage
    if library.mallinfo2().fordblks >= LEAST:
        library.malloc_trim(0)
