"""Portable checkpoints, written for and by `torch.distributed.checkpoint` itself."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_support as support
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.checkpoint import portable
from core_rl.checkpoint.portable import DcpFiles, copy_slices
from core_rl.config.engine import OptimizerConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, WeightsError
from core_rl.state.slices import Shard

KINDS = ("master", "exp_avg", "exp_avg_sq")
STEPS = 2


@pytest.fixture(scope="module")
def engine() -> Iterator[TrainEngine]:
    """An engine after `STEPS` updates, which no test trains."""
    built = support.engine(support.config(optimizer=OptimizerConfig(lr=1e-2)))
    for seed in range(STEPS):
        built.train_batch(support.batch(seed), LossSpec(fn=support.weighted_nll), MicroBatchSpec(count=1))
    yield built
    built.destroy()


def state_dict(engine: TrainEngine) -> dict[str, Tensor]:
    """All tensors under the keys of DCP."""
    tensors: dict[str, Tensor] = {}
    for kind in KINDS:
        for name, value in engine.named_tensors(kind):
            assert value is not None
            key = name if kind == "master" else f"optimizer.state.{name}.{kind}"
            tensors[key] = value.clone()
            if kind == "exp_avg":
                tensors[f"optimizer.state.{name}.step"] = torch.tensor(float(STEPS))
    return tensors


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    names = left.keys() | right.keys()
    return [name for name in names if not torch.equal(left[name], right[name])]


def test_torch_loads_weights_moments_and_steps(engine: TrainEngine, tmp_path: Path) -> None:
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="portable"))
    expected = state_dict(engine)
    loaded = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
    load(loaded, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert differing(loaded, expected) == []


def test_dcp_to_torch_save_nests_the_optimizer(engine: TrainEngine, tmp_path: Path) -> None:
    engine.save(SaveLoadMeta(path=str(tmp_path / "a"), format="portable"))
    dcp_to_torch_save(tmp_path / "a", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    optimizer = {f"optimizer.{key}": value for key, value in loaded.pop("optimizer").items()}
    assert differing({**loaded, **optimizer}, state_dict(engine)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nest", [(), ("model",), ("dcp", "model")])
def test_weights_of_other_programs_load(
    engine: TrainEngine, tmp_path: Path, nest: tuple[str, ...], dtype: torch.dtype
) -> None:
    before = state_dict(engine)
    weights = {key: torch.randn_like(before[key]).to(dtype) for key in before if "optimizer" not in key}
    nested: dict[str, Any] = dict(weights)
    for key in reversed(nest):
        nested = {key: nested, "optim": {"lr": 0.1}}
    nested |= {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}}
    save(nested, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    meta = SaveLoadMeta(path=str(tmp_path / "a"), format="portable")
    with pytest.raises(CheckpointMismatch, match=r"no manifest\.json.*with_optimizer=False"):
        engine.load(meta)
    assert differing(state_dict(engine), before) == []
    updates = engine.progress.updates
    engine.load(SaveLoadMeta(path=meta.path, format="portable", with_optimizer=False))
    expected = {**before, **{name: value.float() for name, value in weights.items()}}
    assert differing(state_dict(engine), expected) == []
    assert engine.progress.updates == updates


def test_unknown_and_missing_weights_are_refused(engine: TrainEngine, tmp_path: Path) -> None:
    before = state_dict(engine)
    weights = {key: torch.zeros_like(value) for key, value in before.items() if "optimizer" not in key}
    weights["model.layers.9.weight"] = weights.pop("model.norm.weight")
    save(weights, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    with pytest.raises(
        WeightsError, match=r"(?s)missing 'model\.norm\.weight'.*unexpected 'model\.layers\.9"
    ):
        engine.load(SaveLoadMeta(path=str(tmp_path / "a"), format="portable", with_optimizer=False))
    assert differing(state_dict(engine), before) == []


def write(directory: Path, shards: list[Shard]) -> None:
    copy_slices(Comm(), lambda: shards).run(directory, Comm())


@pytest.mark.parametrize(
    ("names", "problem"), [("ab", "the export gave: no data for 'b'"), ("aac", "the export gave: 'a' twice")]
)
def test_incomplete_exports_are_refused(names: str, problem: str) -> None:
    stream = [(name, None if name == "b" else torch.ones(2)) for name in names]
    contents: Any = SimpleNamespace(tensors=SimpleNamespace(stream=lambda kind: iter(stream)), is_writer=True)
    with pytest.raises(CheckpointError, match=problem):
        list(portable._streamed(contents, ["master"]))


def test_slices_are_read_in_any_region(tmp_path: Path) -> None:
    full = torch.arange(35.0).reshape(5, 7)
    boxes = [((0, 0), full[:2]), ((2, 0), full[2:, :3]), ((2, 3), full[2:, 3:])]
    shards = [Shard("a", box, (5, 7), offsets) for offsets, box in boxes]
    empty = Shard("empty", torch.zeros(0, 3), (0, 3), (0, 0))
    write(tmp_path, [*shards, empty, Shard("b", torch.tensor(4), (), ())])
    files = DcpFiles(tmp_path)
    for region in [(slice(1, 4), slice(2, 6)), (slice(0, 5), slice(0, 7)), (slice(3, 3), slice(0, 7))]:
        assert torch.equal(files.read("a", region), full[region])
    assert files.read("b").item() == 4
    assert files.read("empty").shape == (0, 3)


def test_regions_without_slices_raise(tmp_path: Path) -> None:
    write(tmp_path, [Shard("a", torch.zeros(2, 7), (5, 7), (0, 0))])
    files = DcpFiles(tmp_path)
    assert files.read("a", (slice(0, 2), slice(0, 7))).shape == (2, 7)
    with pytest.raises(CheckpointDamaged, match="lack 7 of the elements"):
        files.read("a", (slice(1, 3), slice(0, 7)))


def test_truncated_files_of_other_programs_raise(tmp_path: Path) -> None:
    save({"a": torch.zeros(500)}, checkpoint_id=str(tmp_path), no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointDamaged, match="'a' cannot be read"):
        DcpFiles(tmp_path).read("a")


class _Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(_Command()), r"posix\.system, which is no part of such metadata"),
        (
            b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93.",
            r"filesystem\.os\.system, which is no part",
        ),
        (pickle.dumps([1]), "holds a list"),
        (b"", "EOFError"),
    ],
)
def test_metadata_builds_nothing_else(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=message):
        DcpFiles(tmp_path)
