"""Optimizer steps of whole trainers: clipping, learning rates, weights, resume and the order of data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.rollouts import Rollouts
from core_rl_conformance.procedures.trainers import (
    build,
    cuts_of,
    draw,
    model_of,
    need,
    plain_loss,
    spec_of,
    train,
)
from core_rl_conformance.trainers.interface import Trainer
from core_rl_conformance.trainers.spec import Feature
from core_rl_conformance.trajectory import ExpectedTraining, Training
from core_rl_oracle.oracle import AdamW, Schedule, ScheduleFromZero
from core_rl_oracle.policy_losses import PolicyLoss

STEPS = 5
SAVED = 2
"""Steps before the checkpoint."""
SMOOTH = AdamW(lr=0.05, betas=(0.8, 0.95), eps=0.5)
"""With a large epsilon an update is a smooth function of its gradient, and rounding grows slowly."""
ULPS = 1e-6
"""Relative error of a learning rate, whose formula may round in another order."""


def _falling(subject: EngineUnderTest) -> Schedule:
    """A schedule of the trainer's with a warm-up and a fall, or the constant rate."""
    spec = spec_of(subject)
    falling = sorted(spec.schedules - {"constant"})
    if not falling:
        return Schedule()
    kind = falling[subject.case.seed % len(falling)]
    schedule = ScheduleFromZero if spec.warmup_from_zero else Schedule
    return schedule(type=kind, warmup_steps=2, total_steps=STEPS + 2)


def _training(subject: EngineUnderTest, config: AdamW, schedule: Schedule) -> Training[Rollouts, PolicyLoss]:
    # As weights move, ratios would cross the clip bounds, and rounding decide when.
    loss = replace(plain_loss(subject), clip_low=0.999, clip_high=999.0)
    data = tuple(draw(subject, loss, seed=20 + number) for number in range(STEPS))
    return Training(data=data, loss=loss, config=config, schedule=schedule)


def _built(subject: EngineUnderTest, training: Training[Rollouts, PolicyLoss]) -> Trainer:
    return build(subject, training.loss, optimizer=training.config, schedule=training.schedule)


def _expected(subject: EngineUnderTest, training: Training[Rollouts, PolicyLoss]) -> ExpectedTraining:
    return subject.expected.training(
        model_of(subject, training.loss), training, subject.dtype, subject.case.device
    )


def _run(
    subject: EngineUnderTest,
    trainer: Trainer,
    training: Training[Rollouts, PolicyLoss],
    expected: ExpectedTraining,
    steps: Sequence[int],
) -> None:
    """Train ``steps``, each with the expected rate, loss and norm."""
    cuts = cuts_of(subject, training.loss)
    for step in steps:
        _verify_rate(subject, trainer, training.rates[step], step)
        metrics = train(subject, trainer, training.data[step], cuts[step % len(cuts)])
        truth = expected.truth
        subject.verify_scalar(
            f"the loss of step {step}", metrics["loss"], truth.losses[step], expected.losses[step]
        )
        subject.verify_scalar(
            f"the norm of step {step}", metrics["grad_norm"], truth.norms[step], expected.norms[step]
        )


def _verify_rate(subject: EngineUnderTest, trainer: Trainer, expected: float, step: int) -> None:
    rate = trainer.learning_rate()
    subject.require(
        abs(rate - expected) <= ULPS * SMOOTH.lr,
        f"the learning rate of step {step} is {rate:.9g}; expected {expected:.9g}",
    )


def _verify_weights(
    subject: EngineUnderTest, label: str, trainer: Trainer, expected: ExpectedTraining
) -> None:
    subject.verify_named(label, trainer.weights(), expected.truth.weights, expected.weights)


def _run_all(subject: EngineUnderTest, label: str, training: Training[Rollouts, PolicyLoss]) -> None:
    """All steps of one run, and the weights after them."""
    expected, trainer = _expected(subject, training), _built(subject, training)
    _run(subject, trainer, training, expected, range(STEPS))
    _verify_weights(subject, label, trainer, expected)


@check("T6.clipping", kind="trainer", each="layout")
def clipping_scales_by_the_norm(subject: EngineUnderTest) -> None:
    """Clipped steps move the weights by the scaled gradients of the whole batch; the reported norm is not scaled.

    Why: a trainer that clips each micro-batch or each rank, or clips before gradients are normalised, looks right
    while nothing is clipped.
    Look at: the place of clipping: once for each step, after the reduction over ranks and the division by the weight.
    """
    need(subject, Feature.CLIPPING)
    training = _training(subject, replace(SMOOTH, max_grad_norm=0.05), Schedule())
    _run_all(subject, f"weights after {STEPS} clipped steps", training)


@check("T6.steps", kind="trainer", each="layout")
def steps_follow_the_oracle(subject: EngineUnderTest) -> None:
    """Under warm-up and decay, each step has the named learning rate, and the weights follow the float64 run.

    Why: a schedule that is stepped for each micro-batch, before the optimizer, or once too often moves every weight.
    Look at: the order of ``optimizer.step()`` and ``scheduler.step()``, and what a step of the schedule counts.
    """
    training = _training(subject, SMOOTH, _falling(subject))
    _run_all(subject, f"weights after {STEPS} steps", training)


@check("T7.resume", kind="trainer", each="layout")
def resumed_runs_go_on(subject: EngineUnderTest) -> None:
    """A run that is saved, built anew and loaded has the rates, losses and weights of a run that never stopped.

    Why: AReaL 1.0.4 saves no scheduler: under a falling rate, a resumed run starts its schedule again.
    Look at: what the checkpoint holds besides weights: moments, the number of steps, the schedule.
    """
    need(subject, Feature.RESUME)
    training = _training(subject, SMOOTH, _falling(subject))
    expected = _expected(subject, training)
    path = str(subject.directory("checkpoint"))
    trainer = _built(subject, training)
    _run(subject, trainer, training, expected, range(SAVED))
    trainer.save(path)
    trainer = _built(subject, training)
    trainer.load(path)
    _run(subject, trainer, training, expected, range(SAVED, STEPS))
    _verify_weights(subject, f"weights after {STEPS} steps, resumed after {SAVED}", trainer, expected)


@check("T8.epochs", kind="trainer", each="engine")
def epochs_visit_every_sequence_once(subject: EngineUnderTest) -> None:
    """One epoch visits each sequence exactly once, whatever the batch size.

    Why: a sampler that pads the last batch repeats sequences, and without it the same sequences are lost in each epoch
    of a fixed order.
    Look at: ``drop_last``, padding to a multiple of the ranks, and the seed of the shuffle.
    """
    need(subject, Feature.EPOCHS)
    trainer = build(subject, plain_loss(subject))
    for count, size in ((24, 8), (25, 8), (7, 8), (16, 3)):
        batches = trainer.epoch(count, size)
        visits = Counter(index for batch in batches for index in batch)
        wrong = {index: visits[index] for index in range(count) if visits[index] != 1}
        subject.require(
            not wrong and len(visits) == count and all(len(batch) <= size for batch in batches),
            f"an epoch of {count} sequences in batches of {size} visits sequences so often: {wrong or dict(visits)}",
        )
