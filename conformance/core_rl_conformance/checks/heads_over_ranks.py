"""Attention heads and the ranks that share them: too few, and numbers that do not divide."""

from __future__ import annotations

from dataclasses import replace

from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.errors import ConfigError, CoreRLError, LayoutError, UnsupportedCapability
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel

LOSS = TokenMeanLoss(temperature=0.8)
REFUSALS = (LayoutError, UnsupportedCapability, ConfigError)


@check(
    "I3.few-kv-heads",
    requires=[Capability.CONTEXT_PARALLEL],
    each="layout",
    min_cp=2,
    families=("qwen3", "llama", "qwen2", "gemma2"),
)
def few_key_value_heads_are_enough(subject: EngineUnderTest) -> None:
    """With fewer key/value heads than ranks share a sequence, log-probs and gradients are the oracle's.

    There is a single one, or with tensor parallelism one for each of its ranks.

    Why: an exchange of tokens for heads (Ulysses) copies key/value heads when there are fewer than ranks. Copies
    of the wrong head, and copies whose gradients are not added up, show in no model with many of them.
    Look at: which key/value head a rank's query heads belong to, and the backward pass of the copies.
    """
    heads = subject.case.layout.tp
    model = replace(subject.model(), kv_heads=heads)
    _verify_right(subject, subject.start(model), model, f"with {heads} key/value head{'s' * (heads > 1)}")


@check("contract.heads-over-tp", requires=[Capability.TENSOR_PARALLEL], each="engine")
def heads_that_tp_does_not_divide(subject: EngineUnderTest) -> None:
    """Heads that ``tp=2`` does not divide are refused by ``initialize()`` on every rank, or computed right.

    The refusal is a `LayoutError`, `UnsupportedCapability` or `ConfigError`, and the group still works after it.

    Why: half a head on each rank fails in the middle of a run, or trains another model without an error; a single
    rank that refuses leaves the others waiting for it.
    Look at: where the layout is compared with the model's heads: before the first collective, on all ranks alike.
    """
    _verify_odd_heads(subject, ParallelLayout(tp=2))


@check("contract.heads-over-cp", requires=[Capability.CONTEXT_PARALLEL], each="engine")
def heads_that_cp_does_not_divide(subject: EngineUnderTest) -> None:
    """Heads that ``cp=2`` does not divide are refused by ``initialize()`` on every rank, or computed right.

    The refusal is a `LayoutError`, `UnsupportedCapability` or `ConfigError`, and the group still works after it.

    Why: an exchange of tokens for heads (Ulysses) that rounds down loses the last head, and nothing fails.
    Look at: where the layout is compared with the model's heads: before the first collective, on all ranks alike.
    """
    _verify_odd_heads(subject, ParallelLayout(cp=2))


def _verify_odd_heads(subject: EngineUnderTest, layout: ParallelLayout) -> None:
    model = subject.model().with_odd_heads()
    label = f"of a model with {model.heads} heads at {layout}"
    try:
        group = subject.start(model, layout=layout)
    except REFUSALS:
        fields = subject.model()
        _verify_right(subject, subject.start(fields), fields, f"after the refusal {label}")
        return
    try:
        _verify_right(subject, group, model, label)
    except CoreRLError as error:
        reason = str(error).splitlines()[0]
        problem = (
            f"initialize() took a model with {model.heads} heads at {layout}, and then it failed: {reason}"
        )
        raise AssertionError(subject.failure_message(problem)) from error


def _verify_right(subject: EngineUnderTest, group: EngineGroup, model: TinyModel, label: str) -> None:
    data = subject.data()
    subject.verify_logprobs(label, group, model, data)
    subject.verify_backward(label, group, model, data, LOSS)
