"""Contents of an engine's checkpoint, and the steps that all formats share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource, check_source
from core_rl.backend.train_backend import AnyTrainBackend
from core_rl.checkpoint.background import BackgroundSave, DeferredWrite, Write, write_in_background
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.checkpoint.manifest import read_manifest
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.agreement import on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointMismatch, raise_all
from core_rl.state.rng_state import RngState
from core_rl.state.store import TensorStore

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


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that a checkpoint of one engine is made of, on one rank."""

    engine: str
    """The engine's name."""
    resharding: bool
    """Whether the engine loads ``sharded`` checkpoints of other layouts."""
    config: TrainEngineConfig
    backend: AnyTrainBackend
    tensors: TensorStore
    world: Comm
    is_writer: bool
    """Whether this rank writes what exists once, and receives full tensors."""
    progress: EngineProgress
    rng: RngState
    export: Callable[[NamedTensors], NamedTensors] = iter
    """Passes on the full tensors that ``hf`` writes before it returns."""

    def with_moments(self, meta: SaveLoadMeta) -> bool:
        """Whether ``meta`` asks for the optimizer's state, and there is some."""
        return meta.with_optimizer and self.config.optimizer is not None

    def kinds(self, meta: SaveLoadMeta) -> tuple[TensorKind, ...]:
        """Kinds of the float32 weights, and of the moments where ``meta`` asks for them.

        Carried tensors are among them where another engine may load the checkpoint; the same one has its own.
        """
        moments = self.tensors.optimizer_kinds if self.with_moments(meta) else ()
        same_engine = meta.format == "sharded"
        weights = self.tensors.weight_kinds("master") if same_engine else self.tensors.export_kinds("master")
        return (*weights, *moments)

    def fingerprint(self) -> dict[str, Any]:
        """Fields that identify the architecture."""
        config = self.backend.hf_config().get_text_config()
        fields = {name: getattr(config, name, None) for name in MODEL_FIELDS}
        return {"head": self.config.model.head, **fields}

    def state(self, with_optimizer: bool) -> dict[str, Any]:
        """The state that a manifest keeps of the engine."""
        return {
            "engine": self.engine,
            "layout": self.config.layout.model_dump(),
            "model": self._model_fields(),
            "optimizer": with_optimizer,
            "moments": list(self.tensors.optimizer_kinds) if with_optimizer else [],
            "progress": asdict(self.progress),
        }

    def _model_fields(self) -> dict[str, Any]:
        """Fields that identify the model with its adapter and carried tensors."""
        carried = self.tensors.shapes("carried")
        shapes = hashlib.sha256(json.dumps(sorted(carried.items())).encode()).hexdigest()[:8]
        fields = {"carried": f"{len(carried)} tensors, {shapes}"} if carried else {}
        return self.fingerprint() | self._adapter_fields() | fields

    def _adapter_fields(self) -> dict[str, Any]:
        """Fields that identify the kind of adapter."""
        lora = self.config.model.lora
        if lora is None:
            return {}
        names = self.tensors.shapes("adapter")
        layers = [name.rsplit(".", 2)[0] for name in names if name.endswith(".lora_A.weight")]
        last = sorted({layer.rpartition(".")[2] for layer in layers})
        fields = lora.model_dump(include={"rank", "alpha", "rslora"})
        fields |= {"layers": f"{len(layers)}: {', '.join(last)}"}
        return {f"lora.{name}": value for name, value in fields.items()}

    def checked_state(self, meta: SaveLoadMeta, directory: Path) -> Mapping[str, Any]:
        """The state of a checkpoint that this engine can load; `CheckpointMismatch` lists what differs."""
        manifest = read_manifest(directory)
        problems = []
        if manifest.kind == "sharded" and manifest.state["engine"] != self.engine:
            problems.append(
                f"it was saved by the engine {manifest.state['engine']!r}, and this is {self.engine!r}; "
                "save with format='portable' to move between engines"
            )
        fields, saved = self._model_fields(), manifest.state["model"]
        problems += [
            f"it is of another model: {name} is {saved.get(name)!r} there and {fields.get(name)!r} here"
            for name in dict.fromkeys([*saved, *fields])
            if saved.get(name) != fields.get(name)
        ]
        if self.with_moments(meta) and not manifest.state["optimizer"]:
            problems.append("it has no optimizer state; load with with_optimizer=False for the weights alone")
        kinds, saved_kinds = list(self.tensors.optimizer_kinds), manifest.state.get("moments") or []
        if self.with_moments(meta) and saved_kinds and set(saved_kinds) != set(kinds):
            problems.append(
                f"it is of another optimizer, with {', '.join(saved_kinds)}, and this one has {', '.join(kinds)}; set "
                "optimizer.type and optimizer.rules as they were, or load with with_optimizer=False for the weights "
                "alone"
            )
        raise_all(CheckpointMismatch, "it does not fit this engine", problems)
        return manifest.state


def save_files(
    contents: Contents,
    meta: SaveLoadMeta,
    write: Write,
    state: Mapping[str, Any],
    snapshot: Callable[[], DeferredWrite | None],
) -> BackgroundSave | None:
    """Publish what ``write`` writes: at once, or later what ``snapshot`` copied.

    Without a snapshot, the files themselves are one: they are written now, and only their digests,
    the flush to the disk and the renaming come later.
    """
    if not meta.asynchronous:
        write_checkpoint(meta.path, write, contents.world, kind=meta.format, state=state)
        return None

    def prepare(directory: Path) -> DeferredWrite:
        later = snapshot()
        if later is not None:
            return later
        write(directory)
        return DeferredWrite(lambda directory: None)

    world = contents.world
    return write_in_background(
        meta.path, prepare, world, kind=meta.format, state=state, timeout_s=world.timeout_s
    )


def load_tensors(
    contents: Contents, parts: Callable[[], Mapping[TensorKind, TensorSource]], subject: str
) -> None:
    """Check the names and shapes of all parts on all ranks, and only then load them."""

    def checked() -> Mapping[TensorKind, TensorSource]:
        sources = parts()
        for kind, source in sources.items():
            check_source(source, contents.tensors.shapes(kind), f"its {kind!r}")
        return sources

    for kind, source in on_all(contents.world, checked, subject).items():
        contents.tensors.load(kind, source)
