"""Value and reward heads: their outputs and their gradients."""

from __future__ import annotations

import torch

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.inputs.data import LONG
from core_rl_conformance.inputs.losses import CheckLoss, RewardLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.outputs import verify_form, verify_precision


@check("I7.values", requires=[Capability.VALUE_HEAD], each="layout")
def values_match_the_oracle(subject: EngineUnderTest) -> None:
    """The value of the state before each token, and after the last, is the oracle's at any temperature.

    Why: a value that belongs to the token before or after shifts every advantage by one; a temperature
    has no meaning for it.
    Look at: the alignment (``values[t]`` comes from the hidden state of token ``t - 1``), the scalar
    head in float32 without bias.
    """
    model = subject.model(head="value")
    group = subject.start(model)
    runs = (
        ("", subject.data(), BUDGET, 1.0),
        ("", subject.data(), BUDGET, 0.6),
        (" of a long batch", subject.data(lengths=LONG, seed=3), ONE_PASS, 1.0),
    )
    for of, data, cut, temperature in runs:
        output = group.forward(data.batch(), cut, ("values",), temperature)
        verify_form(subject, output, "values", data)
        for name in ("values", "bootstrap"):
            expected = subject.outputs(model, data, name)
            label = f"{name}{of} at temperature {temperature:g}"
            got = per_sequence(output, name, data)
            subject.verify_tokens(label, got, expected, subject.places(data, cut))


@check("I7.scores", requires=[Capability.REWARD_HEAD], each="layout")
def scores_match_the_oracle(subject: EngineUnderTest) -> None:
    """The score of each sequence is the head on its last token.

    Why: a score that is read at the end of the padding, or at the first EOS, ranks noise.
    Look at: which position of each packed sequence the head reads.
    """
    model = subject.model(head="reward")
    group = subject.start(model)
    for of, data, cut in (
        ("", subject.data(), BUDGET),
        (" of a long batch", subject.data(lengths=LONG, seed=3), ONE_PASS),
    ):
        scores = group.forward(data.batch(), cut, ("scores",))["scores"]
        form = f"{str(scores.dtype).removeprefix('torch.')} {list(scores.shape)}"
        subject.require(
            scores.dtype == torch.float32 and scores.shape == (len(data.rows),),
            f"the output 'scores'{of} is {form}; expected float32 [{len(data.rows)}]",
        )
        verify_precision(subject, "scores", scores)
        expected = subject.outputs(model, data, "scores")
        subject.verify_tokens(f"scores{of}", list(scores.unbind()), expected)


@check("I1.value-gradients", requires=[Capability.VALUE_HEAD], each="layout")
def value_gradients_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradients of a loss over values and bootstraps, with any cut and at any temperature, are the oracle's.

    Why: a critic whose learning rate scales with the number of micro-batches (verl #6957); a value that is
    detached, or divided by a temperature in training only.
    Look at: the scalar head (float32, no bias, trained like every other parameter) and the loss scale.
    """
    _verify_head_gradients(subject, subject.model(head="value"), ValueLoss(temperature=0.7))


@check("I1.reward-gradients", requires=[Capability.REWARD_HEAD], each="layout")
def reward_gradients_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradients of a loss over sequence scores, with any cut into micro-batches, are the oracle's.

    Why: a loss that counts sequences and is divided by tokens, or by the sequences of one micro-batch.
    Look at: the scalar head, the position it reads, and the loss scale.
    """
    _verify_head_gradients(subject, subject.model(head="reward"), RewardLoss())


def _verify_head_gradients(subject: EngineUnderTest, model: TinyModel, loss: CheckLoss) -> None:
    group, short = subject.start(model), subject.data()
    for of, data, cut in (
        ("", short, ONE_PASS),
        ("", short, MicroBatchSpec(max_tokens=48)),
        (" over a long batch", subject.data(lengths=LONG, seed=3), ONE_PASS),
    ):
        subject.verify_backward(f"of the {model.head} head{of} with {cut}", group, model, data, loss, cut)
