"""Steps after each change of an engine's mode: passes, moves, saves, loads and weight syncs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sync_meta
from core_rl_conformance.procedures.training import Shadow

LOSS = moving.LOSSES["lm"]
Change = tuple[str, Callable[[], object]]
"""A call that leaves weights and moments as they are, and its name."""


@check("I20.mode-changes", each="layout")
def steps_after_mode_changes_are_adamws(subject: EngineUnderTest) -> None:
    """No pass, move, save or sync changes weights or moments, a load sets all weights, and the next step is AdamW's.

    Some parameters are frozen, where that is declared: a load sets them, and a step does not.

    Why: a load that skips frozen parameters leaves layers of two models; a save or a sync that unfreezes parameters,
    or moves the memory that the optimizer works on, shows only in the step after it (vllm #44371, NeMo-RL #2372).
    Look at: the calls that the message names, and what they leave changed: ``requires_grad``, the memory of weights
    and moments, compute copies.
    """
    model = subject.model()
    frozen = [subject.first_layer] if subject.spec.supports(Capability.FROZEN_PARAMETERS) else []
    group = moving.start(subject, model, frozen=frozen)
    names = group.named_tensors("master").keys() - group.named_tensors("exp_avg").keys()
    _step(subject, group, names, "of the first step")
    for changes in (_passes(subject, group), _saves(subject, group), _syncs(subject, group)):
        if labels := [_unchanged(subject, group, label, change) for label, change in changes]:
            _step(subject, group, names, f"of a step after {', '.join(labels)}")
    source = subject.expected.oracle(moving.elsewhere(model)).parameters()
    before = moving.state(group)
    expected = before | {"master": {name: value.float() for name, value in source.items()}}
    directory = subject.expected.models.directory(moving.elsewhere(model))
    group.load(moving.meta(directory, "hf"))
    label = "after load(format='hf')" + f", with {', '.join(frozen)} frozen" * bool(frozen)
    moving.verify_state(subject, label, group, expected, before)
    _step(subject, group, names, "of a step after load(format='hf')")


def _step(subject: EngineUnderTest, group: EngineGroup, frozen: Collection[str], label: str) -> None:
    """One step of the engine and of a float64 AdamW from the same state."""
    shadow = Shadow.of(group, moving.OPTIMIZER, moving.SCHEDULE, frozen)
    group.optimizer_zero_grad()
    group.forward_backward(subject.data(PROBE).batch(), LOSS.spec(), moving.TWO)
    shadow.step(subject, group, label)
    shadow.verify(subject, group, label)


def _unchanged(subject: EngineUnderTest, group: EngineGroup, label: str, change: Callable[[], object]) -> str:
    """Make a change, and require that weights and moments stay; its label."""
    expected = moving.state(group)
    change()
    moving.verify_state(subject, f"after {label}", group, expected)
    return label


def _passes(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    data = subject.data(PROBE).batch()
    yield "forward()", lambda: group.forward(data, ONE_PASS)
    yield "eval_batch()", lambda: group.eval_batch(data, LOSS.spec(), ONE_PASS)
    yield "save(format='hf')", partial(group.save, moving.meta(subject.directory("hf"), "hf"))
    if subject.spec.supports(Capability.OFFLOAD):
        yield "offload() and onload()", lambda: moving.offload_and_onload(subject, group)


def _saves(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    for name in moving.formats(subject):
        meta = moving.meta(subject.directory(name), name)
        yield f"save(format={name!r})", partial(group.save, meta)
        for turn in ("", " the second time"):
            yield f"load(format={name!r}){turn}", partial(group.load, meta)


def _syncs(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    if subject.spec.supports(Capability.SYNC_DISK):
        update = WeightUpdateMeta(version=1, path=str(subject.directory("sync")))
        yield "a sync by disk", partial(group.upload_weights, update)
    if subject.spec.supports(Capability.SYNC_TENSOR):
        yield "a sync by tensor", partial(caught, group, sync_meta(subject, "tensor", 1, LARGE_BUCKET))
