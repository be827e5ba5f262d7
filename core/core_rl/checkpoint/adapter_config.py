"""``adapter_config.json`` of ``peft``, field by field. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from core_rl.config.engine import Head, LoraConfig
from core_rl.errors import CheckpointDamaged, CheckpointNotFound

ADAPTER_CONFIG = "adapter_config.json"
CHECKED = {"r": ("rank", 8), "lora_alpha": ("alpha", 8), "use_rslora": ("rslora", False)}
"""Fields that equal those of ``model.lora``, and their defaults in ``peft``."""
HARMLESS = frozenset(
    # Where the adapter comes from, and how `peft` runs it.
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version"}
    | {"revision", "runtime_config", "task_type"}
    # Training alone: model.lora.dropout is that of the run.
    | {"lora_dropout"}
    # The choice of layers, which the names of the tensors show.
    | {"target_modules", "exclude_modules"}
    # peft sets it by the base layers.
    | {"fan_in_fan_out"}
    # Settings of other fields, which are checked.
    | {"corda_config", "ensure_weight_tying", "eva_config", "layers_pattern", "lora_ga_config"}
    | {"loftq_config", "qalora_group_size"}
)
"""Fields without an effect on the adapter's outputs."""
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Any other way to begin has changed the base weights.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
"""Values besides null, false and nothing with which an adapter is ``scaling * B @ A`` and nothing else."""
MERGE_FIX = "not plain LoRA; merge it (peft's merge_and_unload) into model.path"
HEADS = frozenset({"score", "classifier"})
"""Names in ``modules_to_save`` of a scalar head, of which `peft` writes both."""


def adapter_problems(lora: LoraConfig, head: Head, directory: Path) -> Iterator[str]:
    """Fields of the adapter in ``directory`` that are not those of ``lora``, or that change what it computes.

    A field that this version does not know counts, unless it is unset or has the default of the installed ``peft``.
    Raises `CheckpointNotFound` and `CheckpointDamaged`.
    """
    saved = _read(directory / ADAPTER_CONFIG)
    if "peft_type" not in saved:
        yield f"its {ADAPTER_CONFIG} has no peft_type, which peft writes as 'LORA'"
    for name, value in sorted(saved.items()):
        if name in HARMLESS or name in CHECKED or _is_unset(value) or value in PLAIN.get(name, ()):
            continue
        if name == "modules_to_save" and head != "lm" and {*value} <= HEADS:
            continue
        if name in PLAIN or value != _peft_defaults().get(name):
            yield f"its {name} is {_shown(value)} in {ADAPTER_CONFIG}, {MERGE_FIX}"
    for name, (field, default) in CHECKED.items():
        saved_value, value = saved.get(name), getattr(lora, field)
        saved_value = default if saved_value is None else saved_value
        if name == "r" and not saved_value:
            yield f"its r is 0 in {ADAPTER_CONFIG}: it has no factors; leave model.lora.path out"
        elif saved_value != value:
            yield f"its {name} is {saved_value!r}, and model.lora.{field} is {value!r} here; set it to {saved_value!r}"


def _is_unset(value: object) -> bool:
    """Null, false or nothing; 0 is the number of a layer or of a token."""
    return value is None or value is False or value in ("", [], {})


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _peft_defaults() -> dict[str, Any]:
    try:
        config: dict[str, Any] = import_module("peft").LoraConfig().to_dict()
    except ImportError:
        return {}
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFound(
            f"there is no {path.name}: this is no adapter that peft has saved"
        ) from error
    except ValueError as error:
        raise CheckpointDamaged(f"{path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointDamaged(f"{path.name} holds a {type(config).__name__}, not an object")
    return config
