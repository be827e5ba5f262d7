"""``format="dcp"``: float32 weights and moments as `torch.distributed.checkpoint` (DCP) writes and reads them.

Weights have the names of the checkpoint, and moments ``optimizer.state.NAME.KIND`` with the step count
``optimizer.state.NAME.step``: the flattened keys of ``torch.distributed.checkpoint.state_dict`` and torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core_rl.backend.meta import EngineProgress, SaveLoadMeta, TensorKind
from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents, load_tensors, save_files
from core_rl.checkpoint.dcp_files import DcpFiles, write_slices
from core_rl.checkpoint.directory import open_checkpoint
from core_rl.checkpoint.manifest import MANIFEST
from core_rl.distributed.agreement import on_all
from core_rl.errors import CheckpointMismatch
from core_rl.state.slices import Shard

MOMENTS = "optimizer.state."
NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Keys of torchtitan next to the weights."""
PREFIXES = ("", "model.", "dcp.model.")
"""Prefixes of the weights: none (torchtitan), the key of PyTorch's examples, and the keys of AReaL."""


def save_dcp(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Float32 weights, and where asked moments; each rank writes its slices. Collective."""

    def write(directory: Path) -> None:
        write_slices(directory, contents.world, lambda: _shards(contents, meta))

    state = contents.state(contents.with_moments(meta))
    # DCP's metadata needs the sizes that all ranks wrote: files are written at once, also for a save in the background.
    return save_files(contents, meta, write, state, lambda: None)


def _shards(contents: Contents, meta: SaveLoadMeta) -> Iterator[Shard]:
    """This rank's slices under the keys of DCP; the writer has carried tensors and step counts as well."""
    tensors, kinds = contents.tensors, contents.kinds(meta)
    for shard in tensors.shards([kind for kind in kinds if kind != "carried"]):
        kind, _, name = shard.name.partition("/")
        moment = kind in tensors.optimizer_kinds
        yield replace(shard, name=f"{MOMENTS}{name}.{kind}" if moment else name)
    if not contents.is_writer:
        return
    full = {name: tensors.carried.read(name) for name in tensors.shapes("carried")}
    trained = {name for kind in kinds if kind in tensors.optimizer_kinds for name in tensors.shapes(kind)}
    # As torch.optim counts: one number for each parameter.
    full |= {
        f"{MOMENTS}{name}.step": torch.tensor(float(contents.progress.updates)) for name in sorted(trained)
    }
    for key, value in full.items():
        yield Shard(key, value, tuple(value.shape), (0,) * value.dim())


def load_dcp(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Weights, and where asked moments; returns the progress where asked. Collective.

    Of a directory without a manifest, which another program wrote, the weights alone.
    """
    subject = f"cannot load {meta.path!r}"
    with open_checkpoint(meta.path, contents.world, kind="dcp", require_manifest=False) as directory:
        state = on_all(contents.world, lambda: _checked_state(contents, meta, directory), subject)
        load_tensors(contents, lambda: _sources(contents, meta, DcpFiles(directory)), subject)
    return EngineProgress(**state["progress"]) if meta.with_optimizer and state else None


def _checked_state(contents: Contents, meta: SaveLoadMeta, directory: Path) -> Mapping[str, Any]:
    """The state in the manifest; empty without a manifest."""
    if (directory / MANIFEST).is_file():
        return contents.checked_state(meta, directory)
    if contents.with_moments(meta):
        raise CheckpointMismatch(
            f"it has no {MANIFEST}, so it is of another program, and its optimizer state has no counters of core-rl; "
            "load with with_optimizer=False for the weights alone"
        )
    return {}


def _sources(contents: Contents, meta: SaveLoadMeta, files: DcpFiles) -> Mapping[TensorKind, TensorSource]:
    """The tensors of each kind; tensors of an unknown name count as weights, and the check reports them."""
    kinds, tensors = contents.kinds(meta), contents.tensors
    names: dict[TensorKind, dict[str, str]] = {kind: {} for kind in kinds}
    weights = {
        name: kind for kind in kinds if kind not in tensors.optimizer_kinds for name in tensors.shapes(kind)
    }
    keys = set(files.names())
    prefix = next((prefix for prefix in PREFIXES if any(prefix + name in keys for name in weights)), "")
    for key in files.names():
        if key.startswith(MOMENTS):
            name, _, kind = key.removeprefix(MOMENTS).rpartition(".")
            if kind in tensors.optimizer_kinds and kind in names:
                names[kind][name] = key
        elif key.startswith(prefix) and not key.startswith(NOT_WEIGHTS):
            name = key.removeprefix(prefix)
            names[weights.get(name, "master")][name] = key
    return {kind: MappedSource(files, keys_of_kind) for kind, keys_of_kind in names.items()}
