"""Weights and moments after optimizer steps, compared with a float64 AdamW; frozen parameters among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from core_rl.backend.meta import EngineProgress, TensorKind, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.hints.mistakes import explain_rates
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss, RewardLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import DEEP, TinyModel, layer_of
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.adapters import verify_trained
from core_rl_conformance.procedures.outputs import PROBE, verify_outputs
from core_rl_conformance.procedures.training import CLIPPED, Shadow, optimizer_config
from core_rl_oracle.oracle import AdamW, Schedule
from core_rl_oracle.tolerance import Tolerance

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)
STEPS = 8
"""Enough that a bias correction which stops early shows."""
DECAYING = AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)
LONG_MEMORY = AdamW(lr=3e-3, betas=(0.99, 0.9999), weight_decay=0.1, max_grad_norm=1.0)
"""The bias correction of its second moment still differs from 1 after 10,000 steps."""
UPDATES = (300, 70_000)
"""More than 8 bits count, and more than 16."""
KINDS: tuple[TensorKind, ...] = ("params", "master", "exp_avg", "exp_avg_sq", "buffers")
HEADS: tuple[tuple[Head, Capability, CheckLoss], ...] = (
    ("value", Capability.VALUE_HEAD, ValueLoss()),
    ("reward", Capability.REWARD_HEAD, RewardLoss()),
)
SCHEDULES = (
    Schedule(warmup_steps=3),
    Schedule(type="linear", total_steps=8, min_lr_ratio=0.25),
    Schedule(type="linear", warmup_steps=2, total_steps=7),
    Schedule(type="cosine", total_steps=8),
    Schedule(type="cosine", warmup_steps=3, total_steps=8, min_lr_ratio=0.1),
)


@check("I20.adamw", images=True, any_model=True)
def steps_are_those_of_adamw(subject: EngineUnderTest) -> None:
    """Weights and moments after several steps match a float64 AdamW on the engine's own gradients.

    One step has gradients of exactly 0, as where all advantages are: weights still decay, and moments still move them.

    Why: wrong decay, epsilon or bias correction, a learning rate that lags behind its schedule, optimizer
    math in a smaller dtype, parameters that the optimizer never got (pytorch #149205), a step that is left out
    because its norm is 0.
    Look at: the optimizer's construction (matrices decay, norms and biases do not), ``TrainBackend.step`` and its
    ``lr``, the float32 master weights.
    """
    rows = subject.data(PROBE).rows
    flat = Ragged(tuple(replace(row, advantages=(0.0,) * len(row.ids)) for row in rows)).batch()
    _verify_steps(subject, subject.model(layers=DEEP), replace(LOSS, entropy_coef=0.0), STEPS, flat)


@check("I20.schedules", each="engine")
def rates_follow_the_schedule(subject: EngineUnderTest) -> None:
    """The reported learning rates follow the configured schedule: of each kind, at each step, and after a resume.

    With and without a warm-up and a smallest rate, up to steps behind the end of the decay.

    Why: a warm-up that is late by one step, or a decay that counts the warm-up twice, makes two engines differ by a few
    per cent from the first step on, and every loss looks right.
    Look at: ``lr_scheduler_step()``, and what the engine computes the rate from; it is a function of the number of
    those calls alone. I20.adamw shows whether the steps have the reported rate.
    """
    nothing = subject.data(PROBE).without_mask().batch()
    for schedule in SCHEDULES:
        group = subject.start(optimizer=optimizer_config(CLIPPED, schedule))
        for steps in (range(10), range(5, 7)):
            group.restore_progress(EngineProgress(lr_steps=steps[0]))
            rates = []
            for _ in steps:
                # Nothing is trained: the step is skipped, and still tells the rate.
                rates.append(group.train_batch(nothing, LOSS.spec(), ONE_PASS)["lr"])
                group.lr_scheduler_step()
            exact = Tolerance(baseline=0.0, floor=1e-12 * CLIPPED.lr)
            explain = partial(explain_rates, rates, steps, schedule, CLIPPED.lr, exact.limit)
            for step, rate in zip(steps, rates, strict=True):
                label = f"the learning rate of step {step} of {schedule}"
                expected = CLIPPED.lr * schedule.factor(step)
                subject.verify_scalar(label, rate, expected, exact, explain=explain)


@check("I20.adamw-value-head", requires={Capability.VALUE_HEAD}, each="layout")
def steps_with_a_value_head_are_those_of_adamw(subject: EngineUnderTest) -> None:
    """The scalar head takes the same steps as every other matrix: same learning rate, same decay.

    Why: a head that is added to a loaded model is easily left out of the optimizer, or gets another learning rate or
    decay. A critic that hardly learns then looks like a hard task.
    Look at: whether ``score.weight`` is among the parameters that the optimizer is built with, and in the
    group that decays; whether its float32 weight is used by the forward pass.
    """
    _verify_steps(subject, subject.model(head="value", layers=DEEP), ValueLoss(), 3)


def _verify_steps(
    subject: EngineUnderTest, model: TinyModel, loss: CheckLoss, steps: int, flat: SequenceBatch | None = None
) -> None:
    """Require AdamW's ``steps``; the second has ``flat``, without a gradient, where that is given."""
    schedule = Schedule(type="cosine", warmup_steps=2, total_steps=steps + 2, min_lr_ratio=0.1)
    group = subject.start(model, optimizer=optimizer_config(DECAYING, schedule))
    shadow = Shadow.of(group, DECAYING, schedule)
    batches = [subject.data(PROBE, seed).batch() for seed in range(steps)]
    if flat is not None:
        batches[1] = flat
    shadow.train(subject, group, batches, loss.spec(), TWO)
    label = f"after {steps} steps"
    shadow.verify(subject, group, label)
    verify_outputs(subject, group, model, label)
    updates = group.progress.updates
    subject.require(updates == steps, f"{steps} steps count as {updates} updates")


@check("I20.update-count", each="layout")
def bias_correction_follows_the_update_count(subject: EngineUnderTest) -> None:
    """After ``restore_progress`` with many updates, the next steps match an AdamW with that count.

    Why: a count that is lost or kept in a small integer begins the bias correction anew, and the first
    steps after a resume are many times too long.
    Look at: the ``count`` of ``TrainBackend.step``; the dtype of the optimizer's own step count, and whether every
    parameter has it.
    """
    group = subject.start(subject.model(layers=DEEP), optimizer=optimizer_config(LONG_MEMORY))
    for updates in UPDATES:
        group.restore_progress(EngineProgress(updates=updates))
        shadow = Shadow.of(group, LONG_MEMORY)
        batches = [subject.data(PROBE, seed).batch() for seed in range(2)]
        shadow.train(subject, group, batches, LOSS.spec(), ONE_PASS)
        shadow.verify(subject, group, f"two steps after {updates} updates")


@check("I5.export-before-step", each="layout")
def exports_leave_the_gradients(subject: EngineUnderTest) -> None:
    """Exports, saves and uploads between the backward pass and the step change neither gradients nor the step.

    Why: a gather that frees or overwrites gradients, or a save that drops them, turns the next step into
    one without its batch; only runs that save at the wrong moment show it.
    Look at: what ``ShardedState.local`` does besides reading, and calls of ``TrainBackend.zero_grad``.
    """
    model, data = subject.model(), subject.data()
    expected = subject.gradients(model, data, LOSS)
    group = subject.start(model, optimizer=optimizer_config(DECAYING))
    shadow = Shadow.of(group, DECAYING)
    metrics = group.forward_backward(data.batch(), LOSS.spec(), TWO)
    for kind in KINDS:
        group.named_tensors(kind)
        subject.verify_gradients(f"after an export of {kind!r}", group, metrics, expected)
    for label in _saved(subject, group):
        subject.verify_gradients(f"after {label}", group, metrics, expected)
    shadow.step(subject, group, "of the step after exports")
    shadow.verify(subject, group, "after exports between backward pass and step")


def _saved(subject: EngineUnderTest, group: EngineGroup) -> Iterator[str]:
    """Save in every format, and upload; returns the calls."""
    for format_ in moving.formats(subject):
        group.save(moving.meta(subject.directory(format_), format_))
        yield f"save() as {format_!r}"
    if subject.spec.supports(Capability.SYNC_DISK):
        group.upload_weights(WeightUpdateMeta(version=1, path=str(subject.directory("upload"))))
        yield "upload_weights()"


@check("I20.all-move", each="layout")
def every_parameter_moves(subject: EngineUnderTest) -> None:
    """One step moves every trainable parameter, and every part that a gradient reaches.

    Why: parameters that the optimizer does not know, or a kernel that drops ``requires_grad``, are never
    trained and nothing fails (pytorch #149205, verl #6913).
    Look at: the optimizer's parameters, and whether it was built before the parameters were replaced.
    """
    _verify_move(subject, subject.model(), subject.data(), LOSS)
    for head, needed, loss in HEADS:
        if subject.spec.supports(needed):
            _verify_move(subject, subject.model(head=head), subject.data(PROBE), loss)


def _verify_move(subject: EngineUnderTest, model: TinyModel, data: Ragged, loss: CheckLoss) -> None:
    expected = subject.gradients(model, data, loss)
    group = subject.start(model, optimizer={"lr": 1e-2})
    before = group.named_tensors("master")
    group.train_batch(data.batch(), loss.spec(), ONE_PASS)
    after = group.named_tensors("master")
    for name, grad in expected.oracle.grads.items():
        significant = grad.abs() > 100 * expected.tolerances[name].limit
        still = int(((after[name] == before[name]) & significant).sum())
        subject.require(
            not still,
            f"{still} of {int(significant.sum())} entries of {name} have a gradient and did not move",
        )
        subject.require(bool(torch.isfinite(after[name]).all()), f"{name} is not finite after one step")


@check("I20.frozen", requires={Capability.FROZEN_PARAMETERS}, each="layout")
def frozen_parameters_stay(subject: EngineUnderTest) -> None:
    """Frozen parameters have no gradient and no moments and never move; the others' steps stay right.

    Why: a frozen parameter that decays, a wrapper that drops gradients next to frozen ones, a clip or a
    decay that goes by position and shifts where some are left out.
    Look at: which parameters reach the optimizer and the norm, and gradient reduction where some have none.
    """
    model = subject.model()
    group = _verify_frozen(subject, model, LOSS, [subject.first_layer])
    verify_outputs(subject, group, model, "after steps with frozen parameters")


@check("I20.frozen-parts", requires={Capability.FROZEN_PARAMETERS}, each="layout")
def any_part_can_be_frozen(subject: EngineUnderTest) -> None:
    """The embedding alone, the last layer, all but the last layer, or the trunk under a value head can be frozen.

    Why: tying again turns on the gradients of a frozen embedding; a wrapper expects gradients in its first or last
    group; a stage without trained parameters sends none back. Most critics begin by training the head alone.
    Look at: ``requires_grad`` after tying, wrapping and casting; hooks that wait for gradients which do
    not come; gradients that a frozen part passes to earlier layers.
    """
    model = subject.model()
    names = list(subject.expected.oracle(model).parameters())
    last = list(filter(None, map(layer_of, names)))[-1]
    _verify_frozen(subject, model, LOSS, names[:1])
    _verify_frozen(subject, model, LOSS, [name for name in names if layer_of(name) != last])
    _verify_frozen(subject, model, LOSS, [name for name in names if layer_of(name) == last])
    if subject.spec.supports(Capability.VALUE_HEAD):
        model = subject.model(head="value")
        trunk = [
            name for name in subject.expected.oracle(model).parameters() if not name.startswith("score.")
        ]
        _verify_frozen(subject, model, ValueLoss(), trunk)


def _verify_frozen(
    subject: EngineUnderTest, model: TinyModel, loss: CheckLoss, patterns: Sequence[str]
) -> EngineGroup:
    """Freeze what ``patterns`` match; compare gradients with the oracle's and some steps with AdamW's."""
    data = subject.data()
    expected = subject.gradients(model, data, loss)
    grads = expected.oracle.grads
    frozen = {name for name in grads if any(fnmatchcase(name, pattern) for pattern in patterns)}
    label = (
        f"with {len(frozen)} of {len(grads)} parameters frozen ({patterns[0]}{', ...' * (len(patterns) > 1)})"
    )
    group = subject.start(model, frozen=patterns, optimizer=optimizer_config(CLIPPED))
    shadow = Shadow.of(group, CLIPPED, frozen=frozen)
    group.forward_backward(data.batch(), loss.spec(), TWO)
    verify_trained(subject, label, group.named_tensors("grads"), expected, lambda name: name not in frozen)
    shadow.step(subject, group, f"of the first step {label}")
    shadow.train(subject, group, [subject.data(seed=1).batch()], loss.spec(), TWO)
    shadow.verify(subject, group, label)
    return group
