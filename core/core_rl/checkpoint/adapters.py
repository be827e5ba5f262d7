"""``format="adapter"``: the adapter alone, in the directory layout of ``peft``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.backend.protocols import SupportsLora
from core_rl.backend.tensors import TensorSource
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents, load_tensors, save_files
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.manifest import MANIFEST, read_manifest
from core_rl.checkpoint.model_files import copy_tokenizer
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.config.engine import LoraConfig
from core_rl.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound, raise_all

__all__ = ["load_adapter", "save_adapter"]

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model"
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    # Any other way to begin has changed the base weights.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Fields of ``peft``'s config, and the values with which an adapter is ``scaling * B @ A`` and nothing else."""


def save_adapter(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """``adapter_model.safetensors`` and ``adapter_config.json``, which ``peft`` and servers load; collective."""
    backend = contents.backend
    assert isinstance(backend, SupportsLora)  # required by the engine

    def write(directory: Path) -> None:
        stream = contents.tensors.stream("adapter")
        # One file, whatever its size: peft reads no index.
        write_tensors(directory, TENSOR_FILE, stream, writes=contents.is_writer, max_file_bytes=1 << 62)
        if contents.is_writer:
            text = json.dumps(backend.adapter_config(), indent=2, sort_keys=True)
            (directory / CONFIG_FILE).write_text(text + "\n")
            if meta.tokenizer_path is not None:
                copy_tokenizer(meta.tokenizer_path, None, directory)

    state = {
        "model": contents.fingerprint(),
        "base": contents.tensors.base_digest(),
        "version": contents.progress.version,
    }
    # An adapter is small: its files are written at once, also for a save in the background.
    return save_files(contents, meta, write, state, lambda: None)


def load_adapter(contents: Contents, meta: SaveLoadMeta) -> None:
    """The adapter alone: the base, progress and moments stay as they are; collective.

    Also takes the files of ``peft`` itself, which do not identify the base weights: then only names and
    shapes are checked. Raises `CheckpointMismatch` that lists what differs.
    """
    expected = {"model": contents.fingerprint(), "base": contents.tensors.base_digest()}
    lora = contents.config.model.lora
    assert lora is not None  # required by the engine
    with open_checkpoint(meta.path, contents.world, kind="adapter", require_manifest=False) as directory:

        def parts() -> dict[TensorKind, TensorSource]:
            problems = [*_config_problems(lora, directory), *_base_problems(expected, directory)]
            raise_all(CheckpointMismatch, "the adapter does not fit this engine", problems)
            return {"adapter": TensorFiles(directory, TENSOR_FILE)}

        load_tensors(contents, parts, f"cannot load {meta.path!r}")


def _config_problems(lora: LoraConfig, directory: Path) -> Iterator[str]:
    saved = _read_config(directory / CONFIG_FILE)
    for name, allowed in PLAIN.items():
        if saved.get(name) not in allowed:
            yield f"its {name} is {saved[name]!r}, which is more than LoRA as model.lora has it"
    for field, name, default in (
        ("rank", "r", None),
        ("alpha", "lora_alpha", None),
        ("rslora", "use_rslora", False),
    ):
        saved_value, value = saved.get(name, default), getattr(lora, field)
        if saved_value != value:
            yield f"its {name} is {saved_value!r}, and model.lora.{field} is {value!r} here; set it to {saved_value!r}"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointNotFound(
            f"there is no {path.name}: this is no adapter that peft has saved"
        ) from error
    except ValueError as error:
        raise CheckpointDamaged(f"{path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointDamaged(f"{path.name} holds a {type(config).__name__}, not an object")
    return config


def _base_problems(expected: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Differences between this model and the base model in the manifest of a core-rl adapter."""
    if not (directory / MANIFEST).is_file():
        return
    state = read_manifest(directory).state
    for name, value in expected["model"].items():
        if state["model"].get(name) != value:
            yield f"it is of another base model: {name} is {state['model'].get(name)!r} there and {value!r} here"
    if state["model"] == expected["model"] and state["base"] != expected["base"]:
        yield (
            "it is of another base model: the same architecture with other weights "
            f"(digest {state['base'][:8]} there and {expected['base'][:8]} here); set model.path to the base that "
            "it was trained on"
        )
