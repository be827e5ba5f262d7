"""Delta weight sync from a train engine to an inference engine, by every method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine_support as support
import pytest
import torch
from rollout_support import ToyBackend, toy_config, toy_spec
from safetensors.torch import load_file
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta, SyncMethod, WeightUpdateMeta
from core_rl.checkpoint.manifest import read_manifest
from core_rl.config.engine import ModelConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_engine
from core_rl.engine.sync import sync_weights
from core_rl.engine.train import TrainEngine
from core_rl.errors import DeltaRefused, UnsupportedCapability
from core_rl.reference import ROLLOUT_SPEC, ReferenceRolloutConfig
from core_rl.reference.rollout import ReferenceRolloutBackend

METHODS: tuple[SyncMethod, ...] = ("disk", "tensor", "distributed")


@pytest.fixture
def trained() -> Iterator[TrainEngine]:
    engine = support.engine()
    yield engine
    engine.destroy()


@pytest.fixture
def served(trained: TrainEngine, tmp_path: Path) -> Iterator[InferenceEngine]:
    trained.save(SaveLoadMeta(path=str(tmp_path / "model"), format="hf", with_optimizer=False))
    config = ReferenceRolloutConfig(model=ModelConfig(path=str(tmp_path / "model")))
    engine = load_engine(ROLLOUT_SPEC, config)
    engine.initialize()
    yield engine
    engine.destroy()


def step(engine: TrainEngine, seed: int) -> None:
    engine.train_batch(support.batch(seed), LossSpec(fn=support.weighted_nll), MicroBatchSpec(max_tokens=64))


def require_same(served: InferenceEngine, trained: TrainEngine) -> None:
    backend = served._backend
    assert isinstance(backend, ReferenceRolloutBackend)
    got: dict[str, Tensor] = dict(backend._model.named_parameters())
    for name, value in trained.named_tensors("params"):
        assert value is not None and torch.equal(got[name], value), name


@pytest.mark.parametrize("method", METHODS)
def test_deltas_arrive_by_every_method(
    trained: TrainEngine, served: InferenceEngine, tmp_path: Path, method: SyncMethod
) -> None:
    for version in range(1, 6):
        if version != 3:  # nothing has changed
            step(trained, version)
        meta = WeightUpdateMeta(
            method=method, version=version, path=str(tmp_path / "sync"), delta=True, verify=version == 4
        )
        sync_weights(trained, served, meta, 60)
        require_same(served, trained)
        assert served.get_version() == version


def test_changes_on_disk_are_refused_on_another_base(
    trained: TrainEngine, served: InferenceEngine, tmp_path: Path
) -> None:
    path = tmp_path / "sync"
    trained.upload_weights(WeightUpdateMeta(version=1, path=str(path), delta=True))
    assert read_manifest(path).kind == "hf"
    step(trained, 1)
    trained.upload_weights(WeightUpdateMeta(version=2, path=str(path), delta=True))
    assert read_manifest(path).kind == "delta"
    assert not list(path.glob("model*"))
    changes = load_file(path / "delta.safetensors")
    assert {"#base", "#digest"} < changes.keys()
    served.set_version(1)
    with pytest.raises(DeltaRefused, match="the receiver has no weights of a delta update"):
        served.update_weights(WeightUpdateMeta(version=2, path=str(path), delta=True)).result(60)
    assert served.get_version() == 1
    step(trained, 2)
    sync_weights(trained, served, WeightUpdateMeta(version=3, path=str(path), delta=True), 60)
    require_same(served, trained)
    assert read_manifest(path).kind == "hf", "a full update followed"


def test_a_full_update_ends_a_series_of_deltas(
    trained: TrainEngine, served: InferenceEngine, tmp_path: Path
) -> None:
    for version, delta in enumerate((True, False, True, True), start=1):
        step(trained, version)
        path = str(tmp_path / "sync")
        sync_weights(trained, served, WeightUpdateMeta(version=version, path=path, delta=delta), 60)
        require_same(served, trained)
        assert read_manifest(Path(path)).kind == ("delta" if version == 4 else "hf")


def test_an_undeclared_delta_is_refused() -> None:
    engine = InferenceEngine(toy_spec(), toy_config(), ToyBackend())
    engine.initialize()
    try:
        with pytest.raises(UnsupportedCapability, match=r"WeightUpdateMeta.delta.*'sync_delta'"):
            engine.update_weights(WeightUpdateMeta(version=1, path="weights", delta=True))
    finally:
        engine.destroy()
