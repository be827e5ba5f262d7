"""``format="adapter"``: the adapter alone, in the directory layout of ``peft``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.backend.protocols import SupportsLora
from core_rl.backend.tensors import TensorSource
from core_rl.checkpoint.adapter_config import ADAPTER_CONFIG, adapter_problems
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents, load_tensors, save_files
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.manifest import MANIFEST, read_manifest
from core_rl.checkpoint.model_files import copy_tokenizer
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.errors import CheckpointMismatch, raise_all

TENSOR_FILE = "adapter_model"


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
            (directory / ADAPTER_CONFIG).write_text(text + "\n")
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
    model = contents.config.model
    lora = model.lora
    assert lora is not None  # required by the engine
    with open_checkpoint(meta.path, contents.world, kind="adapter", require_manifest=False) as directory:

        def parts() -> dict[TensorKind, TensorSource]:
            problems = [*adapter_problems(lora, model.head, directory), *_base_problems(expected, directory)]
            raise_all(CheckpointMismatch, "the adapter does not fit this engine", problems)
            return {"adapter": TensorFiles(directory, TENSOR_FILE)}

        load_tensors(contents, parts, f"cannot load {meta.path!r}")


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
