"""The three formats of a train engine's checkpoint, on the reference engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_support as support
import pytest
import torch
from checkpoint_support import DAMAGE, hidden, on_ranks, remove
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, EngineProgress, SaveLoadMeta
from core_rl.backend.tensors import TensorDict
from core_rl.checkpoint import formats
from core_rl.checkpoint.contents import Contents
from core_rl.checkpoint.formats import save_contents
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.portable import DcpFiles
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig, OptimizerConfig, ScheduleConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    EngineStateError,
    UnsupportedCapability,
    WeightsError,
)
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.state.rng_state import RngState
from core_rl.state.slices import Shard

NLL = LossSpec(fn=support.weighted_nll)
DECAYING = OptimizerConfig(lr=1e-2, schedule=ScheduleConfig(type="linear", total_steps=20))
STATEFUL: list[CheckpointFormat] = ["sharded", "portable"]
FORMATS: list[CheckpointFormat] = ["hf", "sharded", "portable"]
ALL_KINDS = ("master", "exp_avg", "exp_avg_sq")

Start = Callable[..., TrainEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Builds engines, one at a time, and destroys the last one."""
    with support.one_at_a_time() as replaced:

        def build(optimizer: OptimizerConfig | None = DECAYING, seed: int = 0, **model: Any) -> TrainEngine:
            source: dict[str, Any] = {"config": support.TINY} | model
            if "path" in source:
                del source["config"]
            chosen = ModelConfig(**source)
            return replaced(ReferenceConfig(model=chosen, optimizer=optimizer, seed=seed))

        yield build


def train(engine: TrainEngine, steps: int, first: int = 0) -> list[float]:
    """Some steps with a changing batch and a changing learning rate; their losses."""
    losses = []
    for step in range(first, first + steps):
        losses.append(engine.train_batch(support.batch(step), NLL, MicroBatchSpec(count=2))["loss"])
        engine.lr_scheduler_step()
    return losses


def tensors(engine: TrainEngine, kinds: tuple[Any, ...] = ALL_KINDS) -> dict[str, Tensor]:
    return {
        f"{kind}/{name}": value.clone()
        for kind in kinds
        for name, value in engine.named_tensors(kind)
        if value is not None
    }


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", STATEFUL)
def test_training_goes_on_bitwise(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    engine = start()
    train(engine, 3)
    engine.set_version(7)
    engine.save(meta)
    losses, end = train(engine, 3, first=3), tensors(engine)

    engine = start(seed=1)
    engine.load(meta)
    assert engine.progress == EngineProgress(lr_steps=3, updates=3, version=7)
    assert train(engine, 3, first=3) == losses
    assert same(tensors(engine), end)


@pytest.mark.parametrize("name", STATEFUL)
def test_weights_alone_leave_moments_and_progress(
    start: Start, tmp_path: Path, name: CheckpointFormat
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    engine = start()
    train(engine, 1)
    weights = tensors(engine, ("master",))
    engine.save(meta)

    engine = start(seed=1)
    train(engine, 2)
    before = tensors(engine, ALL_KINDS[1:])
    engine.load(replace(meta, with_optimizer=False))
    assert same(tensors(engine, ("master",)), weights)
    assert same(tensors(engine, ALL_KINDS[1:]), before)
    assert engine.progress.updates == 2


@pytest.mark.parametrize("frozen", [(), ("model.embed_tokens.*", "model.layers.0.*")])
def test_frozen_parameters_have_no_moments(start: Start, tmp_path: Path, frozen: tuple[str, ...]) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format="portable")
    engine = start(frozen=frozen)
    train(engine, 2)
    engine.save(meta)
    end = tensors(engine)
    engine = start(seed=1, frozen=frozen)
    engine.load(meta)
    assert same(tensors(engine), end)
    assert (
        len(list(engine.named_tensors("exp_avg"))) == len(list(engine.named_tensors("master")))
    ) is not bool(frozen)


@pytest.mark.parametrize("name", FORMATS)
def test_a_forward_only_engine_saves_and_loads(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    engine = start(optimizer=None)
    weights = tensors(engine, ("master",))
    engine.save(meta)
    engine = start(optimizer=None, seed=1)
    engine.load(meta)
    assert same(tensors(engine, ("master",)), weights)


@pytest.mark.parametrize("name", STATEFUL)
def test_unsaved_moments_are_reported(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    start(optimizer=None).save(meta)
    engine = start(seed=1)
    before = tensors(engine)
    with pytest.raises(CheckpointMismatch, match="no optimizer state; load with with_optimizer=False"):
        engine.load(meta)
    assert same(tensors(engine), before)
    engine.load(replace(meta, with_optimizer=False))
    assert not same(tensors(engine), before)


@pytest.mark.parametrize("name", STATEFUL)
def test_weights_are_saved_alone(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name, with_optimizer=False)
    engine = start()
    train(engine, 2)
    weights = tensors(engine, ("master",))
    engine.save(meta)
    engine = start(seed=1)
    train(engine, 1)
    before, random_state = tensors(engine), next_draws(engine)
    with pytest.raises(CheckpointMismatch, match="no optimizer state; load with with_optimizer=False"):
        engine.load(replace(meta, with_optimizer=True))
    assert same(tensors(engine), before)
    engine.load(meta)
    assert same(tensors(engine, ("master",)), weights)
    assert torch.equal(next_draws(engine), random_state)


def next_draws(engine: TrainEngine) -> Tensor:
    """The state that the engine draws its next numbers from."""
    with engine._parts.runtime.rng.own():
        return torch.get_rng_state()


def test_random_state_is_loaded_with_the_optimizer_only(start: Start, tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format="sharded")
    engine = start()
    saved, outside = next_draws(engine), torch.get_rng_state()
    engine.save(meta)
    with engine._parts.runtime.rng.own():
        torch.rand(3)
    later = next_draws(engine)
    engine.load(replace(meta, with_optimizer=False))
    assert torch.equal(next_draws(engine), later)
    engine.load(meta)
    assert torch.equal(next_draws(engine), saved)
    assert torch.equal(torch.get_rng_state(), outside)


# ---------------------------------------------------------------------- hf


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("limit", [None, 2000])
def test_transformers_loads_the_export(
    start: Start, tmp_path: Path, tied: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        write = "core_rl.checkpoint.tensor_files.write_tensors.__kwdefaults__"
        monkeypatch.setattr(write, {"max_file_bytes": limit})
    engine = start(config=support.TINY | {"tie_word_embeddings": tied})
    train(engine, 1)
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    assert (len(list((tmp_path / "a").glob("model*.safetensors"))) > 1) is (limit is not None)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    loaded = {f"params/{name}": value for name, value in model.named_parameters()}
    assert same(loaded, tensors(engine, ("params",)))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.tie_word_embeddings is tied


def test_a_reward_model_is_exported_as_a_classifier(start: Start, tmp_path: Path) -> None:
    engine = start(head="reward")
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a")
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    assert torch.equal(model.score.weight, tensors(engine, ("params",))["params/score.weight"])


def test_a_model_directory_from_elsewhere_is_loaded(start: Start, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.TINY))
    model.save_pretrained(tmp_path / "a")
    engine = start()
    train(engine, 2)
    engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    assert same(
        tensors(engine, ("params",)), {f"params/{n}": p.detach() for n, p in model.named_parameters()}
    )
    assert engine.progress.updates == 2


def test_tokenizer_and_generation_config_come_along(start: Start, tmp_path: Path) -> None:
    source = tmp_path / "model"
    start().save(SaveLoadMeta(path=str(source), format="hf"))
    given = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json"}
    for name in given | {"training_args.bin"}:
        (source / name).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("t")

    engine = start(path=str(source))
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    found = {
        file.relative_to(tmp_path / "a").as_posix()
        for file in (tmp_path / "a").rglob("*.*")
        if file.is_file()
    }
    weights = {"model.safetensors", "config.json", "manifest.json"}
    assert found == given | weights | {"additional_chat_templates/tool.jinja"}

    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text('"other"')
    engine.save(SaveLoadMeta(path=str(tmp_path / "b"), format="hf", tokenizer_path=str(other)))
    assert (tmp_path / "b" / "tokenizer.json").read_text() == '"other"'
    assert not (tmp_path / "b" / "merges.txt").exists()
    with pytest.raises(CheckpointError, match="holds no tokenizer files"):
        engine.save(SaveLoadMeta(path=str(tmp_path / "b"), format="hf", tokenizer_path=str(tmp_path)))


@pytest.mark.parametrize("head", ["lm", "value", "reward"])
def test_exports_name_end_tokens_and_padding(start: Start, tmp_path: Path, head: str) -> None:
    source, exported = str(tmp_path / "model"), tmp_path / "a"
    start(config=support.TINY | {"eos_token_id": 1}).save(SaveLoadMeta(path=source, format="hf"))
    words = Tokenizer(WordLevel({"<unk>": 0, "<|x|>": 1, "</s>": 2, "<pad>": 3, "a": 4}, unk_token="<unk>"))
    special = {"additional_special_tokens": ["<pad>", "<|x|>"], "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="</s>", **special
    ).save_pretrained(source)
    start(path=source, head=head).save(SaveLoadMeta(path=str(exported), format="hf"))
    if head == "lm":
        assert GenerationConfig.from_pretrained(exported).eos_token_id == [1, 2]
    else:
        assert AutoConfig.from_pretrained(exported).pad_token_id == 3
        assert AutoTokenizer.from_pretrained(exported).pad_token == "<pad>"


def test_new_padding_matches_reloaded_tokenizer(start: Start, tmp_path: Path) -> None:
    source, exported = str(tmp_path / "model"), tmp_path / "a"
    start(config=support.TINY | {"model_type": "qwen2", "eos_token_id": 2}).save(
        SaveLoadMeta(path=source, format="hf")
    )
    letters = Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[]))
    letters.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>").save_pretrained(source)
    start(path=source, head="reward").save(SaveLoadMeta(path=str(exported), format="hf"))
    padding = AutoTokenizer.from_pretrained(exported).pad_token_id
    assert AutoConfig.from_pretrained(exported).pad_token_id == padding


def test_foreign_tensors_change_nothing(start: Start, tmp_path: Path) -> None:
    start(config=support.TINY | {"hidden_size": 24}).save(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    engine = start()
    before = tensors(engine)
    with pytest.raises(
        WeightsError, match=r"(?s)problems.*embed_tokens.weight' is \[61, 24\]; the model has"
    ):
        engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format="hf"))
    assert same(tensors(engine), before)


# ------------------------------------------------------------------ refusals


def test_misfit_moments_change_no_weights(start: Start, tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format="portable")
    engine = start()
    train(engine, 1)
    engine.save(meta)
    engine = start(seed=1, frozen=("model.norm.*",))
    before = tensors(engine)
    with pytest.raises(WeightsError, match=r"its 'exp_avg': unexpected 'model\.norm\.weight'"):
        engine.load(meta)
    assert same(tensors(engine), before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(
    ("model", "problems"),
    [
        ({"config": support.TINY | {"vocab_size": 64}}, ["vocab_size is 64 there and 61 here"]),
        (
            {"config": support.TINY | {"num_hidden_layers": 1, "tie_word_embeddings": False}},
            ["num_hidden_layers is 1 there and 2 here", "tie_word_embeddings is False there and True here"],
        ),
        (
            {"config": support.TINY | {"model_type": "llama"}},
            ["model_type is 'llama' there and 'qwen3' here"],
        ),
        ({"head": "value"}, ["head is 'value' there and 'lm' here"]),
    ],
)
def test_different_model_is_refused_with_differences(
    start: Start, tmp_path: Path, name: CheckpointFormat, model: dict[str, Any], problems: list[str]
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    start(**model).save(meta)
    engine = start(seed=1)
    before = tensors(engine)
    with pytest.raises(CheckpointMismatch) as caught:
        engine.load(meta)
    assert all(problem in str(caught.value) for problem in problems)
    assert same(tensors(engine), before)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_different_format_is_refused(
    start: Start, tmp_path: Path, name: CheckpointFormat, other: CheckpointFormat
) -> None:
    if name == other:
        return
    engine = start()
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format=name))
    with pytest.raises(CheckpointMismatch, match=f"kind '{name}', not '{other}'"):
        engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format=other))


def change_runtime(engine: TrainEngine, **fields: Any) -> None:
    persistence = engine._parts.persistence
    persistence.runtime = replace(persistence.runtime, **fields)


def test_shards_of_different_engine_are_refused(start: Start, tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"))
    engine = start()
    engine.save(meta)
    change_runtime(engine, spec=replace(SPEC, name="other"))
    with pytest.raises(
        CheckpointMismatch, match=r"engine 'reference', and this is 'other'; save with format='por"
    ):
        engine.load(meta)


def test_undeclared_formats_are_refused(start: Start, tmp_path: Path) -> None:
    engine = start()
    change_runtime(engine, spec=replace(SPEC, capabilities=frozenset()))
    for name in STATEFUL:
        meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
        for call in (engine.save, engine.load):
            with pytest.raises(UnsupportedCapability, match=rf"format='{name}'.*_checkpoint"):
                call(meta)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_at_the_path_is_not_found(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    engine = start()
    with pytest.raises(CheckpointNotFound):
        engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format=name))


@pytest.mark.parametrize("name", FORMATS)
def test_successful_load_drops_gradients(start: Start, tmp_path: Path, name: CheckpointFormat) -> None:
    engine = start()
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format=name))
    engine.forward_backward(support.batch(), NLL, MicroBatchSpec(count=1))
    before = tensors(engine, ("grads",))
    with pytest.raises(CheckpointNotFound):
        engine.load(SaveLoadMeta(path=str(tmp_path / "b"), format=name))
    assert same(tensors(engine, ("grads",)), before)
    engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format=name))
    with pytest.raises(EngineStateError, match="without gradients"):
        engine.optimizer_step()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_file_changes_nothing(
    start: Start, tmp_path: Path, name: CheckpointFormat, damage: Callable[[Path], None]
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format=name)
    engine = start()
    engine.save(meta)
    train(engine, 1)
    before = tensors(engine)
    for file in [file for file in (tmp_path / "a").rglob("*") if file.is_file()]:
        if name in ("hf", "portable") and file.name == "manifest.json" and damage is remove:
            continue  # without it, a directory counts as one from elsewhere
        whole = file.read_bytes()
        damage(file)
        with pytest.raises(CheckpointDamaged, match=file.name):
            engine.load(meta)
        assert same(tensors(engine), before)
        file.write_bytes(whole)
    engine.load(meta)
    assert not same(tensors(engine), before)


def test_new_layout_needs_resharding_capability(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, meta = start(), SaveLoadMeta(path=str(tmp_path / "a"))
    engine.save(meta)
    layout = ParallelLayout(cp=2)
    change_runtime(engine, config=engine.config.model_copy(update={"layout": layout}))
    with monkeypatch.context() as patch:
        patch.setattr(formats, "ShardFiles", None)  # nothing is read before the refusal
        with pytest.raises(
            UnsupportedCapability, match=r"saved at the layout dp1, and this is cp2: .*'resharding'"
        ):
            engine.load(meta)
    change_runtime(engine, spec=replace(SPEC, capabilities=SPEC.capabilities | {Capability.RESHARDING}))
    engine.load(meta)


# --------------------------------------------------------------- many ranks


class Halves:
    """Just enough of a `TensorStore` for a portable save: each of two ranks has half of a tensor."""

    optimizer_kinds = ("exp_avg", "exp_avg_sq")
    carried = TensorDict({})

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def export_kinds(self, kind: str) -> tuple[str, ...]:
        return (kind,)

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {}

    def shards(self, kinds: Sequence[str]) -> Iterator[Shard]:
        for kind in kinds:
            yield Shard(f"{kind}/a", torch.ones(3), (6,), (3 * self._rank,))


def contents_of(world: Comm, tensors: Any) -> Contents:
    backend: Any = SimpleNamespace(
        hf_config=lambda: SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="none"))
    )
    return Contents(
        engine="streaming",
        resharding=True,
        config=support.config(),
        backend=backend,
        tensors=tensors,
        world=world,
        is_writer=world.rank == 0,
        progress=EngineProgress(),
        rng=RngState(0, torch.device("cpu")),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk_of_a_rank_keeps_previous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format="portable", asynchronous=asynchronous)

    def save(world: Comm) -> None:
        saving = save_contents(contents_of(world, Halves(world.rank)), meta)
        if saving is not None:
            saving.wait(world)

    assert on_ranks(2, save) == [None, None]
    saved = read_manifest(tmp_path / "a").state

    assert DcpFiles(tmp_path / "a").read("optimizer.state.a.exp_avg").tolist() == [1.0] * 6

    def full(writer: FileSystemWriter, plan: SavePlan, planner: SavePlanner) -> Any:
        if plan.storage_data.prefix == "__1_":
            raise OSError(28, "No space left on device")
        return write_data(writer, plan, planner)

    write_data = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    raised = on_ranks(2, save)
    assert [type(error) for error in raised] == [CheckpointError] * 2
    assert all("rank 1: " in str(error) and "No space left on device" in str(error) for error in raised)
    assert read_manifest(tmp_path / "a").state == saved
    assert hidden(tmp_path) == []


def test_saved_engine_can_be_offloaded(start: Start, tmp_path: Path) -> None:
    engine = start()
    train(engine, 1)
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="portable"))
    saved = {name: tensor.clone() for name, tensor in engine.named_tensors("exp_avg") if tensor is not None}
    engine.offload()
    engine.onload()
    for name, tensor in engine.named_tensors("exp_avg"):
        assert tensor is not None
        assert tensor.equal(saved[name])


def test_the_state_is_readable_without_loading(start: Start, tmp_path: Path) -> None:
    engine = start()
    train(engine, 2)
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="portable"))
    state = read_manifest(tmp_path / "a").state
    assert state["progress"] == {"lr_steps": 2, "updates": 2, "version": 0}
    assert state["model"]["vocab_size"] == support.VOCABULARY
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["kind"] == "portable"
