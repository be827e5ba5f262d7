"""Passes and updates of the engine, against the reference engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mindspore_support as support
import pytest
import torch
from engine_support import batch, mean_loss, weighted_nll
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, masked_sum
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import LossError
from core_rl_mindspore import heads

LOSS, CUT = LossSpec(fn=weighted_nll, temperature=0.7), MicroBatchSpec(max_tokens=32)
RAGGED = (5, 19, 1, 11, 8, 2)


def engine(name: str = "mindspore", **fields: Any) -> TrainEngine:
    """An initialized engine of one rank in this process; the caller destroys it."""
    built = load_engine(name, support.config(name, **fields))
    built.initialize()
    return built


def gradients_and_weights(name: str, loss: LossSpec = LOSS, **fields: Any) -> dict[str, dict[str, Tensor]]:
    """Gradients of a batch, and the weights after the step."""
    with support.started(name, **fields) as group:
        group.forward_backward(batch(0, RAGGED), loss, CUT)
        grads = group.named_tensors("grads")
        group.optimizer_step()
        return {"grads": grads, "weights": group.named_tensors("master")}


assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
# A large eps: near 0, Adam's first step is the sign of a gradient, rounding and all.
ADAMW = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "rules": [{"pattern": "*norm*", "lr_factor": 0.5}]}


@pytest.mark.parametrize("name", support.MODELS)
def test_step_equals_reference(name: str) -> None:
    fields: dict[str, Any] = {"changes": support.MODELS[name], "optimizer": ADAMW}
    actual = gradients_and_weights("mindspore", layout={"dp": 2}, **fields)
    assert_close(actual, gradients_and_weights("reference", **fields))


def entropy_loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    return masked_sum(output["entropy"] - output["logprobs"] ** 2, data.loss_mask), {}


def value_loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    return masked_sum(output["values"] ** 2, data.loss_mask) + output["bootstrap"].sum(), {}


def reward_loss(output: ModelOutput, data: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    return (output["scores"] ** 2).sum(), {}


OUTPUTS: dict[str, LossSpec] = {
    "lm": LossSpec(fn=entropy_loss, outputs=("entropy", "logprobs"), temperature=0.7),
    "value": LossSpec(fn=value_loss, outputs=("values",)),
    "reward": LossSpec(fn=reward_loss, outputs=("scores",)),
}


@pytest.mark.parametrize("head", OUTPUTS)
def test_gradients_of_each_head_equal_reference(head: str) -> None:
    fields: dict[str, Any] = {"model": {"head": head}, "optimizer": ADAMW}
    actual = gradients_and_weights("mindspore", OUTPUTS[head], **fields)
    assert_close(actual, gradients_and_weights("reference", OUTPUTS[head], **fields))


def test_chunks_and_recomputation_keep_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(**fields: Any) -> tuple[Tensor, dict[str, Tensor]]:
        built = engine(**fields)
        outputs = built.forward(batch(0, RAGGED), CUT, outputs=("entropy",))["entropy"]
        built.forward_backward(batch(0, RAGGED), OUTPUTS["lm"], CUT)
        grads = {name: value.clone() for name, value in built.named_tensors("grads") if value is not None}
        built.destroy()
        return outputs, grads

    expected, grads = passes()
    monkeypatch.setattr(heads, "KEEP_BYTES", 0)
    monkeypatch.setattr(heads, "chunk_rows", lambda row_bytes, on_cpu: 3)
    actual, chunked = passes(options={"recompute": True})
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert_close({"grads": chunked}, {"grads": grads})


def test_frozen_weights_stay() -> None:
    fields: dict[str, Any] = {"model": {"frozen": ["*embed_tokens*", "*.layers.0.*"]}, "optimizer": ADAMW}
    actual = gradients_and_weights("mindspore", **fields)
    assert_close(actual, gradients_and_weights("reference", **fields))


def test_raising_loss_leaves_a_usable_engine() -> None:
    built = engine()
    with pytest.raises(LossError, match="must return a scalar sum"):
        built.train_batch(batch(), LossSpec(fn=mean_loss), CUT)
    built.optimizer_zero_grad()
    assert built.train_batch(batch(), LOSS, CUT)["update_successful"] == 1.0
    built.destroy()


def test_single_token_has_no_gradient() -> None:
    built = engine()
    single = batch(0, (1,))
    assert built.forward(single, CUT)["logprobs"].tolist() == [0.0]
    assert built.train_batch(single, LOSS, CUT)["update_successful"] == 0.0
    built.destroy()
