"""Replays rollouts through two trainers, names the terms in which they differ, and reports them as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from core_rl_conformance.differences.reading import (
    Gradient,
    Reading,
    off_policy,
    read_terms,
    with_log_ratios,
    with_references,
)
from core_rl_conformance.differences.terms import Terms, masks_of
from core_rl_conformance.differences.updates import UPDATE, Step, precision_of, read_update
from core_rl_conformance.inputs.rollouts import Rollouts
from core_rl_conformance.trainers.interface import RECIPE_STEPS, MicroBatches, Trainer
from core_rl_conformance.trainers.spec import Feature
from core_rl_oracle.oracle import grad_norm

LOG_RATIOS = (0.0, 1.5, -3.0, 2.5, 0.0, -1.5, 3.0, -4.0)
"""Of all tokens, for each optimizer step whose learning rate and update are compared: gradients of several sizes."""
ORDERED, SHOWN = 64, 8
"""Sequences of an epoch, and of its first batch."""
SAME = 0.01
"""Relative difference of numbers that were read from gradients, at most, where they are the same."""
UNKNOWN = "unknown"
PRECISE = "float32"
WHOLE = MicroBatches()
FIELDS: Mapping[str, Sequence[str]] = {
    "mask": ("mask",),
    "advantages": ("advantages",),
    "temperature": ("temperature",),
    "objective": ("objective",),
    "clip bounds": ("clip",),
    "KL": ("kl",),
    "entropy": ("entropy",),
    "aggregation": ("mean", "scale"),
}
"""Fields of `Terms` by the names of terms, in the order in which a trainer applies them."""
CUT = 1e-3
"""Relative difference of gradients at two cuts, at most, where they do not depend on the cut."""
EXPLAINED = 1e-2
"""Relative distance between measured and predicted gradients, above which a term is missing."""
UNREADABLE = 0.05
"""The same, above which no term is compared."""
ALWAYS = (
    "the precision of a run (both compute in float32, on one rank)",
    "sampling and data",
    f"the steps of a run that leaves their number to its data ({RECIPE_STEPS} stand in)",
    "the epsilon of the optimizer",
    "clipping norms that no replayed gradient reaches",
    "a weight decay that float32 rounds away at the learning rate",
)
"""Never compared."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A trainer as its gradients, learning rates and updates show it."""

    reading: Reading
    precision: str
    """Precision of matrix products."""
    texts: Mapping[str, str]
    """Of terms that are no part of the loss, by their names: `UNKNOWN` for what the trainer does not show."""


def measure_trainer(
    trainer: Trainer, directory: Path, rollouts: Rollouts, features: frozenset[Feature]
) -> Measured:
    """Read the terms of a trainer with ``features`` whose model is in ``directory``, and take a few steps."""

    def gradients(batch: Rollouts, cut: MicroBatches = WHOLE) -> Mapping[str, Tensor]:
        trainer.train_batch(batch.for_trainer(), cut, False)
        return trainer.gradients()

    reading = read_terms(directory, rollouts, gradients)
    referred = with_references(rollouts, reading.basis.logprobs)
    precision, effect = _precision(reading, referred, gradients), UNKNOWN
    if Feature.SEQUENCE_COUNT in features and precision == PRECISE:
        whole = gradients(rollouts)
        single = gradients(rollouts, MicroBatches(sequences=1))
        distance = grad_norm({name: single[name] - value for name, value in whole.items()})
        effect = "changes gradients" if distance > CUT * grad_norm(whole) else "changes nothing"
    steps = []
    for log_ratio in LOG_RATIOS:
        batch = with_log_ratios(referred, reading.basis.logprobs, repeat(log_ratio))
        grads, rate, before = gradients(batch), trainer.learning_rate(), trainer.weights()
        trainer.train_batch(batch.for_trainer(), WHOLE, True)
        steps.append(Step(rate=rate, grads=grads, before=before, after=trainer.weights()))
    order = UNKNOWN
    if Feature.EPOCHS in features:
        first, *_ = trainer.epoch(ORDERED, SHOWN)
        order = f"{', '.join(map(str, first))} of {ORDERED} first"
    texts = {
        "cut into micro-batches": effect,
        "learning rate": ", ".join(f"{step.rate:.4g}" for step in steps),
        **(read_update(steps) or dict.fromkeys(UPDATE, UNKNOWN)),
        "order of data": order,
    }
    return Measured(reading=reading, precision=precision, texts=texts)


def _precision(reading: Reading, rollouts: Rollouts, gradients: Gradient) -> str:
    """The precision of products, by the gradient of one sequence: in a sum over several its digits are lost."""
    on_policy = with_log_ratios(rollouts, reading.basis.logprobs, repeat(0.0))
    grads = gradients(on_policy.untrained(range(1, len(on_policy.rows))))
    return precision_of({name: grads[name] for name in reading.basis.names})


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A term in which two trainers differ."""

    term: str
    left: str
    right: str
    share: float | None
    """Of the difference between the gradients; None where no gradient shows it."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two trainers, in the order in which a trainer applies its terms."""

    left: Reading
    right: Reading
    distance: float
    """Norm of the difference between the gradients, relative to the larger gradient."""
    differences: Sequence[Difference]
    uncompared: Sequence[str]
    """Terms and settings that were not compared."""


def compare_measured(left: Measured, right: Measured, rollouts: Rollouts) -> Comparison:
    """The differences on ``rollouts``, off policy."""
    readings = left.reading, right.reading
    replayed = off_policy(rollouts, left.reading.basis.logprobs)
    one, two = (reading.predict(replayed) for reading in readings)
    uncompared = [name for name, text in left.texts.items() if UNKNOWN in (text, right.texts[name])]
    differences = list(_in_texts("precision", left.precision, right.precision))
    if {left.precision, right.precision} == {PRECISE} and all(r.residual <= UNREADABLE for r in readings):
        differences += _in_gradients(*readings, replayed)
    else:
        uncompared = ["the terms of the losses", *uncompared]
    for name, text in left.texts.items():
        differences += _in_texts(name, text, right.texts[name])
    distance = float((one - two).norm() / torch.maximum(one.norm(), two.norm()).clamp(min=1e-300))
    return Comparison(
        left=readings[0],
        right=readings[1],
        distance=distance,
        differences=differences,
        uncompared=[*uncompared, *ALWAYS],
    )


def _in_gradients(left: Reading, right: Reading, rollouts: Rollouts) -> Iterator[Difference]:
    """Terms that part, each with the part of the way from one gradient to the other that it takes."""
    bases = {reading.terms.temperature: reading.basis for reading in (left, right)}

    def gradient(terms: Terms) -> Tensor:
        return replace(left, terms=terms, basis=bases[terms.temperature]).predict(rollouts)

    way = gradient(right.terms) - gradient(left.terms)
    terms, place = left.terms, gradient(left.terms)
    texts = [_described(reading.terms, rollouts) for reading in (left, right)]
    for term, fields in FIELDS.items():
        if all(_near(getattr(left.terms, name), getattr(right.terms, name)) for name in fields):
            continue
        terms = replace(terms, **{name: getattr(right.terms, name) for name in fields})
        moved = gradient(terms)
        share = float((moved - place) @ way / (way @ way).clamp(min=1e-300))
        place = moved
        yield Difference(term=term, left=texts[0][term], right=texts[1][term], share=share)


def _near(left: object, right: object) -> bool:
    """Whether two values are equal, numbers up to what reading them from gradients leaves."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=SAME)
    if is_dataclass(left) and is_dataclass(right):
        return all(_near(getattr(left, f.name), getattr(right, f.name)) for f in dataclass_fields(left))
    return left == right


def _in_texts(term: str, left: str, right: str) -> Iterator[Difference]:
    if UNKNOWN not in (left, right) and left != right:
        yield Difference(term=term, left=left, right=right, share=None)


def _described(terms: Terms, rollouts: Rollouts) -> dict[str, str]:
    """The value of each term, in words."""
    return {
        "mask": terms.mask,
        "advantages": terms.advantages,
        "temperature": f"{terms.temperature:g}",
        "objective": terms.objective,
        "clip bounds": str(terms.clip),
        "KL": str(terms.kl),
        "entropy": f"{terms.entropy:.4g}",
        "aggregation": _aggregation(terms, masks_of(rollouts)[terms.mask]),
    }


def _aggregation(terms: Terms, rollouts: Rollouts) -> str:
    exact = math.isclose(terms.scale, 1.0, rel_tol=SAME)
    if terms.mean == "tokens" and not exact:
        counts = [sum(row.mask[1:]) for row in rollouts.rows]
        length = sum(counts) / sum(count > 0 for count in counts) / terms.scale
        return f"sum over tokens, divided by {length:.4g} for each sequence"
    unit = {
        "tokens": "mean over trained tokens",
        "sequences": "mean over sequences, each by its trained tokens",
        "whole sequences": "mean over sequences, each by all of its tokens",
        "groups": "mean over groups, each by its trained tokens",
    }[terms.mean]
    return unit if exact else f"{unit}, times {terms.scale:.4g}"


def report_of(left: str, right: str, comparison: Comparison) -> str:
    """Lines for a terminal: the first difference, all of them with their shares, and unexplained rests."""
    return "\n".join(_lines(left, right, comparison))


def _lines(left: str, right: str, comparison: Comparison) -> Iterator[str]:
    differences, readings = comparison.differences, (comparison.left, comparison.right)
    readable = all(reading.residual <= UNREADABLE for reading in readings)
    distance = f"{comparison.distance:{'.1%' if differences else '.1e'}}"
    apart = f" Gradients are {distance} apart." if readable else ""
    if differences:
        yield f"The trainers differ first in: {differences[0].term}.{apart}"
    else:
        yield f"No compared term differs.{apart}"
    for difference in differences:
        yield ""
        share = "" if difference.share is None else f" ({difference.share:.0%} of the difference)"
        yield f"{difference.term}{share}"
        yield f"  {left}: {difference.left}"
        yield f"  {right}: {difference.right}"
    for name, reading in zip((left, right), readings, strict=True):
        if reading.residual > EXPLAINED:
            yield ""
            yield (
                f"{name}: known terms leave {reading.residual:.1%} of its gradients unexplained: it computes in low "
                "precision, or has a term that is not listed; compare it with core-rl certify"
            )
    yield ""
    yield f"Not compared: {'; '.join(comparison.uncompared)}."
