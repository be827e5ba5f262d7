"""A probe of 20 tokens, when an engine is built, refuses a model whose state crosses from one sequence to the next."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_families import packed_model, tiny_model
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import Head, ModelConfig, TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.engine.loading import load_engine
from core_rl.errors import UnsupportedCapability
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend, check_packing
from core_rl.toolkit.packed import PackedModel


def let_state_leak(model: PackedModel) -> None:
    """Give layers with a state their own forward pass again, over the whole row."""
    for layer in model.stateful.layers.values():
        del layer.forward


@pytest.mark.parametrize("head", ["lm", "value", "reward"])
def test_probe_detects_state_across_boundaries(head: Head, tmp_path: Path) -> None:
    model = packed_model("qwen3_next" if head == "lm" else "jamba", tmp_path, head)
    check_packing(model, "float32")
    let_state_leak(model)
    with pytest.raises(UnsupportedCapability, match="cannot be packed: .* of a sequence change by"):
        check_packing(model, "float32")


def round_by_place(model: PackedModel) -> None:
    """Make nats of rounding at one token, as sums over three ranks do, which add up each third in another order."""
    base = model.model.base_model
    unstable: list[Tensor] = []

    def mark(module: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> None:
        unstable[:] = [args[0][0] == (3 * 7919 + 3) % len(module.get_parameter("weight"))]

    def scale(module: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> Tensor:
        third = torch.arange(states.shape[1]) * 3 // states.shape[1]
        return states * (1 + third * unstable[0])[:, None]

    base.get_submodule("embed_tokens").register_forward_hook(mark)
    base.get_submodule("norm").register_forward_hook(scale)


@pytest.mark.parametrize(("family", "leaks"), [("llama", False), ("qwen3_next", True)])
def test_probe_tolerates_rounding_by_place(family: str, leaks: bool, tmp_path: Path) -> None:
    model = packed_model(family, tmp_path)
    if leaks:
        let_state_leak(model)
    else:
        round_by_place(model)
    with pytest.raises(UnsupportedCapability, match="cannot be packed"):
        check_packing(model, "float32")
    with pytest.raises(UnsupportedCapability) if leaks else nullcontext():
        check_packing(model, "bfloat16")


class PacksHybrids(HFBackend[TrainEngineConfig]):
    """A backend over a packed model, perhaps with layers that leak."""

    leaks = False

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        register_packed_attention()
        model = build_model(context.config.model, seed=context.seed, attn_implementation=PACKED_ATTENTION)
        self.packed = PackedModel(model, "lm")
        if self.leaks:
            let_state_leak(self.packed)
        self.adopt(model, context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return ModelOutput(**self.packed(micro_batch, step.outputs, step.temperature, step.trained_only))


class PacksHybridsAndLeaks(PacksHybrids):
    leaks = True


@pytest.mark.parametrize("backend", [PacksHybrids, PacksHybridsAndLeaks])
def test_toolkit_engines_are_probed_at_build(backend: type[PacksHybrids], tmp_path: Path) -> None:
    tiny_model("qwen3_next").save_pretrained(tmp_path)
    spec = replace(SPEC, factory=f"{__name__}:{backend.__name__}", conformance=None)
    engine = load_engine(spec, ReferenceConfig(model=ModelConfig(path=str(tmp_path))))
    if backend.leaks:
        with pytest.raises(UnsupportedCapability, match="'qwen3_next' cannot be packed"):
            engine.initialize()
    else:
        engine.initialize()
        engine.destroy()


def test_probe_leaves_nan_to_the_user(tmp_path: Path) -> None:
    """Weights that give NaN are no leak, and have an error of their own in the first pass."""
    model = packed_model("llama", tmp_path)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    check_packing(model, "float32")
