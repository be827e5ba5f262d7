"""Models, directories and values that a run cannot take: refused before anything starts, in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import training_support as support
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig

from core_rl.errors import ConfigError, CoreRLError
from core_rl_trainer.api import dry_run
from core_rl_trainer.data.tokenizers import check_same_tokens, load_tokenizer
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.recipe.recipe import OTHER_NAMES, load_recipe


def encoder(config: dict[str, Any]) -> None:
    config.clear()
    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.update(small.to_dict())


def few_embeddings(config: dict[str, Any]) -> None:
    config["vocab_size"] = 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (encoder, "of type 'bert' is an encoder: each token sees those after it"),
        (
            few_embeddings,
            r"train.jsonl: 16 problems:\n  - line 1: has the token '=', id 14, and a model of the run",
        ),
    ],
)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_models_without_log_probs_of_all_tokens(
    start: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str, algorithm: str
) -> None:
    model = tmp_path / "model"
    _link(start, model)
    config = json.loads((model / "config.json").read_text())
    change(config)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": algorithm})
    values["model"] = {"path": str(model)}
    with pytest.raises(CoreRLError, match=message):
        dry_run(load_recipe(support.write_recipe(tmp_path / "r.yaml", values)))


def _edited(path: Path, **fields: Any) -> None:
    """``path``, a link, as a JSON file with other ``fields``."""
    values = json.loads(path.read_text()) | fields
    path.unlink()
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {}),
        ("ppo", {"critic": {}}),
        ("sft", {}),
        ("dpo", {"data": "pairs.jsonl"}),
        ("reward_model", {"data": "pairs.jsonl"}),
    ],
)
@pytest.mark.parametrize("end", [None, "beyond", "stop_token_ids", "config"])
def test_runs_need_an_end_token(
    start: Path, tmp_path: Path, algorithm: str, changes: dict[str, Any], end: str | None
) -> None:
    model = tmp_path / "model"
    _link(start, model)
    _edited(model / "tokenizer_config.json", eos_token="<new>" if end == "beyond" else None)
    _edited(model / "config.json", eos_token_id=support.EOS if end == "config" else None)
    (model / "generation_config.json").unlink()
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": algorithm}, **changes)
    data = str(start / changes.get("data", "train.jsonl"))
    values |= {"model": {"path": str(model)}, "data": {"train": data}}
    del values["eval_every"]
    values["rollout"] |= {"stop_token_ids": [support.EOS]} if end == "stop_token_ids" else {}
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    if end == "config" or (end == "stop_token_ids" and algorithm in ("grpo", "ppo")):
        assert dry_run(recipe).end_tokens == {support.EOS: "</s>"}
        return
    with pytest.raises(ConfigError, match=r"there is no end token with an embedding"):
        dry_run(recipe)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens in tokenizer_config"),
        ("generation_config.json", {"eos_token_id": "2"}, r"generation_config\.json: eos_token_id is '2'"),
        ("config.json", {"hidden_size": "32"}, r"config\.json: .*'hidden_size' expected int"),
        ("config.json", {"vocab_size": 64}, r"do not fit their config: .*misshapen"),
        ("config.json", {"is_causal": False}, "is an encoder"),
    ],
)
def test_wrong_model_files_are_refused(
    start: Path, tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    model = tmp_path / "model"
    _link(start, model)
    _edited(model / file, **fields)
    values = support.recipe_values(start, tmp_path / "out") | {"model": {"path": str(model)}}
    with pytest.raises(ConfigError, match=message):
        dry_run(load_recipe(support.write_recipe(tmp_path / "r.yaml", values)))


def test_random_merges_of_tokenizer_are_refused(start: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    _link(start, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    symbols = {"\u2581": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4}
    tokenizer["model"] = {"type": "BPE", "dropout": 0.5, "vocab": symbols, "merges": [["a", "b"]]}
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"dropout = 0\.5 in tokenizer\.json"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [("text, sample", False), ("*args", False), ("text", True), ("source, text, truth, extra=None", True)],
)
def test_reward_of_other_arguments_is_refused(
    start: Path, tmp_path: Path, arguments: str, refused: bool
) -> None:
    (tmp_path / "score.py").write_text(f"def score({arguments}):\n    return 1.0\n")
    values = support.recipe_values(start, tmp_path / "out", reward=f"{tmp_path / 'score.py'}:score")
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    if not refused:
        dry_run(recipe)
        return
    with pytest.raises(ConfigError, match="a reward is called with the text of a completion and its sample"):
        dry_run(recipe)


@pytest.mark.parametrize("place", sorted(set(OTHER_NAMES.values())))
def test_names_of_other_systems_lead_to_fields(start: Path, tmp_path: Path, place: str) -> None:
    algorithm = {"type": "ppo_actor", "args": {"kl_coef": 0.0}}
    values = support.recipe_values(start, tmp_path, algorithm=algorithm)
    values["model"]["lora"] = {"rank": 2}
    value: Any = load_recipe(values)
    for name in place.partition(",")[0].split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)


def test_token_ids_beyond_the_vocabulary(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path / "out")
    values["rollout"] |= {"stop_token_ids": [2, 99], "logit_bias": {15: 1.0}, "off_distribution": "warn"}
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    with pytest.raises(
        ConfigError, match=r"stop_token_ids has the token id 99; .*0 to 14[\s\S]*logit_bias has .* 15"
    ):
        dry_run(recipe)


OTHER_TOKENS = [
    ('"4": 7', '"?": 7', r"reward_model.path = .*not that of model.path \(id 7 is '\?', not '4'; .*: 1\)"),
    ('"=": 14', '"=": 14, "[PAD]": 15', None),
]


@pytest.mark.parametrize(("old", "new", "message"), OTHER_TOKENS)
def test_reward_models_share_the_tokenizer(
    start: Path, tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    _link(start, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    text = json.dumps(json.loads(file.read_text()))
    file.unlink()
    file.write_text(text.replace(old, new))
    assert old in text
    tokenizer = load_tokenizer(str(start / "model"))
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_same_tokens(
            tokenizer, {"critic.path": None, "reward_model.path": str(file.parent), "x": str(tmp_path)}
        )


def _link(start: Path, model: Path) -> None:
    """A directory with links to the files of the model."""
    model.mkdir()
    for file in (start / "model").iterdir():
        (model / file.name).symlink_to(file)


def test_a_model_without_a_tokenizer(start: Path, tmp_path: Path) -> None:
    _link(start, tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    values = support.recipe_values(start, tmp_path / "out")
    values["model"] = {"path": str(tmp_path / "model")}
    with pytest.raises(ConfigError, match=r"tokenizer.*; copy tokenizer\.json"):
        dry_run(load_recipe(support.write_recipe(tmp_path / "r.yaml", values)))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_invalid_output_directory(start: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    values = support.recipe_values(start, tmp_path / name)
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    with (
        pytest.raises(ConfigError, match=r"output_dir = '.*': (File exists|Not a directory)"),
        support.open_directory(recipe),
    ):
        pass


def test_schedule_ending_before_warm_up(start: Path, tmp_path: Path) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    with pytest.raises(ConfigError, match="warmup_steps = 7, and the schedule ends after 4 steps"):
        dry_run(load_recipe(recipe, ["optimizer.schedule.warmup_steps=7"]))
    assert not (tmp_path / "out").exists()


NOTHING = "matches all parameters, so that nothing is left to train"


FROZEN = [
    ("sft", {"frozen": ["*"]}, NOTHING),
    ("sft", {"frozen": ["model.*", "lm_head*"]}, NOTHING),
    ("grpo", {"frozen": ["*"]}, NOTHING),
    ("sft", {"frozen": ["model.layers.77.*"]}, r"model.frozen = \['model.layers.77.\*'\] match no parameter"),
    ("grpo", {"frozen": ["visual.*", "model.*"]}, r"model.frozen = \['visual.\*'\] match no parameter"),
    ("sft", {"frozen": ["*layers.9*"], "lora": {"rank": 2}}, "match no parameter; names look like"),
    ("sft", {"frozen": ["model.layers.*"]}, None),
    ("reward_model", {"frozen": ["model.*"]}, None),
    ("reward_model", {"frozen": ["*"]}, NOTHING),
    ("sft", {"frozen": ["*"], "lora": {"rank": 2}}, None),
    ("ppo", {"frozen": ["*"]}, NOTHING),
]


@pytest.mark.parametrize(("algorithm", "model", "message"), FROZEN)
def test_frozen_patterns_leave_something_to_train(
    start: Path, tmp_path: Path, algorithm: str, model: dict[str, Any], message: str | None
) -> None:
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": algorithm})
    values["model"] |= model
    if algorithm == "ppo":
        values["critic"] = {}
    if algorithm == "reward_model":
        values["data"] = {"train": str(start / "pairs.jsonl")}
        del values["eval_every"]
    recipe = load_recipe(values)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        remarks = "".join(resolve(recipe).remarks)
        assert ("beside model.lora changes nothing" in remarks) == ("lora" in model)


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        ("model.layers.7.mlp.up_proj.weight", True),
        ("model.layers.0.mlp.up_proj.SCB", True),
        ("model.layers.0.self_attn.o_proj.bias", True),
        ("mtp.layers.0.norm.weight", False),
        ("visual.blocks.0.norm.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("lm_head.weight", None),
    ],
)
def test_unused_tensors_are_refused_or_remarked(
    start: Path, tmp_path: Path, extra: str, refused: bool | None
) -> None:
    """Tensors of the layers are refused, others are remarked, and those that are computed or tied are neither."""
    model = shutil.copytree(start / "model", tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tied = tensors["model.embed_tokens.weight"] if extra == "lm_head.weight" else torch.zeros(4)
    save_file({extra: tied.clone(), **tensors}, file)
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": "sft"})
    values["model"] = {"path": str(model)}
    recipe = load_recipe(values)
    with (
        pytest.raises(ConfigError, match=f"the model has no '{re.escape(extra)}'")
        if refused
        else nullcontext()
    ):
        assert (f"does not compute '{extra}'" in "".join(resolve(recipe).remarks)) == (refused is False)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_unread_fields_of_generation_are_remarked(start: Path, tmp_path: Path, algorithm: str) -> None:
    model = shutil.copytree(start / "model", tmp_path / "model")
    file = model / "generation_config.json"
    fields = json.loads(file.read_text()) if file.is_file() else {}
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": algorithm})
    for unread in ({}, {"stop_strings": ["x"], "num_beams": 4, "do_sample": False}):
        same = {"temperature": values["rollout"].get("temperature", 1.0), "use_cache": False}
        file.write_text(json.dumps(fields | same | unread))
        values["model"] = {"path": str(model)}
        remarks = "".join(resolve(load_recipe(values)).remarks)
        assert "temperature" not in remarks and "use_cache" not in remarks
        named = [
            name for name in ("stop_strings = ['x']", "num_beams = 4", "do_sample = False") if name in remarks
        ]
        assert len(named) == (len(unread) if algorithm == "grpo" else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, value: (name, value), None),
        (lambda name, value: (name.replace(".weight", ".default.weight"), value), "missing .*lora_A.weight'"),
        (
            lambda name, value: (name.replace("q_proj", "v_proj"), value),
            r"for \['v_proj'\], and model\.lora\.target_modules is \('q_proj',\)",
        ),
        (
            lambda name, value: (name.replace("layers.0.", "layers.1."), value),
            r"without the exclude_modules of peft; set the first, or merge it .*missing .*layers\.0\.self_attn\.q_proj",
        ),
        (lambda name, value: (name, value[:, :-1].clone()), "the model has"),
        (lambda name, value: (name, value / 0), "values that are not finite"),
    ],
)
def test_unfit_adapters_are_refused(
    start: Path, tmp_path: Path, change: Callable[[str, Tensor], tuple[str, Tensor]], message: str | None
) -> None:
    base = AutoModelForCausalLM.from_pretrained(start / "model")
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    peft.get_peft_model(base, settings).save_pretrained(str(tmp_path / "adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(dict(change(name, value) for name, value in load_file(file).items()), file)
    lora = {"rank": 4, "alpha": 8, "target_modules": ["q_proj"], "path": str(tmp_path / "adapter")}
    values = support.recipe_values(start, tmp_path / "out", algorithm={"type": "sft"})
    values["model"] = {"path": str(start / "model"), "lora": lora}
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", values))
    if message is None:
        dry_run(recipe)
        return
    with pytest.raises(ConfigError, match=rf"(?s)^model\.lora\.path = .*{message}"):
        dry_run(recipe)
