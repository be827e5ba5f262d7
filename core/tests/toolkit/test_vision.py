"""Vision-language models: arguments of one sequence, refused models and batches, and adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.tensors import TensorDict
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.engine.placeholders import placeholder_violations
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, ConfigError, UnsupportedCapability
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.vision import blank_image, sequence_arguments
from core_rl_conformance.inputs.tiny_vision import CONFIGS, IMAGE, MODEL_TYPES, VIDEO, vision_config

ONE = MicroBatchSpec(count=1)
GRIDS = ("qwen3_vl", "qwen2_5_vl", "qwen3_5_vl", "qwen3_vl_moe")
TEXT = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 61,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
FEATURES = {family: 1 if family in GRIDS else 4 for family in CONFIGS}
"""Features of the smallest image."""


def tiny(family: str, **fields: Any) -> ModelConfig:
    config = {"model_type": MODEL_TYPES.get(family, family), **CONFIGS[family]}
    return ModelConfig(config=config, **{"vision": True, **fields})


@cache
def built(family: str) -> PreTrainedModel:
    register_packed_attention()
    return build_model(tiny(family), seed=0, attn_implementation=PACKED_ATTENTION)


def pictured(family: str, *, before: int = 3) -> SequenceBatch:
    """A sequence with the smallest image, and a text with the placeholder of a video."""
    ids = [*range(5, 5 + before), *[IMAGE] * FEATURES[family], 9, VIDEO, 11]
    image = {
        name: torch.ones_like(value) if value.is_floating_point() else value
        for name, value in blank_image(vision_config(family)).items()
    }
    return SequenceBatch.from_sequences([ids, [7, VIDEO, 9]], media=[image, {}])


@pytest.fixture
def engine() -> Iterator[TrainEngine]:
    started = load_engine(SPEC, ReferenceConfig(model=tiny("qwen3_vl"), optimizer=None))
    started.initialize()
    yield started
    started.destroy()


@pytest.mark.parametrize("family", CONFIGS)
def test_blank_image_is_smallest_possible(family: str) -> None:
    """It has features for as many placeholders as the smallest image, and the tower takes it."""
    config, model = vision_config(family), built(family)
    blank = blank_image(config)
    assert not any(bool(value.any()) for name, value in blank.items() if name == "pixel_values")
    row = torch.full((FEATURES[family],), config.image_token_id)
    assert not list(placeholder_violations([row], [blank], config))
    features = cast("Any", model.base_model).get_image_features(**blank).pooler_output
    joined = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    assert joined.flatten(0, -2).shape[0] == FEATURES[family]


@pytest.mark.parametrize("family", CONFIGS)
def test_sequence_arguments_mark_placeholders(family: str) -> None:
    trunk, batch = built(family).base_model, pictured(family)
    assert isinstance(trunk.config, PretrainedConfig)
    ids = batch.input_ids[None, : batch.lengths[0]]
    arguments = sequence_arguments(trunk, ids, batch.media[0])
    kinds = {"gemma3": {"token_type_ids"}, "internvl": set()}.get(
        trunk.config.model_type, {"mm_token_type_ids"}
    )
    assert arguments.keys() == batch.media[0].keys() | kinds
    for name in kinds:
        assert torch.equal(arguments[name], (ids == IMAGE).long())
    assert sequence_arguments(trunk, ids, {}) == {}


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_images_match_single_sequences(family: str) -> None:
    """Also with the placeholder of a video in the text, which a model may sample."""
    model = built(family)
    packed = PackedModel(model, "lm")
    batch = pictured(family)
    together = packed(batch, ("logprobs",))["logprobs"]
    alone = [packed(batch.select([b]), ("logprobs",))["logprobs"] for b in range(batch.num_sequences)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_sharing_prefixes_refuses_images() -> None:
    with pytest.raises(
        UnsupportedCapability, match="'qwen3_vl' has images, which equal placeholders stand for; set"
    ):
        PackedModel(built("qwen3_vl"), "lm").check_sharing()


def test_engine_refuses_videos(engine: TrainEngine) -> None:
    video = {"pixel_values_videos": torch.ones(4, 96), "video_grid_thw": torch.tensor([[1, 2, 2]])}
    batch = SequenceBatch.from_sequences([[1, 2], [3, VIDEO, 4]], media=[{}, video])
    with pytest.raises(
        BatchError, match="sequence 1: the media have pixel_values_videos, video_grid_thw; pass the"
    ):
        engine.forward(batch, ONE)


def test_engine_refuses_wrong_placeholders(engine: TrainEngine) -> None:
    batch = pictured("qwen3_vl")
    moved = SequenceBatch.from_sequences(batch.input_ids.split(batch.lengths), media=batch.media[::-1])
    with pytest.raises(BatchError, match="2 problems.*\n.*sequence 0 has 1 placeholders .* for 0 features"):
        engine.forward(moved, ONE)
    assert engine.forward(batch, ONE).logprobs is not None


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "text model": (
        {"config": TEXT, "vision": True},
        ConfigError,
        "model.vision is true, and the model type 'qwen3' has no vision tower; set it to false",
    ),
    "tower of a text engine": (
        {"config": {"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"]}},
        UnsupportedCapability,
        "more than a text model; set model.vision to true",
    ),
    "audio": (
        {"config": {"model_type": "qwen3_omni_moe_thinker"}, "vision": True},
        UnsupportedCapability,
        "'qwen3_omni_moe_thinker' is not among the vision-language models .* qwen3_vl",
    ),
    "another family": (
        {"config": {"model_type": "mllama"}, "vision": True},
        UnsupportedCapability,
        "'mllama' is not among the vision-language models .* gemma3, internvl, .*; choose a model of these",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_model_is_refused(case: str) -> None:
    fields, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        build_model(ModelConfig(**fields), seed=0, attn_implementation="eager")


@pytest.mark.parametrize("head", ["value", "reward"])
def test_scalar_heads_refuse_towers(head: str) -> None:
    with pytest.raises(ValueError, match=f"'vision' is for language-model heads, and 'head' is '{head}'"):
        tiny("qwen3_vl", head=head)


ADAPTERS: dict[str, tuple[str, LoraConfig, str]] = {
    "text": ("qwen3_vl", LoraConfig(rank=2), r"model\.language_model\.layers\.\d\..*"),
    "text of equal names": ("gemma3_vl", LoraConfig(rank=2), r"model\.language_model\.layers\.\d\..*"),
    "tower": (
        "qwen3_vl",
        LoraConfig(rank=2, target_modules=("qkv",)),
        r"model\.visual\.blocks\.\d\.attn\.qkv",
    ),
    "both": (
        "gemma3_vl",
        LoraConfig(rank=2, target_modules=("q_proj",)),
        r"model\.(vision_tower|language_model)\..*\.q_proj",
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_peft_reads_adapters_of_vision_models(case: str, tmp_path: Path) -> None:
    """The default is the text alone; names reach the tower as well. An adapted tower changes log-probs."""
    family, lora, layers = ADAPTERS[case]
    built(family).save_pretrained(tmp_path / "model")
    batch = pictured(family)
    model = ModelConfig(path=str(tmp_path / "model"), vision=True, lora=lora)
    engine = load_engine(SPEC, ReferenceConfig(model=model, optimizer=None))
    engine.initialize()
    try:
        before = engine.forward(batch, ONE)["logprobs"]
        random = torch.Generator().manual_seed(0)
        tensors = {name: value for name, value in engine.named_tensors("master") if value is not None}
        factors = {
            name: torch.randn(value.shape, generator=random)
            for name, value in tensors.items()
            if ".lora_" in name
        }
        engine.load_named_tensors("master", TensorDict({**tensors, **factors}))
        logprobs = engine.forward(batch, ONE)["logprobs"]
        engine.save(SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter"))
    finally:
        engine.destroy()
    named = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in factors}
    assert named and all(re.fullmatch(layers, name) for name in named)
    assert not torch.equal(logprobs, before)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", local_files_only=True)
    reloaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = batch.input_ids[: batch.lengths[0]]
    images = sequence_arguments(built(family).base_model, ids[None], batch.media[0])
    with torch.no_grad():
        logits = reloaded(input_ids=ids[None], use_cache=False, **images).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(logprobs[1 : len(ids)], expected, rtol=1e-4, atol=1e-4)
