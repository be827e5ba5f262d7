"""`weight_update`: the update of a meta, by its method."""

from __future__ import annotations

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.weight_sync.delta import DeltaBase
from core_rl.weight_sync.distributed import DistributedUpdate
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl.weight_sync.tensor import TensorUpdate


def weight_update(
    meta: WeightUpdateMeta, adapter: AdapterMetadata | None = None, base: DeltaBase | None = None
) -> TensorUpdate:
    """The update of ``meta`` by any method but ``disk``; see `TensorUpdate` for ``adapter`` and ``base``."""
    return (DistributedUpdate if meta.method == "distributed" else TensorUpdate)(meta, adapter, base)
