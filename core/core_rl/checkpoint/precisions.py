"""Precision of each layer of a quantized checkpoint, as the ``quantization_config`` of its directory describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SKIPPED = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "awq": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "compressed-tensors": ("ignore",),
}
"""Fields with layers that keep their precision."""
HEAD = "lm_head"


def quantized_layers(
    quantization: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The precision of each quantized layer of a model with tensors of ``shapes``; other layers are left out.

    Knows ``fp8``, ``compressed-tensors``, ``gptq``, ``awq`` and ``bitsandbytes``; by another method all linear layers
    have its name for a precision.
    """
    method = str(quantization.get("quant_method", "")).replace("_", "-")
    skipped = [str(name) for field in SKIPPED.get(method, ()) for name in quantization.get(field) or ()]
    skipped += [rule[2:] for rule in quantization.get("dynamic") or () if rule.startswith("-:")]
    precision = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer == name or len(shape) != 2 or "embed" in layer.rpartition(".")[2]:
            continue
        value = _precision(method, quantization, layer)
        head = layer == HEAD and method != "compressed-tensors" and not quantization.get(HEAD)
        if value is not None and not head and not any(_matches(rule, layer, method) for rule in skipped):
            precision[layer] = value
    return precision


def shown_layers(precisions: Mapping[str, str]) -> str:
    """The layers of each precision, with ``*`` for the numbers of blocks."""
    groups: dict[str, dict[str, None]] = {}
    for layer, precision in precisions.items():
        groups.setdefault(precision, {})[re.sub(r"\b\d+\b", "*", layer)] = None
    return "; ".join(f"{precision}: {', '.join(layers)}" for precision, layers in groups.items())


def _precision(method: str, quantization: Mapping[str, Any], layer: str) -> str | None:
    match method:
        case "gptq" | "awq":
            return f"int{quantization.get('bits', quantization.get('w_bit', 4))}"
        case "bitsandbytes" if quantization.get("load_in_8bit"):
            return "int8"
        case "bitsandbytes":
            return str(quantization.get("bnb_4bit_quant_type", "fp4"))
        case "compressed-tensors":
            return _of_groups(quantization.get("config_groups") or {}, layer)
        case _:
            return method or "quantized"


def _of_groups(groups: Mapping[str, Mapping[str, Any]], layer: str) -> str | None:
    for group in groups.values():
        targets: Sequence[str] = group.get("targets") or ()
        if any(target == "Linear" or _matches(target, layer, "compressed-tensors") for target in targets):
            weights = group.get("weights") or {}
            return f"{weights.get('type', 'int')}{weights.get('num_bits', '')}"
    return None


def _matches(rule: str, layer: str, method: str) -> bool:
    """Whether ``rule``, a name, a part of names or a pattern as ``method`` has it, is of ``layer``."""
    if method == "gptq":
        return re.match(rule, layer) is not None
    if rule.startswith("re:"):
        return re.match(rule[3:], layer) is not None
    if method == "awq":
        return rule in layer
    return f".{rule}." in f".{layer}."
