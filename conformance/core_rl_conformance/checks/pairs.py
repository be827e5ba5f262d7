"""Two train engines compared with each other, from the same weights and on the same data.

They may be as far apart as each may be from the oracle. Where they are further apart, the oracle decides which engine
is off, so that a correct engine never fails for its partner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedOutputs
from core_rl_conformance.hints.diagnose import (
    Finding,
    compare_named,
    compare_scalar,
    compare_tokens,
    explain_tokens,
)
from core_rl_conformance.hints.tokens import Places
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.outputs import verify_form
from core_rl_conformance.procedures.training import (
    Trained,
    expected_training,
    train_end_to_end,
    training_of,
    verify_rates,
)
from core_rl_conformance.trajectory import ExpectedTraining
from core_rl_oracle.tolerance import Tolerance

LOSS = TokenMeanLoss(temperature=0.8)
CUT = MicroBatchSpec(max_tokens=48)
OUTPUTS: tuple[OutputName, ...] = ("logprobs", "entropy")


@dataclass(frozen=True, kw_only=True)
class PairFinding:
    """One quantity of two engines: compared with each other, and each with the oracle."""

    between: Finding
    own: Finding
    partner: Finding


def pair_tokens(
    label: str,
    ours: Sequence[Tensor],
    partner: Sequence[Tensor],
    expected: ExpectedOutputs,
    places: Places | None = None,
) -> PairFinding:
    """A token output ``[L]`` of each sequence; ``places`` of the tokens, for the hints."""
    truth, allowed = expected.values, expected.tolerance
    explain = partial(explain_tokens, ours, truth, allowed, expected.mistakes, None)
    return PairFinding(
        between=compare_tokens(_between(label), ours, partner, allowed + allowed),
        own=compare_tokens(label, ours, truth, allowed, places, explain=explain),
        partner=compare_tokens(label, partner, truth, allowed),
    )


def pair_scalars(label: str, ours: float, partner: float, truth: float, allowed: Tolerance) -> PairFinding:
    """A number."""
    return PairFinding(
        between=compare_scalar(_between(label), ours, partner, allowed + allowed),
        own=compare_scalar(label, ours, truth, allowed),
        partner=compare_scalar(label, partner, truth, allowed),
    )


def pair_named(
    label: str,
    ours: Mapping[str, Tensor],
    partner: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    allowed: Mapping[str, Tolerance],
) -> PairFinding:
    """Tensors by name."""
    # Over the oracle's names: of other ones there is no tolerance, and it is they that are wrong.
    present = {name: partner[name] for name in truth if name in partner}
    together = {name: tolerance + tolerance for name, tolerance in allowed.items()}
    return PairFinding(
        between=compare_named(_between(label), ours, present, together),
        own=compare_named(label, ours, truth, allowed),
        partner=compare_named(label, partner, truth, allowed),
    )


def _between(label: str) -> str:
    return f"{label} compared with the other engine"


def verify_pair(subject: EngineUnderTest, quantities: Sequence[PairFinding]) -> None:
    """Require that two engines agree in ``quantities``, in the order in which they arise.

    Where they do not, and the engine under check is off the oracle, this raises `AssertionError`; where only
    the partner is, `NotRun`: it is the case from the other side that fails.
    """
    differences = [quantity for quantity in quantities if quantity.between.problem is not None]
    if not differences:
        for quantity in quantities:
            subject.verify(quantity.between)
        return
    off = next((quantity for quantity in quantities if quantity.own.problem is not None), None)
    blamed = next((quantity.partner for quantity in quantities if quantity.partner.problem is not None), None)
    if off is None and blamed is not None:
        raise NotRun(
            f"the partner {subject.peer.spec.name!r} is off the oracle: {_by(blamed)}; {subject.spec.name!r} is not"
        )
    # Either engine is off by the triangle inequality, unless their names or shapes differ.
    finding = differences[0].between if off is None else off.own
    problem = "\n".join([*_verdict(subject, differences[0].between, off, blamed), str(finding.problem)])
    subject.verify(replace(finding, problem=problem))


def _verdict(
    subject: EngineUnderTest, between: Finding, off: PairFinding | None, blamed: Finding | None
) -> Iterator[str]:
    """The difference between the two engines, and the one to fix."""
    ours, partner = subject.spec.name, subject.peer.spec.name
    yield f"{ours!r} and {partner!r} differ: {_by(between)}"
    if off is not None:
        yield f"{ours!r} is off the oracle: {_by(off.own)}"
        if blamed is None:
            yield f"{partner!r} is within its tolerance: {_by(off.partner)}; fix {ours!r}"
        else:
            yield f"{partner!r} is off as well: {_by(blamed)}; fix both"


def _by(finding: Finding) -> str:
    return f"{finding.what} by {finding.error:.1e} (allowed {finding.limit:.1e})"


@contextmanager
def partners_part(subject: EngineUnderTest) -> Iterator[None]:
    """Context for the partner's work: where it fails, this raises `NotRun` with the partner's name."""
    try:
        yield
    except AssertionError as error:
        raise NotRun(f"the partner {subject.peer.spec.name!r} is wrong: {_gist(error)}") from error
    except CoreRLError as error:
        subject.expected.discard(subject.peer.spec.name)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotRun(f"the partner {subject.peer.spec.name!r} failed: {reason}") from error


def _gist(error: AssertionError) -> str:
    lines = str(error).splitlines()
    return lines[min(1, len(lines) - 1)].strip() if lines else "AssertionError"


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
    for step, (left, right) in enumerate(zip(ours.reports, partner.reports, strict=True)):
        for label, name, value, allowed in expected.of_step(step):
            yield pair_scalars(f"the {label} of step {step}", left[name], right[name], value, allowed)
    label = f"weights after {len(ours.reports)} steps"
    yield pair_named(label, ours.weights, partner.weights, expected.truth.weights, expected.weights)


@check(
    "I11.pair-portable",
    requires={Capability.PORTABLE_CHECKPOINT},
    partner="train",
    partner_requires={Capability.PORTABLE_CHECKPOINT},
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
