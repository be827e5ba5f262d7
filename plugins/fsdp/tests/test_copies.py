"""Copies of a pass and storage of a rank: no gradient twice, no frozen weight larger than in its files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.engine import FSDPBackend

SMALLEST = 24 * 24
"""Numbers of the smallest matrix of a layer; no activation of a loss has as many."""
LORA = LoraConfig(rank=3, alpha=7)
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
    actual: list[tuple[str, int]] = written.found
    return actual


def dtypes_of(engine: TrainEngine) -> dict[str, tuple[torch.dtype, bool]]:
    """Dtype of each stored parameter, and whether it is trained."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    return {name: (p.dtype, p.requires_grad) for name, p in backend.model.named_parameters()}


def written_in_a_pass(engine: TrainEngine) -> list[tuple[str, int]]:
    with Written() as written:
        engine.forward(support.make_batch(0), MicroBatchSpec(count=1))
    actual: list[tuple[str, int]] = written.found
    return actual


@pytest.fixture
def half_files(tmp_path: Path) -> Path:
    """A model in bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**support.TINY)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config_of(path: Path, dp: int, dtype: Any = "bfloat16", **fields: Any) -> FSDPConfig:
    model = ModelConfig(path=str(path), lora=fields.pop("lora", None))
    return support.fsdp_config(dp, dtype=dtype).model_copy(update={"model": model, **fields})


def test_single_rank_divides_no_gradient() -> None:
    """``gradient / 1.0`` would be one more copy of each group of gradients."""
    with EngineGroup("fsdp", support.fsdp_config(1, dtype="bfloat16")) as group:
        (actual,), shapes = group.run(written_in_a_step), group.tensor_shapes("params")
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.0."))
    assert ("div", layer) not in actual, actual


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dp", [1, 2])
def test_frozen_weights_are_stored_as_in_their_files(half_files: Path, dp: int) -> None:
    files = TensorFiles(half_files, "model")
    with EngineGroup("fsdp", config_of(half_files, dp, lora=LORA)) as group:
        (stored, *_), before = group.run(dtypes_of), group.named_tensors("master")
        group.train_batch(support.make_batch(0), LOSS, MicroBatchSpec(count=1))
        after = group.named_tensors("master")
        group.initialize(config=config_of(half_files, dp))
        (trained, *_) = group.run(dtypes_of)
    assert {dtype for dtype, grad in stored.values() if grad} == {torch.float32}
    assert {dtype for dtype, grad in stored.values() if not grad} == {torch.bfloat16}
    assert {dtype for dtype, _ in trained.values()} == {torch.float32}
    for name in files.names():
        for actual in (before, after):
            assert actual[name].dtype == torch.float32 and torch.equal(actual[name], files.read(name).float())


def test_files_in_float32_are_stored_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.TINY), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with EngineGroup("fsdp", config_of(tmp_path, 1, lora=LORA)) as group:
        (stored,) = group.run(dtypes_of)
    assert {dtype for dtype, _ in stored.values()} == {torch.float32}


def test_single_rank_gathers_no_frozen_weight(half_files: Path) -> None:
    with EngineGroup("fsdp", config_of(half_files, 1, optimizer=None)) as group:
        (actual,), shapes = group.run(written_in_a_pass), group.tensor_shapes("params")
    assert actual and not {("copy_", math.prod(shape)) for shape in shapes.values()} & {*actual}, actual
