"""Training runs that resume from a checkpoint, for checks of one engine and of two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_rl.backend.meta import CheckpointFormat, EngineProgress, SaveLoadMeta, TensorKind
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import CheckLoss, RewardLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_conformance.profile import Setting
from core_rl_oracle.media import model_class
from core_rl_oracle.on_disk import copied
from core_rl_oracle.oracle import AdamW, Schedule

LOSSES: Mapping[Head, CheckLoss] = {
    "lm": TokenMeanLoss(temperature=0.8),
    "value": ValueLoss(),
    "reward": RewardLoss(),
}
TWO = MicroBatchSpec(count=2)
OPTIMIZER = AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)
SCHEDULE = Schedule(type="linear", total_steps=8)
KINDS: tuple[TensorKind, ...] = ("master", "exp_avg", "exp_avg_sq")
FORMATS: Mapping[CheckpointFormat, Capability] = {
    "sharded": Capability.SHARDED_CHECKPOINT,
    "portable": Capability.PORTABLE_CHECKPOINT,
}

State = Mapping[TensorKind, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint, and the state of the engine that wrote it."""

    path: Path
    state: State
    progress: EngineProgress
    names: frozenset[str]
    """All weights and buffers."""


def start(
    subject: EngineUnderTest,
    model: TinyModel,
    *,
    layout: ParallelLayout | Setting | None = None,
    spec: EngineSpec | None = None,
    frozen: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    config: AdamW = OPTIMIZER,
) -> EngineGroup:
    """The engine with an optimizer whose learning rate falls, and with ``changes`` of its config."""
    optimizer = optimizer_config(config, SCHEDULE)
    return subject.start(model, layout=layout, spec=spec, optimizer=optimizer, frozen=frozen, changes=changes)


def elsewhere(model: TinyModel) -> TinyModel:
    """The same architecture with other weights: whatever a load leaves out shows."""
    return replace(model, seed=model.seed + 100)


def train(
    group: EngineGroup, subject: EngineUnderTest, steps: Sequence[int], head: Head = "lm"
) -> list[dict[str, float]]:
    """One update of a model with this ``head`` for each number, which picks its batch; the learning rate falls."""
    reports = []
    for step in steps:
        reports.append(group.train_batch(subject.data(seed=step).batch(), LOSSES[head].spec(), TWO))
        group.lr_scheduler_step()
    return reports


def state(group: EngineGroup, kinds: Sequence[TensorKind] = KINDS) -> dict[TensorKind, dict[str, Tensor]]:
    """Weights and both moments, or tensors of other ``kinds``; large ones in files."""
    return {
        kind: {name: copied(value) for name, value in group.named_tensors(kind).items()} for kind in kinds
    }


def meta(path: Path, format_: CheckpointFormat) -> SaveLoadMeta:
    """The path and the format of a save or load."""
    return SaveLoadMeta(path=str(path), format=format_)


def offload_and_onload(subject: EngineUnderTest, group: EngineGroup, expected: State | None = None) -> None:
    """To the host and back, where ``offload`` is declared; then require the weights and moments ``expected``."""
    if not subject.spec.supports(Capability.OFFLOAD):
        return
    group.offload()
    group.onload()
    if expected is not None:
        verify_state(subject, "after offload() and onload()", group, expected)


def verify_resume(
    subject: EngineUnderTest,
    start_with: Callable[[TinyModel], EngineGroup],
    model: TinyModel,
    forms: Sequence[CheckpointFormat],
    steps: Sequence[int] = (2, 3),
    *,
    kinds: Sequence[TensorKind] = KINDS,
    dropout: bool = False,
) -> State:
    """Require of each of ``forms`` that a fresh engine which loads it takes ``steps`` as the engine that saved it.

    ``start_with`` gives an engine with the weights of a model. Before each step and after the second there is a save.
    Tensors of ``kinds``, progress and version are equal bit for bit; nor does an offload change the tensors. With
    ``dropout`` no steps follow ``portable``, which has no random state. Returns the saved tensors.
    """
    dropout = dropout or model.dropout > 0
    group = start_with(model)
    group.set_version(7)
    offload_and_onload(subject, group)
    for step in (0, 1):
        group.save(meta(subject.directory(f"before-{step}"), forms[0]))
        train(group, subject, [step], model.head)
    for form in forms:
        group.save(meta(subject.directory(form), form))
    saved, progress = state(group, kinds), group.progress
    offload_and_onload(subject, group, saved)
    reports = train(group, subject, steps, model.head)
    expected, last = state(group, kinds), group.progress
    for form in forms:
        group = start_with(elsewhere(model))
        train(group, subject, [5], model.head)
        before = state(group, kinds)
        group.load(meta(subject.directory(form), form))
        label = f"after the load of {form!r}"
        verify_state(subject, label, group, saved, progress, since=before)
        if not (dropout and form == "portable"):
            got = train(group, subject, steps, model.head)
            verify_steps(subject, 2, got, reports, dropout=dropout)
            verify_state(subject, f"after resuming from {form!r}", group, expected, last)
    return saved


def weights_of(subject: EngineUnderTest, model: TinyModel) -> dict[str, Tensor]:
    """The weights in the files of ``model``, float32."""
    return {name: value.float() for name, value in subject.expected.oracle(model).parameters().items()}


def load_weights(subject: EngineUnderTest, group: EngineGroup, model: TinyModel) -> None:
    """Load the files of ``model``."""
    group.load(meta(subject.expected.models.directory(model), "hf"))


def verify_loads(subject: EngineUnderTest, model: TinyModel, path: Path) -> PreTrainedModel:
    """The export of ``model`` in ``path``, float32, which transformers loads without a remark."""
    loading: tuple[PreTrainedModel, dict[str, object]] = model_class(
        model.head, model.vision
    ).from_pretrained(path, output_loading_info=True, local_files_only=True, dtype=torch.float32)
    problems = {name: str(mismatch) for name, mismatch in loading[1].items() if mismatch}
    subject.require(not problems, f"transformers reports while loading the export: {problems}")
    return loading[0]


def saved_portable(subject: EngineUnderTest, group: EngineGroup, name: str) -> Saved:
    """Save as ``portable`` under ``name``; its version is 5."""
    path = subject.directory(name)
    group.set_version(5)
    group.save(meta(path, "portable"))
    names = frozenset((*group.tensor_shapes("master"), *group.tensor_shapes("buffers")))
    return Saved(path=path, state=state(group), progress=group.progress, names=names)


def verify_state(
    subject: EngineUnderTest,
    label: str,
    group: EngineGroup,
    expected: State,
    progress: EngineProgress | None = None,
    *,
    since: State | None = None,
) -> None:
    """Require that the engine's weights and moments are those, bit for bit, and its ``progress`` where that is given.

    ``since`` is the state before a load.
    """
    for kind, tensors in expected.items():
        before = None if since is None else since[kind]
        subject.verify_same(f"{kind} {label}", group.named_tensors(kind), tensors, before)
    got = group.progress
    problem = f"the progress {label} is {got}; expected {progress}"
    subject.require(progress in (None, got), problem)


def formats(subject: EngineUnderTest) -> list[CheckpointFormat]:
    """Formats with an optimizer that are declared: ``sharded`` and ``portable``."""
    return [format_ for format_, needed in FORMATS.items() if subject.spec.supports(needed)]


def verify_report(
    subject: EngineUnderTest,
    label: str,
    metrics: Mapping[str, float],
    expected: Mapping[str, float],
    otherwise: str,
) -> None:
    """Require that a step reports the same metrics as ``otherwise``, bit for bit."""
    mismatches = [name for name in expected if metrics.get(name) != expected[name]]
    subject.require(
        not mismatches,
        f"{label} reports {', '.join(f'{name} {metrics.get(name)!r}' for name in mismatches)}; {otherwise} "
        f"{', '.join(f'{name} {expected[name]!r}' for name in mismatches)}",
    )


def verify_steps(
    subject: EngineUnderTest,
    first: int,
    got: Sequence[Mapping[str, float]],
    expected: Sequence[Mapping[str, float]],
    *,
    dropout: bool = False,
) -> None:
    """Require that steps report the same metrics as without the interruption, bit for bit.

    ``first`` is the number of the first step. Loaded state is known to be equal, so the first number that
    differs names state missing from the checkpoint; random state only where there is ``dropout``.
    """
    for number, (ours, reference) in enumerate(zip(got, expected, strict=True), first):
        for name in (*reference, *sorted(set(ours) - set(reference))):
            if ours.get(name) != reference.get(name):
                problem = (
                    f"the state is equal after the load, and {name!r} of step {number} is {ours.get(name)!r}; "
                    f"without the interruption it is {reference.get(name)!r}: {_lacks(name, number == first, dropout)}"
                )
                raise AssertionError(subject.failure_message(problem))


def _lacks(name: str, at_once: bool, dropout: bool) -> str:
    """The likely cause of a difference between runs from the same weights and moments."""
    if name == "lr":
        return "the progress of the schedule"
    causes = ["random state of dropout"] * dropout
    if at_once:
        causes.append("gradients that were there before the load")
    else:
        causes.insert(0, "the update between, so the step count of the bias correction")
    return ", or ".join(causes)


def verify_file(subject: EngineUnderTest, model: TinyModel, saved: Saved) -> None:
    """Require that a portable checkpoint has the engine's state bit for bit, so that any engine can resume.

    Also that this is finite, and under the names that transformers writes.
    """
    written_names = TensorFiles(subject.expected.models.directory(model), "model").names()
    odd = sorted(saved.names.symmetric_difference(written_names))
    subject.require(not odd, f"names that only the engine or only transformers has: {', '.join(odd[:6])}")
    buffers = saved.names - saved.state["master"].keys()
    written = portable_tensors(saved.path)
    written["master"] = {name: value for name, value in written["master"].items() if name not in buffers}
    for kind, tensors in saved.state.items():
        broken = [name for name, value in tensors.items() if not bool(value.isfinite().all())]
        subject.require(not broken, f"{kind} is not finite: {', '.join(broken[:6])}")
        subject.verify_same(f"{kind} in the portable checkpoint", written[kind], tensors)
    saved_progress, expected = read_manifest(saved.path).state["progress"], asdict(saved.progress)
    subject.require(
        saved_progress == expected,
        f"the portable checkpoint holds the progress {saved_progress}; it is {expected}",
    )


def portable_tensors(path: Path) -> dict[TensorKind, dict[str, Tensor]]:
    """Tensors of a portable checkpoint by kind; buffers and carried tensors count as ``master``."""
    # torch.distributed.checkpoint takes a second to import.
    from core_rl.checkpoint.portable import DcpFiles, kind_and_name

    files = DcpFiles(path)
    tensors: dict[TensorKind, dict[str, Tensor]] = defaultdict(dict)
    for key in files.names():
        kind, name = kind_and_name(key)
        tensors[kind][name] = files.read(key)
    return tensors


def verify_goes_on(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, saved: Saved, label: str
) -> None:
    """Load ``saved``; require its very state and progress, and that the next steps are AdamW's."""
    before = state(group, list(saved.state))
    group.load(meta(saved.path, "portable"))
    verify_state(subject, label, group, saved.state, saved.progress, since=before)
    verify_next_steps(subject, group, model, label)


def verify_next_steps(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, label: str, config: AdamW = OPTIMIZER
) -> None:
    """Train from the loaded state, and compare with a float64 AdamW that starts from it."""
    negative = [name for name, value in group.named_tensors("exp_avg_sq").items() if bool((value < 0).any())]
    subject.require(
        not negative,
        f"second moments are negative, {label}: {', '.join(negative[:6])}; exp_avg_sq is a mean of squares: does "
        "the engine export exp_avg under its name?",
    )
    shadow = Shadow.of(group, config, SCHEDULE)
    shadow.train(
        subject, group, [subject.data(seed=seed).batch() for seed in (2, 3)], LOSSES[model.head].spec(), TWO
    )
    shadow.verify(subject, group, f"two steps after it was {label}")
    verify_outputs(subject, group, model, f"two steps after it was {label}")
