"""A pass that raises leaves an engine that can be used again, or a failed engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fsdp_support as support
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core_rl.backend.loss import LossSpec
from core_rl.backend.tensors import TensorDict
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineStateError, LossError
from core_rl.launch.group import EngineGroup
from core_rl_fsdp.engine import FSDPBackend

LOSS = LossSpec(fn=support.loss, outputs=("logprobs", "entropy"))
BUDGET = MicroBatchSpec(max_tokens=24)


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=60) as ranks:
        yield ranks


def gradients(group: EngineGroup) -> dict[str, Tensor]:
    group.forward_backward(support.make_batch(0), LOSS, BUDGET)
    actual = group.named_tensors("grads")
    group.optimizer_zero_grad()
    return actual


def test_loss_raises_on_first_rank(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(2, dtype="bfloat16", reduce_scatter="last"))
    expected = gradients(group)
    batch = SequenceBatch.from_sequences(
        [[1, 2, 3], [4, 5, 6], [7, 60, 8], [9, 10, 11]], tokens={"weight": [[1.0] * 3] * 4}
    )
    raising = LossSpec(fn=support.sometimes_raising, outputs=LOSS.outputs)
    with pytest.raises(LossError, match=r"rank \d: ZeroDivisionError: the loss divides by zero"):
        group.forward_backward(batch, raising, BUDGET)
    with pytest.raises(EngineStateError, match="after a pass that raised"):
        group.optimizer_step()
    group.optimizer_zero_grad()
    assert support.equal(gradients(group), expected)


def raising_on_rank_1(data: SequenceBatch) -> float:
    """A weight that one rank alone cannot compute."""
    if dist.get_rank() == 1:
        raise ZeroDivisionError("the weight divides by zero")
    return float(data.loss_mask.sum())


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(tp=2)], ids=["dp2", "tp2"])
def test_weight_fn_raises_on_first_rank(group: EngineGroup, layout: ParallelLayout) -> None:
    group.initialize(config=support.fsdp_config(layout))
    expected = gradients(group)
    raising = LossSpec(fn=support.loss, weight_fn=raising_on_rank_1, outputs=LOSS.outputs)
    with pytest.raises(LossError, match="weight_fn: rank 1: ZeroDivisionError: the weight divides by zero"):
        group.forward_backward(support.make_batch(0), raising, BUDGET)
    assert support.equal(gradients(group), expected)


class Broken(Exception):
    """Raised inside of the model."""


def break_pass(engine: TrainEngine, where: str, forward_only: bool) -> None:
    """A pass that raises in the second micro-batch: in the first block's forward or backward pass."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Broken(where)

    layer: Any = backend.model.base_model.get_submodule("layers.0.mlp")
    if where == "forward":
        hook = layer.register_forward_hook(lambda *_: count())
    else:
        hook = layer.register_full_backward_hook(lambda *_: count())
    with pytest.raises(Broken):
        engine.forward_backward(support.make_batch(1), LOSS, BUDGET, forward_only=forward_only)
    hook.remove()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce_scatter", ["each", "last"])
@pytest.mark.parametrize("reshard", [True, False])
def test_model_raises_on_single_rank(
    group: EngineGroup, dtype: str, reduce_scatter: str, reshard: bool
) -> None:
    config = support.fsdp_config(1, dtype=dtype, reduce_scatter=reduce_scatter, reshard_after_forward=reshard)
    group.initialize(config=config)
    expected = gradients(group)
    for where, forward_only in (("forward", False), ("forward", True), ("backward", False)):
        group.run(break_pass, where, forward_only)
        group.optimizer_zero_grad()
        assert support.equal(gradients(group), expected), where
    assert group.train_batch(support.make_batch(0), LOSS, BUDGET)["update_successful"] == 1


def break_reduction(engine: TrainEngine) -> None:
    """A backward pass in which memory for gradients is there, and they do not come."""
    copy_in = "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce_scatter_copy_in"
    with mock.patch(copy_in, side_effect=Broken), pytest.raises(Broken):
        engine.forward_backward(support.make_batch(1), LOSS, BUDGET)


class Copies(TorchDispatchMode):
    """Counts the numbers that are copied from float32 to float32, in tensors of at least ``least``."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = least
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0] is not args[1]:
            both = args[0].dtype == args[1].dtype == torch.float32
            self.count += args[0].numel() if both and args[0].numel() >= self.least else 0
        return func(*args, **(kwargs or {}))


def gradient_copies(engine: TrainEngine) -> int:
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    matrices = [weight.numel() for weight in backend.model.parameters() if weight.ndim > 1]
    with Copies(min(matrices)) as copies:
        engine.forward_backward(support.make_batch(0), LOSS, MicroBatchSpec(max_tokens=1000))
    return int(copies.count)


def test_a_lone_rank_copies_no_gradients(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(1, dtype="bfloat16"))
    assert group.run(gradient_copies) == [0]


def break_first_pass(engine: TrainEngine) -> None:
    with mock.patch.object(FSDPBackend, "outputs", side_effect=Broken), pytest.raises(Broken):
        engine.forward_backward(support.make_batch(1), LOSS, BUDGET)


@pytest.mark.parametrize("fail", [break_first_pass, break_reduction])
def test_the_first_pass_may_raise(group: EngineGroup, fail: Callable[[TrainEngine], None]) -> None:
    config = support.fsdp_config(1, dtype="bfloat16")  # in float32 a lone rank has nothing to reduce
    group.initialize(config=config)
    expected = gradients(group)
    group.initialize(config=config)
    group.run(fail)
    group.optimizer_zero_grad()
    assert support.equal(gradients(group), expected)


def fail_on_one_rank(engine: TrainEngine) -> str:
    """Rank 1 raises inside the pass, and so do waiting ranks; the answer of each to the next call."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    with pytest.raises(Broken), mock.patch.object(FSDPBackend, "outputs", side_effect=Broken("no memory")):
        engine.forward_backward(support.make_batch(1), LOSS, BUDGET)
    with pytest.raises(EngineStateError) as caught:
        engine.optimizer_zero_grad()
    return str(caught.value)


def test_rank_raising_alone_has_failed(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(2))
    for message in group.run(fail_on_one_rank):
        assert "an engine that has failed: Broken: no memory" in message
    group.initialize(config=support.fsdp_config(2))
    assert gradients(group)


def logprobs(group: EngineGroup) -> Tensor:
    actual: Tensor = group.forward(support.make_batch(0), BUDGET)["logprobs"]
    return actual


def test_weights_loaded_after_failed_forward_are_used(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(1).model_copy(update={"seed": 1}))
    weights, expected = group.named_tensors("master"), logprobs(group)
    group.initialize(config=support.fsdp_config(1))
    group.run(break_pass, "forward", True)
    group.load_named_tensors("master", TensorDict(weights))
    assert torch.equal(logprobs(group), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failed_pass_leaves_no_gradients(group: EngineGroup, where: str) -> None:
    group.initialize(config=support.fsdp_config(1))
    expected = gradients(group)
    group.run(break_pass, where, False)
    with pytest.raises(
        EngineStateError, match=r"after a pass that raised.*call optimizer_zero_grad\(\) first"
    ):
        group.forward_backward(support.make_batch(0), LOSS, BUDGET)
    group.optimizer_zero_grad()
    assert support.equal(gradients(group), expected)
