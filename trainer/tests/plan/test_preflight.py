"""Checks before torch is imported: weights, directories, environment and sections, by name."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import training_support as support
from safetensors.torch import load_file, save_file

from core_rl.checkpoint.model_files import check_weight_files
from core_rl.errors import BatchError, ConfigError, CoreRLError, LayoutError, RankDied, UnsupportedCapability
from core_rl_trainer.api import dry_run
from core_rl_trainer.plan.resolve import preflight
from core_rl_trainer.recipe.recipe import load_recipe

WEIGHTS = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"


def _pickled(model: Path) -> None:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")


def _truncated(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-100])


def _indexed(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": WEIGHTS}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _left_shards(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _rewritten(model: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    tensors = load_file(model / WEIGHTS)
    save_file(dict(change(name, tensor) for name, tensor in tensors.items()), model / WEIGHTS)


def _compiled(model: Path) -> None:
    _rewritten(model, lambda name, tensor: (f"_orig_mod.{name}", tensor))


def _of_integers(model: Path) -> None:
    _rewritten(model, lambda name, tensor: (name, tensor.to(torch.int8) if "q_proj" in name else tensor))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (_compiled, ["all names begin with '_orig_mod.'", "remove the prefix"]),
        (_of_integers, ["q_proj.weight'", "are stored as I8, and weights are floats"]),
        (lambda model: (model / WEIGHTS).unlink(), ["there are no weights in it"]),
        (_pickled, ["its weights are pickled (pytorch_model.bin)", "save_pretrained()"]),
        (_truncated, [f"{WEIGHTS}: truncated: ", "by its header"]),
        (lambda model: (model / WEIGHTS).write_text("<html>"), [f"{WEIGHTS}: no safetensors file"]),
        (lambda model: (model / WEIGHTS).write_text(POINTER), ["a pointer of Git LFS", "git lfs pull"]),
        (lambda model: (model / "tokenizer.json").write_text(POINTER), ["tokenizer.json: a pointer of Git"]),
        (
            _left_shards,
            [f"{WEIGHTS} lies next to the files of {WEIGHTS}.index.json; remove the older weights"],
        ),
        (_indexed, ["model-00001-of-00002.safetensors: missing", f"{WEIGHTS}: lacks 'b'"]),
    ],
)
@pytest.mark.parametrize("field", ["model.path", "reward_model.path"])
def test_damaged_weights_name_field_and_file(
    start: Path, tmp_path: Path, field: str, damage: Callable[[Path], None], messages: list[str]
) -> None:
    shutil.copytree(start / "model", tmp_path / "model")
    damage(tmp_path / "model")
    values = support.recipe_values(start, tmp_path / "out")
    with pytest.raises(ConfigError) as raised:
        preflight(load_recipe(values, [f"{field}={tmp_path / 'model'}"]))
    assert str(raised.value).startswith(f"recipe: {field} = ")
    assert all(message in str(raised.value) for message in messages)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engines.fdsp.layout.dp=2", "engines.fdsp: no engine is called 'fdsp'; did you mean 'fsdp'?"),
        (
            "engines.reference-rollout.options.api_key=${env:CORE_RL_UNSET}",
            "'engines.reference-rollout.options.api_key' = '${env:CORE_RL_UNSET}': the environment variable",
        ),
        ("output_dir={file}", "output_dir = '{file}': Not a directory ({file})"),
        ("output_dir=s3://a/run", "output_dir' = 's3://a/run' is a URL; name a directory"),
        ("output_dir=$UNSET/run", "field 'output_dir' = '$UNSET/run': $UNSET is not set; set it"),
        ("output_dir=${UNSET}/{engine}", "'${UNSET}/reference': ${UNSET} is not set; set it"),
        ("output_dir=${file}/{}", "'${file}/{}': only {engine} and {seed}, {here}"),
        (
            "data.train=${UNSET}/run.jsonl",
            "'data.train.0.path' = '${UNSET}/run.jsonl': ${UNSET} is not set; set it",
        ),
        ("output_dir={file}/run", "output_dir = '{file}/run': Not a directory ({file})"),
        ("model.lora={rank: 4, path: /nowhere}", "model.lora.path = '/nowhere': there is no such directory"),
    ],
)
def test_wrong_fields_are_named_without_torch(
    start: Path, tmp_path: Path, override: str, message: str
) -> None:
    (tmp_path / "file").touch()
    override, message = (text.replace("{file}", str(tmp_path / "file")) for text in (override, message))
    with pytest.raises(ConfigError) as raised:
        preflight(load_recipe(support.recipe_values(start, tmp_path / "out"), [override]))
    assert message in str(raised.value)


def test_locked_directory_is_refused_first(start: Path, tmp_path: Path) -> None:
    recipe = load_recipe(support.recipe_values(start, tmp_path))
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is at work there"):
            preflight(recipe)
    assert preflight(recipe) == ()


@pytest.mark.parametrize(("share", "refused"), [(0.5, True), (1.1, False)])
def test_small_disk_is_refused_or_remarked(
    start: Path, tmp_path: Path, share: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(support.recipe_values(start, tmp_path / "out"), ["keep=4", "save_every=1"])
    weights = check_weight_files(Path(recipe.model.path))
    needed = 4 * 12 * weights.parameters + weights.size
    usage = shutil.disk_usage(tmp_path)._replace(free=int(share * needed))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    if refused:
        with pytest.raises(ConfigError, match="checkpoints and exports take about"):
            preflight(recipe)
    else:
        assert "checkpoints and exports take about" in preflight(recipe)[0]


def test_sections_of_unused_engines_are_remarked(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path / "out", engines={"fsdp": {"layout": {"dp": 2}}})
    (remark,) = preflight(load_recipe(values))
    assert remark == "engines.fsdp not read: the engines of this recipe are reference and reference-rollout"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engines.fsdp.layout.tp=3"],
            "tp=3 does not divide num_attention_heads=2 and num_key_value_heads=1",
        ),
        (["engines.fsdp.layout.cp=4"], "2 attention heads cannot be spread over cp=4 ranks"),
        (["engines.fsdp={layout: {dp: 4}, options: {replicas: 3}}"], "replicas=3 must divide dp=4"),
        (["engines.fsdp.layout={dp: 2, ep: 2}"], "ep=2 for LlamaForCausalLM, which has no experts"),
    ],
)
def test_layouts_are_compared_with_the_model(
    start: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = load_recipe(support.recipe_values(start, tmp_path / "out", engine="fsdp"), overrides)
    with pytest.raises(LayoutError, match=re.escape(message)):
        dry_run(recipe)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, 2), (LayoutError, 2), (UnsupportedCapability, 2), (BatchError, 2), (RankDied, 1)],
)
def test_exit_codes_follow_the_table(error: type[CoreRLError], code: int) -> None:
    assert error("").exit_code == code
