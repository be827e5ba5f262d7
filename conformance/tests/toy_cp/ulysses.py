"""The same engine with heads over ranks inside the attention."""

from __future__ import annotations

from toy_cp.engine import ContextParallelEngine
from toy_cp.shard import UlyssesShard

__all__ = ["UlyssesEngine"]


class UlyssesEngine(ContextParallelEngine):
    """Tokens over ranks everywhere, and heads over ranks in the attention."""

    shard_type = UlyssesShard
