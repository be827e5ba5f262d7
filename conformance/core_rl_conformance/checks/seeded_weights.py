"""Weights without a file: drawn by the toolkit from the seed, whatever engine and layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.distributed.comm import Comm
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_state import HFShardedState
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter

SEED = 13


@check("I3.seeded-draws", each="layout")
def new_weights_are_drawn_from_the_seed(subject: EngineUnderTest) -> None:
    """Weights from a config, a new value head and a new adapter are what ``build_model`` draws from the same seed.

    Bit for bit in float32; the head and the adapter where they are declared.

    Why: engines that draw by themselves begin a comparison of two engines, or a move to another layout, from two
    models; a rank's number in the seed makes one model of several.
    Look at: the seed that reaches ``build_model``, the order of draws, and the dtype in which they are made.
    """
    model = subject.model()
    path = str(subject.expected.models.directory(model))
    sections: dict[str, dict[str, Any]] = {
        "weights drawn from a config": {"config": model.config().to_dict(), "head": "lm"}
    }
    if subject.spec.supports(Capability.VALUE_HEAD):
        sections["a model with a new head"] = {"path": path, "head": "value"}
    if subject.spec.supports(Capability.LORA):
        lora = TinyAdapter(model=model).section()
        sections["a model with a new adapter"] = {"path": path, "head": "lm", "lora": lora}
    for label, section in sections.items():
        group = subject.start(model, changes={"model": section, "seed": SEED})
        subject.verify_same(label, group.named_tensors("master"), _drawn(section))


def _drawn(section: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of the model, with its adapter, by the names under which they are written."""
    built = build_model(ModelConfig(**section), seed=SEED, attn_implementation="eager")
    state = HFShardedState(built, None, {}, Comm())
    return {part.name: part.tensor.clone() for part in state.local("master")}
