"""Layers that get an adapter, by ``peft``'s ``all-linear``, in the toolkit and in the oracle."""

from __future__ import annotations

import pytest
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from core_rl.config.engine import Head, LoraConfig
from core_rl.toolkit.lora import add_adapter, low_rank_products
from core_rl_conformance.inputs.tiny_models import CONFIGS, OTHER_LAYERS, TinyModel, build
from core_rl_conformance.profile import VISION
from core_rl_oracle.low_rank import linear_layers

CASES: list[tuple[str, Head]] = [
    *((family, "lm") for family in (*CONFIGS, *OTHER_LAYERS, *VISION)),
    *((family, "value") for family in CONFIGS),
]


def text_of(model: PreTrainedModel) -> nn.Module:
    return getattr(model.base_model, "language_model", model.base_model)


def adapted_by_toolkit(model: PreTrainedModel, head: Head) -> set[str]:
    add_adapter(model, LoraConfig(rank=1), head, seed=0)
    return {name.removesuffix(".weight") for name in low_rank_products(model)}


def adapted_by_peft(model: PreTrainedModel, head: Head) -> set[str]:
    """Layers of the text; ``peft`` adapts layers of towers as well, and wraps parameters of routers and experts."""
    names = {id(module): name for name, module in model.named_modules()}
    text = {names[id(module)] for module in text_of(model).modules()}
    task = "CAUSAL_LM" if head == "lm" else "SEQ_CLS"
    adapted = get_peft_model(model, PeftConfig(r=1, target_modules="all-linear", task_type=task))
    layers = {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    }
    return layers & text


@pytest.mark.parametrize(("family", "head"), CASES)
def test_adapted_layers_equal_those_of_peft(family: str, head: Head) -> None:
    model = TinyModel(family=family, head=head)
    expected = adapted_by_peft(build(model), head)
    plain = build(model)
    assert set(linear_layers(plain, text_of(plain))) == expected
    assert adapted_by_toolkit(plain, head) == expected
