"""Optimizer steps of whole trainers: clipping, learning rates, weights, resume and the order of data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

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
from core_rl_conformance.trainers.spec import Feature
from core_rl_conformance.trajectory import Training
from core_rl_oracle.oracle import AdamW, Schedule, ScheduleFromZero
from core_rl_oracle.policy_losses import PolicyLoss

STEPS = 5
SAVED = 3
"""Steps before the checkpoint: the rate is neither the highest, which the config names, nor that of a first step."""
SMOOTH = AdamW(lr=0.05, betas=(0.8, 0.95), eps=0.5)
"""With a large epsilon an update is a smooth function of its gradient, and rounding grows slowly."""
ULPS = 1e-6
"""Relative error of a learning rate, whose formula may round in another order."""


def _schedule(subject: EngineUnderTest, turn: int) -> Schedule:
    """A schedule of the trainer's with a warm-up and a fall, another one at each ``turn``; or a constant rate."""
    spec = spec_of(subject)
    kinds = sorted(spec.schedules - {"constant"})
    if not kinds:
        return Schedule()
    kind = kinds[(subject.case.seed + turn) % len(kinds)]
    schedule = ScheduleFromZero if spec.warmup_from_zero else Schedule
    return schedule(type=kind, warmup_steps=2, total_steps=STEPS + 2)


def _training(subject: EngineUnderTest, config: AdamW, schedule: Schedule) -> Training[Rollouts, PolicyLoss]:
    # As weights move, ratios would cross the clip bounds, and rounding decide when.
    loss = replace(plain_loss(subject), clip_low=0.999, clip_high=999.0)
    data = tuple(draw(subject, loss, seed=20 + number) for number in range(STEPS))
    return Training(data=data, loss=loss, config=config, schedule=schedule)


def _verify_run(
    subject: EngineUnderTest, label: str, training: Training[Rollouts, PolicyLoss], saved: int = STEPS
) -> None:
    """Rates, losses and norms of all steps, and the weights after them; the run is resumed after ``saved`` steps."""
    loss = training.loss
    expected = subject.expected.training(
        model_of(subject, loss), training, subject.dtype, subject.case.device
    )
    cuts = cuts_of(subject, loss)
    start = partial(build, subject, loss, optimizer=training.config, schedule=training.schedule)
    trainer = start()
    for step, rate in enumerate(training.rates):
        if step == saved:
            path = str(subject.directory("checkpoint"))
            trainer.save(path)
            trainer = start()
            trainer.load(path)
        reported = trainer.learning_rate()
        subject.require(
            abs(reported - rate) <= ULPS * SMOOTH.lr,
            f"the learning rate of step {step} is {reported:.9g}; expected {rate:.9g}",
        )
        metrics = train(subject, trainer, training.data[step], cuts[step % len(cuts)])
        for name, key, value, allowed in expected.of_step(step):
            subject.verify_scalar(f"the {name} of step {step}", metrics[key], value, allowed)
    subject.verify_named(label, trainer.weights(), expected.truth.weights, expected.weights)


@check("T6.clipping", kind="trainer", each="layout")
def clipping_scales_by_the_norm(subject: EngineUnderTest) -> None:
    """Clipped steps move the weights by the scaled gradients of the whole batch; the reported norm is not scaled.

    Why: a trainer that clips each micro-batch or each rank, or clips before gradients are normalised, looks right
    while nothing is clipped.
    Look at: the place of clipping: once for each step, after the reduction over ranks and the division by the weight.
    """
    need(subject, Feature.CLIPPING)
    training = _training(subject, replace(SMOOTH, max_grad_norm=0.05), Schedule())
    _verify_run(subject, f"weights after {STEPS} clipped steps", training)


@check("T6.steps", kind="trainer", each="layout")
def steps_follow_the_oracle(subject: EngineUnderTest) -> None:
    """Under warm-up and decay, each step has the named learning rate, and the weights follow the float64 run.

    Why: a schedule that is stepped for each micro-batch, before the optimizer, or once too often moves every weight.
    Look at: the order of ``optimizer.step()`` and ``scheduler.step()``, and what a step of the schedule counts.
    """
    training = _training(subject, SMOOTH, _schedule(subject, 0))
    _verify_run(subject, f"weights after {STEPS} steps", training)


@check("T7.resume", kind="trainer", each="layout")
def resumed_runs_go_on(subject: EngineUnderTest) -> None:
    """A run that is saved, built anew and loaded has the rates, losses and weights of a run that never stopped.

    Why: AReaL 1.0.4 saves no scheduler: under a falling rate, a resumed run starts its schedule again. A first step at
    the config's rate shows only where the schedule is not at its highest.
    Look at: what the checkpoint holds besides weights: moments, the number of steps, the schedule, the present rate.
    """
    need(subject, Feature.RESUME)
    training = _training(subject, SMOOTH, _schedule(subject, 1))
    label = f"weights after {STEPS} steps, resumed after {SAVED}"
    _verify_run(subject, label, training, saved=SAVED)


@check("T8.epochs", kind="trainer", each="engine")
def epochs_visit_every_sequence_once(subject: EngineUnderTest) -> None:
    """One epoch visits each sequence exactly once, whatever the batch size, in an order that the seed alone decides.

    Why: a sampler that pads the last batch repeats sequences, and without it the same sequences are lost in each epoch
    of a fixed order. An order that ignores the seed gives every run the same data.
    Look at: ``drop_last``, padding to a multiple of the ranks, and the seed of the shuffle.
    """
    need(subject, Feature.EPOCHS)
    loss, seed = plain_loss(subject), subject.case.seed
    seeds = (seed, seed, seed + 1)
    orders = [[list(batch) for batch in build(subject, loss, seed=s).epoch(24, 8)] for s in seeds]
    subject.require(
        orders[0] == orders[1], f"two epochs of the seed {seed} differ: {orders[0]} and {orders[1]}"
    )
    subject.require(orders[0] != orders[2], f"the seeds {seed} and {seed + 1} give one order: {orders[0]}")
    trainer = build(subject, loss)
    for count, size in ((24, 8), (25, 8), (7, 8), (16, 3)):
        batches = trainer.epoch(count, size)
        visits = Counter(index for batch in batches for index in batch)
        wrong = {index: visits[index] for index in range(count) if visits[index] != 1}
        subject.require(
            not wrong and len(visits) == count and all(len(batch) <= size for batch in batches),
            f"an epoch of {count} sequences in batches of {size} visits sequences so often: {wrong or dict(visits)}",
        )
