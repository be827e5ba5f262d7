"""Two train engines compared with each other, from the same weights and on the same data.

They may be as far apart as each may be from the oracle. Where they are further apart, the oracle
decides which engine is off: `core_rl_conformance.procedures.blame`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, EngineUnderTest, per_sequence
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.blame import (
    PairFinding,
    pair_named,
    pair_scalars,
    pair_tokens,
    partners_part,
    verify_pair,
)
from core_rl_conformance.procedures.end_to_end import (
    Trained,
    expected_training,
    train_end_to_end,
    training_of,
    verify_rates,
)
from core_rl_conformance.procedures.outputs import verify_form
from core_rl_conformance.trajectory import ExpectedTraining

LOSS = TokenMeanLoss(temperature=0.8)
CUT = MicroBatchSpec(max_tokens=48)
OUTPUTS: tuple[OutputName, ...] = ("logprobs", "entropy")


@check("I7.pair-logprobs", partner="train", each="layout")
def two_engines_have_the_same_logprobs(subject: EngineUnderTest) -> None:
    """The log-prob and the entropy of every token equal the other engine's.

    Why: two backends that differ on the same weights and batch leave open which is right.
    Look at: the engine that is off the oracle, which the message names; then its own I7 checks.
    """
    model, data = subject.model(), subject.data()
    with partners_part(subject):
        partner = _outputs(subject.peer)
    ours = _outputs(subject)
    quantities = [
        pair_tokens(name, ours[name], partner[name], subject.outputs(model, data, name), subject.places(data))
        for name in OUTPUTS
    ]
    verify_pair(subject, quantities)


def _outputs(side: EngineUnderTest) -> dict[str, list[Tensor]]:
    """Log-probs and entropy of each sequence, in several micro-batches."""
    data = side.data()
    output = side.start(side.model()).forward(data.batch(), BUDGET, OUTPUTS)
    for name in OUTPUTS:
        verify_form(side, output, name, data)
    return {name: per_sequence(output, name, data) for name in OUTPUTS}


@check("I1.pair-gradients", partner="train", each="layout")
def two_engines_have_the_same_gradients(subject: EngineUnderTest) -> None:
    """Loss, the gradient of every parameter and the norm before clipping equal the other engine's.

    Why: on the same batch, one backend's gradient norm was three times the other's for months, and the
    right one stayed unknown (verl #4710).
    Look at: the engine that is off the oracle, which the message names; then its own I1, I2 and I4 checks.
    """
    expected = subject.gradients(subject.model(), subject.data(), LOSS)
    truth = expected.oracle
    with partners_part(subject):
        other_loss, other_norm, other_grads = _backward(subject.peer)
    loss, norm, grads = _backward(subject)
    quantities = [
        pair_scalars("the loss", loss, other_loss, truth.loss, expected.loss),
        pair_named("gradients", grads, other_grads, truth.grads, expected.tolerances),
        pair_scalars("the norm before clipping", norm, other_norm, truth.norm, expected.norm),
    ]
    verify_pair(subject, quantities)


def _backward(side: EngineUnderTest) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and gradients of one backward pass and the step after it."""
    group = side.start(side.model(), optimizer={"max_grad_norm": 1e-2})
    loss = group.forward_backward(side.data().batch(), LOSS.spec(), CUT)["loss"]
    grads = group.named_tensors("grads")
    return loss, group.optimizer_step()["grad_norm"], grads


@check("I1.pair-training", partner="train", each="layout")
def two_engines_train_alike(subject: EngineUnderTest) -> None:
    """Several steps on the same data take both engines to the same weights, and to the oracle's.

    Why: some bugs show from the second step on: a schedule that is advanced twice (slime #1152), moments
    or gradients of the step before, a scale that changes on the way.
    Look at: the first step at which the engine that the message names is off. If its loss and norm are
    right up to the end, look at the optimizer: I20.adamw and I4.clipping show it alone. I1.training shows
    the same without the other engine.
    """
    training = training_of(subject)
    expected = expected_training(subject, training)
    with partners_part(subject):
        partner = train_end_to_end(subject.peer, training)
    ours = train_end_to_end(subject, training)
    verify_pair(subject, list(_pair_steps(ours, partner, expected)))
    verify_rates(subject, training, ours)


def _pair_steps(ours: Trained, partner: Trained, expected: ExpectedTraining) -> Iterator[PairFinding]:
    """Losses and norms in the order of the steps, and then the weights."""
    truth = expected.truth
    for step, (left, right) in enumerate(zip(ours.reports, partner.reports, strict=True)):
        for label, name, values, allowed in (
            ("the loss", "loss", truth.losses, expected.losses),
            ("the norm", "grad_norm", truth.norms, expected.norms),
        ):
            pair = left[name], right[name]
            yield pair_scalars(f"{label} of step {step}", *pair, values[step], allowed[step])
    label = f"weights after {len(ours.reports)} steps"
    yield pair_named(label, ours.weights, partner.weights, truth.weights, expected.weights)


@check(
    "I11.pair-portable",
    requires=[Capability.PORTABLE_CHECKPOINT],
    partner="train",
    partner_requires=[Capability.PORTABLE_CHECKPOINT],
    each="layout",
)
def a_training_moves_between_two_engines(subject: EngineUnderTest) -> None:
    """A ``portable`` checkpoint of the other engine is loaded bit for bit, and its training continues.

    This engine saves its state bit for bit.

    Why: moving a run to another backend must not lose the optimizer (AReaL #1468, NeMo-RL #3171), nor round
    weights on the way (NeMo-RL #2372).
    Look at: for loads, ``ShardedState.local`` and ``TrainBackend.after_load``; for saves,
    ``named_tensors`` of ``master``, ``exp_avg`` and ``exp_avg_sq``, which must be the same whoever asks.
    """
    model = subject.model()
    with partners_part(subject):
        group = moving.start(subject.peer, model)
        moving.train(group, subject.peer, [0, 1])
        saved = moving.saved_portable(subject.peer, group, "of the partner")
        moving.verify_file(subject.peer, model, saved)
    group = moving.start(subject, moving.elsewhere(model))
    partner = subject.peer.spec.name
    moving.verify_goes_on(subject, group, model, saved, f"moved from {partner!r} to {subject.spec.name!r}")
    moving.verify_file(subject, model, moving.saved_portable(subject, group, "of the engine"))
