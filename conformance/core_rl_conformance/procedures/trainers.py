"""Builds a trainer, trains a batch, and compares it with the float64 losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import GradientRuns, Judged, run_gradients
from core_rl_conformance.hints.diagnose import Mistakes, explain_loss, explain_named
from core_rl_conformance.inputs.rollouts import (
    ABOVE,
    BELOW,
    LENGTHS,
    NEAR,
    PAIR,
    Distance,
    Rollouts,
    draw_rollouts,
    with_shared_prompts,
)
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import NotSupported
from core_rl_conformance.trainers.interface import SGD, MicroBatches, Trainer, TrainerSetup
from core_rl_conformance.trainers.spec import Feature, TrainerSpec
from core_rl_oracle.loss_names import PAIRWISE, AdvantageRule, Aggregation, Objective
from core_rl_oracle.oracle import AdamW, Gradients, Schedule
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_oracle.tolerance import EXACT, Tolerance

ValueT = TypeVar("ValueT")
WHOLE = MicroBatches()
MAX_TOKENS = 64
"""A budget that takes one to six of the sequences."""
RATE = 1024.0
"""Learning rate of a step whose weights show its gradients: large, so that the weights' rounding does not hide them."""
ORDER: Sequence[Objective] = (
    *("cross_entropy", "reinforce", "clipped", "dual_clipped", "cispo", "gspo"),
    *("dpo", "bradley_terry"),
)
"""Objectives, the simplest first."""
DISTANCES = {"near": NEAR, "far below": BELOW, "far above": ABOVE}
REQUIRED = ("loss", "grad_norm")
Mistaken = Callable[[], Iterator[tuple[str, Rollouts, PolicyLoss]]]
"""Sentences about usual mistakes, and the batch and the loss of a trainer with each."""


def spec_of(subject: EngineUnderTest) -> TrainerSpec:
    """The declaration of the trainer under check."""
    trainer = subject.case.target.trainer
    assert trainer is not None
    return trainer


def need(subject: EngineUnderTest, *features: Feature) -> None:
    """Raise `NotSupported` unless the trainer declares all ``features``."""
    if missing := sorted(set(features) - spec_of(subject).features):
        raise NotSupported(f"the trainer declares no {', '.join(missing)}")


def plain_loss(subject: EngineUnderTest) -> PolicyLoss:
    """The simplest loss of the trainer, without clip bounds if it has one."""
    spec = spec_of(subject)
    objective = min(spec.objectives, key=ORDER.index)
    return PolicyLoss(
        objective=objective,
        aggregation=max(spec.aggregations, default="token_mean"),
        log_ratio_clamp=spec.log_ratio_clamp,
        kl_clamp=spec.kl_clamp,
    )


def loss_of(subject: EngineUnderTest, objective: Objective) -> PolicyLoss:
    """A loss with ``objective``, with an aggregation of the trainer by seed. Raises `NotSupported` without it."""
    spec = spec_of(subject)
    if objective not in spec.objectives:
        raise NotSupported(f"the trainer names no objective {objective}")
    aggregations: list[Aggregation] = ["token_mean"] if objective in PAIRWISE else sorted(spec.aggregations)
    number = subject.case.seed + get_args(Objective).index(objective)
    aggregation = aggregations[number % len(aggregations)]
    return replace(plain_loss(subject), objective=objective, aggregation=aggregation)


def at_temperature(subject: EngineUnderTest, loss: PolicyLoss, temperature: float) -> PolicyLoss:
    """``loss`` at ``temperature``, or at 1 if the trainer takes no other."""
    return (
        replace(loss, temperature=temperature) if Feature.TEMPERATURE in spec_of(subject).features else loss
    )


def token_loss(subject: EngineUnderTest) -> PolicyLoss:
    """The same of a trainer on sequences. Raises `NotSupported` for a trainer on pairs alone."""
    loss = plain_loss(subject)
    if loss.pairwise:
        raise NotSupported("the trainer names no objective on single sequences")
    return loss


def aggregated_losses(subject: EngineUnderTest) -> list[PolicyLoss]:
    """`token_loss` with each aggregation of the trainer."""
    loss = token_loss(subject)
    return [replace(loss, aggregation=name) for name in sorted(spec_of(subject).aggregations)]


def pair_losses(subject: EngineUnderTest) -> list[PolicyLoss]:
    """A loss for each objective on pairs, which may be none."""
    return [loss_of(subject, objective) for objective in sorted(spec_of(subject).objectives & PAIRWISE)]


def policy_loss(subject: EngineUnderTest) -> PolicyLoss:
    """The simplest loss on rollouts. Raises `NotSupported` for a trainer that only imitates."""
    loss = plain_loss(subject)
    objectives = spec_of(subject).objectives - PAIRWISE - {"cross_entropy"}
    if not objectives:
        raise NotSupported("the trainer names no objective on rollouts")
    return replace(loss, objective=min(objectives, key=ORDER.index))


def model_of(subject: EngineUnderTest, loss: PolicyLoss) -> TinyModel:
    """The case's model, with the head that ``loss`` takes."""
    return subject.model(head="reward" if loss.objective == "bradley_terry" else "lm")


def draw(subject: EngineUnderTest, loss: PolicyLoss, seed: int = 0, distance: Distance = NEAR) -> Rollouts:
    """Rollouts for ``loss`` at a ``distance`` from the case's language model; pairs for a loss on pairs."""
    data = subject.data(LENGTHS, seed)
    if loss.pairwise:
        data = with_shared_prompts(data)
    logprobs = subject.outputs(subject.model(), data, "logprobs", loss.temperature).values
    features = spec_of(subject).features
    return draw_rollouts(
        logprobs,
        [row.ids for row in data.rows],
        1000 * subject.case.seed + seed,
        holes=Feature.MASK_HOLES in features,
        of_tokens=Feature.TOKEN_ADVANTAGES in features,
        paired=loss.pairwise,
        distance=distance,
    )


def cuts_of(subject: EngineUnderTest, loss: PolicyLoss) -> list[MicroBatches]:
    """The whole batch, and every other kind of cut that the trainer takes; none parts a pair."""
    size = PAIR if loss.pairwise else 1
    features = spec_of(subject).features
    cuts = [WHOLE]
    cuts += [MicroBatches(max_tokens=MAX_TOKENS)] if Feature.TOKEN_BUDGET in features else []
    cuts += [MicroBatches(sequences=n * size) for n in (1, 2)] if Feature.SEQUENCE_COUNT in features else []
    return cuts


def build(
    subject: EngineUnderTest,
    loss: PolicyLoss,
    rule: AdvantageRule | None = None,
    optimizer: AdamW | SGD | None = None,
    schedule: Schedule | None = None,
    of: TinyModel | TinyAdapter | None = None,
    seed: int | None = None,
) -> Trainer:
    """The trainer with the case's model or ``of``, freshly built, with the case's seed or ``seed``."""
    case, spec = subject.case, spec_of(subject)
    adapter = of if isinstance(of, TinyAdapter) else None
    model = of if isinstance(of, TinyModel) else model_of(subject, loss)
    setup = TrainerSetup(
        model_dir=str(subject.expected.models.directory(model)),
        optimizer=optimizer or (AdamW(lr=1e-3) if Feature.GRADIENTS in spec.features else SGD(lr=RATE)),
        schedule=schedule or Schedule(),
        loss=loss,
        advantages=rule,
        dtype=case.dtype,
        ranks=case.layout.dp,
        seed=case.seed if seed is None else seed,
        adapter_dir=str(adapter.write(subject.directory("adapter"))) if adapter else None,
        options=case.setting.over(spec.profile.options),
    )
    return subject.expected.trainers.build(spec, setup)


def train(
    subject: EngineUnderTest,
    trainer: Trainer,
    rollouts: Rollouts,
    cut: MicroBatches = WHOLE,
    *,
    apply: bool = True,
) -> Mapping[str, float]:
    """The metrics of one batch; raises `AssertionError` without a finite ``loss``, and ``grad_norm`` of a step."""
    # Foreign code: its answer may be anything.
    metrics: Any = trainer.train_batch(rollouts.for_trainer(), cut, apply)
    for name in REQUIRED if apply else REQUIRED[:1]:
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        subject.require(
            isinstance(value, int | float) and math.isfinite(value),
            f"train_batch() returned {metrics!r}; expected a dict with a finite number {name!r} of the whole batch",
        )
    return dict(metrics)


def _expected(subject: EngineUnderTest, rollouts: Rollouts, loss: PolicyLoss, model: Judged) -> GradientRuns:
    """Gradients of the float64 loss over the whole batch, and tolerances of gradients, loss and norm."""
    expected = subject.expected

    def run() -> GradientRuns:
        plain = expected.plain(model, subject.dtype, subject.case.device)
        return run_gradients(
            expected.oracle(model), plain, rollouts.for_oracle(), loss.of_sequence, loss.temperature
        )

    return expected.stored(model, ("policy", rollouts, loss, subject.dtype, subject.case.device), run)


def _of_loss(rollouts: Rollouts, loss: PolicyLoss) -> Iterator[tuple[str, Rollouts, PolicyLoss]]:
    yield from ((sentence, rollouts, wrong) for sentence, wrong in loss.mistakes())
    if loss.pairwise:
        yield "the rejected sequence is preferred", rollouts.swapped(), loss
    if loss.objective == "dpo":
        yield "the log-probs of the reference are left out", rollouts.without_reference(), loss


def verify_objective(subject: EngineUnderTest, objective: Objective) -> None:
    """Gradients of ``objective`` at every cut, and at one cut of policies and references that are far away."""
    loss = loss_of(subject, objective)
    label = objective if loss.pairwise else f"{objective} with {loss.aggregation}"
    cuts = cuts_of(subject, loss)
    verify_gradients(subject, label, draw(subject, loss), loss, cuts)
    for name in () if objective in ("cross_entropy", "bradley_terry") else ("far below", "far above"):
        rollouts = draw(subject, loss, 1, DISTANCES[name])
        verify_gradients(subject, f"{label}, {name} the old policy", rollouts, loss, cuts[-1:])


def verify_gradients(
    subject: EngineUnderTest,
    label: str,
    rollouts: Rollouts,
    loss: PolicyLoss,
    cuts: Sequence[MicroBatches] | None = None,
    rule: AdvantageRule | None = None,
    mistaken: Mistaken | None = None,
    of: TinyModel | TinyAdapter | None = None,
) -> None:
    """Gradients, loss and norm of a batch equal the float64 ones at each of ``cuts``, or all that the trainer takes.

    They are of the case's model or ``of``: of an adapter, gradients are those of its factors. With a ``rule`` the
    trainer takes advantages from rewards, and ``rollouts`` have the right ones. A loss of 0 is not judged, nor the norm
    of another model than the case's.
    """
    model = of or model_of(subject, loss)
    truth, tolerances, loss_tolerance, norm_tolerance = _expected(subject, rollouts, loss, model)
    right = _reported(model, truth.grads)
    mistakes = partial(_mistakes, subject, model, mistaken or partial(_of_loss, rollouts, loss))
    direct = Feature.GRADIENTS in spec_of(subject).features
    trainer, cuts = build(subject, loss, rule, of=of), cuts or cuts_of(subject, loss)
    for number, cut in enumerate(cuts):
        if number and not direct:
            trainer = build(subject, loss, rule, of=of)
        metrics, grads, coarse = _gradients(subject, trainer, rollouts, cut)
        allowed = {name: t + coarse for name, t in _reported(model, tolerances).items()}
        otherwise = f"right at {cuts[0]}: it depends on the cut" if number else None
        explain = partial(_explained, mistakes, otherwise)
        place, value = f"{label} ({cut})", metrics["loss"]
        of_grads = partial(explain, partial(explain_named, grads, allowed))
        subject.verify_named(f"gradients of {place}", grads, right, allowed, explain=of_grads)
        of_loss = partial(explain, partial(explain_loss, value, truth.loss, loss_tolerance))
        if abs(truth.loss) > torch.finfo(torch.float32).eps:
            subject.verify_scalar(f"the loss of {place}", value, truth.loss, loss_tolerance, explain=of_loss)
        if "grad_norm" in metrics and of is None:
            subject.verify_scalar(f"the norm of {place}", metrics["grad_norm"], truth.norm, norm_tolerance)


def _reported(model: Judged, values: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """``values`` by the names that the trainer gives: with an adapter, of its factors alone."""
    if isinstance(model, TinyModel):
        return dict(values)
    return {PREFIX + name: value for name, value in values.items() if ".lora_" in name}


def _explained(
    mistakes: Mistakes, otherwise: str | None, explain: Callable[[Mistakes, None], str | None]
) -> str | None:
    """A usual mistake, or ``otherwise``."""
    return explain(mistakes, None) or otherwise


def _mistakes(subject: EngineUnderTest, model: Judged, mistaken: Mistaken) -> Iterator[tuple[str, Gradients]]:
    for sentence, rollouts, loss in mistaken():
        wrong = subject.expected.oracle(model).gradients(
            rollouts.for_oracle(), loss.of_sequence, loss.temperature
        )
        yield sentence, replace(wrong, grads=_reported(model, wrong.grads))


def _gradients(
    subject: EngineUnderTest, trainer: Trainer, rollouts: Rollouts, cut: MicroBatches
) -> tuple[Mapping[str, float], Mapping[str, Tensor], Tolerance]:
    """Metrics and gradients of a batch, and their rounding: the trainer's, or from weights around a step of SGD."""
    if Feature.GRADIENTS in spec_of(subject).features:
        metrics = train(subject, trainer, rollouts, cut, apply=False)
        return metrics, trainer.gradients(), EXACT
    before = {name: value.double() for name, value in trainer.weights().items()}
    metrics = train(subject, trainer, rollouts, cut)
    grads = {name: (before[name] - value.double()) / RATE for name, value in trainer.weights().items()}
    largest = max(float(value.abs().max()) for value in before.values())
    floor = torch.finfo(torch.float32).eps * largest / RATE
    return metrics, grads, Tolerance(baseline=0.0, floor=floor)
