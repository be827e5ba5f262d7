"""Seeds from seeds."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *path: int) -> int:
    """A seed in [0, 2**63) that depends on all arguments, and on nothing else."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
