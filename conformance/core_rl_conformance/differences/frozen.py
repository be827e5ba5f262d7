"""Frozen rollouts: the lengths, masks, rewards and groups of a file, or drawn ones, in tokens of a tiny model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core_rl.errors import ConfigError, raise_all
from core_rl_conformance.inputs.rollouts import LENGTHS, Rollout, Rollouts

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
