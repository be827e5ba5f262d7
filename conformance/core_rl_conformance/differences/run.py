"""Builds two trainers from the files of their settings, and compares them on a tiny model."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers.utils import logging

from core_rl.errors import ConfigError, raise_all
from core_rl_conformance.differences.reading import variant_of
from core_rl_conformance.differences.replay import Comparison, Measured, compare_measured, measure_trainer
from core_rl_conformance.inputs.rollouts import LENGTHS, Rollout, Rollouts
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.trainers.interface import Trainer
from core_rl_conformance.trainers.pool import make_trainer
from core_rl_conformance.trainers.spec import Feature, TrainerSpec, find_trainer

GROUPS = (0,) * 3 + (1,) * 4 + (2,) * 5 + (3,) * 4
"""Prompts of drawn sequences: groups of several sizes tell rules of advantages apart."""
ROWS = 16
"""Sequences that are replayed, at most: whole groups from the beginning of the file."""
LONGEST = 40
"""Tokens of the longest sequence; longer ones are shortened by one factor for all."""
PARTS = 64
"""Drawn numbers are multiples of 1/64."""


class FrozenRow(BaseModel):
    """One line of the file: one completion."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_ids: tuple[int, ...] = Field(min_length=1)
    completion_ids: tuple[int, ...] = Field(min_length=1)
    completion_mask: tuple[bool, ...] | None = None
    """Trained tokens of the completion; all by default."""
    reward: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    advantage: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Taken by a trainer that takes none from rewards."""
    group: int | str | None = None
    """The prompt's name; equal prompts are a group by default."""

    @model_validator(mode="after")
    def _as_long(self) -> FrozenRow:
        if self.completion_mask is not None and len(self.completion_mask) != len(self.completion_ids):
            raise ValueError(
                f"completion_mask has {len(self.completion_mask)} values and completion_ids {len(self.completion_ids)}"
            )
        return self

    @property
    def mask(self) -> tuple[bool, ...]:
        """Of the completion."""
        return self.completion_mask or (True,) * len(self.completion_ids)


def read_rows(path: Path) -> list[FrozenRow]:
    """The lines of a JSONL file; raises `ConfigError` with all that is wrong with them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rollouts={path}: it cannot be read ({error}); give a JSONL file") from error
    rows, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(FrozenRow.model_validate_json(line))
        except ValidationError as error:
            problems += [f"line {number}: {_described(problem)}" for problem in error.errors()]
    raise_all(ConfigError, f"--rollouts={path}", problems)
    if not rows:
        raise ConfigError(f"--rollouts={path}: the file has no line; one for each completion is needed")
    return rows


def _described(problem: Any) -> str:
    field = ".".join(map(str, problem["loc"]))
    known = ", ".join(FrozenRow.model_fields)
    hint = f"; fields are {known}" if problem["type"] == "extra_forbidden" else ""
    return f"field {field!r}: {problem['msg']}{hint}" if field else str(problem["msg"]) + hint


def drawn_rows(seed: int) -> list[FrozenRow]:
    """Completions of several lengths, with rewards."""
    rng = random.Random(seed)
    rows = []
    for length, group in zip(LENGTHS, GROUPS, strict=True):
        prompt = rng.randrange(1, length // 2 + 1)
        rows.append(
            FrozenRow(
                prompt_ids=(group,) * prompt,
                completion_ids=(0,) * (length - prompt),
                reward=rng.randrange(3 * PARTS) / PARTS,
                group=group,
            )
        )
    return rows


def rollouts_of(rows: Sequence[FrozenRow], vocab_size: int, seed: int) -> Rollouts:
    """The first groups of ``rows`` in a vocabulary of ``vocab_size`` tokens.

    Ids are drawn, since a tiny model has another vocabulary. First tokens are all different: with a common beginning,
    two sequences would have the same gradients of tokens.
    """
    rng = random.Random(seed)
    names = [row.prompt_ids if row.group is None else row.group for row in rows]
    used = [index for index, name in enumerate(names) if _last(names, name) < ROWS] or range(
        min(ROWS, len(rows))
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    longest = max(len(rows[index].prompt_ids) + len(rows[index].completion_ids) for index in used)
    factor = min(1.0, LONGEST / longest)
    firsts = rng.sample(range(vocab_size), len(used))
    result = []
    for index, first in zip(used, firsts, strict=True):
        row = rows[index]
        prompt = max(1, round(factor * len(row.prompt_ids)))
        completion = max(1, round(factor * len(row.completion_ids)))
        mask = [row.mask[len(row.mask) * t // completion] for t in range(completion)]
        drawn = rng.choice((-1, 1)) * rng.randrange(PARTS // 2, 2 * PARTS) / PARTS
        length = prompt + completion
        result.append(
            Rollout(
                ids=(first, *(rng.randrange(vocab_size) for _ in range(length - 1))),
                mask=(*(False for _ in range(prompt)), *mask),
                advantages=(drawn if row.advantage is None else row.advantage,) * length,
                old=(0.0,) * length,
                ref=(0.0,) * length,
                reward=row.reward,
                group=numbers[names[index]],
            )
        )
    return Rollouts(tuple(result))


def _last(names: Sequence[object], name: object) -> int:
    """The index of the last row of a group."""
    return max(index for index, other in enumerate(names) if other == name)


MODEL = TinyModel(family="qwen3")
TIMEOUT_S = 300.0
NEEDED = (Feature.GRADIENTS, Feature.RECIPES)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A trainer that is built from the file of its settings."""

    spec: TrainerSpec
    trainer: Trainer

    def measure(self, directory: Path, rollouts: Rollouts) -> Measured:
        return measure_trainer(self.trainer, directory, rollouts, self.spec.features)

    def measure_after(self, other: Measured | None, directory: Path, rollouts: Rollouts) -> Measured:
        """The same with the advantages that the ``other`` trainer takes from rewards, which this one cannot."""
        if other is None:
            return self.measure(directory, rollouts)
        terms = other.reading.terms
        measured = self.measure(directory, variant_of(rollouts, replace(terms, mask="as given")))
        if measured.reading.terms.advantages != "as given":
            return measured
        same = replace(measured.reading.terms, advantages=terms.advantages)
        return replace(measured, reading=replace(measured.reading, terms=same))


def compare(left: str, right: str, rollouts: Path | None, seed: int) -> Comparison:
    """The differences of two trainers, each given as ``NAME:FILE``. Raises `ConfigError` for what cannot be compared.

    A trainer without rules for advantages gets the other's.
    """
    logging.disable_progress_bar()
    rows = drawn_rows(seed) if rollouts is None else read_rows(rollouts)
    frozen = rollouts_of(rows, MODEL.vocab_size, seed)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="core-rl-diff-")))
        directory = ModelStore(place).directory(MODEL)
        sides = [_built(stack, argument, directory) for argument in (left, right)]
        judges = [side.measure(directory, frozen) if side.spec.advantages else None for side in sides]
        one, two = (
            judge or side.measure_after(other, directory, frozen)
            for side, judge, other in zip(sides, judges, reversed(judges), strict=True)
        )
        return compare_measured(one, two, frozen)


def _built(stack: ExitStack, argument: str, directory: Path) -> _Side:
    name, separator, recipe = argument.rpartition(":")
    if not separator or not Path(recipe).is_file():
        raise ConfigError(
            f"{argument!r}: expected NAME:FILE, with an existing file of the trainer's settings"
        )
    spec, _, _ = find_trainer(name)
    missing = [feature for feature in NEEDED if feature not in spec.features]
    raise_all(
        ConfigError,
        f"{argument!r}",
        [f"the trainer {name} declares no '{feature}', which core-rl diff needs" for feature in missing],
    )
    trainer = make_trainer(spec, TIMEOUT_S)
    stack.callback(trainer.close)
    trainer.build_recipe(recipe, str(directory))
    return _Side(spec=spec, trainer=trainer)
