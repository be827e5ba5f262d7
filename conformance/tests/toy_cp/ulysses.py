"""The same backend with heads over ranks inside the attention."""

from __future__ import annotations

from toy_cp.engine import ContextParallelBackend
from toy_cp.shard import UlyssesShard


class UlyssesBackend(ContextParallelBackend):
    """Tokens over ranks everywhere, and heads over ranks in the attention."""

    shard_type = UlyssesShard
