"""The formats in which a train engine saves itself; see `SaveLoadMeta.format`."""

from __future__ import annotations

from core_rl.backend.meta import EngineProgress, SaveLoadMeta
from core_rl.checkpoint.adapters import load_adapter, save_adapter
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents
from core_rl.checkpoint.hf import load_hf, save_hf
from core_rl.checkpoint.portable import load_portable, save_portable
from core_rl.checkpoint.sharded import load_sharded, save_sharded

__all__ = ["load_contents", "save_contents"]

SAVE = {"hf": save_hf, "portable": save_portable, "sharded": save_sharded, "adapter": save_adapter}
LOAD = {"hf": load_hf, "portable": load_portable, "sharded": load_sharded, "adapter": load_adapter}


def save_contents(contents: Contents, meta: SaveLoadMeta) -> BackgroundSave | None:
    """Save ``contents`` in ``meta.format``; collective. Returns the save in the background, if one was asked for.

    Raises one `CheckpointError` on all ranks when anything fails on any of them; what was at the path stays.
    """
    return SAVE[meta.format](contents, meta)


def load_contents(contents: Contents, meta: SaveLoadMeta) -> EngineProgress | None:
    """Load what `save_contents` wrote, or for ``hf`` any model directory of transformers; collective.

    Files, model and names are checked before anything changes. Returns the progress to restore, if any. Raises
    `CheckpointNotFound`, `CheckpointDamaged` or `CheckpointMismatch`, and `WeightsError` for a model directory with
    other tensors; the same on all ranks.
    """
    return LOAD[meta.format](contents, meta)
