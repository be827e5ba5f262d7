"""Checkpoints: training goes on as if nothing had happened, here, on other ranks, and in another engine."""

from __future__ import annotations

from pathlib import Path

from core_rl.config.layout import ParallelLayout
from core_rl.engines.spec import Capability, EngineSpec
from core_rl.errors import CheckpointDamaged
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.procedures.moving import (
    elsewhere,
    meta,
    saved_portable,
    start,
    state,
    train,
    verify_goes_on,
    verify_next_steps,
    verify_state,
)
from core_rl_conformance.reference import SPEC as REFERENCE
from core_rl_conformance.subject import Subject


@check("I11.resume", requires=[Capability.SHARDED_CHECKPOINT])
def resume_is_bitwise(subject: Subject) -> None:
    """Steps, save, load into a fresh engine, as many steps again: bitwise what all of them give, with dropout.

    Why: moments that are dropped without a word (AReaL #1468), a scheduler that is not restored or
    advanced twice (NeMo-RL #3171, slime #1152; a constant learning rate hides it), random state that
    starts again.
    Look at: ``_save_shards``/``_load_shards``: master weights, both moments, the step count of the bias
    correction (``_set_update_count``), the random state of every rank.
    """
    model = subject.model(dropout=0.1)
    group = start(subject, model)
    train(group, subject, [0, 1])
    group.set_version(7)
    group.save(meta(subject.directory("checkpoint"), "sharded"))
    saved = state(group)
    reports = train(group, subject, [2, 3])
    expected, progress = state(group), group.progress
    group = start(subject, elsewhere(model))
    train(group, subject, [5])
    group.load(meta(subject.directory("checkpoint"), "sharded"))
    subject.require(
        group.get_version() == 7, f"the version is {group.get_version()} after a load; it was saved as 7"
    )
    verify_state(subject, "after the load", group, saved)
    again = train(group, subject, [2, 3])
    subject.require(
        again == reports,
        f"the steps after the load report {again}; without the interruption it was {reports}",
    )
    verify_state(subject, "after resuming", group, expected)
    subject.require(group.progress == progress, f"the progress is {group.progress}; expected {progress}")


@check(
    "I11.resume-frozen", requires=[Capability.SHARDED_CHECKPOINT, Capability.FROZEN_PARAMETERS], each="layout"
)
def resume_with_frozen_parameters_is_bitwise(subject: Subject) -> None:
    """The same with frozen parameters, which have no moments, and twice in a row.

    Why: optimizer states that are matched by position go to the wrong parameters as soon as some have none.
    Look at: how moments find their parameter: by name.
    """
    model = subject.model()
    group = start(subject, model, frozen=["*.0.*"])
    train(group, subject, [0])
    group.save(meta(subject.directory("first"), "sharded"))
    train(group, subject, [1, 2])
    expected = state(group)
    for step, name in ((1, "first"), (2, "second")):
        group = start(subject, elsewhere(model), frozen=["*.0.*"])
        group.load(meta(subject.directory(name), "sharded"))
        train(group, subject, [step])
        group.save(meta(subject.directory("second"), "sharded"))
    verify_state(subject, "after resuming twice", group, expected)


@check("I11.other-layout", requires=[Capability.SHARDED_CHECKPOINT, Capability.DATA_PARALLEL], min_layouts=2)
def resume_on_another_layout(subject: Subject) -> None:
    """What one layout saved, another loads: the same weights and moments, and the next steps are AdamW's.

    Why: a resharded checkpoint that loses a rank's padding, or moments that stay where they were saved
    (AReaL #1470).
    Look at: offsets of shards in the full tensor, and uneven shards of sizes that divide by nothing.
    """
    model = subject.model()
    other = subject.case.other_layout
    assert other is not None  # the check asks for a profile with two
    group = start(subject, model)
    train(group, subject, [0, 1])
    group.save(meta(subject.directory("checkpoint"), "sharded"))
    expected, progress = state(group), group.progress
    group = start(subject, elsewhere(model), layout=other)
    group.load(meta(subject.directory("checkpoint"), "sharded"))
    what = f"loaded on {other}"
    verify_state(subject, what, group, expected)
    subject.require(
        group.progress == progress, f"the progress {what} is {group.progress}; expected {progress}"
    )
    verify_next_steps(subject, group, model, what)


@check("I11.portable-to-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def reference_goes_on_from_a_portable_checkpoint(subject: Subject) -> None:
    """The reference engine loads what this engine saved as ``portable``, bit for bit, and trains on.

    Why: moving a run to another backend must not lose the optimizer (NeMo-RL #3171), nor round weights.
    Look at: ``named_tensors`` of ``master`` (float32, not the compute dtype), ``exp_avg`` and ``exp_avg_sq``.
    If only the steps after the move differ, its optimizer does: see I20.adamw and ``_set_lr``.
    """
    _verify_portable(subject, (subject.spec, subject.layout), (REFERENCE, ParallelLayout()))


@check("I11.portable-from-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def engine_goes_on_from_a_portable_checkpoint(subject: Subject) -> None:
    """This engine loads what the reference engine saved as ``portable``, bit for bit, and trains on.

    Why: a load that fills the weights and leaves the optimizer's own copies is undone by the next step
    (NeMo-RL #2372).
    Look at: ``_load_named_tensors``, which sets master weights and compute copies, and ``_set_update_count``.
    If only the steps after the move differ, the optimizer does: see I20.adamw and ``_set_lr``.
    """
    _verify_portable(subject, (REFERENCE, ParallelLayout()), (subject.spec, subject.layout))


def _verify_portable(
    subject: Subject, source: tuple[EngineSpec, ParallelLayout], target: tuple[EngineSpec, ParallelLayout]
) -> None:
    model = subject.model()
    group = start(subject, model, spec=source[0], layout=source[1])
    train(group, subject, [0, 1])
    saved = saved_portable(subject, group, "portable")
    group = start(subject, elsewhere(model), spec=target[0], layout=target[1])
    verify_goes_on(subject, group, model, saved, f"moved from {source[0].name!r} to {target[0].name!r}")


@check("I11.damaged", requires=[Capability.SHARDED_CHECKPOINT], each="layout")
def damaged_checkpoint_is_refused(subject: Subject) -> None:
    """A checkpoint with a changed byte or a missing file is refused, and the engine stays as it was.

    Why: a truncated file that loads halfway is a run that silently begins with noise.
    Look at: files that ``_save_shards`` writes outside the directory it is given.
    """
    path = subject.directory("checkpoint")
    group = start(subject, subject.model())
    train(group, subject, [0])
    group.save(meta(path, "sharded"))
    train(group, subject, [1])
    before = state(group)
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    for what, damage in (("a changed byte", bytes(content)), ("a missing file", None)):
        largest.unlink()
        if damage is not None:
            largest.write_bytes(damage)
        _verify_refused(subject, group, path, what)
        verify_state(subject, f"after {what} was refused", group, before)
        largest.write_bytes(bytes(content))


def _verify_refused(subject: Subject, group: EngineGroup, path: Path, what: str) -> None:
    try:
        group.load(meta(path, "sharded"))
    except CheckpointDamaged:
        return
    raise AssertionError(
        subject.explained(f"a checkpoint with {what} was loaded; expected CheckpointDamaged")
    )
