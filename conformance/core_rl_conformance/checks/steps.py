"""Optimizer steps: clipping, `train_batch`, and when there is no step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.hints.mistakes import Steps, compare_steps
from core_rl_conformance.inputs.losses import InfiniteGradientLoss, ScaledLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import DEEP
from core_rl_conformance.procedures.moving import state, verify_state
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.training import (
    Shadow,
    expected_training,
    optimizer_config,
    rows_of,
    train_end_to_end,
    training_of,
    verify_rates,
)
from core_rl_oracle.oracle import AdamW, OptimizerState
from core_rl_oracle.tolerance import FLOOR_ULPS, Tolerance

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)
SMALL = -14
"""A power of two, of a loss whose gradients are below the limit of clipping."""
DECAYING = AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)


@check("I4.clipping", each="layout", any_model=True)
def clipping_scales_the_update(subject: EngineUnderTest) -> None:
    """With a tiny ``max_grad_norm`` the update is that of the scaled gradients; the reported norm is not scaled.

    Gradients whose norm is smaller stay as they are.

    Why: an engine that computes the norm and forgets to clip, or clips each shard by its own norm, looks
    right until the first spike; one that scales all gradients to the limit looks right until they are small.
    Look at: ``TrainBackend.step``, which must scale every gradient before the optimizer runs; and whether the
    configured ``betas`` and ``eps`` reach the optimizer, since this check sets an ``eps`` of its own.
    """
    # Adam's update hardly depends on the scale of its gradients, unless epsilon is large.
    config = AdamW(lr=1e-1, eps=1e-2, max_grad_norm=0.02)
    group = subject.start(subject.model(layers=DEEP), optimizer=optimizer_config(config))
    shadow = Shadow.of(group, config)
    shadow.train(subject, group, [subject.data(seed=s).batch() for s in range(3)], LOSS.spec(), ONE_PASS)
    shadow.verify(subject, group, "after clipped steps")
    small = ScaledLoss(exponent=SMALL)
    shadow.train(subject, group, [subject.data(seed=3).batch()], small.spec(), ONE_PASS)
    shadow.verify(subject, group, "after a step whose norm is below the limit")


@check("I1.train-batch", any_model=True)
def train_batch_follows_the_oracle(subject: EngineUnderTest) -> None:
    """``train_batch`` moves the weights along the oracle's gradient, whatever the cut into micro-batches.

    Why: exported gradients may be right, and the optimizer's wrong: stale, scaled, or of one rank.
    Look at: whether the optimizer steps on the very tensors that ``named_tensors("grads")`` shows; and
    whether the configured ``betas`` and ``eps`` reach it, since this check sets an ``eps`` of its own.
    """
    # With a large epsilon the update is a smooth function of the gradient: its error is at most
    # lr / eps times the gradient's, so no noise is amplified.
    config = AdamW(lr=0.5, eps=1.0)
    model, data = subject.model(), subject.data()
    gradients = subject.gradients(model, data, LOSS)
    for cut in (ONE_PASS, MicroBatchSpec(count=4), MicroBatchSpec(max_tokens=48)):
        group = subject.start(optimizer=optimizer_config(config))
        start = OptimizerState.start(rows_of(subject.expected.oracle(model).parameters()))
        grads = rows_of(gradients.oracle.grads)
        steps = Steps(config=config, start=start, grads=[grads], rates=[config.lr])
        reported = group.train_batch(data.batch(), LOSS.spec(), cut)
        largest = max(float(value.abs().max()) for value in steps.state().params.values())
        slope = config.lr / config.eps
        floor = FLOOR_ULPS * torch.finfo(torch.float32).eps * largest
        allowed = {
            name: Tolerance(baseline=slope * t.baseline, floor=floor + slope * t.floor)
            for name, t in gradients.tolerances.items()
        }
        got = {"params": rows_of(group.named_tensors("master"))}
        label = f"after train_batch() with {cut}"
        for finding in compare_steps(label, got, steps, {"params": allowed}, subject.layout.dp):
            subject.verify(finding)
        truth, loss, norm = gradients.oracle, reported["loss"], reported["grad_norm"]
        subject.verify_scalar("the loss of train_batch()", loss, truth.loss, gradients.loss)
        subject.verify_scalar("the norm of train_batch()", norm, truth.norm, gradients.norm)


@check("I10.tied-after-steps", families=("qwen3", "gpt2", "gemma2"), each="layout")
def tied_weights_stay_tied(subject: EngineUnderTest) -> None:
    """After several steps the head still equals the embedding, on every rank's shard.

    Why: a wrapper that unties them lets input and output drift apart, one step at a time (Automodel #2511).
    Look at: whether the tie is made again after sharding, loading or moving to a device.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 5e-2})
    for seed in range(2):
        group.train_batch(subject.data(seed=seed).batch(), LOSS.spec(), ONE_PASS)
    verify_outputs(subject, group, model, "after steps with a tied embedding")


@check("I20.nan-loss-skips", each="layout")
def nan_skips_the_step(subject: EngineUnderTest) -> None:
    """A loss or gradient that is not finite, on any rank, skips the step on all and changes nothing.

    Why: one bad sample must not end a run, and one rank must not step alone.
    Look at: ``nan_to_num`` and filters that hide non-finite values from the norm; loss scalers that skip
    or rescale on their own; gradients that survive the skipped step; an Adam step count that advances
    without one.
    """
    config = replace(DECAYING, max_grad_norm=None)
    data = subject.data()
    batch = data.batch()
    poisoned = batch["advantages"].clone()
    poisoned[int(batch.loss_mask.nonzero()[-1])] = math.nan
    group = subject.start(optimizer=optimizer_config(config))
    group.train_batch(subject.data(seed=1).batch(), LOSS.spec(), ONE_PASS)
    before = state(group)
    for value in (math.nan, math.inf):
        bad = batch.with_tokens(advantages=torch.where(poisoned.isnan(), value, poisoned))
        reported = group.train_batch(bad, LOSS.spec(), MicroBatchSpec(count=3))
        subject.require(reported["update_successful"] == 0.0, f"a loss of {value} made an update: {reported}")
    reported = group.train_batch(batch, InfiniteGradientLoss().spec(), ONE_PASS)
    subject.require(reported["update_successful"] == 0.0, f"an infinite gradient made an update: {reported}")
    verify_state(subject, "after skipped steps", group, before)
    subject.require(group.progress.updates == 1, f"skipped steps count as updates: {group.progress}")
    shadow = Shadow.of(group, config)
    shadow.train(subject, group, [batch], LOSS.spec(), TWO)
    shadow.verify(subject, group, "after a step that follows skipped ones")


@check("I16.all-masked", each="layout", any_model=True)
def all_masked_skips_the_step(subject: EngineUnderTest) -> None:
    """A batch without a trained token skips the step, reports it, and changes nothing.

    Why: a weight of zero divides by zero, and decay or old moments would move the weights.
    Look at: nothing of the engine's, unless a pass with a zero loss fails or leaves gradients behind.
    """
    group = subject.start(optimizer=optimizer_config(DECAYING))
    group.train_batch(subject.data(seed=1).batch(), LOSS.spec(), ONE_PASS)
    before = state(group)
    reported = group.train_batch(subject.data().without_mask().batch(), LOSS.spec(), TWO)
    subject.require(reported["update_successful"] == 0.0, f"an all-masked batch made an update: {reported}")
    verify_state(subject, "after an all-masked batch", group, before)


@check("I1.training", each="layout", on_three_ranks=True)
def training_follows_the_oracle(subject: EngineUnderTest) -> None:
    """Several steps of ``train_batch`` go the oracle's way: the loss and norm of each, and the last weights.

    Nothing is exported before the end, as in a real run.

    Why: some bugs show from the second step on: a schedule that is advanced twice (slime #1152), a clip scale or
    gradients of the step before; and stale weights that an export in between would refresh.
    Look at: the first step that is off. If all losses and norms are right, look at the optimizer:
    I20.adamw and I4.clipping show it alone, with exports between the steps.
    """
    training = training_of(subject)
    expected = expected_training(subject, training)
    trained = train_end_to_end(subject, training)
    for step, report in enumerate(trained.reports):
        for name, key, value, allowed in expected.of_step(step):
            subject.verify_scalar(f"the {name} of step {step}", report[key], value, allowed)
    verify_rates(subject, training, trained)
    start = subject.expected.oracle(subject.model()).parameters()
    label = f"weights after {len(trained.reports)} steps without an export"
    subject.verify_named(label, trained.weights, expected.truth.weights, expected.weights, since=start)
