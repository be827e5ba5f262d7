"""Groups of ranks as small objects."""

from __future__ import annotations

from core_rl.distributed.comm import Comm, RankGroups


def test_groups_share_only_given_objects() -> None:
    first, second = (RankGroups(data_parallel=Comm()) for _ in range(2))
    first.model_parallel.shared["a mesh"] = object()
    assert not second.model_parallel.shared
    assert not first.data_parallel.shared
