"""The formats in which a train engine saves itself; see `SaveLoadMeta.format`. The adapter's has its own module."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, TensorKind
from core_rl.backend.named_tensors import TensorSource, check_source
from core_rl.backend.progress import EngineProgress
from core_rl.checkpoint.background import BackgroundSave, Later, Write, publish_later
from core_rl.checkpoint.directory import opened, publish
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.config.capability import Capability
from core_rl.distributed.agreement import on_all
from core_rl.engine import guards
from core_rl.errors import CheckpointError, CheckpointMismatch, raise_all

if TYPE_CHECKING:
    from core_rl.engine.state import EngineState

__all__ = ["fingerprint", "load_engine_state", "load_parts", "publish_save", "save_engine"]

CAPABILITY = {
    "sharded": Capability.SHARDED_CHECKPOINT,
    "portable": Capability.PORTABLE_CHECKPOINT,
    "adapter": Capability.LORA,
}
MOMENTS: tuple[TensorKind, ...] = ("exp_avg", "exp_avg_sq")
SHARDS = "shards"
PARTS = ".parts"

MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates/*",
)


def save_engine(engine: EngineState, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Save ``engine`` as ``meta`` says; collective. Returns what is still to be done in the background, if so asked.

    Raises `UnsupportedCapability` for a format that the engine does not declare, and one
    `CheckpointError` on all ranks when anything fails on any of them; what was at the path stays.
    """
    from core_rl.checkpoint.adapters import save_adapter

    _require_format(engine, meta.format)
    formats = {"hf": save_hf, "portable": save_portable, "sharded": save_sharded, "adapter": save_adapter}
    return formats[meta.format](engine, meta)


def load_engine_state(engine: EngineState, meta: SaveLoadMeta) -> None:
    """Load what `save_engine` wrote, or for ``hf`` any model directory of transformers; collective.

    Files, model and names are checked before anything changes. Raises `CheckpointNotFound`,
    `CheckpointDamaged` or `CheckpointMismatch`, and `WeightsError` for a model directory with other
    tensors; the same on all ranks.
    """
    from core_rl.checkpoint.adapters import load_adapter

    _require_format(engine, meta.format)
    formats = {"hf": load_hf, "portable": load_portable, "sharded": load_sharded, "adapter": load_adapter}
    formats[meta.format](engine, meta)


def _require_format(engine: EngineState, name: CheckpointFormat) -> None:
    if name in CAPABILITY:
        guards.require_capability(engine.spec, CAPABILITY[name], f"a checkpoint with format={name!r}")


# ---------------------------------------------------------------------- hf


def save_hf(engine: EngineState, meta: SaveLoadMeta) -> BackgroundSave | None:
    """A model directory of transformers: safetensors, config, generation config and tokenizer."""
    kinds = _weights(engine, "params")

    def write(directory: Path) -> None:
        stream = (item for kind in kinds for item in engine.named_tensors(kind))
        write_tensors(directory, "model", stream, writes=engine.is_writer)
        if engine.is_writer:
            beside(directory)

    def beside(directory: Path) -> None:
        config.save_pretrained(directory)
        _copy_model_files(engine.config.model.path, meta.tokenizer_path, directory)

    config = copy.deepcopy(engine.hf_config())
    config.dtype = engine.config.dtype
    state = {"model": fingerprint(engine), "version": engine.progress.version}
    return publish_save(engine, meta, write, state, lambda: _tensors_later(engine, {"model": kinds}, beside))


def load_hf(engine: EngineState, meta: SaveLoadMeta) -> None:
    """Weights only: progress, and moments if there are some, stay as they are."""
    guards.require_loadable(engine.config, "params")
    with opened(meta.path, engine.world, kind="hf", require_manifest=False) as directory:

        def parts() -> dict[TensorKind, TensorSource]:
            source = TensorFiles(directory, "model")
            buffers = set(engine.tensor_shapes("buffers"))
            params = _Selection(source, [name for name in source.names() if name not in buffers])
            present = _Selection(source, [name for name in source.names() if name in buffers])
            return {"params": params, "buffers": present} if buffers else {"params": params}

        load_parts(engine, parts, f"cannot load {meta.path!r}")


class _Selection:
    """Some tensors of another source."""

    def __init__(self, source: TensorSource, names: Sequence[str]) -> None:
        self._source = source
        self._names = list(names)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self._source.read(name, slices)


def _copy_model_files(model_path: str | None, tokenizer_path: str | None, directory: Path) -> None:
    """The tokenizer, and the model's generation config, from where they are."""
    if model_path is not None:
        _copy(Path(model_path), ("generation_config.json",), directory)
    if tokenizer_path is not None:
        if not _copy(Path(tokenizer_path), TOKENIZER_FILES, directory):
            raise CheckpointError(
                f"tokenizer_path = {tokenizer_path!r} holds no tokenizer files; correct the path"
            )
    elif model_path is not None:
        _copy(Path(model_path), TOKENIZER_FILES, directory)


def _copy(source: Path, patterns: Sequence[str], directory: Path) -> int:
    found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    for path in found:
        target = directory / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return len(found)


# ---------------------------------------------------------------- portable


def save_portable(engine: EngineState, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Float32 weights, moments and progress as named tensors, for any engine and layout."""
    with_moments = meta.with_optimizer and engine.config.optimizer is not None
    kinds = _weights(engine, "master") + (MOMENTS if with_moments else ())

    def write(directory: Path) -> None:
        errors = []
        for kind in kinds:
            try:
                write_tensors(directory, kind, engine.named_tensors(kind), writes=engine.is_writer)
            except CheckpointError as error:  # this rank's own: the others go on with the next kind
                errors.append(error)
        if errors:
            raise errors[0]

    files: dict[str, Sequence[TensorKind]] = {kind: (kind,) for kind in kinds}
    state = _state(engine, with_moments)
    return publish_save(engine, meta, write, state, lambda: _tensors_later(engine, files))


def load_portable(engine: EngineState, meta: SaveLoadMeta) -> None:
    """Weights, and with ``meta.with_optimizer`` moments and progress."""
    subject = f"cannot load {meta.path!r}"
    with opened(meta.path, engine.world, kind="portable") as directory:
        state = on_all(engine.world, lambda: _checked_state(engine, meta, directory), subject)
        with_moments = meta.with_optimizer and engine.config.optimizer is not None
        kinds = _weights(engine, "master") + (MOMENTS if with_moments else ())
        load_parts(engine, lambda: {kind: TensorFiles(directory, kind) for kind in kinds}, subject)
    if meta.with_optimizer:
        engine.restore_progress(EngineProgress(**state["progress"]))


# ----------------------------------------------------------------- sharded


def save_sharded(engine: EngineState, meta: SaveLoadMeta) -> BackgroundSave | None:
    """The engine's own parallel format, and progress."""
    with_optimizer = meta.with_optimizer and engine.config.optimizer is not None

    def write(directory: Path) -> None:
        engine._save_shards(_shards_in(directory), with_optimizer)

    def snapshot() -> Later | None:
        later = engine._snapshot_shards(with_optimizer)
        return None if later is None else Later(lambda directory: later(_shards_in(directory)))

    return publish_save(engine, meta, write, _state(engine, with_optimizer), snapshot)


def load_sharded(engine: EngineState, meta: SaveLoadMeta) -> None:
    """What the same engine saved, perhaps at another layout."""
    subject = f"cannot load {meta.path!r}"
    with_optimizer = meta.with_optimizer and engine.config.optimizer is not None
    with opened(meta.path, engine.world, kind="sharded") as directory:
        state = on_all(engine.world, lambda: _checked_state(engine, meta, directory), subject)
        on_all(engine.world, lambda: engine._load_shards(directory / SHARDS, with_optimizer), subject)
    if meta.with_optimizer:
        engine.restore_progress(EngineProgress(**state["progress"]))


def _shards_in(directory: Path) -> Path:
    shards = directory / SHARDS
    shards.mkdir(exist_ok=True)
    return shards


# ------------------------------------------------------------------ common


def publish_save(
    engine: EngineState,
    meta: SaveLoadMeta,
    write: Write,
    state: Mapping[str, Any],
    snapshot: Callable[[], Later | None],
) -> BackgroundSave | None:
    """Publish what ``write`` writes: at once, or later what ``snapshot`` holds.

    Without a snapshot, the files themselves are one: they are written now, and only their digests,
    the flush to the disk and the renaming come later.
    """
    if not meta.asynchronous:
        publish(meta.path, write, engine.world, kind=meta.format, state=state)
        return None

    def prepare(directory: Path) -> Later:
        later = snapshot()
        if later is not None:
            return later
        write(directory)
        return Later(lambda directory: None)

    timeout_s = engine.timeout_s
    return publish_later(meta.path, prepare, engine.world, kind=meta.format, state=state, timeout_s=timeout_s)


def _tensors_later(
    engine: EngineState, files: Mapping[str, Sequence[TensorKind]], beside: Write | None = None
) -> Later | None:
    """Named tensors from a snapshot: every rank writes its parts, and rank 0 puts them together.

    ``files`` tells which kinds go into files of which prefix, and ``beside`` writes what else there is.
    """
    copies = engine._snapshot_tensors([kind for kinds in files.values() for kind in kinds])
    if copies is None:
        return None
    rank, size = engine.world.rank, engine.world.size

    def write(directory: Path) -> None:
        parts = directory / PARTS
        parts.mkdir(exist_ok=True)
        write_copies(parts, rank, copies, size)
        copies.clear()

    def finish(directory: Path) -> None:
        parts = ShardFiles(directory / PARTS)
        for prefix, kinds in files.items():
            names = [name for kind in kinds for name in parts.names() if name.startswith(f"{kind}/")]
            stream = ((name.partition("/")[2], parts.read(name)) for name in names)
            write_tensors(directory, prefix, stream, writes=True)
        shutil.rmtree(directory / PARTS)
        if beside is not None:
            beside(directory)

    return Later(write, finish)


def _weights(engine: EngineState, kind: TensorKind) -> tuple[TensorKind, ...]:
    """``kind``, and the buffers where the model has some that an export holds."""
    return (kind, "buffers") if engine.tensor_shapes("buffers") else (kind,)


def load_parts(
    engine: EngineState, parts: Callable[[], Mapping[TensorKind, TensorSource]], subject: str
) -> None:
    """Check the names and shapes of all parts on all ranks, and only then load them."""

    def checked() -> Mapping[TensorKind, TensorSource]:
        sources = parts()
        for kind, source in sources.items():
            check_source(source, engine.tensor_shapes(kind), f"its {kind!r}")
        return sources

    def load() -> None:
        for kind, source in sources.items():
            engine.load_named_tensors(kind, source)

    sources = on_all(engine.world, checked, subject)
    on_all(engine.world, load, subject)


def _state(engine: EngineState, with_optimizer: bool) -> dict[str, Any]:
    return {
        "engine": engine.spec.name,
        "layout": engine.config.layout.model_dump(),
        "model": fingerprint(engine) | _adapter_fields(engine),
        "optimizer": with_optimizer,
        "progress": asdict(engine.progress),
    }


def _adapter_fields(engine: EngineState) -> dict[str, Any]:
    """What tells one kind of adapter from another."""
    lora = engine.config.model.lora
    if lora is None:
        return {}
    layers = [
        name.rsplit(".", 2)[0] for name in engine.tensor_shapes("adapter") if name.endswith(".lora_A.weight")
    ]
    last = sorted({layer.rpartition(".")[2] for layer in layers})
    fields = lora.model_dump(include={"rank", "alpha", "rslora"}) | {
        "layers": f"{len(layers)}: {', '.join(last)}"
    }
    return {f"lora.{name}": value for name, value in fields.items()}


def fingerprint(engine: EngineState) -> dict[str, Any]:
    """What tells one architecture from another."""
    config = engine.hf_config().get_text_config()
    fields = {name: getattr(config, name, None) for name in MODEL_FIELDS}
    return {"head": engine.config.model.head, **fields}


def _checked_state(engine: EngineState, meta: SaveLoadMeta, directory: Path) -> Mapping[str, Any]:
    """The state of a checkpoint that ``engine`` can load; `CheckpointMismatch` lists what differs."""
    manifest = read_manifest(directory)
    problems = _mismatches(engine, meta, manifest.kind, manifest.state)
    raise_all(CheckpointMismatch, "it does not fit this engine", problems)
    return manifest.state


def _mismatches(
    engine: EngineState, meta: SaveLoadMeta, kind: str, state: Mapping[str, Any]
) -> Iterator[str]:
    if kind == "sharded" and state["engine"] != engine.spec.name:
        yield (
            f"it was saved by the engine {state['engine']!r}, and this is {engine.spec.name!r}; "
            "save with format='portable' to move between engines"
        )
    own, saved = fingerprint(engine) | _adapter_fields(engine), state["model"]
    for name in dict.fromkeys([*saved, *own]):
        if saved.get(name) != own.get(name):
            yield f"it is of another model: {name} is {saved.get(name)!r} there and {own.get(name)!r} here"
    if meta.with_optimizer and engine.config.optimizer is not None and not state["optimizer"]:
        yield "it has no optimizer state; load with with_optimizer=False for the weights alone"
