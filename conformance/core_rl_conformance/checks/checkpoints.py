"""Checkpoints: training goes on as if nothing had happened, here, on other ranks, and in another engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engines.meta import CheckpointFormat, SaveLoadMeta, TensorKind
from core_rl.engines.spec import Capability, EngineSpec
from core_rl.errors import CheckpointDamaged
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.diagnose import same_named
from core_rl_conformance.losses import TokenMeanLoss
from core_rl_conformance.oracle import AdamW
from core_rl_conformance.reference import SPEC as REFERENCE
from core_rl_conformance.subject import Subject
from core_rl_conformance.tiny_models import TinyModel
from core_rl_conformance.training import Shadow, optimizer_config, verify_outputs

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)
OPTIMIZER = AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)
TOTAL_STEPS = 8
KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")


def _start(
    subject: Subject,
    model: TinyModel,
    *,
    layout: ParallelLayout | None = None,
    spec: EngineSpec | None = None,
    frozen: Sequence[str] = (),
) -> EngineGroup:
    optimizer = optimizer_config(OPTIMIZER, TOTAL_STEPS)
    return subject.start(model, layout=layout, spec=spec, optimizer=optimizer, frozen=frozen)


def _elsewhere(model: TinyModel) -> TinyModel:
    """The same architecture with other weights: whatever a load leaves out shows."""
    return replace(model, seed=model.seed + 100)


def _train(group: EngineGroup, subject: Subject, steps: Sequence[int]) -> list[dict[str, float]]:
    """One update for each number, which picks its batch; the learning rate falls."""
    reports = []
    for step in steps:
        reports.append(group.train_batch(subject.data(seed=step).batch(), LOSS.spec(), TWO))
        group.lr_scheduler_step()
    return reports


def _state(group: EngineGroup) -> dict[TensorKind, dict[str, Tensor]]:
    return {kind: group.named_tensors(kind) for kind in KINDS}


def _verify_state(
    subject: Subject, what: str, group: EngineGroup, expected: Mapping[TensorKind, Mapping[str, Tensor]]
) -> None:
    for kind, tensors in expected.items():
        subject.verify(same_named(f"{kind} {what}", group.named_tensors(kind), tensors))


def _meta(path: Path, format_: CheckpointFormat) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), format=format_)


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
    group = _start(subject, model)
    _train(group, subject, [0, 1])
    group.set_version(7)
    group.save(_meta(subject.directory("checkpoint"), "sharded"))
    reports = _train(group, subject, [2, 3])
    expected, progress = _state(group), group.progress
    group = _start(subject, _elsewhere(model))
    _train(group, subject, [5])
    group.load(_meta(subject.directory("checkpoint"), "sharded"))
    subject.require(
        group.get_version() == 7, f"the version is {group.get_version()} after a load; it was saved as 7"
    )
    again = _train(group, subject, [2, 3])
    subject.require(
        again == reports,
        f"the steps after the load report {again}; without the interruption it was {reports}",
    )
    _verify_state(subject, "after resuming", group, expected)
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
    group = _start(subject, model, frozen=["*.0.*"])
    _train(group, subject, [0])
    group.save(_meta(subject.directory("first"), "sharded"))
    _train(group, subject, [1, 2])
    expected = _state(group)
    for step, name in ((1, "first"), (2, "second")):
        group = _start(subject, _elsewhere(model), frozen=["*.0.*"])
        group.load(_meta(subject.directory(name), "sharded"))
        _train(group, subject, [step])
        group.save(_meta(subject.directory("second"), "sharded"))
    _verify_state(subject, "after resuming twice", group, expected)


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
    group = _start(subject, model)
    _train(group, subject, [0, 1])
    group.save(_meta(subject.directory("checkpoint"), "sharded"))
    expected, progress = _state(group), group.progress
    group = _start(subject, _elsewhere(model), layout=other)
    group.load(_meta(subject.directory("checkpoint"), "sharded"))
    what = f"loaded on {other}"
    _verify_state(subject, what, group, expected)
    subject.require(
        group.progress == progress, f"the progress {what} is {group.progress}; expected {progress}"
    )
    _verify_next_steps(subject, group, model, what)


def _verify_next_steps(subject: Subject, group: EngineGroup, model: TinyModel, what: str) -> None:
    """Go on from the loaded state beside a float64 AdamW that starts from it."""
    shadow = Shadow.of(group, OPTIMIZER, TOTAL_STEPS)
    shadow.train(subject, group, [subject.data(seed=seed).batch() for seed in (2, 3)], LOSS.spec(), TWO)
    shadow.verify(subject, group, f"two steps after it was {what}")
    verify_outputs(subject, group, model, f"two steps after it was {what}")


@check("I11.portable-to-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def reference_goes_on_from_a_portable_checkpoint(subject: Subject) -> None:
    """The reference engine loads what this engine saved as ``portable``, bit for bit, and trains on.

    Why: moving a run to another backend must not lose the optimizer (NeMo-RL #3171), nor round weights.
    Look at: ``named_tensors`` of ``master`` (float32, not the compute dtype), ``exp_avg`` and ``exp_avg_sq``.
    """
    _verify_portable(subject, (subject.spec, subject.layout), (REFERENCE, ParallelLayout()))


@check("I11.portable-from-reference", requires=[Capability.PORTABLE_CHECKPOINT])
def engine_goes_on_from_a_portable_checkpoint(subject: Subject) -> None:
    """This engine loads what the reference engine saved as ``portable``, bit for bit, and trains on.

    Why: a load that fills the weights and leaves the optimizer's own copies is undone by the next step
    (NeMo-RL #2372).
    Look at: ``_load_named_tensors``, which sets master weights and compute copies, and ``_set_update_count``.
    """
    _verify_portable(subject, (REFERENCE, ParallelLayout()), (subject.spec, subject.layout))


def _verify_portable(
    subject: Subject, source: tuple[EngineSpec, ParallelLayout], target: tuple[EngineSpec, ParallelLayout]
) -> None:
    model = subject.model()
    group = _start(subject, model, spec=source[0], layout=source[1])
    _train(group, subject, [0, 1])
    group.set_version(5)
    group.save(_meta(subject.directory("portable"), "portable"))
    expected, progress = _state(group), group.progress
    group = _start(subject, _elsewhere(model), spec=target[0], layout=target[1])
    group.load(_meta(subject.directory("portable"), "portable"))
    what = f"moved from {source[0].name!r} to {target[0].name!r}"
    _verify_state(subject, what, group, expected)
    subject.require(
        group.progress == progress, f"the progress {what} is {group.progress}; expected {progress}"
    )
    _verify_next_steps(subject, group, model, what)


@check("I11.damaged", requires=[Capability.SHARDED_CHECKPOINT], each="layout")
def damaged_checkpoint_is_refused(subject: Subject) -> None:
    """A checkpoint with a changed byte or a missing file is refused, and the engine stays as it was.

    Why: a truncated file that loads halfway is a run that silently begins with noise.
    Look at: files that ``_save_shards`` writes outside the directory it is given.
    """
    path = subject.directory("checkpoint")
    group = _start(subject, subject.model())
    _train(group, subject, [0])
    group.save(_meta(path, "sharded"))
    _train(group, subject, [1])
    before = _state(group)
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    for what, damage in (("a changed byte", bytes(content)), ("a missing file", None)):
        largest.unlink()
        if damage is not None:
            largest.write_bytes(damage)
        _verify_refused(subject, group, path, what)
        _verify_state(subject, f"after {what} was refused", group, before)
        largest.write_bytes(bytes(content))


def _verify_refused(subject: Subject, group: EngineGroup, path: Path, what: str) -> None:
    try:
        group.load(_meta(path, "sharded"))
    except CheckpointDamaged:
        return
    raise AssertionError(
        subject.explained(f"a checkpoint with {what} was loaded; expected CheckpointDamaged")
    )
