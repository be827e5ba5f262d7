"""Builds a trainer, trains a batch, and compares it with the float64 losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedGradients, GradientRuns, Judged, run_gradients
from core_rl_conformance.hints.diagnose import Mistakes, explain_loss, explain_named
from core_rl_conformance.inputs.rollouts import LENGTHS, PAIR, Rollouts, draw_rollouts, with_shared_prompts
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import NotSupported
from core_rl_conformance.trainers.interface import SGD, MicroBatches, Trainer, TrainerSetup
from core_rl_conformance.trainers.spec import Feature, TrainerSpec
from core_rl_oracle.loss_names import PAIRWISE, AdvantageRule, Aggregation, Objective
from core_rl_oracle.oracle import AdamW, Gradients, Schedule
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_oracle.tolerance import Tolerance

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
    return PolicyLoss(objective=objective, aggregation=max(spec.aggregations, default="token_mean"))


def token_loss(subject: EngineUnderTest) -> PolicyLoss:
    """The same of a trainer on sequences. Raises `NotSupported` for a trainer on pairs alone."""
    loss = plain_loss(subject)
    if loss.pairwise:
        raise NotSupported("the trainer names no objective on single sequences")
    return loss


def aggregations_of(subject: EngineUnderTest) -> list[Aggregation]:
    """The aggregations of tokens, in order. Raises `NotSupported` as `token_loss` does."""
    token_loss(subject)
    return sorted(spec_of(subject).aggregations)


def pair_losses(subject: EngineUnderTest) -> list[PolicyLoss]:
    """A loss for each objective on pairs, which may be none."""
    objectives = sorted(spec_of(subject).objectives & PAIRWISE)
    return [PolicyLoss(objective=objective) for objective in objectives]


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


def draw(subject: EngineUnderTest, loss: PolicyLoss, seed: int = 0) -> Rollouts:
    """Rollouts for ``loss``, near the log-probs of the case's language model; pairs for a loss on pairs."""
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
    adapter: TinyAdapter | None = None,
) -> Trainer:
    """The trainer with the case's model, freshly built."""
    case, spec = subject.case, spec_of(subject)
    setup = TrainerSetup(
        model_dir=str(subject.expected.models.directory(model_of(subject, loss))),
        optimizer=optimizer or (AdamW(lr=1e-3) if Feature.GRADIENTS in spec.features else SGD(lr=RATE)),
        schedule=schedule or Schedule(),
        loss=loss,
        advantages=rule,
        dtype=case.dtype,
        ranks=case.layout.dp,
        seed=case.seed,
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


def expected_of(
    subject: EngineUnderTest, rollouts: Rollouts, loss: PolicyLoss, of: Judged | None = None
) -> ExpectedGradients:
    """Loss, gradients and norm of the float64 loss over the whole batch, of the case's model or ``of``."""
    expected, model = subject.expected, of or model_of(subject, loss)

    def run() -> GradientRuns:
        plain = expected.plain(model, subject.dtype, subject.case.device)
        return run_gradients(
            expected.oracle(model), plain, rollouts.for_oracle(), loss.of_sequence, loss.temperature
        )

    truth, tolerances, of_loss, of_norm = expected.stored(
        model, ("policy", rollouts, loss, subject.dtype, subject.case.device), run
    )
    return ExpectedGradients(oracle=truth, tolerances=tolerances, loss=of_loss, norm=of_norm)


def _of_loss(rollouts: Rollouts, loss: PolicyLoss) -> Iterator[tuple[str, Rollouts, PolicyLoss]]:
    yield from ((sentence, rollouts, wrong) for sentence, wrong in loss.mistakes())
    if loss.pairwise:
        yield "the rejected sequence is preferred", rollouts.swapped(), loss
    if loss.objective == "dpo":
        yield "the log-probs of the reference are left out", rollouts.without_reference(), loss


def verify_gradients(
    subject: EngineUnderTest,
    label: str,
    rollouts: Rollouts,
    loss: PolicyLoss,
    cuts: Sequence[MicroBatches] | None = None,
    rule: AdvantageRule | None = None,
    mistaken: Mistaken | None = None,
) -> None:
    """Gradients, loss and norm of a batch equal the float64 ones at each of ``cuts``, or all that the trainer takes.

    With a ``rule`` the trainer takes advantages from rewards, and ``rollouts`` have the right ones.
    """
    expected = expected_of(subject, rollouts, loss)
    truth = expected.oracle
    direct = Feature.GRADIENTS in spec_of(subject).features
    trainer = build(subject, loss, rule)
    cuts = cuts or cuts_of(subject, loss)
    for number, cut in enumerate(cuts):
        if not direct:
            trainer = build(subject, loss, rule)
        metrics, grads, coarse = (_gradients if direct else _moved)(subject, trainer, rollouts, cut)
        allowed = {name: t + coarse for name, t in expected.tolerances.items()}
        explain = _Explanations(
            mistakes=partial(_mistakes, subject, mistaken or partial(_of_loss, rollouts, loss)),
            otherwise=f"right at {cuts[0]}: it depends on the cut" if number else None,
        )
        place = f"{label} ({cut})"
        of_grads = partial(explain.of_gradients, grads, allowed)
        subject.verify_named(f"gradients of {place}", grads, truth.grads, allowed, explain=of_grads)
        value, of_loss = metrics["loss"], partial(explain.of_loss, metrics["loss"], expected.loss)
        subject.verify_scalar(f"the loss of {place}", value, truth.loss, expected.loss, explain=of_loss)
        if "grad_norm" in metrics:
            subject.verify_scalar(f"the norm of {place}", metrics["grad_norm"], truth.norm, expected.norm)


@dataclass(frozen=True, kw_only=True)
class _Explanations:
    """Explanations of wrong values: a usual mistake, or ``otherwise``."""

    mistakes: Mistakes
    otherwise: str | None

    def of_gradients(self, got: Mapping[str, Tensor], allowed: Mapping[str, Tolerance]) -> str | None:
        return explain_named(got, allowed, self.mistakes, None) or self.otherwise

    def of_loss(self, got: float, allowed: Tolerance) -> str | None:
        return explain_loss(got, allowed, self.mistakes, None) or self.otherwise


def _mistakes(subject: EngineUnderTest, mistaken: Mistaken) -> Iterator[tuple[str, Gradients]]:
    for sentence, rollouts, loss in mistaken():
        oracle = subject.expected.oracle(model_of(subject, loss))
        yield sentence, oracle.gradients(rollouts.for_oracle(), loss.of_sequence, loss.temperature)


def verify_adapter_gradients(
    subject: EngineUnderTest, rollouts: Rollouts, loss: PolicyLoss, adapter: TinyAdapter
) -> None:
    """Gradients of the factors, loss and norm equal the float64 ones at every cut."""
    expected = expected_of(subject, rollouts, loss, adapter)
    factors = {name for name in expected.oracle.grads if ".lora_" in name}
    truth = {PREFIX + name: expected.oracle.grads[name] for name in factors}
    tolerances = {PREFIX + name: expected.tolerances[name] for name in factors}
    trainer = build(subject, loss, adapter=adapter)
    for cut in cuts_of(subject, loss):
        metrics = train(subject, trainer, rollouts, cut, apply=False)
        subject.verify_named(f"gradients of the factors ({cut})", trainer.gradients(), truth, tolerances)
        subject.verify_scalar(
            f"the loss with an adapter ({cut})", metrics["loss"], expected.oracle.loss, expected.loss
        )


def _gradients(
    subject: EngineUnderTest, trainer: Trainer, rollouts: Rollouts, cut: MicroBatches
) -> tuple[Mapping[str, float], Mapping[str, Tensor], Tolerance]:
    """Metrics and gradients of a batch, which no way to them rounds."""
    metrics = train(subject, trainer, rollouts, cut, apply=False)
    return metrics, trainer.gradients(), Tolerance(baseline=0.0, floor=0.0)


def _moved(
    subject: EngineUnderTest, trainer: Trainer, rollouts: Rollouts, cut: MicroBatches
) -> tuple[Mapping[str, float], Mapping[str, Tensor], Tolerance]:
    """The same from the weights before and after a step of SGD, with what these round."""
    before = {name: value.double() for name, value in trainer.weights().items()}
    metrics = train(subject, trainer, rollouts, cut)
    grads = {name: (before[name] - value.double()) / RATE for name, value in trainer.weights().items()}
    largest = max(float(value.abs().max()) for value in before.values())
    floor = torch.finfo(torch.float32).eps * largest / RATE
    return metrics, grads, Tolerance(baseline=0.0, floor=floor)
