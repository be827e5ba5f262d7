"""Checkpoints for other engines, without the optimizer, and damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from core_rl.launch.group import EngineGroup
from core_rl.reference import SPEC as REFERENCE
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.procedures import moving
from core_rl_conformance.profile import Setting

ONE_RANK = Setting(layout=ParallelLayout())


@check("I11.portable-to-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def reference_goes_on_from_a_portable_checkpoint(subject: EngineUnderTest) -> None:
    """The reference engine loads what this engine saved as ``portable``, bit for bit, and trains on.

    Why: moving a run to another backend must not lose the optimizer (NeMo-RL #3171), nor round weights.
    Look at: ``named_tensors`` of ``master`` (float32, not the compute dtype), ``exp_avg`` and ``exp_avg_sq``.
    If only the steps after the move differ, its optimizer does: see I20.adamw and the ``lr`` of ``TrainBackend.step``.
    """
    _verify_portable(subject, (subject.spec, subject.case.setting), (REFERENCE, ONE_RANK))


@check("I11.portable-from-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def engine_goes_on_from_a_portable_checkpoint(subject: EngineUnderTest) -> None:
    """This engine loads a checkpoint of the reference engine, saved as ``portable``, bit for bit, and trains on.

    Why: a load that fills the weights and leaves the optimizer's own copies is undone by the next step
    (NeMo-RL #2372).
    Look at: ``ShardedState.local``, whose master weights are written, and ``TrainBackend.after_load``, which sets
    compute copies. If only the steps after the move differ, the optimizer does: see I20.adamw and the ``lr`` of
    ``TrainBackend.step``.
    """
    _verify_portable(subject, (REFERENCE, ONE_RANK), (subject.spec, subject.case.setting))


def _verify_portable(
    subject: EngineUnderTest, source: tuple[EngineSpec, Setting], target: tuple[EngineSpec, Setting]
) -> None:
    model = subject.model()
    group = moving.start(subject, model, spec=source[0], layout=source[1])
    moving.train(group, subject, [0, 1])
    saved = moving.saved_portable(subject, group, "portable")
    group = moving.start(subject, moving.elsewhere(model), spec=target[0], layout=target[1])
    moving.verify_goes_on(
        subject, group, model, saved, f"moved from {source[0].name!r} to {target[0].name!r}"
    )


@check("I11.portable-round-trip", requires=[Capability.PORTABLE_CHECKPOINT], each="layout")
def portable_checkpoints_come_back(subject: EngineUnderTest) -> None:
    """A fresh engine of the same kind continues bitwise from ``portable``: with a value head, and frozen parameters.

    Why: loading by name leaves out special tensors: a head on the model, or moments that only some parameters have. A
    language model with all parameters trained never shows it. Without the capability, the check runs without the
    head, or without frozen parameters.
    Look at: the names of ``exp_avg`` and ``exp_avg_sq``: names of trained parameters, ``score.weight`` among them.
    """
    head: Head = "value" if subject.spec.supports(Capability.VALUE_HEAD) else "lm"
    frozen = [subject.first_layer] if subject.spec.supports(Capability.FROZEN_PARAMETERS) else []
    model = subject.model(head=head)
    group = moving.start(subject, model, frozen=frozen)
    moving.train(group, subject, [0, 1], head)
    saved = moving.saved_portable(subject, group, "portable")
    reports = moving.train(group, subject, [2, 3], head)
    expected = moving.state(group)
    group = moving.start(subject, moving.elsewhere(model), frozen=frozen)
    moving.train(group, subject, [5], head)
    group.load(moving.meta(saved.path, "portable"))
    moving.verify_state(subject, "after the load", group, saved.state)
    moving.verify_steps(subject, 2, moving.train(group, subject, [2, 3], head), reports)
    moving.verify_state(subject, "after resuming", group, expected)


@check("I11.weights-only", requires=[Capability.SHARDED_CHECKPOINT], each="layout")
def weights_are_saved_and_loaded_alone(subject: EngineUnderTest) -> None:
    """``with_optimizer=False`` loads weights, and neither moments nor progress; saved so, there are no moments to load.

    Why: a policy that begins from another run's weights must not inherit its momentum, and a load with promised
    but missing moments must fail.
    Look at: the kinds that ``TrainBackend.after_load`` gets.
    """
    model = subject.model()
    source = moving.start(subject, model)
    moving.train(source, subject, [0, 1])
    weights: moving.State = {"master": source.named_tensors("master")}
    names = moving.formats(subject)
    paths = {name: (subject.directory(f"{name}-full"), subject.directory(f"{name}-bare")) for name in names}
    for name, (full, bare) in paths.items():
        source.save(moving.meta(full, name))
        source.save(replace(moving.meta(bare, name), with_optimizer=False))
        sizes = _size(full), _size(bare)
        subject.require(
            sizes[1] < sizes[0],
            f"saved as {name!r} with_optimizer=False has {sizes[1]} bytes, and {sizes[0]} with the optimizer: "
            "moments are saved all the same",
        )
    group = moving.start(subject, moving.elsewhere(model))
    for name, (full, bare) in paths.items():
        moving.train(group, subject, [5])
        before, progress = moving.state(group), group.progress
        _verify_refused(subject, group, moving.meta(bare, name), CheckpointMismatch, "no moments")
        moving.verify_state(subject, f"after {name!r} without moments was refused", group, before)
        for path in (full, bare):
            group.load(replace(moving.meta(path, name), with_optimizer=False))
            label = f"after {name!r} was loaded with_optimizer=False"
            moving.verify_state(subject, label, group, {**before, **weights})
            moving.verify_progress(subject, label, group, progress)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@check("I11.damaged", requires=[Capability.SHARDED_CHECKPOINT], each="layout")
def damaged_checkpoint_is_refused(subject: EngineUnderTest) -> None:
    """A checkpoint with a changed byte or a missing file is refused, and the engine stays as it was.

    Why: a truncated file that loads halfway is a run that silently begins with noise.
    Look at: files that the engine writes outside the directory it is given.
    """
    path = subject.directory("checkpoint")
    group = moving.start(subject, subject.model())
    moving.train(group, subject, [0])
    group.save(moving.meta(path, "sharded"))
    moving.train(group, subject, [1])
    before = moving.state(group)
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    for label, damage in (("a changed byte", bytes(content)), ("a missing file", None)):
        largest.unlink()
        if damage is not None:
            largest.write_bytes(damage)
        _verify_refused(subject, group, moving.meta(path, "sharded"), CheckpointDamaged, label)
        moving.verify_state(subject, f"after {label} was refused", group, before)
        largest.write_bytes(bytes(content))


def _verify_refused(
    subject: EngineUnderTest, group: EngineGroup, label: SaveLoadMeta, error: type[CheckpointError], flaw: str
) -> None:
    problem = f"a {label.format!r} checkpoint with {flaw} was loaded; expected {error.__name__}"
    subject.require_error(error, lambda: group.load(label), problem)
