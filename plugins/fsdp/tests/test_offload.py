"""State and activations in host memory: the same training bit for bit, and memory that is really given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import fsdp_support as support
import pytest
import torch
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.toolkit.dtensor import local_part
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.engine import FSDPBackend, HostCopy

LOSS, BUDGET = support.LOSS, support.BUDGET


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=120) as ranks:
        yield ranks


def trained(group: EngineGroup, config: FSDPConfig) -> dict[str, Tensor]:
    """Gradients of a first step, and everything after three."""
    group.initialize(config=config)
    group.forward_backward(support.make_batch(0), LOSS, BUDGET)
    group.onload()
    actual = {f"grads/{name}": value for name, value in group.named_tensors("grads").items()}
    actual["norm"] = torch.tensor(group.optimizer_step()["grad_norm"])
    for step in range(1, 3):
        group.train_batch(support.make_batch(step), LOSS, BUDGET)
    group.onload()
    return actual | support.state(group)


@pytest.fixture(scope="module")
def plain(group: EngineGroup) -> dict[bool, dict[str, Tensor]]:
    """Without and with gradient checkpointing."""
    return {on: trained(group, support.fsdp_config(2, gradient_checkpointing=on)) for on in (False, True)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_on_the_host_change_no_bit(
    group: EngineGroup, plain: dict[bool, dict[str, Tensor]], checkpointing: bool
) -> None:
    options: dict[str, Any] = {"activation_offload": True, "gradient_checkpointing": checkpointing}
    assert support.equal(trained(group, support.fsdp_config(2, **options)), plain[checkpointing])


@pytest.mark.parametrize("reshard", [False, True])
def test_state_on_the_host_changes_no_bit(
    group: EngineGroup, plain: dict[bool, dict[str, Tensor]], reshard: bool
) -> None:
    values = support.fsdp_config(2, reshard_after_forward=reshard).model_dump()
    config = FSDPConfig(**values | {"offload_params": True, "offload_optimizer": True})
    assert support.equal(trained(group, config), plain[False])


def bytes_on_device(engine: TrainEngine) -> dict[str, int]:
    """Bytes of parameters and of moments in their storages."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend) and backend.optimizer is not None
    moments = [value for state in backend.optimizer.state.values() for value in state.values()]
    parts: dict[str, list[Tensor]] = {
        "parameters": [local_part(p.detach()).tensor for p in backend.model.parameters()],
        "optimizer's": list(backend.owned.values()),
        "moments": [value for value in moments if value.dim()],
    }
    return {name: sum(t.untyped_storage().nbytes() for t in tensors) for name, tensors in parts.items()}


def test_memory_is_given_back_and_shared_as_before(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(2))
    group.train_batch(support.make_batch(0), LOSS, BUDGET)
    before = group.run(bytes_on_device)
    assert all(min(stored.values()) > 0 for stored in before)
    group.to("cpu")  # the engine's own device: nothing moves
    assert group.run(bytes_on_device) == before
    group.offload()
    assert all(max(stored.values()) == 0 for stored in group.run(bytes_on_device))
    group.train_batch(support.make_batch(1), LOSS, BUDGET)
    assert all(max(stored.values()) == 0 for stored in group.run(bytes_on_device))
    group.onload()
    assert group.run(bytes_on_device) == before


def packed_tensors(engine: TrainEngine, seed: int) -> dict[str, int]:
    """Copies of tensors that autograd saved in one forward pass: their number, bytes, and how many are weights."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend) and backend.activation_offload is not None
    copied: list[Tensor] = []
    weights: list[bool] = []
    real = backend.activation_offload._pack

    def pack(tensor: Tensor) -> Any:
        storages = {local_part(p).tensor.untyped_storage()._cdata for p in backend.model.parameters()}
        actual = real(tensor)
        if isinstance(actual, HostCopy):
            copied.append(actual.values)
            weights.append(tensor.untyped_storage()._cdata in storages)
        return actual

    with mock.patch.object(backend.activation_offload, "_pack", pack):
        engine.forward_backward(support.make_batch(seed), LOSS, MicroBatchSpec(count=1))
        engine.optimizer_zero_grad()
    return {"copies": len(copied), "bytes": sum(c.nbytes for c in copied), "weights": sum(weights)}


LAYOUTS = (ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(tp=2, sequence_parallel=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_activations_move_and_weights_stay(group: EngineGroup, layout: ParallelLayout) -> None:
    seen: dict[bool, dict[str, int]] = {}
    for checkpointing in (False, True):
        options: dict[str, Any] = {"activation_offload": True, "gradient_checkpointing": checkpointing}
        group.initialize(config=support.fsdp_config(layout, **options))
        seen[checkpointing] = group.run(packed_tensors, 0)[0]
    assert seen[False]["weights"] == seen[True]["weights"] == 0
    # With checkpointing the inputs of the blocks move, and what lies inside of them is never kept.
    assert 2 <= seen[True]["copies"] < seen[False]["copies"]
    assert seen[True]["bytes"] < seen[False]["bytes"] / 2
