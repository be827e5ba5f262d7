"""Checkpoints in the engine's own format: training continues bitwise, on the same and on other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread
from unittest import mock

from core_rl.backend.meta import SaveLoadMeta
from core_rl.checkpoint import background
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.serving import verify_version

CHANGED = replace(moving.OPTIMIZER, betas=(0.7, 0.9), eps=1e-6, weight_decay=0.3)
"""The optimizer of an engine that continues from the checkpoint of another run."""


@check("I11.resume", requires=[Capability.SHARDED_CHECKPOINT])
def resume_is_bitwise(subject: EngineUnderTest) -> None:
    """Steps, save, load into a fresh engine, as many steps again: bitwise what all of them give, with dropout.

    Why: moments that are dropped without an error (AReaL #1468), a scheduler that is not restored or
    advanced twice (NeMo-RL #3171, slime #1152; a constant learning rate hides it), random state that
    starts again.
    Look at: ``ShardedState.local``: master weights and both moments; the ``count`` of ``TrainBackend.step``; the
    random state of every rank.
    """
    model = subject.model(dropout=0.1)
    group = moving.start(subject, model)
    moving.train(group, subject, [0, 1])
    group.set_version(7)
    group.save(moving.meta(subject.directory("checkpoint"), "sharded"))
    saved = moving.state(group)
    reports = moving.train(group, subject, [2, 3])
    expected, progress = moving.state(group), group.progress
    group = moving.start(subject, moving.elsewhere(model))
    moving.train(group, subject, [5])
    group.load(moving.meta(subject.directory("checkpoint"), "sharded"))
    verify_version(subject, group, 7, "after a load")
    moving.verify_state(subject, "after the load", group, saved)
    moving.verify_steps(subject, 2, moving.train(group, subject, [2, 3]), reports, dropout=True)
    moving.verify_state(subject, "after resuming", group, expected)
    moving.verify_progress(subject, "after resuming", group, progress)


@check(
    "I11.resume-frozen", requires=[Capability.SHARDED_CHECKPOINT, Capability.FROZEN_PARAMETERS], each="layout"
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
    moving.train(group, subject, [1, 2])
    expected = moving.state(group)
    for step, name in ((1, "first"), (2, "second")):
        group = moving.start(subject, moving.elsewhere(model), frozen=[subject.first_layer])
        group.load(moving.meta(subject.directory(name), "sharded"))
        moving.train(group, subject, [step])
        group.save(moving.meta(subject.directory("second"), "sharded"))
    moving.verify_state(subject, "after resuming twice", group, expected)


@check(
    "I11.resume-value-head", requires=[Capability.SHARDED_CHECKPOINT, Capability.VALUE_HEAD], each="layout"
)
def resume_with_a_value_head_is_bitwise(subject: EngineUnderTest) -> None:
    """The same with a value head, a tensor that the language model does not have, and its moments.

    They are also unchanged after ``offload()`` and ``onload()``, where ``offload`` is declared.
    Why: a critic whose head stays out of the checkpoint starts again from noise, and no actor shows it.
    Look at: whether the head is among the tensors of ``ShardedState.local``.
    """
    model = subject.model(head="value")
    group = moving.start(subject, model)
    moving.offload_and_onload(subject, group)
    moving.train(group, subject, [0, 1], "value")
    group.save(moving.meta(subject.directory("checkpoint"), "sharded"))
    saved = moving.state(group)
    moving.offload_and_onload(subject, group, saved)
    reports = moving.train(group, subject, [2], "value")
    expected = moving.state(group)
    group = moving.start(subject, moving.elsewhere(model))
    moving.train(group, subject, [5], "value")
    group.load(moving.meta(subject.directory("checkpoint"), "sharded"))
    moving.verify_state(subject, "after the load", group, saved)
    moving.verify_steps(subject, 2, moving.train(group, subject, [2], "value"), reports)
    moving.verify_state(subject, "after resuming", group, expected)


@check(
    "I11.other-layout",
    requires=[Capability.SHARDED_CHECKPOINT, Capability.RESHARDING, Capability.DATA_PARALLEL],
    min_layouts=2,
)
def resume_on_another_layout(subject: EngineUnderTest) -> None:
    """A checkpoint of one layout loads on another: same weights and moments, and the next steps are AdamW's.

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
    group.save(moving.meta(subject.directory("checkpoint"), "sharded"))
    expected, progress = moving.state(group), group.progress
    group = moving.start(subject, moving.elsewhere(model), layout=second, config=CHANGED)
    group.load(moving.meta(subject.directory("checkpoint"), "sharded"))
    label = f"loaded on {second}"
    moving.verify_state(subject, label, group, expected)
    moving.verify_progress(subject, label, group, progress)
    moving.verify_next_steps(subject, group, model, label, CHANGED)


@check("I11.asynchronous", requires=[Capability.SHARDED_CHECKPOINT], each="layout")
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
        state[name] = (moving.state(group), group.progress)
        later = replace(moving.meta(subject.directory(name), name), asynchronous=True)
        group.run(_save_and_train, later, [subject.data(seed=seed).batch() for seed in (2, 3)])
        group.wait_for_saves()
    group = moving.start(subject, moving.elsewhere(model))
    for name, (expected, progress) in state.items():
        group.load(moving.meta(subject.directory(name), name))
        label = f"loaded from a {name!r} checkpoint that was saved in the background"
        moving.verify_state(subject, label, group, expected)
        moving.verify_progress(subject, label, group, progress)


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
