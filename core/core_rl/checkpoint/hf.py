"""``format="hf"``: a model directory of transformers."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from core_rl.backend.meta import SaveLoadMeta, TensorKind
from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents, load_parts, publish_save
from core_rl.checkpoint.directory import opened
from core_rl.checkpoint.portable import tensors_later
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.errors import CheckpointError

__all__ = ["load_hf", "save_hf"]

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


def save_hf(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Safetensors, config, generation config and tokenizer; collective."""
    kinds = contents.tensors.weight_kinds("params")

    def write(directory: Path) -> None:
        stream = (item for kind in kinds for item in contents.tensors.stream(kind))
        write_tensors(directory, "model", stream, writes=contents.is_writer)
        if contents.is_writer:
            write_rest(directory)

    def write_rest(directory: Path) -> None:
        config.save_pretrained(directory)
        _copy_model_files(contents.config.model.path, meta.tokenizer_path, directory)

    config = copy.deepcopy(contents.backend.hf_config())
    config.dtype = contents.config.dtype
    state = {"model": contents.fingerprint(), "version": contents.progress.version}
    return publish_save(
        contents, meta, write, state, lambda: tensors_later(contents, {"model": kinds}, write_rest)
    )


def load_hf(contents: Contents, meta: SaveLoadMeta) -> None:
    """Weights only: progress, and moments if there are some, stay as they are; collective."""
    with opened(meta.path, contents.world, kind="hf", require_manifest=False) as directory:

        def parts() -> Mapping[TensorKind, TensorSource]:
            source, buffers = TensorFiles(directory, "model"), set(contents.tensors.shapes("buffers"))
            params = MappedSource(source, {name: name for name in source.names() if name not in buffers})
            present = MappedSource(source, {name: name for name in source.names() if name in buffers})
            return {"params": params, "buffers": present} if buffers else {"params": params}

        load_parts(contents, parts, f"cannot load {meta.path!r}")


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
