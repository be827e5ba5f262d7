"""Adapters: names, merging, trained parameters, and bad input, on a real engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import engine_support as support
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny_families import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.metrics import Metric
from core_rl.backend.tensors import TensorDict
from core_rl.checkpoint import tensor_files
from core_rl.config.capability import Capability
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    CoreRLError,
    EngineStateError,
    UnsupportedCapability,
    WeightsError,
)
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.state.store import digest_of_parts
from core_rl.toolkit.lora import add_adapter, low_rank_products

ONE = MicroBatchSpec(count=1)
NLL = LossSpec(fn=support.weighted_nll)
LORA = LoraConfig(rank=3, alpha=7)


class Build(Protocol):
    def __call__(self, lora: LoraConfig | None = LORA, seed: int = 0) -> TrainEngine: ...


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes engines, which are destroyed after the test."""
    with ExitStack() as stack:

        def made(lora: LoraConfig | None = LORA, seed: int = 0) -> TrainEngine:
            engine = support.engine(support.config(lora=lora).model_copy(update={"seed": seed}))
            stack.callback(engine.destroy)
            return engine

        yield made


@pytest.fixture
def engine(build: Build) -> TrainEngine:
    """An engine whose adapter has taken a step."""
    built = build()
    built.train_batch(support.batch(), NLL, ONE)
    return built


def tensors(engine: TrainEngine, kind: Any = "master") -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.named_tensors(kind) if value is not None}


def saved(engine: TrainEngine, path: Path) -> SaveLoadMeta:
    meta = SaveLoadMeta(path=str(path), format="adapter")
    engine.save(meta)
    return meta


def test_kinds_match_announced_names_and_shapes(engine: TrainEngine, build: Build) -> None:
    engine.forward_backward(support.batch(), NLL, ONE)
    for kind in ("params", "master", "grads", "exp_avg", "exp_avg_sq", "adapter"):
        actual = {name: tuple(value.shape) for name, value in tensors(engine, kind).items()}
        assert actual == engine.tensor_shapes(kind) and list(actual) == list(engine.tensor_shapes(kind))
    adapter = set(engine.tensor_shapes("adapter"))
    assert adapter == set(engine.tensor_shapes("grads"))
    assert set(engine.tensor_shapes("master")) == adapter | set(engine.tensor_shapes("params"))
    plain = build(lora=None)
    assert plain.tensor_shapes("params") == engine.tensor_shapes("params")


def test_an_adapter_leaves_the_global_random_state(build: Build) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build()
    assert torch.equal(torch.get_rng_state(), before)


def test_only_named_layers_get_an_adapter(build: Build) -> None:
    targets = ("q_proj", "model.layers.1.mlp.up_proj")
    engine = build(LoraConfig(rank=2, target_modules=targets))
    layers = {
        name.rsplit(".", 2)[0].removeprefix("base_model.model.") for name in engine.tensor_shapes("adapter")
    }
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_a_tokenizer_comes_with_the_adapter(engine: TrainEngine, tmp_path: Path, build: Build) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tokenizer / name).write_text(name)
    meta = SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter", tokenizer_path=str(tokenizer))
    engine.save(meta)
    assert (tmp_path / "adapter" / "chat_template.jinja").read_text() == "chat_template.jinja"
    build().load(meta)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no tokenizer files"):
        engine.save(replace(meta, tokenizer_path=str(tmp_path / "empty")))


def test_different_base_of_same_shape_is_detected(engine: TrainEngine, tmp_path: Path, build: Build) -> None:
    meta = saved(engine, tmp_path / "adapter")
    same, second = build(seed=0), build(seed=1)
    same.load(meta)
    assert tensors(same, "adapter").keys() == tensors(engine, "adapter").keys()
    before = tensors(second)
    with pytest.raises(
        CheckpointMismatch, match="another base model: the same architecture with other weights"
    ):
        second.load(meta)
    assert all(torch.equal(value, before[name]) for name, value in tensors(second).items())


def squared_values(output: ModelOutput, data: SequenceBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
    return output["values"].square().sum(), {}


def test_head_loads_with_its_adapter(tmp_path: Path) -> None:
    """A trained head does not make another base."""
    settings = support.config(lora=LORA, head="value")
    with ExitStack() as stack:
        trained, fresh = support.engine(settings), support.engine(settings)
        for engine in (trained, fresh):
            stack.callback(engine.destroy)
        trained.train_batch(support.batch(), LossSpec(fn=squared_values, outputs=("values",)), ONE)
        fresh.load(saved(trained, tmp_path / "adapter"))
        expected, actual = tensors(trained, "adapter"), tensors(fresh, "adapter")
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


def test_adapter_without_manifest_is_matched_by_shapes(
    engine: TrainEngine, tmp_path: Path, build: Build
) -> None:
    path = Path(saved(engine, tmp_path / "adapter").path)
    (path / "manifest.json").unlink()
    second = build(seed=1)
    second.load(SaveLoadMeta(path=str(path), format="adapter"))
    stored = tensors(engine, "adapter")
    assert all(torch.equal(value, stored[name]) for name, value in tensors(second, "adapter").items())


@pytest.mark.parametrize("form", ["sharded", "portable"])
def test_checkpoints_of_different_adapter_are_refused(
    engine: TrainEngine, tmp_path: Path, form: Any, build: Build
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "saved"), format=form)
    engine.save(meta)
    for lora, message in (
        (None, "lora.rank is 3 there and None here"),
        (LoraConfig(rank=2, alpha=9), r"2 problems:(.|\n)*lora.rank is 3 there and 2 here(.|\n)*lora.alpha"),
        (LoraConfig(rank=3, alpha=7, target_modules=("q_proj",)), "lora.layers is '14: .* here"),
    ):
        second = build(lora)
        before = tensors(second)
        with pytest.raises(CheckpointMismatch, match=message):
            second.load(meta)
        assert all(torch.equal(value, before[name]) for name, value in tensors(second).items())


# ------------------------------------------------------------------ bad input


def edit_config(path: Path, **changes: object) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop_config(path: Path) -> None:
    (path / "adapter_config.json").unlink()


def garbage_config(path: Path) -> None:
    (path / "adapter_config.json").write_text("{")


def list_config(path: Path) -> None:
    (path / "adapter_config.json").write_text("[]")


def drop_tensors(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()


def edit_tensors(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors.pop(name)
    save_file(tensors, file)


def cut_tensors(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


SPOILED: list[tuple[Callable[[Path], None], type[CheckpointError | WeightsError], str]] = [
    (drop_config, CheckpointNotFound, "no adapter_config.json"),
    (garbage_config, CheckpointDamaged, "adapter_config.json is not JSON"),
    (list_config, CheckpointDamaged, "holds a list, not an object"),
    (drop_tensors, CheckpointNotFound, "adapter_model.safetensors"),
    (edit_tensors, WeightsError, r"2 problems:(.|\n)*missing(.|\n)*unexpected .*lm_head"),
    (cut_tensors, CheckpointDamaged, "adapter_model.safetensors"),
    (lambda path: edit_config(path, peft_type="LOHA"), CheckpointMismatch, "peft_type is 'LOHA'"),
    (lambda path: edit_config(path, use_dora=True), CheckpointMismatch, "use_dora is True"),
    (
        lambda path: edit_config(path, init_lora_weights="pissa"),
        CheckpointMismatch,
        "init_lora_weights is 'pissa'",
    ),
    (lambda path: edit_config(path, rank_pattern={"q": 1}), CheckpointMismatch, "rank_pattern"),
    (
        lambda path: edit_config(path, r=4, lora_alpha=8, use_rslora=True),
        CheckpointMismatch,
        r"3 problems:(.|\n)*its r is 4, and model.lora.rank is 3 here; set it to 4",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "error", "message"), SPOILED, ids=[str(row) for row in range(len(SPOILED))]
)
def test_a_spoiled_adapter_is_refused_and_nothing_changes(
    engine: TrainEngine, tmp_path: Path, spoil: Callable[[Path], None], error: type[CoreRLError], message: str
) -> None:
    path = Path(saved(engine, tmp_path / "adapter").path)
    (path / "manifest.json").unlink()  # as peft writes it: digests would say so first
    spoil(path)
    before = tensors(engine)
    with pytest.raises(error, match=message):
        engine.load(SaveLoadMeta(path=str(path), format="adapter"))
    assert all(torch.equal(value, before[name]) for name, value in tensors(engine).items())
    assert engine.train_batch(support.batch(), NLL, ONE)["update_successful"] == 1


def test_missing_adapter_leaves_engine_new(tmp_path: Path) -> None:
    engine = load_engine(SPEC, support.config(lora=LoraConfig(path=str(tmp_path / "nothing"))))
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at this place"):
        engine.initialize()
    with pytest.raises(EngineStateError, match="call initialize"):
        engine.forward(support.batch(), ONE)


def test_missing_peft_error_names_install_command(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ConfigError, match=r"model.lora needs the package peft.*pip install 'core-rl\[peft\]'"
    ):
        build()
    build(lora=None)


BAD_TARGETS: Mapping[str, tuple[str, ...]] = {
    r"\['w_proj'\] matches no linear layer of the trunk, where there are down_proj, .*, v_proj": (
        "q_proj",
        "w_proj",
    ),
    r"\['lm_head'\] matches no linear layer": ("lm_head",),
    r"\['embed_tokens'\] matches no linear layer": ("embed_tokens",),
    "an empty list matches no linear layer": (),
}


@pytest.mark.parametrize("message", BAD_TARGETS)
def test_unmatched_targets_are_refused(message: str, build: Build) -> None:
    with pytest.raises(ConfigError, match=message):
        build(LoraConfig(target_modules=BAD_TARGETS[message]))


def test_layers_that_peft_refuses_are_named() -> None:
    with pytest.raises(ConfigError, match="target_modules: peft refuses them: .*'out_proj'.*mamba"):
        add_adapter(tiny_model("mamba"), LORA, "lm", seed=0)


def test_a_trunk_with_a_head_adapts_no_head() -> None:
    model = tiny_model("llama4_text")
    add_adapter(model, LORA, "lm", seed=0)
    assert "lm_head.weight" not in low_rank_products(model)


def load_merged(engine: TrainEngine, path: Path) -> None:
    engine.load_named_tensors("params", TensorDict(tensors(engine, "params")))


def load_export(engine: TrainEngine, path: Path) -> None:
    meta = SaveLoadMeta(path=str(path / "export"), format="hf")
    engine.save(meta)
    engine.load(meta)


def train_without(engine: TrainEngine, path: Path) -> None:
    with engine.disable_adapter():
        engine.train_batch(support.batch(), NLL, ONE)


def export_without(engine: TrainEngine, path: Path) -> None:
    with engine.disable_adapter():
        engine.save(SaveLoadMeta(path=str(path / "export"), format="hf"))


def merged_without(engine: TrainEngine, path: Path) -> None:
    with engine.disable_adapter():
        engine.named_tensors("params")


BAD: list[tuple[Callable[[TrainEngine, Path], None], type[CoreRLError], str]] = [
    (load_merged, WeightsError, "do not come apart; load the adapter"),
    (load_export, WeightsError, "do not come apart; load the adapter"),
    (train_without, EngineStateError, r"forward_backward\(\) inside disable_adapter\(\)"),
    (export_without, EngineStateError, r"save\(format='hf'\) inside disable_adapter\(\)"),
    (merged_without, EngineStateError, r"named_tensors\('params'\) inside disable_adapter\(\)"),
]


@pytest.mark.parametrize(("act", "error", "message"), BAD, ids=[act.__name__ for act, _, _ in BAD])
def test_misuse_is_refused_and_the_engine_goes_on(
    engine: TrainEngine,
    tmp_path: Path,
    act: Callable[[TrainEngine, Path], None],
    error: type[CoreRLError],
    message: str,
) -> None:
    before, logprobs = tensors(engine), engine.forward(support.batch(), ONE)["logprobs"]
    with pytest.raises(error, match=message):
        act(engine, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in tensors(engine).items())
    assert torch.equal(engine.forward(support.batch(), ONE)["logprobs"], logprobs)
    assert engine.train_batch(support.batch(), NLL, ONE)["update_successful"] == 1


def test_outermost_context_restores_the_adapter(engine: TrainEngine) -> None:
    logprobs = engine.forward(support.batch(), ONE)["logprobs"]
    with engine.disable_adapter():
        base = engine.forward(support.batch(), ONE)["logprobs"]
        with engine.disable_adapter():
            pass
        assert torch.equal(engine.forward(support.batch(), ONE)["logprobs"], base)
    assert not torch.equal(base, logprobs)
    assert torch.equal(engine.forward(support.batch(), ONE)["logprobs"], logprobs)


def test_an_engine_without_an_adapter_says_so(tmp_path: Path, build: Build) -> None:
    plain = build(lora=None)
    for act in (
        lambda: plain.save(SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter")),
        lambda: plain.load(SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter")),
        lambda: plain.named_tensors("adapter"),
    ):
        with pytest.raises(EngineStateError, match="this engine has no adapter; set model.lora"):
            act()


def test_undeclared_lora_config_is_refused() -> None:
    spec = replace(SPEC, capabilities=SPEC.capabilities - {Capability.LORA})
    with pytest.raises(UnsupportedCapability, match="a config with lora: .* does not declare 'lora'"):
        load_engine(spec, support.config(lora=LORA))


def test_base_digest_covers_all_tensor_slices() -> None:
    """Queries, keys and values that an engine has group by group are several parts of each tensor on one rank."""
    value = torch.randn(6, 4)
    parts = [("q", value[:2]), ("k", value), ("q", value[2:])]
    assert digest_of_parts(Comm(), parts) == digest_of_parts(Comm(), [("q", value), ("k", value)])


def test_peft_reads_adapter_of_36_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size: ``peft`` and servers read no index."""
    config = AutoConfig.for_model(**support.TINY | {"num_hidden_layers": 36})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"), lora=LoraConfig(rank=2))
    engine = support.engine(ReferenceConfig(model=model, optimizer=None))
    try:
        monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", 4096)
        engine.save(SaveLoadMeta(path=str(tmp_path / "adapter"), format="adapter"))
        local = {name: value for name, value in engine.named_tensors("adapter") if value is not None}
    finally:
        engine.destroy()
    assert [file.name for file in (tmp_path / "adapter").glob("*.safetensors*")] == [
        "adapter_model.safetensors"
    ]
    assert len(local) == 36 * 7 * 2
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    read = get_peft_model_state_dict(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    torch.testing.assert_close(read, local, rtol=0, atol=0)
