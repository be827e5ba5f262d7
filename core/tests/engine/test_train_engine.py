"""The public methods of `TrainEngine`: states, scale, skipped steps, and bad input, on a real engine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import engine_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec, count_sequences
from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from core_rl.backend.tensors import TensorDict
from core_rl.config.capability import Capability
from core_rl.config.engine import LoraConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.process_group import RankAddress, StoreAddress, open_store
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import (
    BatchError,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    EngineContractError,
    EngineStateError,
    LayoutError,
    LossError,
    UnsupportedCapability,
    WeightsError,
)
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.reference.train import ReferenceBackend

DROPPING = ModelConfig(config=support.TINY | {"attention_dropout": 0.3})
ONE, TWO = MicroBatchSpec(count=1), MicroBatchSpec(count=2)
NLL = LossSpec(fn=support.weighted_nll)


@pytest.fixture
def engine() -> Iterator[TrainEngine]:
    built = support.engine()
    yield built
    built.destroy()


def tensors(engine: TrainEngine, kind: Any = "master") -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.named_tensors(kind) if value is not None}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


# ------------------------------------------------------------------ one step


def test_a_step_reports_and_changes_every_parameter(engine: TrainEngine) -> None:
    before = tensors(engine)
    metrics = engine.train_batch(support.batch(), NLL, TWO)
    assert metrics.keys() == {"loss", "nll", "grad_norm", "lr", "update_successful"}
    assert metrics["loss"] == pytest.approx(metrics["nll"]) and metrics["update_successful"] == 1
    assert changed(before, tensors(engine)) == list(before)


def test_calls_with_total_weight_equal_single_call(engine: TrainEngine) -> None:
    batch = support.batch()
    engine.forward_backward(batch, NLL, ONE)
    complete = tensors(engine, "grads")
    engine.optimizer_zero_grad()
    total = NLL.weight(batch)
    for part in (batch.select([0]), batch.select([1, 2])):
        engine.forward_backward(part, NLL, ONE, total_weight=total)
    torch.testing.assert_close(tensors(engine, "grads"), complete, rtol=1e-4, atol=1e-6)


def test_gradients_are_normalised_by_loss_weight(engine: TrainEngine) -> None:
    batch = support.batch()
    engine.forward_backward(batch, NLL, ONE)
    by_token = tensors(engine, "grads")
    engine.optimizer_zero_grad()
    engine.forward_backward(batch, LossSpec(fn=support.weighted_nll, weight_fn=count_sequences), ONE)
    ratio = float(batch.loss_mask.sum()) / 3
    for name, grad in tensors(engine, "grads").items():
        torch.testing.assert_close(grad, by_token[name] * ratio, rtol=1e-4, atol=1e-6)


def test_learning_rate_follows_counted_steps() -> None:
    schedule = ScheduleConfig(type="linear")
    engine = load_engine(SPEC, support.config(OptimizerConfig(lr=1.0, schedule=schedule)))
    engine.initialize(ft_spec=FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=1))
    rates = [engine.train_batch(support.batch(), NLL, ONE)["lr"] for _ in range(2)]
    assert rates == [1.0, 1.0]  # train_batch does not advance it
    assert engine.lr_scheduler_step() == 0.75
    assert engine.train_batch(support.batch(), NLL, ONE)["lr"] == 0.75
    engine.destroy()


# -------------------------------------------------------------- skipped steps


def test_nan_loss_skips_the_step(engine: TrainEngine) -> None:
    engine.train_batch(support.batch(), NLL, ONE)
    before = [tensors(engine, kind) for kind in ("master", "exp_avg", "exp_avg_sq")]
    metrics = engine.train_batch(support.batch(1), LossSpec(fn=support.nan_loss), TWO)
    assert metrics["update_successful"] == 0 and math.isnan(metrics["loss"])
    for old, kind in zip(before, ("master", "exp_avg", "exp_avg_sq"), strict=True):
        assert not changed(old, tensors(engine, kind))
    assert engine.train_batch(support.batch(), NLL, ONE)["update_successful"] == 1


def test_an_all_masked_batch_skips_the_step(engine: TrainEngine, caplog: pytest.LogCaptureFixture) -> None:
    batch = support.batch()
    batch = batch.with_tokens(loss_mask=torch.zeros(batch.num_tokens, dtype=torch.bool))
    before = tensors(engine)
    metrics = engine.train_batch(batch, NLL, TWO)
    assert metrics["update_successful"] == 0 and metrics["grad_norm"] == 0
    assert not changed(before, tensors(engine))
    assert "no token counts in this batch" in caplog.text


def test_nan_in_masked_positions_is_harmless(engine: TrainEngine) -> None:
    batch = support.batch()
    clean = engine.forward_backward(batch, NLL, ONE)["loss"]
    engine.optimizer_zero_grad()
    poisoned = torch.where(batch.loss_mask, batch["weight"], torch.nan)
    metrics = engine.train_batch(batch.with_tokens(weight=poisoned), NLL, ONE)
    assert metrics["loss"] == clean and metrics["update_successful"] == 1


def test_an_empty_batch_is_skipped(engine: TrainEngine) -> None:
    assert engine.train_batch(support.batch().select([]), NLL, ONE)["update_successful"] == 0
    assert dict(engine.forward(support.batch().select([]), ONE).items()) == {}


# -------------------------------------------------------------------- forward


def test_forward_comes_back_in_the_callers_order(engine: TrainEngine) -> None:
    batch = support.batch(lengths=(9, 2, 7, 1, 5))
    complete = engine.forward(batch, ONE, outputs=("logprobs", "entropy"))
    cut = engine.forward(batch, MicroBatchSpec(max_tokens=10), outputs=("logprobs", "entropy"))
    for (name, left), (_, right) in zip(complete.items(), cut.items(), strict=True):
        torch.testing.assert_close(left, right, msg=name)
    assert (complete["logprobs"][batch.cu_seqlens[:-1].long()] == 0).all()


def last_logprob(output: ModelOutput, data: SequenceBatch) -> torch.Tensor:
    return output["logprobs"][data.cu_seqlens[1:].long() - 1]


def first_two(output: ModelOutput, data: SequenceBatch) -> torch.Tensor:
    starts = data.cu_seqlens[:-1].long()
    return torch.stack([data.input_ids[starts], data.input_ids[starts + 1]], 1).reshape(-1)


def test_post_hook_and_aggregate(engine: TrainEngine) -> None:
    batch = support.batch(lengths=(9, 2, 7, 4))
    ends = batch.cu_seqlens[1:].long() - 1
    expected = engine.forward(batch, ONE)["logprobs"][ends]
    got = engine.forward(batch, TWO, post_hook=last_logprob)
    torch.testing.assert_close(got, expected)
    pairs = engine.forward(batch, TWO, output_seqlens=[2] * 4, post_hook=first_two, aggregate_fn=torch.stack)
    starts = batch.cu_seqlens[:-1].long()
    assert torch.equal(pairs, torch.stack([batch.input_ids[starts], batch.input_ids[starts + 1]], 1))
    with pytest.raises(BatchError, match="post_hook returned 4 rows for 4 sequences with 12 expected"):
        engine.forward(batch, ONE, output_seqlens=[3] * 4, post_hook=last_logprob)


def test_output_lengths_match_sequences(engine: TrainEngine) -> None:
    with pytest.raises(BatchError, match="output_seqlens has 1 entries for 2 sequences"):
        engine.forward(support.batch(lengths=(3, 2)), ONE, output_seqlens=[1], post_hook=last_logprob)


def test_post_hook_rows_follow_output_seqlens(engine: TrainEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []

    def lengths(batch: SequenceBatch) -> list[int]:
        listed.append(batch.num_sequences)
        return list(batch.cu_seqlens.diff().tolist())

    monkeypatch.setattr(SequenceBatch, "lengths", property(lengths))
    for count in (4, 12):
        engine.forward(support.batch(lengths=(2,) * count), ONE, post_hook=last_logprob)
    assert listed.count(12) == listed.count(4)


def test_forward_leaves_no_gradient_and_restores_the_mode(engine: TrainEngine) -> None:
    with engine.train_mode():
        engine.forward(support.batch(), ONE)
        engine.eval_batch(support.batch(), NLL, ONE)
        assert engine.backend.model.training  # type: ignore[attr-defined]
    assert not engine.backend.model.training  # type: ignore[attr-defined]
    with pytest.raises(EngineStateError, match="without gradients"):
        engine.optimizer_step()


# ------------------------------------------------------------------ bad input


def long_sequence(engine: TrainEngine) -> None:
    engine.forward(support.batch(lengths=(4, 9)), MicroBatchSpec(max_tokens=8))


def beyond_context(engine: TrainEngine) -> None:
    engine.forward(support.batch(lengths=(4, 65)), ONE)


def foreign_token(engine: TrainEngine) -> None:
    engine.forward(SequenceBatch.from_sequences([[1, 2], [3, 61, 4]]), ONE)


def wrong_output(engine: TrainEngine) -> None:
    engine.forward(support.batch(), ONE, outputs=("values",))


def token_losses(engine: TrainEngine) -> None:
    engine.forward_backward(support.batch(), LossSpec(fn=support.mean_loss), ONE)


def unlisted_output(engine: TrainEngine) -> None:
    engine.forward_backward(support.batch(), LossSpec(fn=support.weighted_nll, outputs=("entropy",)), ONE)


def train_in_eval(engine: TrainEngine) -> None:
    with engine.eval_mode():
        engine.forward_backward(support.batch(), NLL, ONE)


def grads_too_early(engine: TrainEngine) -> None:
    engine.named_tensors("grads")


def accumulate_after_export(engine: TrainEngine) -> None:
    engine.forward_backward(support.batch(), NLL, ONE)
    list(engine.named_tensors("grads"))
    engine.forward_backward(support.batch(), NLL, ONE)


def wrong_weights(engine: TrainEngine) -> None:
    weights = tensors(engine)
    weights["extra"] = weights.pop("model.norm.weight")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-1]
    engine.load_named_tensors("params", TensorDict(weights))


def initialize_twice(engine: TrainEngine) -> None:
    engine.initialize()


def adapters(engine: TrainEngine) -> None:
    with engine.disable_adapter():
        pass


def export_while_offloaded(engine: TrainEngine) -> None:
    engine.offload()
    try:
        list(engine.named_tensors("params"))
    finally:
        engine.onload()


def offload_inside_a_mode(engine: TrainEngine) -> None:
    with engine.train_mode():
        engine.offload()


def elsewhere(engine: TrainEngine) -> None:
    engine.to("meta")


def adapter_sync(engine: TrainEngine) -> None:
    engine.upload_weights(WeightUpdateMeta(method="lora", version=1))


def save_to_url(engine: TrainEngine) -> None:
    engine.save(SaveLoadMeta(path="s3://bucket/a"))


def save_to_url_later(engine: TrainEngine) -> None:
    engine.save(SaveLoadMeta(path="s3://bucket/a", asynchronous=True))


def load_from_url(engine: TrainEngine) -> None:
    engine.load(SaveLoadMeta(path="s3://bucket/a"))


def sync_by_url(engine: TrainEngine) -> None:
    engine.upload_weights(WeightUpdateMeta(path="memory://sync/a", version=1))


URL = r"'(s3://bucket|memory://sync)/a' is a URL; name a local directory"
BAD: list[tuple[Callable[[TrainEngine], None], type[Exception], str]] = [
    (long_sequence, BatchError, "sequence 1 has 9 tokens, and max_tokens is 8"),
    (beyond_context, BatchError, "sequence 1 has 65 tokens; the model takes 64"),
    (foreign_token, BatchError, "sequence 1 holds the token id 61 at position 1; the vocabulary has 61"),
    (
        wrong_output,
        ConfigError,
        r"head 'lm' gives \['entropy', 'logits', 'logprobs', 'routing'\], not \['values'\]",
    ),
    (token_losses, LossError, r"the loss must return a scalar sum; its total is \[17\]"),
    (unlisted_output, LossError, "the output 'logprobs' was not computed; list it in 'outputs'"),
    (train_in_eval, EngineStateError, "inside eval_mode"),
    (grads_too_early, EngineStateError, "call forward_backward"),
    (accumulate_after_export, EngineStateError, "already reduced by an export"),
    (wrong_weights, WeightsError, "3 problems"),
    (initialize_twice, EngineStateError, r"initialize\(\) on an engine that is 'ready'"),
    (adapters, EngineStateError, "this engine has no adapter; set model.lora"),
    (
        export_while_offloaded,
        EngineStateError,
        r"named_tensors\('params'\): the model state is offloaded; call onload",
    ),
    (offload_inside_a_mode, EngineStateError, r"offload\(\) inside train_mode\(\); leave the context"),
    (elsewhere, ConfigError, r"to\('meta'\): this engine runs on cpu"),
    (save_to_url, CheckpointError, URL),
    (save_to_url_later, CheckpointError, URL),
    (load_from_url, CheckpointError, URL),
    (sync_by_url, CheckpointError, URL),
    (adapter_sync, EngineStateError, "weight sync by 'lora': this engine has no adapter; set model.lora"),
]


@pytest.mark.parametrize(("act", "error", "message"), BAD, ids=[act.__name__ for act, _, _ in BAD])
def test_bad_input_raises_clear_error(
    engine: TrainEngine, act: Callable[[TrainEngine], None], error: type[Exception], message: str
) -> None:
    before = tensors(engine)
    with pytest.raises(error, match=message):
        act(engine)
    assert not changed(before, tensors(engine))
    assert engine.train_batch(support.batch(), NLL, ONE)["update_successful"] == 1


def test_misfit_layout_is_refused() -> None:
    with pytest.raises(
        LayoutError, match="layout tp2 needs tensor_parallel, which the engine 'reference' does"
    ):
        load_engine(
            SPEC, ReferenceConfig(model=ModelConfig(config=support.TINY), layout=ParallelLayout(tp=2))
        )
    address = RankAddress(rank=0, world_size=3)
    with pytest.raises(
        LayoutError, match="= 1 does not equal the world size 3; change a degree or start 1 ranks"
    ):
        load_engine(SPEC, support.config()).initialize(address)


def test_an_engine_without_an_optimizer_only_runs_forward() -> None:
    engine = support.engine(support.config(None))
    assert engine.forward(support.batch(), ONE)["logprobs"].shape == (17,)
    with pytest.raises(EngineStateError, match="optimizer = null"):
        engine.train_batch(support.batch(), NLL, ONE)
    engine.destroy()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"path": "/nowhere"}, "no such directory"),
        ({"config": {"model_type": "no-such-model"}}, "transformers refuses the model config"),
    ],
)
def test_unbuildable_model_is_named(model: dict[str, Any], message: str) -> None:
    engine = load_engine(SPEC, ReferenceConfig(model=ModelConfig(**model)))
    with pytest.raises(ConfigError, match=message):
        engine.initialize()
    assert not torch.distributed.is_initialized()


def test_unmatched_frozen_pattern_is_refused() -> None:
    engine = load_engine(SPEC, support.config(frozen=("model.embed.*",)))
    with pytest.raises(ConfigError, match=r"\['model.embed.\*'\] match no parameter"):
        engine.initialize()


def test_frozen_parameters_have_no_moments() -> None:
    engine = support.engine(support.config(frozen=("model.embed_tokens.*",)))
    before = tensors(engine)
    engine.train_batch(support.batch(), NLL, ONE)
    assert set(before) - set(changed(before, tensors(engine))) == {"model.embed_tokens.weight"}
    assert "model.embed_tokens.weight" not in tensors(engine, "exp_avg")
    engine.destroy()


# ------------------------------------------------------- several engines in one process


def dropping(seed: int) -> TrainEngine:
    return support.engine(ReferenceConfig(model=DROPPING, optimizer=support.OPTIMIZER, seed=seed))


def test_undeclared_dropout_is_refused_in_training() -> None:
    spec = replace(SPEC, capabilities=SPEC.capabilities - {Capability.DROPOUT})
    adapter = ModelConfig(config=support.TINY, lora=LoraConfig(dropout=0.1))
    with pytest.raises(UnsupportedCapability, match="attention_dropout = 0.3.*does not declare 'dropout'"):
        load_engine(spec, ReferenceConfig(model=DROPPING, optimizer=support.OPTIMIZER)).initialize()
    with pytest.raises(UnsupportedCapability, match="does not declare 'dropout'"):
        load_engine(spec, ReferenceConfig(model=adapter, optimizer=support.OPTIMIZER))
    forward_only = load_engine(spec, ReferenceConfig(model=DROPPING, optimizer=None))
    forward_only.initialize()
    forward_only.destroy()


def test_draws_depend_on_seed_alone() -> None:
    losses: dict[str, list[float]] = {}
    for name, seed in (("alone", 0), ("again", 0), ("beside another", 0), ("another seed", 1)):
        engine, second = dropping(seed), dropping(5)
        before = torch.get_rng_state()
        losses[name] = []
        for step in range(3):
            losses[name].append(engine.train_batch(support.batch(step), NLL, ONE)["loss"])
            if name == "beside another":
                second.train_batch(support.batch(step), NLL, ONE)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)  # so that the next one finds another state of the process
        engine.destroy()
        second.destroy()
    assert losses["alone"] == losses["again"] == losses["beside another"]
    assert losses["alone"][0] != losses["another seed"][0]


def test_the_process_group_goes_with_the_last_engine(engine: TrainEngine) -> None:
    second = support.engine()
    engine.destroy()
    assert second.train_batch(support.batch(), NLL, ONE)["update_successful"] == 1.0
    second.destroy()
    second.destroy()
    assert not torch.distributed.is_initialized()


def test_engine_of_different_world_is_refused(engine: TrainEngine) -> None:
    store = open_store("127.0.0.1")
    store_address = StoreAddress(host="127.0.0.1", port=store.port, name="another")
    address = RankAddress(rank=0, world_size=1, store=store_address)
    second = load_engine(SPEC, support.config())
    with pytest.raises(EngineStateError, match="already initialised in this process, as rank 0 of 1"):
        second.initialize(address)
    engine.destroy()
    second.initialize(address)
    third = load_engine(SPEC, support.config())
    third.initialize(address)
    assert third.world.group is second.world.group
    second.destroy()
    third.destroy()


def test_failed_engine_leaves_its_process_group(engine: TrainEngine, tmp_path: Path) -> None:
    lora = {"rank": 2, "path": str(tmp_path / "no adapter")}
    backend = CountsTeardowns()
    failing = TrainEngine(SPEC, support.config(lora=LoraConfig.model_validate(lora)), backend)
    with pytest.raises(CheckpointNotFound):
        failing.initialize()
    assert backend.teardowns == 1
    assert torch.distributed.is_initialized()
    engine.destroy()
    assert not torch.distributed.is_initialized()


class CountsTeardowns(ReferenceBackend):
    teardowns = 0

    def teardown(self) -> None:
        self.teardowns += 1
        super().teardown()


@pytest.mark.parametrize("stage", ["groups", "build", "hf_config"])
def test_failed_build_is_torn_down(stage: str) -> None:
    backend = CountsTeardowns()
    failing = TrainEngine(SPEC, support.config(), backend)
    with (
        mock.patch.object(backend, stage, side_effect=MemoryError("no memory for the model")),
        pytest.raises(MemoryError),
    ):
        failing.initialize()
    assert backend.teardowns == 1
    assert not torch.distributed.is_initialized()


class FailsInTeardown(ReferenceBackend):
    def teardown(self) -> None:
        raise OSError("the device is gone")


def test_failing_teardown_leaves_the_process_group() -> None:
    built = TrainEngine(SPEC, support.config(), FailsInTeardown())
    built.initialize()
    with pytest.raises(OSError, match="the device is gone"):
        built.destroy()
    assert not torch.distributed.is_initialized()
    with pytest.raises(EngineStateError, match="'destroyed'"):
        built.forward(support.batch(), ONE)


# ----------------------------------------------------- a backend's own bugs


class SkipsOne(ReferenceBackend):
    def run(self, micro_batches: Any, step: Any, mode: Any) -> None:
        super().run(micro_batches[1:], step, mode)


class Twice(ReferenceBackend):
    def run(self, micro_batches: Any, step: Any, mode: Any) -> None:
        super().run([*micro_batches, micro_batches[0]], step, mode)


class HalfPrecision(ReferenceBackend):
    def outputs(self, micro_batch: SequenceBatch, step: Any) -> ModelOutput:
        return ModelOutput(logprobs=super().outputs(micro_batch, step)["logprobs"].bfloat16())


BROKEN = [
    (SkipsOne, r"run\(\) left out the micro-batches \[0\]"),
    (Twice, "twice with the same"),
    (HalfPrecision, r"output 'logprobs' is torch.bfloat16 \[\d+\], not float32"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_backend_contract_violations_are_reported(broken: type[ReferenceBackend], message: str) -> None:
    engine = TrainEngine(SPEC, support.config(), broken())
    engine.initialize()
    with pytest.raises(EngineContractError, match=message):
        engine.train_batch(support.batch(), NLL, TWO)
    engine.destroy()


def test_file_weights_are_aligned(tmp_path: Path) -> None:
    """Kernels round by alignment: resuming would not be bitwise after an offload."""
    first = support.engine()
    first.save(SaveLoadMeta(path=str(tmp_path / "model"), format="hf"))
    first.destroy()
    loaded = support.engine(ReferenceConfig(model=ModelConfig(path=str(tmp_path / "model"))))
    assert isinstance(loaded.backend, ReferenceBackend)
    assert {parameter.data_ptr() % 64 for parameter in loaded.backend.model.parameters()} == {0}
    loaded.destroy()


def test_an_engine_alone_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    support.engine().destroy()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SaveLoadMeta(path="a", format=cast("Any", "huggingface")),
            r"SaveLoadMeta\.format = 'huggingface'; choose from 'hf', 'sharded', 'portable', 'adapter'",
        ),
        (
            lambda: WeightUpdateMeta(version=1, path="a", method=cast("Any", "nccl")),
            r"WeightUpdateMeta\.method = 'nccl'; choose from 'disk', 'tensor', 'distributed', 'lora'",
        ),
    ],
    ids=["format", "method"],
)
def test_an_unknown_format_or_method_is_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
