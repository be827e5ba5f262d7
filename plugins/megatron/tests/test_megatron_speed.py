"""Options that make steps faster: each trains as the plain engine does, from the same weights."""

from __future__ import annotations

from typing import Any

import megatron_support as support
import pytest
import torch

from core_rl.backend.loss import LossSpec
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import LossError
from core_rl.launch.group import EngineGroup
from core_rl_megatron.backend import MegatronBackend

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}
PLAIN = {"overlap_grad_reduce": False, "moe_grouped_gemm": False, "fusions": False}
SMALL = {"ddp_bucket_size": 1000}  # a head that is not tied has a bucket of its own
SPREAD = {"distributed_optimizer": True, "overlap_param_gather": True, **SMALL}


def trained(group: EngineGroup) -> dict[str, Any]:
    """Steps of one pass and of two, an evaluation in between, and the weights after them."""
    actual: dict[str, Any] = {}
    for step in range(3):
        metrics = group.train_batch(support.batch(step), LOSS, CUT)
        actual |= {f"loss {step}": metrics["loss"], f"norm {step}": metrics["grad_norm"]}
    data = support.batch(3)
    for part in (data.select([0, 1, 2, 3]), data.select([4, 5, 6])):
        group.forward_backward(part, LOSS, CUT, total_weight=float(data.loss_mask.sum()))
    actual["grads"] = dict(group.named_tensors("grads"))
    actual["forward"] = group.forward(support.batch(4), CUT)["logprobs"]
    actual["norm 3"] = group.optimizer_step()["grad_norm"]
    actual["weights"] = dict(group.named_tensors("params"))
    return actual | {"loss 4": group.eval_batch(support.batch(4), LOSS, CUT)["loss"]}


def under_way(engine: TrainEngine) -> int:
    """Buckets of this rank, and an assertion that no collective of them is under way."""
    assert isinstance(engine.backend, MegatronBackend)
    groups = engine.backend.buckets._groups
    assert all(group.grad_reduce_handle is None for group in groups)
    assert all(group.param_gather_handle is None for group in groups)
    return len(groups)


Fields = dict[str, Any]
CASES: dict[str, tuple[Fields, Fields, Fields, int]] = {
    "reduce": ({"dp": 2}, SMALL, {}, 5),
    "gather": ({"dp": 2}, SPREAD, {"tie_word_embeddings": False}, 5),
    "adapter": ({"dp": 2}, SPREAD, {"lora": {"rank": 2}}, 2),
    "fused": ({"dp": 2}, {**SPREAD, "fusions": True}, {}, 5),
    "interleaved": ({"dp": 2, "pp": 2}, {**SPREAD, "virtual_stages": 2}, {}, 2),
    "experts": ({"dp": 2, "ep": 2}, {**SPREAD, "fusions": True}, EXPERTS, 5),
    "experts-tp": ({"tp": 2, "sequence_parallel": True}, {"fusions": True}, EXPERTS, 1),
}
"""Layout, options, fields of the model or an adapter, and how many buckets some rank has."""
BY_DAY = ["reduce", "fused", "experts-tp"]
"""Each of the options in one case."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in BY_DAY else pytest.mark.nightly) for case in CASES]
)
def test_fast_options_train_like_plain_options(case: str) -> None:
    layout, options, model, buckets = CASES[case]
    adapter = {name: value for name, value in model.items() if name == "lora"}
    model = {name: value for name, value in model.items() if name != "lora"}
    stages = {"virtual_stages": options.get("virtual_stages", 1)}
    actual = []
    for selected in (PLAIN | stages, options):
        with support.started(
            support.config(layout=layout, options=selected, model=model, **adapter)
        ) as group:
            actual.append(trained(group))
            counts = group.run(under_way)
    assert max(counts) >= buckets
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-4, atol=1e-5)


def fails_on_one_rank(output: Any, micro_batch: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise ArithmeticError
    return support.weighted_nll(output, micro_batch)


def test_loss_failure_leaves_no_pending_work() -> None:
    """Fail after ranks began to add up gradients."""
    with support.started(support.config(layout={"dp": 2}, options=SPREAD)) as group:
        expected = group.train_batch(support.batch(), LOSS, CUT)
        group.initialize()
        with pytest.raises(LossError):
            group.train_batch(support.batch(1), LossSpec(fn=fails_on_one_rank), CUT)
        group.optimizer_zero_grad()
        group.run(under_way)
        assert group.train_batch(support.batch(), LOSS, CUT) == expected
