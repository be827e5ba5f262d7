"""Tensors of a checkpoint that the module does not hold: every export has them, or the checkpoint is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_support as support
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.portable import DcpFiles
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.engine.sync import sync_weights
from core_rl.engine.train import TrainEngine
from core_rl.errors import CheckpointMismatch, UnsupportedCapability, WeightsError
from core_rl.reference import ROLLOUT_SPEC, ReferenceConfig, ReferenceRolloutConfig
from core_rl.toolkit.meta_build import build_on_meta
from core_rl.toolkit.model_files import exported_shapes
from core_rl.weight_sync.update import weight_update

EXTRA = {
    "mtp.proj.weight": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "extra_head.weight": torch.randn(3, 16, generator=torch.Generator().manual_seed(2)),
    "extra_head.steps": torch.tensor([7, 8]),
}
FORMATS: tuple[CheckpointFormat, ...] = ("portable", "hf")
ALL_FORMATS: tuple[CheckpointFormat, ...] = (*FORMATS, "sharded")
NLL = LossSpec(fn=support.weighted_nll)
TIMEOUT_S = 60.0

Start = Callable[..., TrainEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Builds engines, one at a time, and destroys the last one."""
    with support.one_at_a_time() as replaced:

        def build(path: Path, **model: Any) -> TrainEngine:
            chosen = ModelConfig(path=str(path), **model)
            return replaced(ReferenceConfig(model=chosen, optimizer=support.OPTIMIZER))

        yield build


def with_extra(path: Path, extra: dict[str, Tensor] | None = None) -> Path:
    """A directory of the tiny model with ``extra`` tensors, of another architecture."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.TINY), dtype=torch.float32)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | (EXTRA if extra is None else extra)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("Qwen3ForCausalLM", "Qwen3WithHeads"))
    (path / "preprocessor_config.json").write_text("{}")
    return path


def vision_language(path: Path, tied: bool) -> Path:
    """A directory of a tiny Qwen3.5 with a vision tower; its text has full attention only."""
    text = {
        **{name: support.TINY[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        "tie_word_embeddings": tied,
    }
    vision = {
        "depth": 1,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def held(engine: TrainEngine, kind: str) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.named_tensors(kind) if value is not None}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that only one has, or that differ in dtype or any bit."""
    return [
        name
        for name in sorted({*found, *expected})
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name], expected[name])
    ]


def streamed(engine: TrainEngine, meta: WeightUpdateMeta) -> dict[str, Tensor]:
    """The tensors that ``engine`` sends."""

    def receive() -> dict[str, Tensor]:
        with weight_update(meta).receive_copies(TIMEOUT_S) as buckets:
            return {name: tensor for bucket in buckets for name, tensor in bucket}

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive)
        engine.upload_weights(meta)
        return received.result(TIMEOUT_S)


def test_every_export_has_the_tensors_that_nobody_knows(start: Start, tmp_path: Path) -> None:
    source = with_extra(tmp_path / "source")
    engine, expected = start(source), tensors_of(source)
    assert differing(held(engine, "carried"), EXTRA) == []
    for asynchronous in (False, True):
        path = tmp_path / f"hf-{asynchronous}"
        engine.save(SaveLoadMeta(path=str(path), format="hf", asynchronous=asynchronous))
        engine.wait_for_saves()
        assert differing(tensors_of(path), expected) == []
        assert '"Qwen3WithHeads"' in (path / "config.json").read_text()
        assert (path / "preprocessor_config.json").is_file()
        path = tmp_path / f"portable-{asynchronous}"
        engine.save(SaveLoadMeta(path=str(path), format="portable", asynchronous=asynchronous))
        engine.wait_for_saves()
        files = DcpFiles(path)
        assert differing({name: files.read(name) for name in EXTRA}, EXTRA) == []
    assert exported_shapes(engine.config.model) == {n: tuple(t.shape) for n, t in expected.items()}
    methods: tuple[SyncMethod, ...] = ("tensor", "distributed")
    for method in methods:
        meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "meeting"), bucket_bytes=512)
        assert differing(streamed(engine, meta), expected) == []
    engine.upload_weights(WeightUpdateMeta(version=1, path=str(tmp_path / "disk")))
    assert differing(tensors_of(tmp_path / "disk"), expected) == []


def test_a_rollout_engine_takes_the_whole_update(start: Start, tmp_path: Path) -> None:
    engine = start(with_extra(tmp_path / "source"))
    engine.train_batch(support.batch(), NLL, MicroBatchSpec(count=1))
    rollout = load_engine(
        ROLLOUT_SPEC, ReferenceRolloutConfig(model=ModelConfig(path=str(tmp_path / "source")))
    )
    assert isinstance(rollout, InferenceEngine)
    rollout.initialize()
    methods: tuple[SyncMethod, ...] = ("disk", "tensor")
    try:
        for version, method in enumerate(methods, start=1):
            path = str(tmp_path / f"weights-{version}")
            sync_weights(engine, rollout, WeightUpdateMeta(method=method, version=version, path=path))
            assert rollout.get_version() == version
    finally:
        rollout.destroy()


def test_a_load_refuses_other_carried_tensors_before_anything_changes(start: Start, tmp_path: Path) -> None:
    head = "extra_head.weight"
    changed = with_extra(tmp_path / "changed", EXTRA | {head: EXTRA[head] + 1})
    engine = start(changed)
    engine.train_batch(support.batch(), NLL, MicroBatchSpec(count=1))
    engine.save(SaveLoadMeta(path=str(tmp_path / "portable"), format="portable"))
    engine.save(SaveLoadMeta(path=str(tmp_path / "hf"), format="hf"))
    engine = start(with_extra(tmp_path / "source"))
    before = held(engine, "master")
    for format_ in FORMATS:
        with pytest.raises(WeightsError, match=rf"'{head}' differs .* set model\.path to the other"):
            engine.load(SaveLoadMeta(path=str(tmp_path / format_), format=format_))
        assert differing(held(engine, "master"), before) == []
    plain = start(with_extra(tmp_path / "plain", {}))
    with pytest.raises(CheckpointMismatch, match="carried is '3 tensors, .*' there and None here"):
        plain.load(SaveLoadMeta(path=str(tmp_path / "portable"), format="portable"))
    with pytest.raises(WeightsError, match="unexpected 'extra_head.steps'"):
        plain.load(SaveLoadMeta(path=str(tmp_path / "hf"), format="hf"))


def test_the_same_engine_continues_from_its_own_checkpoints(start: Start, tmp_path: Path) -> None:
    engine = start(with_extra(tmp_path / "source"))
    for format_ in ALL_FORMATS:
        meta = SaveLoadMeta(path=str(tmp_path / format_), format=format_)
        engine.save(meta)
        engine.load(meta)


def test_a_scalar_head_replaces_the_output_layer(start: Start, tmp_path: Path) -> None:
    """The output layer is not carried into a value model; other tensors are."""
    source = with_extra(tmp_path / "source", {"extra_head.steps": torch.tensor([7])})
    config = source / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    engine = start(source, head="value")
    assert [name for name, _ in engine.named_tensors("carried")] == ["extra_head.steps"]
    assert engine.hf_config().architectures == ["Qwen3ForSequenceClassification"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all", "lora"])
def test_a_vision_language_model_comes_back_whole(
    start: Start, tied: bool, lora: LoraConfig | None, tmp_path: Path
) -> None:
    """Its text is trained; the export has all tensors under their names, and the architecture that it came with."""
    source = vision_language(tmp_path / "source", tied)
    expected = tensors_of(source)
    engine = start(source, lora=lora)
    carried = held(engine, "carried")
    assert carried.keys() == {name for name in expected if name.startswith("model.visual.")}
    engine.train_batch(support.batch(), NLL, MicroBatchSpec(count=1))
    engine.save(SaveLoadMeta(path=str(tmp_path / "hf"), format="hf"))
    found = tensors_of(tmp_path / "hf")
    assert found.keys() == expected.keys()
    moved = {*differing(found, expected)}
    assert moved >= {name for name in expected if name.endswith("_proj.weight") and "visual" not in name}
    assert not moved & carried.keys()
    family: Any = AutoModelForImageTextToText
    loaded, report = family.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(loaded) is Qwen3_5ForConditionalGeneration and not any(report.values())
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(loaded(input_ids=ids).logits, text(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_vision_language_model_is_read_in_parts(tied: bool, tmp_path: Path) -> None:
    """Its names in the files have a prefix, and no rank builds all of it."""
    source = vision_language(tmp_path, tied)
    unloaded = build_on_meta(ModelConfig(path=str(source)), seed=0, attn_implementation="eager")
    assert unloaded is not None
    own = {name: unloaded.source.read(name) for name in unloaded.source.names()}
    text = {name: value for name, value in tensors_of(source).items() if ".visual." not in name}
    assert differing(own, text) == []


@pytest.mark.parametrize(
    ("make", "head", "error", "message"),
    [
        (
            lambda path: vision_language(path, tied=True),
            "value",
            UnsupportedCapability,
            r"Qwen3_5ForSequenceClassification is more than a text model.*set model\.path",
        ),
        (
            lambda path: quantized(with_extra(path)),
            "lm",
            UnsupportedCapability,
            r"are quantized, .*; set model\.path to weights in bfloat16 or float32",
        ),
    ],
    ids=["scalar head over a vision tower", "quantized"],
)
def test_refusals(
    start: Start, make: Any, head: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        start(make(tmp_path / "source"), head=head)


def quantized(path: Path) -> Path:
    config = path / "config.json"
    section = '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},'
    config.write_text(config.read_text().replace("{", "{" + section, 1))
    return path
