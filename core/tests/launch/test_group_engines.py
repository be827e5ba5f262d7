"""`EngineGroup` over a real engine equals the engine in this process, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine_support as support
import pytest
import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta, TensorKind, WeightUpdateMeta
from core_rl.backend.tensors import TensorDict
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, CheckpointNotFound, EngineStateError
from core_rl.launch.group import EngineGroup

LOSS = LossSpec(fn=support.weighted_nll)
MB = MicroBatchSpec(max_tokens=12)
KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def ranks() -> Iterator[EngineGroup]:
    with EngineGroup("reference", support.config(), timeout_s=120, threads_per_rank=1) as group:
        yield group


@pytest.fixture
def group(ranks: EngineGroup) -> EngineGroup:
    ranks.initialize()
    return ranks


@pytest.fixture
def engine() -> Iterator[TrainEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = support.engine()
    yield engine
    engine.destroy()
    torch.set_num_threads(threads)


def last_entropy(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output["entropy"][batch.cu_seqlens[1:].long() - 1]


def entropy_in_eval_mode(engine: TrainEngine, batch: SequenceBatch) -> Tensor:
    with engine.eval_mode():
        actual = engine.forward(batch, MB, outputs=("entropy",)).entropy
    assert isinstance(actual, Tensor)
    return actual


def weights(target: TrainEngine | EngineGroup, kind: TensorKind = "master") -> dict[str, Tensor]:
    tensors = target.named_tensors(kind)
    items = tensors.items() if isinstance(tensors, dict) else tensors
    return {name: tensor.clone() for name, tensor in items if tensor is not None}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    assert left
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_training_is_the_engines(group: EngineGroup, engine: TrainEngine) -> None:
    for step in range(3):
        batch = support.batch(step)
        assert group.train_batch(batch, LOSS, MB) == engine.train_batch(batch, LOSS, MB)
        assert group.lr_scheduler_step() == engine.lr_scheduler_step()
    for kind in KINDS:
        assert_equal(weights(group, kind), weights(engine, kind))
    assert group.eval_batch(support.batch(7), LOSS, MB) == engine.eval_batch(support.batch(7), LOSS, MB)
    assert group.tensor_shapes("params") == engine.tensor_shapes("params")
    assert group.progress == engine.progress
    assert group.hf_config().to_dict() == engine.hf_config().to_dict()
    assert group.get_scheduling_config() == engine.get_scheduling_config()


def test_step_in_pieces_equals_train_batch(group: EngineGroup, engine: TrainEngine) -> None:
    first, second = support.batch(1), support.batch(2)
    complete = LOSS.weight(first) + LOSS.weight(second)
    for target in (group, engine):
        target.optimizer_zero_grad()
        target.forward_backward(first, LOSS, MB, total_weight=complete)
        target.forward_backward(second, LOSS, MB, total_weight=complete)
    assert_equal(weights(group, "grads"), weights(engine, "grads"))
    assert group.optimizer_step() == engine.optimizer_step()
    assert_equal(weights(group), weights(engine))


def test_forward_and_hooks_are_the_engines(group: EngineGroup, engine: TrainEngine) -> None:
    batch = support.batch(3, (4, 11, 2, 7))
    outputs: tuple[OutputName, ...] = ("logprobs", "entropy")
    ours, theirs = (target.forward(batch, MB, outputs, temperature=0.7) for target in (group, engine))
    assert_equal(dict(ours.items()), dict(theirs.items()))
    for aggregate in (None, torch.stack, len):
        ours, theirs = (
            target.forward(
                batch,
                MB,
                ("entropy",),
                output_seqlens=[1] * 4,
                post_hook=last_entropy,
                aggregate_fn=aggregate,
            )
            for target in (group, engine)
        )
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert torch.equal(group.run(entropy_in_eval_mode, batch)[0], entropy_in_eval_mode(engine, batch))


def test_state_goes_in_and_out(group: EngineGroup, tmp_path: Path) -> None:
    group.train_batch(support.batch(0), LOSS, MB)
    group.set_version(5)
    trained = weights(group)
    group.save(SaveLoadMeta(path=str(tmp_path / "saved"), format="portable"))
    group.upload_weights(WeightUpdateMeta(path=str(tmp_path / "sync"), version=6))
    assert (tmp_path / "sync" / "config.json").is_file()
    progress = group.progress
    group.initialize()
    assert group.get_version() == 0
    group.load(SaveLoadMeta(path=str(tmp_path / "saved"), format="portable"))
    assert (group.get_version(), group.progress) == (5, progress)
    assert_equal(weights(group), trained)
    group.load_named_tensors("master", TensorDict({name: torch.zeros_like(t) for name, t in trained.items()}))
    assert all(not tensor.any() for tensor in weights(group).values())
    group.restore_progress(progress)
    assert group.progress == progress


def test_errors_of_the_engine_are_the_groups(group: EngineGroup, tmp_path: Path) -> None:
    unknown_token = SequenceBatch.from_sequences([torch.tensor([1, support.VOCABULARY])])
    with pytest.raises(BatchError, match=f"token id {support.VOCABULARY}"):
        group.train_batch(unknown_token, LOSS, MB)
    with pytest.raises(BatchError, match="13"):
        group.train_batch(support.batch(0, (13,)), LOSS, MB)
    with pytest.raises(EngineStateError, match="no gradients"):
        group.named_tensors("grads")
    with pytest.raises(EngineStateError, match="has no adapter"):
        group.upload_weights(WeightUpdateMeta(method="lora", version=1))
    with pytest.raises(CheckpointNotFound):
        group.load(SaveLoadMeta(path=str(tmp_path / "nothing")))
    assert group.train_batch(support.batch(0), LossSpec(fn=support.nan_loss), MB)["update_successful"] == 0.0
    assert group.train_batch(support.batch(0), LOSS, MB)["update_successful"] == 1.0
