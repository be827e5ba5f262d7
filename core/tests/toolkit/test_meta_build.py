"""A model that is built on the meta device and filled from its files, against transformers' own loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from core_rl.config.engine import Head, LoraConfig, ModelConfig
from core_rl.engine.guards import dropout_rates
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.build import build_model
from core_rl.toolkit.lora import checkpoint_name
from core_rl.toolkit.meta_build import build_on_meta, model_on_meta
from core_rl.toolkit.model_files import require_unquantized

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": False},
    "llama-scaled": {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "gemma3": {"model_type": "gemma3_text", **SMALL, "tie_word_embeddings": True, "sliding_window": 16},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 61,
    },
}


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def written(name: str, directory: Path, dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """A model directory with random weights."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(**MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory, **saving)
    return directory


def from_meta(model: ModelConfig, seed: int = 3) -> PreTrainedModel | None:
    unloaded = build_on_meta(model, seed=seed, attn_implementation="eager")
    if unloaded is None:
        return None
    assert {value.device.type for value in unloaded.model.parameters()} == {"meta"}
    unloaded.materialize(unloaded.model, torch.device("cpu"))
    stored = dict(unloaded.model.named_parameters()) | dict(unloaded.model.named_buffers())
    assert {*dict(unloaded.model.named_parameters())} <= {*unloaded.source.names()}
    with torch.no_grad():
        for name in unloaded.source.names():
            stored[name].copy_(unloaded.source.read(name))
    return unloaded.model


def same(left: PreTrainedModel, right: PreTrainedModel) -> bool:
    """Equal parameters and buffers, dtypes and ties, and equal outputs."""
    for part in ("named_parameters", "named_buffers"):
        first, second = (dict(getattr(model, part)()) for model in (left, right))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    ids = torch.tensor([[5, 60, 3, 17, 2, 9]])
    with torch.no_grad():
        outputs = [model(input_ids=ids).logits for model in (left, right)]
    return torch.equal(*outputs)


def change(directory: Path, edit: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shared(directory: Path) -> Path:
    return written("llama", directory, max_shard_size="8KB")


def shared_in_half(directory: Path) -> Path:
    return written("llama", directory, torch.bfloat16, max_shard_size="8KB")


def trunk(directory: Path) -> Path:
    model = AutoModel.from_config(AutoConfig.for_model(**MODELS["qwen3"]), dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def written_twice(name: str, directory: Path) -> Path:
    written(name, directory)
    change(directory, lambda stored: stored.update({HEAD: stored[EMBEDDING].clone()}))
    return directory


def under_its_alias(directory: Path) -> Path:
    written("qwen3", directory)
    change(directory, lambda stored: stored.update({HEAD: stored.pop(EMBEDDING)}))
    return directory


FILES: list[tuple[Callable[[Path], Path], Head]] = [
    *((partial(written, name), head) for name in MODELS for head in ("lm", "value")),
    (shared, "lm"),
    (shared_in_half, "lm"),
    (trunk, "value"),
    (partial(written_twice, "qwen3"), "lm"),
    (partial(written_twice, "llama"), "lm"),
    (under_its_alias, "lm"),
]


@pytest.mark.parametrize(("write", "head"), FILES)
def test_meta_build_equals_transformers_load(
    write: Callable[[Path], Path], head: Head, tmp_path: Path
) -> None:
    model = ModelConfig(path=str(write(tmp_path)), head=head)
    built = from_meta(model)
    assert built is not None
    assert same(built, build_model(model, seed=3, attn_implementation="eager"))


def test_a_new_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    model = ModelConfig(path=str(written("qwen3", tmp_path)), head="reward")
    heads = []
    for seed in (3, 3, 4):
        torch.rand(7)  # the global random state must not matter, and must not change
        before = torch.get_rng_state()
        built = from_meta(model, seed)
        assert built is not None and torch.equal(torch.get_rng_state(), before)
        heads.append(built.get_parameter("score.weight"))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].dtype == torch.float32 and heads[0].any()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_an_adapter_begins_with_the_same_values(name: str, tmp_path: Path) -> None:
    model = ModelConfig(path=str(written(name, tmp_path)), lora=LoraConfig(rank=3))
    unloaded = build_on_meta(model, seed=3, attn_implementation="eager")
    assert unloaded is not None
    assert {value.device.type for value in unloaded.model.parameters()} == {"meta"}
    plain = build_model(model, seed=3, attn_implementation="eager")
    values = {checkpoint_name(stored): parameter.detach() for stored, parameter in plain.named_parameters()}
    assert values.keys() == {*unloaded.source.names()}
    assert all(torch.equal(unloaded.source.read(stored), value) for stored, value in values.items())
    trained = {stored for stored, parameter in plain.named_parameters() if parameter.requires_grad}
    assert trained == {stored for stored, value in unloaded.model.named_parameters() if value.requires_grad}


def test_unmapped_files_are_loaded_by_transformers(tmp_path: Path) -> None:
    assert from_meta(ModelConfig(config=MODELS["qwen3"])) is None
    bert: dict[str, Any] = {
        "model_type": "bert",
        "is_decoder": True,
        "hidden_size": 24,
        "num_attention_heads": 4,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**bert)).save_pretrained(tmp_path)
    norm = "bert.embeddings.LayerNorm"  # transformers reads its name of before
    change(tmp_path, lambda stored: stored.update({f"{norm}.gamma": stored.pop(f"{norm}.weight")}))
    assert from_meta(ModelConfig(path=str(tmp_path))) is None


def test_differing_tied_tensors_are_refused(tmp_path: Path) -> None:
    directory = written("qwen3", tmp_path / "untied")
    change(directory, lambda stored: stored.update({HEAD: stored[EMBEDDING] + 1}))
    with pytest.raises(
        ConfigError, match=rf"{HEAD} differ, and tie_word_embeddings is true; set it to false"
    ):
        from_meta(ModelConfig(path=str(directory)))


def drop(stored: dict[str, torch.Tensor]) -> None:
    del stored["model.norm.weight"]


def shorten(stored: dict[str, torch.Tensor]) -> None:
    stored["model.norm.weight"] = stored["model.norm.weight"][:-1].clone()


def drop_beside_others(stored: dict[str, torch.Tensor]) -> None:
    others = {name: torch.zeros(1, 24) for name in ("score.weight", "visual.merger.weight")}
    stored |= others | {"model.norm.gamma": stored.pop("model.norm.weight")}


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    ("damage", "message"), [(drop, "missing"), (shorten, "misshapen"), (drop_beside_others, "missing")]
)
def test_misfit_weights_raise_config_error(damage: Any, message: str, head: Head, tmp_path: Path) -> None:
    model = ModelConfig(path=str(written("qwen3", tmp_path)), head=head)
    change(tmp_path, damage)
    with pytest.raises(ConfigError, match=rf"do not fit their config: .*{message} \['model\.norm\.weight'\]"):
        build_on_meta(model, seed=3, attn_implementation="eager")
    with pytest.raises(ConfigError):
        build_model(model, seed=3, attn_implementation="eager")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    file = written("qwen3", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"cannot be built: .*model\.safetensors"):
        build_on_meta(ModelConfig(path=str(tmp_path)), seed=0, attn_implementation="eager")


OWN_CODE = {"architectures": ["MyModel"], "auto_map": {"AutoModelForCausalLM": "modeling.MyModel"}}
ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"pad_token_id": 300}, "Padding_idx"),
        ({"hidden_act": "nothing"}, "hidden_act = 'nothing'"),
        ({"rope_parameters": ROPE | {"rope_type": "mine"}}, "rope_parameters.rope_type = 'mine'"),
        ({"rope_parameters": ROPE | {"factor": "4"}}, "rope_parameters.factor = '4'"),
        (
            {"rope_scaling": {"type": "su", "factor": 4.0}, "rope_parameters": None},
            "rope_scaling.type = 'su'",
        ),
        ({"num_attention_heads": 0}, "integer modulo by zero"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"vocab_size": -1}, "negative dimension -1"),
        ({"vocab_size": None}, "vocab_size"),
        ({"dtype": "float99"}, "dtype = 'float99'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({"model_type": "unknown"}, "model_type = 'unknown'"),
        (OWN_CODE, "architectures = 'MyModel' is code of the model's own"),
        (OWN_CODE | {"model_type": "mine"}, "architectures = 'MyModel' is code of the model's own"),
        ({"is_causal": False}, "is an encoder"),
        ({"is_encoder_decoder": True}, "is an encoder"),
    ],
    ids=str,
)
def test_wrong_config_values_raise_config_error(fields: dict[str, Any], part: str, tmp_path: Path) -> None:
    file = written("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(
        ConfigError, match=r"cannot be built|refuses the model config|is an encoder|\(auto_map\)"
    ) as raised:
        model_on_meta(ModelConfig(path=str(tmp_path)))
    assert len(str(raised.value).splitlines()) == 1
    assert part in str(raised.value) and "transformers_version" not in str(raised.value)


def test_quantized_weights_are_not_trained(tmp_path: Path) -> None:
    file = written("llama", tmp_path) / "config.json"
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantization))
    with pytest.raises(UnsupportedCapability, match="are quantized"):
        require_unquantized(ModelConfig(path=str(tmp_path)))


def test_noise_of_routers_counts_as_dropout() -> None:
    config = AutoConfig.for_model("mixtral", router_jitter_noise=0.1, attention_dropout=0.2)
    assert dropout_rates(config) == {"router_jitter_noise": 0.1, "attention_dropout": 0.2}


@pytest.mark.parametrize("build", [build_model, build_on_meta])
def test_pickled_weights_are_refused_by_name(build: Any, tmp_path: Path) -> None:
    tensors = load_file(written("qwen3", tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match="there are no weights in it"):
        build(model, seed=0, attn_implementation="eager")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"weights are pickled \(pytorch_model\.bin\).*save_pretrained\(\)"):
        build(model, seed=0, attn_implementation="eager")
