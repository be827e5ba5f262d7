"""What a pass copies: no gradient twice on one rank."""

from __future__ import annotations

import math
from typing import Any

import fsdp_support as support
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup

SMALLEST = 24 * 24
"""Numbers of the smallest matrix of a layer; no activation of a loss has as many."""
LOSS = LossSpec(fn=support.loss, outputs=("logprobs", "entropy"))


class Written(TorchDispatchMode):
    """The operations that wrote at least `SMALLEST` numbers, with how many."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= SMALLEST:
            self.found.append((func.overloadpacket.__name__, result.numel()))
        return result


def written_in_a_step(engine: TrainEngine) -> list[tuple[str, int]]:
    with Written() as written:
        engine.train_batch(support.make_batch(0), LOSS, MicroBatchSpec(count=1))
    return written.found


def test_one_rank_divides_no_gradient() -> None:
    """``gradient / 1.0`` would be one more copy of each group of gradients."""
    with EngineGroup("fsdp", support.fsdp_config(1, dtype="bfloat16")) as group:
        (found,), shapes = group.run(written_in_a_step), group.tensor_shapes("params")
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.0."))
    assert ("div", layer) not in found, found
