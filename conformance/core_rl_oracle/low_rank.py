"""Low-rank adapters (LoRA, arXiv:2106.09685) as their paper writes them: ``y = W x + scaling * B A x``.

Nothing here imports ``peft`` or core-rl. The adapter is a hook on the output of a layer, so it does not
depend on how the layer stores its weight; its factors are parameters of the model, with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

A, B = ".lora_A.weight", ".lora_B.weight"
EXPERT_PARTS = ("gate", "gate_proj", "up_proj", "down_proj")
SPLIT_EXPERTS = (
    "Dots3NoteTextModel UnlimitedOcrTextModel afmoe beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 "
    "ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash "
    "mellum olmoe qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker solar_open"
)
"""Model types in which `EXPERT_PARTS` were layers of each expert, and routers, before transformers 5 fused them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """An adapter: for some layers ``A [rank, in]`` and ``B [out, rank]``."""

    factors: Mapping[str, Tensor]
    """``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``."""
    scaling: float
    transposed: frozenset[str] = frozenset()
    """Layers that store their weight as ``[in, out]``."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Names of weights in files, by layer, where they are not the names of their modules."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Factors of the adapter's inputs ``[in]`` of some layers, such as a mask of dropout over ``1 - rate``."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have a part of it."""
        return [name.removesuffix(A) for name in self.factors if name.endswith(A)]

    def weight_of(self, layer: str) -> str:
        """The name of the weight of ``layer`` in files."""
        return self.weights.get(layer, f"{layer}.weight")

    def attach(self, model: nn.Module) -> None:
        """Add it to ``model``, in the model's dtype and on its device."""
        for name in self.layers:
            layer = model.get_submodule(name)
            like = next(layer.parameters())
            for factor in ("lora_A", "lora_B"):
                holder = nn.Module()
                value = self.factors[f"{name}.{factor}.weight"].to(like)
                holder.register_parameter("weight", nn.Parameter(value.clone()))
                layer.add_module(factor, holder)
            layer.register_forward_hook(partial(self._add, self.inputs.get(name)))

    def _add(
        self, factor: Tensor | None, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        a, b = layer.get_parameter("lora_A.weight"), layer.get_parameter("lora_B.weight")
        given = inputs[0] if factor is None else inputs[0] * factor.to(inputs[0])
        return output + self.scaling * F.linear(F.linear(given, a), b)

    def merged(self, weights: Mapping[str, Tensor], order: Literal[0, 1, 2] = 0) -> dict[str, Tensor]:
        """``weights`` by name, with the product added where there is one, in their dtype.

        Each ``order`` of the multiplications rounds in its own way.
        """
        merged = dict(weights)
        for name in self.layers:
            weight = weights[self.weight_of(name)]
            a, b = self.factors[name + A].to(weight), self.factors[name + B].to(weight)
            product = (self.scaling * (b @ a), (self.scaling * b) @ a, b @ (self.scaling * a))[order]
            merged[self.weight_of(name)] = weight + (product.T if name in self.transposed else product)
        return merged

    def mistaken(self) -> Iterator[tuple[str, LowRank]]:
        """Sentences about usual mistakes, and the adapter that an engine with each computes with."""
        root = math.sqrt(next(len(value) for name, value in self.factors.items() if name.endswith(A)))
        for sentence, scaling in (
            ("the adapter is not applied", 0.0),
            ("the adapter is applied twice, as over weights with it merged", 2 * self.scaling),
            ("the adapter's product is not scaled", 1.0),
            ("the adapter's product is scaled twice", self.scaling**2),
            ("rank and alpha are exchanged in the adapter's scale", 1 / self.scaling),
            ("the adapter's scale is alpha / rank, and not alpha / sqrt(rank)", self.scaling / root),
            ("the adapter's scale is alpha / sqrt(rank), and not alpha / rank", self.scaling * root),
        ):
            yield sentence, replace(self, scaling=scaling)
        rounded = {name: value.bfloat16().to(value.dtype) for name, value in self.factors.items()}
        yield "the adapter's factors are rounded to bfloat16", replace(self, factors=rounded)
        for kind in dict.fromkeys(layer.rpartition(".")[2] for layer in self.layers):
            rest = {name: value for name, value in self.factors.items() if f".{kind}.lora_" not in name}
            yield f"the adapter of {kind} is not applied", replace(self, factors=rest)


def linear_layers(model: nn.Module, trunk: nn.Module) -> dict[str, tuple[int, int, bool]]:
    """Linear layers of the ``trunk`` of ``model``: sizes of output and input, and whether one stores ``[in, out]``.

    Of `SPLIT_EXPERTS`, without `EXPERT_PARTS`, also in dense layers and shared experts: ``peft`` takes these names for
    the fused weights alone.
    """
    inside = {id(module) for module in trunk.modules()}
    skipped = EXPERT_PARTS if getattr(model.config, "model_type", "") in SPLIT_EXPERTS.split() else ()
    result = {}
    for name, module in model.named_modules():
        transposed = type(module).__name__ == "Conv1D"  # GPT-2's
        linear = transposed or isinstance(module, nn.Linear)
        if linear and id(module) in inside and name.rpartition(".")[2] not in skipped:
            sizes = module.get_parameter("weight").shape
            result[name] = (sizes[transposed], sizes[not transposed], transposed)
    return result
