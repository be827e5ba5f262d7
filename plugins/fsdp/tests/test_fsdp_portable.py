"""``portable`` checkpoints of the FSDP engine load at other layouts, and by `torch.distributed.checkpoint` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsdp_support as support
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CheckpointDamaged
from core_rl.launch.group import EngineGroup


def state(group: EngineGroup) -> dict[str, Tensor]:
    """All tensors under the keys of DCP."""
    return {
        name if kind == "master" else f"optimizer.state.{name}.{kind}": value
        for kind in support.KINDS
        for name, value in group.named_tensors(kind).items()
    }


@pytest.fixture
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(2, model=support.UNEVEN), timeout_s=60) as ranks:
        yield ranks


def test_portable_checkpoint_moves_between_layouts(group: EngineGroup, tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "saved"), format="portable")
    group.train_batch(support.make_batch(0), support.LOSS, support.BUDGET)
    group.save(meta)
    expected, progress = state(group), group.progress
    plain = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
    load(plain, checkpoint_id=meta.path, no_dist=True)
    assert support.equal(plain, expected)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    group.initialize(config=support.fsdp_config(ParallelLayout(tp=2), model=support.UNEVEN))
    group.train_batch(support.make_batch(1), support.LOSS, support.BUDGET)
    group.load(meta)
    assert support.equal(state(group), expected)
    assert group.progress == progress
    file = tmp_path / "saved" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=file.name):
        group.load(meta)
    assert support.equal(state(group), expected)
