"""Files of a model directory: weights, checked by their headers, the tokenizer and further configs. No torch."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, raise_all

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

MODEL_FILES = ("generation_config.json", "*processor_config.json")
"""Configs of generation, and of processors that a vision tower's server reads images with."""
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
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "base_model.model.")
"""Prefixes of `torch.compile`, DistributedDataParallel, FSDP and ``peft``."""


@dataclass(frozen=True, kw_only=True)
class WeightFiles:
    """Sizes of the weights in a directory, by their headers."""

    files: tuple[Path, ...]
    parameters: int
    """Numbers in all tensors."""
    size: int
    """Bytes of all tensors."""


def check_weight_files(directory: Path, prefix: str = "model") -> WeightFiles:
    """Sizes of ``PREFIX.safetensors``, or of the files of its index; only headers are read.

    Raises `CheckpointNotFound` where there are none, and one `CheckpointDamaged` with every file that is missing,
    truncated, unreadable, a pointer of Git LFS, without a tensor that the index assigns to it, with names
    of a wrapper, or with integers as weights.
    """
    weight_map = indexed_tensors(directory, prefix)
    assigned: dict[str, list[str]] = {} if weight_map is not None else {f"{prefix}.safetensors": []}
    for name, file in (weight_map or {}).items():
        assigned.setdefault(file, []).append(name)
    problems: list[str] = []
    parameters = size = 0
    for file, names in sorted(assigned.items()):
        try:
            header = _read_header(directory / file)
        except CheckpointDamaged as error:
            problems.append(str(error))
            continue
        problems += _content_problems(file, header, prefix)
        missing = [name for name in names if name not in header]
        if missing:
            problems.append(f"{file}: lacks {some(missing)}, which the index assigns to it")
        parameters += _numbers(header)
        size += _data_bytes(header)
    raise_all(CheckpointDamaged, directory, problems)
    return WeightFiles(
        files=tuple(directory / file for file in sorted(assigned)), parameters=parameters, size=size
    )


def _content_problems(file: str, header: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Names and types of tensors with which no model reads its weights."""
    wrapper = next((one for one in WRAPPERS if header and all(name.startswith(one) for name in header)), None)
    if wrapper is not None and prefix == "model":
        yield (
            f"{file}: all names begin with {wrapper!r}, which is of a wrapper around the model; save the model inside, "
            "or remove the prefix"
        )
    integers = [name for name in header if name.endswith(".weight") and header[name]["dtype"][0] in "IU"]
    if integers:
        yield (
            f"{file}: {some(integers)} are stored as {header[integers[0]]['dtype']}, and weights are floats; take the "
            "model as it was before it was quantized"
        )


def no_weights(directory: Path) -> str:
    """The reason why ``directory`` has no safetensors files: pickled weights, or none."""
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if not pickled:
        return "there are no weights in it; download the model with its *.safetensors files"
    return (
        f"its weights are pickled ({', '.join(pickled[:3])}), and unpickling can run any code; load it once in "
        "transformers, an adapter in peft, and call save_pretrained(), which writes safetensors"
    )


def git_lfs_pointers(directory: Path) -> list[str]:
    """Names of files in ``directory`` that Git LFS has not downloaded."""
    return sorted(path.name for path in directory.iterdir() if path.is_file() and is_lfs_pointer(path))


def indexed_tensors(directory: Path, prefix: str) -> dict[str, str] | None:
    """The file of each tensor by the index of ``directory``; None where ``PREFIX.safetensors`` has all of them.

    Raises `CheckpointNotFound` for neither, and `CheckpointDamaged` for an invalid index, and for both, of which
    transformers reads the single file, and servers the shards.
    """
    index, single = directory / f"{prefix}.safetensors.index.json", directory / f"{prefix}.safetensors"
    is_single = single.is_file() or single.is_symlink()
    if index.is_file():
        weight_map = _read_index(index)
        if is_single and single.name not in weight_map.values():
            raise CheckpointDamaged(
                f"{directory}: {single.name} lies next to the files of {index.name}; remove the older weights, with "
                "their index"
            )
        return weight_map
    if not is_single:
        raise CheckpointNotFound(f"{directory} holds neither {single.name} nor {index.name}")
    return None


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        places = {file: PurePosixPath(file) for file in weight_map.values()}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{index.name} is not an index of safetensors files: {error}") from error
    # Names only: in the cache of the Hub, the files themselves are links out of the directory.
    outside = sorted(file for file, place in places.items() if place.is_absolute() or ".." in place.parts)
    if outside:
        raise CheckpointDamaged(f"{index.name} names {outside[0]!r}, which lies outside of its directory")
    return weight_map


def _read_header(path: Path) -> Mapping[str, Any]:
    """The entry of each tensor; raises `CheckpointDamaged` unless the file has the size that they add up to."""
    try:
        if is_lfs_pointer(path):
            raise CheckpointDamaged(
                f"{path.name}: a pointer of Git LFS instead of weights; run: git lfs pull"
            )
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointDamaged(f"{path.name}: no safetensors file, or truncated ({size:,} bytes)")
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + _data_bytes(header)
            _numbers(header)  # raises here for an invalid shape
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path.name}: missing") from error
    except OSError as error:
        raise CheckpointDamaged(f"{path.name}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointDamaged(f"{path.name}: its safetensors header is invalid") from error
    if end != size:
        word = "truncated" if size < end else "too long"
        raise CheckpointDamaged(
            f"{path.name}: {word}: {size:,} bytes, and {end:,} by its header; copy or download it again"
        )
    return header


def _data_bytes(header: Mapping[str, Any]) -> int:
    return max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)


def _numbers(header: Mapping[str, Any]) -> int:
    return sum(math.prod(map(int, tensor["shape"])) for tensor in header.values())


def is_lfs_pointer(path: Path) -> bool:
    """Whether ``path`` is the pointer of a file that Git LFS has not downloaded."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first ``names``, and the number of the others, for a message."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + rest


def tokenizer_files(directory: Path) -> list[Path]:
    """Files of the tokenizer in ``directory``, its chat templates included; sorted."""
    return _matching(directory, TOKENIZER_FILES)


def copy_model_files(model_path: str | None, directory: Path) -> None:
    """Copy `MODEL_FILES` from where the model was."""
    if model_path is not None:
        _copy(Path(model_path), MODEL_FILES, directory)


def copy_tokenizer(tokenizer_path: str | None, model_path: str | None, directory: Path) -> None:
    """Copy the tokenizer from ``tokenizer_path``, or from where the model was.

    Raises `CheckpointError` when ``tokenizer_path`` holds none.
    """
    source = tokenizer_path or model_path
    copied = 0 if source is None else _copy(Path(source), TOKENIZER_FILES, directory)
    if tokenizer_path is not None and not copied:
        raise CheckpointError(
            f"tokenizer_path = {tokenizer_path!r} holds no tokenizer files; correct the path"
        )


def _copy(source: Path, patterns: Sequence[str], directory: Path) -> int:
    paths = _matching(source, patterns)
    for path in paths:
        target = directory / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return len(paths)


def _matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
