"""Checkpoints: training resumes bitwise, on other layouts and engines; damaged files are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from unittest import mock

import torch

from core_rl.backend.meta import SaveLoadMeta
from core_rl.checkpoint import background
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from core_rl.launch.group import EngineGroup
from core_rl.reference import SPEC as REFERENCE
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import DEEP
from core_rl_conformance.procedures import moving
from core_rl_conformance.profile import Setting

ONE_RANK = Setting(layout=ParallelLayout())
CHANGED = replace(moving.OPTIMIZER, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.3)
"""The optimizer of an engine that continues from the checkpoint of another run."""


@check("I11.portable-to-reference", requires={Capability.PORTABLE_CHECKPOINT}, images=True)
def reference_goes_on_from_a_portable_checkpoint(subject: EngineUnderTest) -> None:
    """The reference engine loads what this engine saved as ``portable``, bit for bit, and trains on.

    Why: moving a run to another backend must not lose the optimizer (NeMo-RL #3171), nor round weights.
    Look at: ``named_tensors`` of ``master`` (float32, not the compute dtype), ``exp_avg`` and ``exp_avg_sq``.
    If only the steps after the move differ, its optimizer does: see I20.adamw and the ``lr`` of ``TrainBackend.step``.
    """
    _verify_portable(subject, (subject.spec, subject.case.setting), (REFERENCE, ONE_RANK))


@check("I11.portable-from-reference", requires={Capability.PORTABLE_CHECKPOINT})
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


@check("I11.portable-round-trip", requires={Capability.PORTABLE_CHECKPOINT}, each="layout")
def portable_checkpoints_come_back(subject: EngineUnderTest) -> None:
    """A fresh engine of the same kind continues bitwise from ``portable``: with a value head, and frozen parameters.

    Why: loading by name leaves out special tensors: a head on the model, or moments that only some parameters have. A
    language model with all parameters trained never shows it. Without the capability, the check runs without the
    head, or without frozen parameters.
    Look at: the names of ``exp_avg`` and ``exp_avg_sq``: names of trained parameters, ``score.weight`` among them.
    """
    head: Head = "value" if subject.spec.supports(Capability.VALUE_HEAD) else "lm"
    frozen = [subject.first_layer] if subject.spec.supports(Capability.FROZEN_PARAMETERS) else []
    start = partial(moving.start, subject, frozen=frozen)
    moving.verify_resume(subject, start, subject.model(head=head), ["portable"])


@check("I11.weights-only", requires={Capability.SHARDED_CHECKPOINT}, each="layout")
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
            moving.verify_state(subject, label, group, {**before, **weights}, progress)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@check("I11.damaged", requires={Capability.SHARDED_CHECKPOINT}, each="layout")
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


@check("I11.resume", requires={Capability.SHARDED_CHECKPOINT}, images=True, any_model=True)
def resume_is_bitwise(subject: EngineUnderTest) -> None:
    """Steps, three saves, load of the last into a fresh engine, steps again: bitwise what all give.

    With dropout, where it is declared.

    Why: moments that are dropped without an error (AReaL #1468), a scheduler that is not restored or
    advanced twice (NeMo-RL #3171, slime #1152; a constant learning rate hides it), random state that
    starts again.
    Look at: ``ShardedState.local``: master weights and both moments; the ``count`` of ``TrainBackend.step``; the
    random state of every rank.
    """
    model = subject.model(dropout=0.1, layers=DEEP)
    moving.verify_resume(subject, partial(moving.start, subject), model, ["sharded"])


@check(
    "I11.resume-frozen", requires={Capability.SHARDED_CHECKPOINT, Capability.FROZEN_PARAMETERS}, each="layout"
)
def resume_with_frozen_parameters_is_bitwise(subject: EngineUnderTest) -> None:
    """The same with frozen parameters, which have no moments, and twice in a row.

    Why: optimizer states that are matched by position go to the wrong parameters as soon as some have none.
    Look at: how moments find their parameter: by name.
    """
    model = subject.model()
    group = moving.start(subject, model, frozen=[subject.first_layer])
    moving.train(group, subject, [0])
    group.save(moving.meta(subject.directory("first"), "sharded"))
    saved = moving.state(group)
    moving.train(group, subject, [1, 2])
    expected = moving.state(group)
    for step, name in ((1, "first"), (2, "second")):
        group = moving.start(subject, moving.elsewhere(model), frozen=[subject.first_layer])
        before = moving.state(group)
        group.load(moving.meta(subject.directory(name), "sharded"))
        moving.verify_state(subject, "after the load", group, saved, since=before)
        moving.train(group, subject, [step])
        group.save(moving.meta(subject.directory("second"), "sharded"))
        saved = moving.state(group)
    moving.verify_state(subject, "after resuming twice", group, expected)


@check(
    "I11.resume-value-head", requires={Capability.SHARDED_CHECKPOINT, Capability.VALUE_HEAD}, each="layout"
)
def resume_with_a_value_head_is_bitwise(subject: EngineUnderTest) -> None:
    """The same with a value head, a tensor that the language model does not have, and its moments.

    They are also unchanged after ``offload()`` and ``onload()``, where ``offload`` is declared.
    Why: a critic whose head stays out of the checkpoint starts again from noise, and no actor shows it.
    Look at: whether the head is among the tensors of ``ShardedState.local``.
    """
    start = partial(moving.start, subject)
    moving.verify_resume(subject, start, subject.model(head="value"), ["sharded"], [2])


@check(
    "I11.other-layout",
    requires={Capability.SHARDED_CHECKPOINT, Capability.RESHARDING, Capability.DATA_PARALLEL},
    min_layouts=2,
    images=True,
)
def resume_on_another_layout(subject: EngineUnderTest) -> None:
    """A checkpoint of one layout loads on another: same weights and moments, and the next steps are AdamW's.

    From ``sharded``, and from ``portable`` where it is declared.
    These have the betas, epsilon and decay of the engine's own config, which differ from the checkpoint's.

    Why: a resharded checkpoint that loses a rank's padding, or moments that stay where they were saved
    (AReaL #1470); ``load_state_dict`` of an optimizer, which brings back the settings of the run before.
    Look at: offsets of shards in the full tensor, and uneven shards of sizes that divide by nothing. If only the steps
    are wrong: the optimizer's groups after a load.
    """
    model = subject.model()
    second = subject.case.other_setting
    assert second is not None  # the check asks for a profile with two
    group = moving.start(subject, model)
    moving.train(group, subject, [0, 1])
    forms = moving.formats(subject)
    for form in forms:
        group.save(moving.meta(subject.directory(form), form))
    expected, progress = moving.state(group), group.progress
    group = moving.start(subject, moving.elsewhere(model), layout=second, config=CHANGED)
    for form in forms:
        group.load(moving.meta(subject.directory(form), form))
        label = f"loaded on {second} from {form!r}"
        moving.verify_state(subject, label, group, expected, progress)
        if form == "sharded":
            moving.verify_next_steps(subject, group, model, label, CHANGED)


@check("I11.asynchronous", requires={Capability.SHARDED_CHECKPOINT}, each="layout")
def a_save_in_the_background_is_a_snapshot(subject: EngineUnderTest) -> None:
    """A save with ``asynchronous=True`` writes the state of that moment, although training continues at once.

    Why: a writer that still reads the live tensors mixes two steps in one checkpoint, and every digest is right.
    Look at: the snapshot of ``ShardedState.local``: copies, not views, of weights, moments and random state.
    """
    model = subject.model()
    group = moving.start(subject, model)
    moving.train(group, subject, [0, 1])
    state = {}
    for number, name in enumerate(moving.formats(subject)):
        group.set_version(7 + number)
        expected, progress = moving.state(group), group.progress
        background_save = replace(moving.meta(subject.directory(name), name), asynchronous=True)
        group.run(_save_and_train, background_save, [subject.data(seed=seed).batch() for seed in (2, 3)])
        group.wait_for_saves()
        state[name] = (expected, progress, group.named_tensors("master"))
    group = moving.start(subject, moving.elsewhere(model))
    for name, (expected, progress, later) in state.items():
        group.load(moving.meta(subject.directory(name), name))
        label = f"loaded from a {name!r} checkpoint that was saved in the background"
        is_live = all(torch.equal(value, later[key]) for key, value in group.named_tensors("master").items())
        subject.require(not is_live, f"weights {label} are those after the next steps: it holds no copies")
        moving.verify_state(subject, label, group, expected, progress)


def _save_and_train(engine: TrainEngine, later: SaveLoadMeta, batches: Sequence[SequenceBatch]) -> None:
    """Save on a rank as with a slow disk: its files are written after the steps, or when the engine waits for them."""
    stepped = Event()

    class LateThread(Thread):
        def run(self) -> None:
            stepped.wait()
            super().run()

        def join(self, timeout: float | None = None) -> None:
            stepped.set()
            super().join(timeout)

    try:
        with mock.patch.object(background, "Thread", LateThread):
            engine.save(later)
        for batch in batches:
            engine.train_batch(engine.shard_data(batch), TokenMeanLoss().spec(), MicroBatchSpec(count=1))
            engine.lr_scheduler_step()
    finally:
        stepped.set()
