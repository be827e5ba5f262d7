"""Fields of ``adapter_config.json``: computed, ignored knowingly, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig as PeftConfig

from core_rl.checkpoint.adapter_config import CHECKED, HARMLESS, PLAIN, adapter_problems
from core_rl.config.engine import Head, LoraConfig
from core_rl.errors import CheckpointDamaged, CheckpointNotFound

LORA = LoraConfig(rank=4, alpha=9)
FIELDS = {field.name for field in dataclasses.fields(PeftConfig)}


def problems(directory: Path, values: object, head: Head = "lm") -> str:
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return "\n".join(adapter_problems(LORA, head, directory))


def saved(directory: Path, **changes: Any) -> dict[str, Any]:
    """The fields that peft writes for a plain adapter, with ``changes``."""
    PeftConfig(r=4, lora_alpha=9, target_modules=["q_proj"]).save_pretrained(str(directory))
    values: dict[str, Any] = json.loads((directory / "adapter_config.json").read_text())
    return values | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": None, "bias": None, "rank_pattern": None, "layers_to_transform": []},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": False, "lora_dropout": 0.05, "base_model_name_or_path": "/elsewhere"},
        {"field_of_a_newer_peft": False, "other_field": [], "third": None},
        {"exclude_modules": ["lm_head"], "inference_mode": False, "task_type": "CAUSAL_LM"},
    ],
)
def test_plain_adapters_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert problems(tmp_path, saved(tmp_path, **changes)) == ""


@pytest.mark.parametrize("name", sorted(FIELDS - HARMLESS - {*CHECKED, *PLAIN}))
@pytest.mark.parametrize("value", [True, 3, "text", [0], {"x": 1}])
def test_other_fields_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    message = problems(tmp_path, saved(tmp_path, **{name: value}))
    assert message.startswith(f"its {name} is {value!r} in adapter_config.json")
    assert "; merge it (peft's merge_and_unload) into model.path" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"field_of_a_newer_peft": 0.5}, "its field_of_a_newer_peft is 0.5"),
        ({"layers_to_transform": 0}, "its layers_to_transform is 0"),
        ({"bias": "all"}, "its bias is 'all'"),
        ({"peft_type": "LOHA"}, "its peft_type is 'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "its init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "its init_lora_weights is 'olora'"),
        ({"modules_to_save": ["embed_tokens"]}, "its modules_to_save is ['embed_tokens']"),
        ({"r": 8}, "its r is 8, and model.lora.rank is 4 here; set it to 8"),
        ({"r": 0}, "its r is 0 in adapter_config.json: it has no factors"),
        ({"lora_alpha": 16}, "its lora_alpha is 16"),
        ({"use_rslora": True}, "its use_rslora is True, and model.lora.rslora is False here"),
        ({"rank_pattern": {"q_proj": 2}, "use_dora": True}, "its rank_pattern is {'q_proj': 2}"),
        ({"alpha_pattern": {str(n): n for n in range(999)}}, "its alpha_pattern is {'0': 0"),
    ],
)
def test_fields_beyond_plain_lora_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    lines = problems(tmp_path, saved(tmp_path, **changes)).splitlines()
    assert lines[0].startswith(message) and all(len(line) < 200 for line in lines)
    assert len(lines) == len(changes)


@pytest.mark.parametrize(("head", "accepted"), [("reward", True), ("value", True), ("lm", False)])
def test_heads_are_saved_with_scalar_models(tmp_path: Path, head: Head, accepted: bool) -> None:
    for names in (["score"], ["classifier", "score"]):
        assert (problems(tmp_path, saved(tmp_path, modules_to_save=names), head) == "") == accepted
    assert problems(tmp_path, saved(tmp_path, modules_to_save=["score", "norm"]), head)


@pytest.mark.parametrize(
    ("text", "error"), [(None, CheckpointNotFound), ("{", CheckpointDamaged), ("[]", CheckpointDamaged)]
)
def test_unreadable_adapter_configs_are_named(tmp_path: Path, text: str | None, error: type) -> None:
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(error, match=r"adapter_config\.json"):
        [*adapter_problems(LORA, "lm", tmp_path)]
