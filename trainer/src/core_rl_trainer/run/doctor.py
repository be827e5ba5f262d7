"""``doctor`` of a recipe: the running engines against the suite's float64 oracle, on completions of the run."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from core_rl.config.engine import DType
from core_rl.data.batch import SequenceBatch
from core_rl.errors import CoreRLError
from core_rl.launch.hosts import LocalHosts, Slot
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool
from core_rl_oracle.oracle import Oracle, OracleSequence
from core_rl_oracle.plain import ALONE, VARIANTS, PlainModel
from core_rl_oracle.tolerance import mean_square, tolerance

logger = logging.getLogger(__name__)

LOGPROBS, VERSIONS, ROUTING = "logprobs", "versions", "routing"
NOTABLE_SHARE = 0.01
"""The share of a run's time from which a warning has the cost."""


class Judgement(NamedTuple):
    """Log-probs ``[T]`` of some sequences, one after the other."""

    expected: Tensor
    """The oracle's, float64."""
    plain: Mapping[DType, Sequence[Tensor]]
    """The plain model's in each dtype, computed in several equivalent ways."""


class JudgedEngine(NamedTuple):
    """One of the two engines that are judged."""

    role: str
    name: str
    dtype: DType


@dataclass(kw_only=True)
class RunDoctor:
    """Judges both engines with the weights before the updates of step 1 and of every ``every`` steps from there."""

    every: int
    sequences: int
    temperature: float
    trainer: JudgedEngine
    rollout: JudgedEngine
    model: Path
    """A directory for the present weights; it is there only meanwhile."""
    timeout_s: float
    _version: int | None = field(default=None, init=False)
    """The version of the weights in ``model``, until the rollout engine is judged with them."""
    _since: float = field(default_factory=time.perf_counter, init=False)
    _spent_s: float = field(default=0.0, init=False)

    def judge(
        self, step: int, batch: SequenceBatch, trainer: Tensor, save: Callable[[Path], None]
    ) -> dict[str, float]:
        """Metrics, with a warning for each engine that is off the oracle by more than rounding explains.

        ``trainer [T]`` are the train engine's log-probs of ``batch``, whose ``logprobs`` are the rollout engine's;
        ``save`` writes the present weights. The rollout engine is judged by tokens that the same weights have drawn, in
        an asynchronous run at a later step. A problem of the judge itself is a warning; the run continues.
        """
        begin = time.perf_counter()
        due = (step - 1) % self.every == 0
        try:
            if due:
                save(self.model)
                self._version = step - 1
            drawn = batch.loss_mask & (batch[VERSIONS] == self._version)  # none for None
            if not due and not bool(drawn.any()):
                return {}
            rows = sorted(
                range(batch.num_sequences), key=lambda row: -int(drawn[batch.token_index([row])].sum())
            )[: self.sequences]
            part = batch.with_tokens(trainer=trainer.double(), drawn=drawn).select(rows)
            judgement = self._judgement(part)
        except (CoreRLError, OSError) as error:
            logger.warning("step %d: the doctor could not judge the engines: %s", step, error)
            self.forget()
            return {}
        metrics: dict[str, float] = {}
        if due:
            metrics |= _compared(step, self.trainer, part["trainer"], part.loss_mask, judgement, rows, part)
        if bool(drawn.any()):
            got = part[LOGPROBS].double()
            metrics |= _compared(step, self.rollout, got, part["drawn"], judgement, rows, part)
            self.forget()
        seconds = time.perf_counter() - begin
        self._spent_s += seconds
        if due:
            self._warn_of_cost(step)
        return metrics | {"time_doctor_s": seconds}

    def forget(self) -> None:
        """Remove the weights that wait for the rollout engine's tokens."""
        self._version = None
        shutil.rmtree(self.model, ignore_errors=True)

    def _judgement(self, part: SequenceBatch) -> Judgement:
        """Computed in a process of its own, whose memory is free afterwards."""
        fields = {ROUTING: part[ROUTING]} if ROUTING in part.tokens else {}
        ends = part.cu_seqlens.tolist()
        sequences = [
            OracleSequence(
                input_ids=part.input_ids[first:last].tolist(),
                fields={name: value[first:last] for name, value in fields.items()},
            )
            for first, last in pairwise(ends)
        ]
        dtypes = tuple({self.trainer.dtype, self.rollout.dtype})
        pool = RankPool(LocalHosts())
        try:
            pool.grow([Slot(0, 0)])
            arguments = (judgement_of, (str(self.model), sequences, self.temperature, dtypes))
            judgement: Judgement
            (judgement,) = pool.call(Call(0, "run_alone", arguments), [()], self.timeout_s)
            return judgement
        finally:
            pool.close(wait_s=0.0)

    def _warn_of_cost(self, step: int) -> None:
        """Warn where judgements take a notable part of the time since the last due one."""
        now = time.perf_counter()
        share = self._spent_s / (now - self._since)
        if step > 1 and share > NOTABLE_SHARE:
            logger.warning(
                "step %d: the doctor takes %.0f s, %.1f %% of the run's time; doctor.every=%d keeps it below 1 %%",
                *(step, self._spent_s, 100 * share, math.ceil(self.every * share / NOTABLE_SHARE)),
            )
        self._since, self._spent_s = now, 0.0


def judgement_of(
    directory: str, sequences: Sequence[OracleSequence], temperature: float, dtypes: Sequence[DType]
) -> Judgement:
    """The log-probs of ``sequences`` on the model in ``directory``; one process computes them."""
    hf_logging.disable_progress_bar()
    oracle = Oracle(Path(directory))
    with torch.no_grad():  # one sequence's logits at a time
        expected = [oracle.outputs(sequence, temperature)[LOGPROBS] for sequence in sequences]
    del oracle
    plain: dict[DType, list[Tensor]] = {}
    for dtype in dtypes:
        model = PlainModel(Path(directory), "lm", getattr(torch, dtype))
        runs = (model.outputs(variant, sequences, temperature) for variant in (*VARIANTS, ALONE))
        plain[dtype] = [torch.cat([outputs[LOGPROBS] for outputs in run]).double() for run in runs]
    return Judgement(torch.cat(expected), plain)


def _compared(
    step: int,
    engine: JudgedEngine,
    got: Tensor,
    counted: Tensor,
    judgement: Judgement,
    rows: Sequence[int],
    part: SequenceBatch,
) -> dict[str, float]:
    """The largest error of ``got [T]`` at ``counted`` tokens, and its share of what rounding explains.

    ``part`` are the sequences ``rows`` of the step's batch.
    """
    expected = judgement.expected[counted]
    plain = [variant[counted] for variant in judgement.plain[engine.dtype]]
    errors = got[counted] - expected
    sizes = torch.nan_to_num(errors.abs(), nan=torch.inf)
    allowed = tolerance(plain, expected, getattr(torch, engine.dtype))
    square, square_allowed = mean_square([errors], [[variant - expected] for variant in plain], allowed.floor)
    largest = float(sizes.max())
    ratio = max(largest / allowed.limit, square / square_allowed.limit)
    if not ratio <= 1.0:
        worst = int(counted.nonzero().flatten()[sizes.argmax()])
        row = int(torch.searchsorted(part.cu_seqlens, worst, right=True)) - 1
        logger.warning(
            "step %d: the %s engine %r is off the float64 oracle by up to %.1e nats (allowed %.1e; root mean square "
            "%.1e, allowed %.1e). Worst is sequence %d of the batch, token %d of %d: log-prob %.6g, expected %.6g. "
            "core-rl doctor finds the cause",
            *(step, engine.role, engine.name, largest, allowed.limit, square, square_allowed.limit),
            *(rows[row], worst - int(part.cu_seqlens[row]), part.lengths[row]),
            *(float(got[worst]), float(judgement.expected[worst])),
        )
    return {f"doctor_{engine.role}_max": largest, f"doctor_{engine.role}_ratio": ratio}
