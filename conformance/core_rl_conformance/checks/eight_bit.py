"""AdamW with moments of 8 bits: its steps, and checkpoints of them."""

from __future__ import annotations

from dataclasses import replace

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import MissingPackage
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_named
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.mixed import default_settings
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import MOMENTS, optimizer_config
from core_rl_conformance.profile import DENSE
from core_rl_oracle.eight_bit import share_of_values, with_rounding_to_codes
from core_rl_oracle.muon import MixedOptimizer, MixedState, mixed_tolerances
from core_rl_oracle.oracle import AdamW
from core_rl_oracle.tolerance import Tolerance

LOSS = TokenMeanLoss(temperature=0.8)
STEPS = 3
CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
VOCABULARY = 1024
"""Token ids: the embedding has 4,096 weights or more on each of some ranks, and blocks of 256 divide them."""
SMALLEST = 4096
"""Weights of one parameter on one rank, from which on moments are in 8 bits."""
MOST_VALUES = 0.9
"""The largest share of different values that moments of 8 bits have."""


@check("I20.8bit", requires=[Capability.ADAMW_8BIT], each="layout", families=DENSE)
def steps_with_8_bit_moments_are_those_of_adamw(subject: EngineUnderTest) -> None:
    """With ``optimizer.type = "adamw_8bit"``, a step is AdamW's from the moments before it; only their codes round.

    After the step, a moment differs from the exact one by at most half of the distance of two codes, in relation to the
    largest of its tensor. The embedding's moments have the values of 8 bits. The exported moments are in use.

    Why: a scale that is lost, codes with a sign for unsigned values, or moments that are rounded before they are used
    look like a smaller or noisier learning rate. An engine that keeps float32 saves nothing.
    Look at: when moments are rounded: after the update; blocks that end at the borders of this rank's parts; the codes
    of the second moment, which have no sign.
    """
    model = _wide(subject)
    group = _start(subject, model)
    settings = default_settings(group.named_tensors("master"), CONFIG.weight_decay)
    config = MixedOptimizer(adamw=CONFIG, settings=settings)
    for number in range(STEPS):
        _verify_step(subject, group, config, number)
    for kind in MOMENTS:
        large = {n: v for n, v in group.named_tensors(kind).items() if _coded(subject, v.numel())}
        plain = [name for name, value in large.items() if share_of_values(value) > MOST_VALUES]
        subject.require(not plain, f"{kind} of {', '.join(plain)} has more values than 8 bits do")


def _verify_step(subject: EngineUnderTest, group: EngineGroup, config: MixedOptimizer, number: int) -> None:
    before = moving.state(group)
    group.optimizer_zero_grad()
    group.forward_backward(subject.data(PROBE, number).batch(), LOSS.spec(), MicroBatchSpec(count=2))
    grads = group.named_tensors("grads")
    group.optimizer_step()
    moments = {kind: before[kind] for kind in MOMENTS}
    start = MixedState(params=before["master"], **moments, count=number)
    right = start.copied(config.dtype)
    config.step(right, grads, CONFIG.lr)
    allowed = mixed_tolerances(start, right, config, [grads], [CONFIG.lr])
    label = f"after step {number}"
    exported = group.named_tensors("master")
    subject.verify(
        compare_named(f"weights {label}", exported, right.params, allowed["params"], before["master"])
    )
    for kind in MOMENTS:
        exact = getattr(right, kind)
        limits = with_rounding_to_codes(kind, exact, allowed[kind])
        subject.verify(compare_named(f"{kind} {label}", group.named_tensors(kind), exact, limits))


@check("I11.resume-8bit", requires=[Capability.ADAMW_8BIT], each="layout", families=DENSE)
def resume_with_8_bit_moments_is_bitwise(subject: EngineUnderTest) -> None:
    """Training with moments of 8 bits continues bit for bit from ``sharded`` at the same layout, and after an offload.

    From ``portable``, which has them as float32, they are rounded to codes again: weights are equal, and moments differ
    by no more than that.

    Why: codes that are saved without their scales, or rounded again on the way, are near enough for no loss to show it.
    Look at: ``SupportsOpaqueState``: codes and scales of each part; the copies of an offload.
    """
    model = _wide(subject)
    group = _start(subject, model)
    moving.train(group, subject, [0, 1])
    # Declared by the engine, and not asked for above: without torchao, they are certified by other checks.
    names = moving.formats(subject)
    for format_ in names:
        group.save(moving.meta(subject.directory(format_), format_))
    saved = moving.state(group)
    moving.offload_and_onload(subject, group, saved)
    reports = moving.train(group, subject, [2, 3])
    expected = moving.state(group)
    group = _start(subject, moving.elsewhere(model))
    moving.train(group, subject, [5])
    if "portable" in names:
        group.load(moving.meta(subject.directory("portable"), "portable"))
        _verify_near(subject, group, saved)
    if "sharded" in names:
        group.load(moving.meta(subject.directory("sharded"), "sharded"))
        moving.verify_state(subject, "after the load of 'sharded'", group, saved)
        moving.verify_steps(subject, 2, moving.train(group, subject, [2, 3]), reports)
        moving.verify_state(subject, "after resuming from 'sharded'", group, expected)


def _verify_near(subject: EngineUnderTest, group: EngineGroup, saved: moving.State) -> None:
    label = "after the load of 'portable'"
    moving.verify_state(subject, label, group, {"master": saved["master"]})
    for kind in MOMENTS:
        exact = Tolerance(baseline=0.0, floor=0.0)
        limits = with_rounding_to_codes(kind, saved[kind], dict.fromkeys(saved[kind], exact))
        subject.verify(compare_named(f"{kind} {label}", group.named_tensors(kind), saved[kind], limits))


def _wide(subject: EngineUnderTest) -> TinyModel:
    return replace(subject.model(), vocabulary=VOCABULARY)


def _start(subject: EngineUnderTest, model: TinyModel) -> EngineGroup:
    """Raises `NotRun` where the package that rounds to codes is missing."""
    try:
        return subject.start(model, optimizer={**optimizer_config(CONFIG), "type": "adamw_8bit"})
    except MissingPackage as error:
        raise NotRun(str(error)) from error


def _coded(subject: EngineUnderTest, size: int) -> bool:
    """Whether a tensor of this ``size`` has moments of 8 bits, whatever the layout cuts it into."""
    return size >= SMALLEST * subject.layout.world_size
