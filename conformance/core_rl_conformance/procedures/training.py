"""Optimizer steps, compared with a float64 AdamW on the engine's own exported gradients.

The oracle's gradients would not do: in its first steps Adam is near the sign of the gradient, which
amplifies the noise of tiny ones and hides bugs in large ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import TensorKind
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.mistakes import Steps, compare_steps, explain_norm
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.trajectory import ExpectedTraining, Training
from core_rl_oracle.oracle import AdamW, OptimizerState, Schedule, grad_norm
from core_rl_oracle.plain_adamw import step_tolerances
from core_rl_oracle.tolerance import Tolerance, largest_difference

EngineTraining = Training[Ragged, CheckLoss]
CONSTANT = Schedule()
MOMENTS: tuple[TensorKind, ...] = ("exp_avg", "exp_avg_sq")
LOSS = TokenMeanLoss(temperature=0.8)
CUT = MicroBatchSpec(max_tokens=48)
LARGE = 1 << 16
"""More numbers than any tensor of a tiny model has."""
BATCHES = (0, 1, 0, 2)
"""The batch of each step; one comes again, as in a second epoch."""
CONFIG = AdamW(lr=0.2, betas=(0.8, 0.95), eps=0.1, weight_decay=0.01, max_grad_norm=0.5)
"""With a large epsilon an update is a smooth function of its gradient; clipping acts in every step."""


CLIPPED = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.02)
"""Clipped in every step, with an epsilon that makes the update depend on the scale."""


def optimizer_config(config: AdamW, schedule: Schedule = CONSTANT) -> dict[str, Any]:
    """``config`` and ``schedule`` as the ``optimizer`` section of an engine."""
    return {**asdict(config), "schedule": asdict(schedule)}


def rows_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and of those above `LARGE` numbers rows at equal distances: an optimizer step is elementwise."""
    return {
        name: value if value.numel() <= LARGE else value[:: math.ceil(value.numel() / LARGE)].clone()
        for name, value in tensors.items()
    }


@dataclass(kw_only=True)
class Shadow:
    """A float64 AdamW that takes every step that the engine takes."""

    config: AdamW
    state: OptimizerState
    """Names of the trained parameters."""
    schedule: Schedule = CONSTANT
    lr_steps: int = 0
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    """Frozen parameters, unchanged bit for bit."""
    clipping: AdamW | None = None
    """The config that clips by the norm of whole gradients, where ``state`` has rows of them; ``config`` has none."""
    _start: OptimizerState = field(init=False)
    _grads: list[Mapping[str, Tensor]] = field(default_factory=list)
    _rates: list[float] = field(default_factory=list)
    _weights: list[Mapping[str, Tensor]] = field(default_factory=list)
    """The engine's, after each step."""

    def __post_init__(self) -> None:
        self._start = self.state.copy()

    @staticmethod
    def of(
        group: EngineGroup, config: AdamW, schedule: Schedule = CONSTANT, frozen: Collection[str] = ()
    ) -> Shadow:
        """Begin where the engine is: its weights, moments and step counts; ``frozen`` names the unchanged
        parameters.
        """
        progress = group.progress
        master = group.named_tensors("master")
        trained = rows_of({name: value for name, value in master.items() if name not in frozen})
        whole = all(trained[name].numel() == master[name].numel() for name in trained)
        state = replace(OptimizerState.start(trained), count=progress.updates)
        for kind in MOMENTS:
            tensors = rows_of(group.named_tensors(kind))
            getattr(state, kind).update({name: tensors[name].double() for name in tensors if name in trained})
        return Shadow(
            config=config if whole else replace(config, max_grad_norm=None),
            clipping=None if whole else config,
            state=state,
            schedule=schedule,
            lr_steps=progress.lr_steps,
            frozen={name: value for name, value in master.items() if name in frozen},
        )

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.config.lr * self.schedule.factor(self.lr_steps)

    def train(
        self,
        subject: EngineUnderTest,
        group: EngineGroup,
        batches: Sequence[SequenceBatch],
        loss: LossSpec,
        mb_spec: MicroBatchSpec,
    ) -> None:
        """One step of both for each batch, then a step of the schedule; compare the reported metrics."""
        for number, batch in enumerate(batches):
            group.optimizer_zero_grad()
            group.forward_backward(batch, loss, mb_spec)
            self.step(subject, group, f"of step {number}")

    def step(self, subject: EngineUnderTest, group: EngineGroup, label: str) -> float:
        """One step of both with the gradients that the engine holds, then a step of the schedule. The reported norm."""
        grads = group.named_tensors("grads")
        odd = sorted(set(grads).symmetric_difference(self.state.params))
        subject.require(
            not odd, f"gradients {label}: not just the trained parameters have one: {', '.join(odd[:6])}"
        )
        broken = [name for name, grad in grads.items() if not bool(grad.isfinite().all())]
        subject.require(not broken, f"gradients {label} are not finite: {', '.join(broken[:6])}")
        reported = group.optimizer_step()
        norm, rows = grad_norm(grads), rows_of(grads)
        if self.clipping is not None:
            rows = {name: grad * self.clipping.clip_scale(norm) for name, grad in rows.items()}
        self.config.step(self.state, rows, self.rate)
        tolerance = Tolerance(baseline=0.0, floor=1e-6 * norm)
        subject.verify_scalar(
            f"the norm {label}",
            reported["grad_norm"],
            norm,
            tolerance,
            explain=partial(_explain_norm, reported["grad_norm"], grads, tolerance),
        )
        exact = Tolerance(baseline=0.0, floor=1e-12 * self.config.lr)
        subject.verify_scalar(f"the learning rate {label}", reported["lr"], self.rate, exact)
        subject.require(reported["update_successful"] == 1.0, f"the update {label} was not made: {reported}")
        self._grads.append(rows)
        self._rates.append(self.rate)
        self._weights.append(rows_of(group.named_tensors("master")))
        group.lr_scheduler_step()
        self.lr_steps += 1
        return reported["grad_norm"]

    def verify(self, subject: EngineUnderTest, group: EngineGroup, label: str) -> None:
        """Compare the engine's weights and moments with the float64 AdamW."""
        allowed = step_tolerances(
            self._start, self.state, self.config, self._grads, self._rates, subject.case.device
        )
        weights = group.named_tensors("master")
        still = {name: weights.pop(name) for name in self.frozen if name in weights}
        if self.frozen:
            subject.verify_same(f"frozen weights {label}", still, self.frozen)
        got = {"params": weights, **{kind: group.named_tensors(kind) for kind in MOMENTS}}
        got = {kind: rows_of(tensors) for kind, tensors in got.items()}
        steps = Steps(config=self.config, start=self._start, grads=self._grads, rates=self._rates)
        for finding in compare_steps(label, got, steps, allowed, subject.layout.dp):
            if finding.problem is not None:
                finding = replace(finding, problem=f"{finding.problem}{self._first_off(subject.case.device)}")  # noqa: PLW2901
            subject.verify(finding)

    def _first_off(self, device: str) -> str:
        """A line about the first of several steps after which weights are wrong."""
        if len(self._grads) < 2:
            return ""
        for count, weights in enumerate(self._weights, 1):
            grads, rates = self._grads[:count], self._rates[:count]
            right = Steps(config=self.config, start=self._start, grads=grads, rates=rates).state()
            allowed = step_tolerances(self._start, right, self.config, grads, rates, device)["params"]
            off = [
                name
                for name, value in right.params.items()
                if not largest_difference(weights[name], value) <= allowed[name].limit
            ]
            if off:
                return f"\nweights are off from step {count - 1} on (of {len(self._grads)}, from 0), {off[0]} first"
        return f"\nweights were right after each of the {len(self._grads)} steps when they were made"


def _explain_norm(norm: float, grads: Mapping[str, Tensor], tolerance: Tolerance) -> str | None:
    """Squares in float32, which has none below 1e-45 or above 3e38, or a part that ``norm`` miscounts."""
    wrong = float(sum(grad.float().square().sum() for grad in grads.values())) ** 0.5
    same = norm == wrong or abs(norm - wrong) <= 1e-3 * wrong
    if same:
        return "the norm adds up squares in float32, which are 0 or infinite at this size"
    return explain_norm(norm, grads, tolerance)


def verify_steps_of_losses(subject: EngineUnderTest, group: EngineGroup, losses: Sequence[CheckLoss]) -> None:
    """Take one step with each of ``losses`` on ``group``, whose optimizer has `CONFIG`; compare with AdamW's."""
    shadow, batch = Shadow.of(group, CONFIG), subject.data(PROBE).batch()
    for loss in losses:
        shadow.train(subject, group, [batch], loss.spec(), CUT)
    names = "; ".join(" and ".join(loss.spec().outputs) for loss in losses)
    shadow.verify(subject, group, f"after one step for each of these outputs: {names}")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The reports of the training steps, and the weights at the end."""

    reports: list[dict[str, float]]
    weights: dict[str, Tensor]


def training_of(subject: EngineUnderTest) -> EngineTraining:
    """One step on each of several batches, with clipping and a learning rate that falls."""
    return Training(
        data=tuple(subject.data(PROBE, seed) for seed in BATCHES),
        loss=LOSS,
        config=CONFIG,
        schedule=Schedule(type="linear", total_steps=len(BATCHES) + 2),
    )


def expected_training(subject: EngineUnderTest, training: EngineTraining) -> ExpectedTraining:
    """The oracle's values for ``training``, with tolerances."""
    return subject.expected.training(subject.model(), training, subject.dtype, subject.case.device)


def train_end_to_end(side: EngineUnderTest, training: EngineTraining) -> Trained:
    """The engine of ``side`` goes through ``training``; its weights are looked at only at the end."""
    optimizer = optimizer_config(training.config, training.schedule)
    group = side.start(side.model(), optimizer=optimizer)
    reports = []
    for step, data in enumerate(training.data):
        reports.append(group.train_batch(data.batch(), training.loss.spec(), CUT))
        side.require(
            reports[-1]["update_successful"] == 1.0, f"the update of step {step} was not made: {reports[-1]}"
        )
        group.lr_scheduler_step()
    return Trained(reports=reports, weights=group.named_tensors("master"))


def verify_rates(subject: EngineUnderTest, training: EngineTraining, trained: Trained) -> None:
    """Require that each step reports the learning rate of the schedule."""
    for step, (report, rate) in enumerate(zip(trained.reports, training.rates, strict=True)):
        subject.require(
            abs(report["lr"] - rate) <= 1e-12 * training.config.lr,
            f"step {step} reports the learning rate {report['lr']}; the schedule has {rate}",
        )


def backward_on_parts(
    engine: TrainEngine, parts: Sequence[SequenceBatch], loss: LossSpec, mb_spec: MicroBatchSpec
) -> dict[str, float]:
    """``forward_backward`` with the part of this data-parallel rank."""
    return engine.forward_backward(parts[engine.data_parallel_rank], loss, mb_spec)


def forward_inside_train_mode(
    engine: TrainEngine, batch: SequenceBatch, mb_spec: MicroBatchSpec, outputs: tuple[OutputName, ...]
) -> ModelOutput:
    """``forward`` of the whole batch on every rank, inside ``train_mode()``."""
    with engine.train_mode():
        output: ModelOutput = engine.forward(batch, mb_spec, outputs)
    return output


def train_mode_losses(
    engine: TrainEngine, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec
) -> list[float]:
    """Two training losses before, and two after, a ``forward`` inside one ``train_mode()``."""
    losses = []
    with engine.train_mode():
        for turn in range(4):
            if turn == 2:
                engine.forward(batch, mb_spec)
            losses.append(engine.forward_backward(batch, loss, mb_spec)["loss"])
    engine.optimizer_zero_grad()
    return losses


def disable_adapter(engine: TrainEngine) -> None:
    """Enter and leave ``disable_adapter()``."""
    with engine.disable_adapter():
        pass


def fail_without_adapter(engine: TrainEngine) -> None:
    """Leave ``disable_adapter()`` by an error."""
    with suppress(ArithmeticError), engine.disable_adapter():
        raise ArithmeticError
