"""The rows of the page: what is measured in each framework, or the reason why nothing ran."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from field.models import Pictured, pictured, tokens, write_model, write_vision_model
from field.peers.interface import NotRun, Peer
from field.result import Result, State, judged

ROUNDING = 1e-4
"""Of float32, in nats: neighbours and wrong positions change log-probs by 0.01 nats and more."""
WITHOUT = "disable_dropout=True"
TEMPERATURES = {"T = 0.6": (0.6, 0.5), "T = 0.3": (0.3, 0.25)}
"""The temperature, and the power of two below, by which every float divides without rounding."""


@dataclass(frozen=True)
class Figure:
    """The error of a case."""

    error: float
    limit: float
    unit: str = "nats"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement of every framework."""

    title: str
    description: str
    cases: Iterable[str]
    measure: Callable[[Peer, str, Path], Figure]
    """The figure of a case, with an empty directory. Raises `NotRun`, or the framework's own errors."""


def measured(row: Row, case: str, peer: Peer, named: dict[str, Any]) -> Result:
    """The figure of ``case``; an error that the framework raises is its refusal."""
    named = {"row": row.title, "case": case, **named}
    try:
        with tempfile.TemporaryDirectory() as directory:
            figure = row.measure(peer, case, Path(directory))
    except NotRun as reason:
        return Result(**named, state=State.NOT_RUN, reason=str(reason))
    # Frameworks refuse a model with errors of any type, and the page quotes them.
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines() or [""]
        return Result(**named, state=State.REFUSED, reason=f"{type(error).__name__}: {lines[0]}")
    return Result(
        **named,
        state=judged(figure.error, figure.limit),
        error=figure.error,
        limit=figure.limit,
        unit=figure.unit,
    )


def _neighbours(peer: Peer, case: str, directory: Path) -> Figure:
    """Packed sequences next to each alone, by the model ``case`` in float32."""
    peer.open(write_model(case, directory), "float32")
    sequences = [tokens(20, seed=1), tokens(24, seed=2)]
    packed = peer.logprobs(sequences)
    return _largest(packed, [peer.logprobs([ids])[0] for ids in sequences])


def _images(peer: Peer, case: str, directory: Path) -> Figure:
    """Packed sequences with images next to each alone, by the model ``case`` in float32."""
    path = write_vision_model(case, directory)
    sequences = [pictured(case, 20, (4, 4), seed=1), pictured(case, 24, (4, 6), seed=2)]
    # First: verl replaces forward passes of transformers.
    alone = _alone(path, sequences)
    return _largest(peer.image_logprobs(path, sequences), alone)


def _largest(packed: Sequence[Tensor], alone: Sequence[Tensor]) -> Figure:
    return Figure(max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True)), ROUNDING)


@torch.no_grad()
def _alone(path: str, sequences: Sequence[Pictured]) -> list[Tensor]:
    """Log-probs of each sequence by transformers, which counts its positions."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    image = model.config.image_token_id
    rows = []
    for row in sequences:
        kinds = (row.ids == image).int()[None]
        logits = model(input_ids=row.ids[None], mm_token_type_ids=kinds, use_cache=False, **row.media).logits[
            0
        ]
        rows.append(logits[:-1].log_softmax(-1).gather(1, row.ids[1:, None])[:, 0])
    return rows


def _dropout(peer: Peer, case: str, directory: Path) -> Figure:
    """Values of a critic in two training passes, with the setting ``case``."""
    sequences = [tokens(20, seed=1), tokens(24, seed=2)]
    first, second = peer.critic(write_model("qwen3", directory), sequences, disable_dropout=case == WITHOUT)
    difference, size = (first - second).square().mean().sqrt(), first.square().mean().sqrt()
    return Figure(float(100 * difference / size), 1e-3, "%")


def _temperature(peer: Peer, case: str, directory: Path) -> Figure:
    """Log-probs in bfloat16 at the temperature ``case``."""
    peer.open(write_model("qwen3", directory), "bfloat16")
    ids = tokens(512, seed=1)
    logits = peer.logits(ids)
    error, exact = (_error(peer.logprobs([ids], value), logits, ids, value) for value in TEMPERATURES[case])
    return Figure(error, exact + ROUNDING)


def _error(logprobs: Sequence[Tensor], logits: Tensor, ids: Tensor, temperature: float) -> float:
    expected = torch.log_softmax(logits[:-1].double() / temperature, -1).gather(1, ids[1:, None])[:, 0]
    return float((logprobs[0].double() - expected).square().mean().sqrt())


ROWS: Mapping[str, Row] = {
    "packed-neighbours": Row(
        title="packed neighbours",
        description=(
            "Log-probs of two sequences of 20 and 24 tokens that share a packed row, next to the log-probs of each "
            "alone: the largest difference, in float32. qwen3, of attention alone, is the control. Without CUDA "
            "kernels, transformers refuses the boundaries of sequences, which TRL and AReaL pass, and verl and its "
            "own default collator do not. verl passes them for the model types qwen3_5 and qwen3_5_moe alone "
            "([#6660](https://github.com/verl-project/verl/pull/6660)), and "
            "[#5346](https://github.com/verl-project/verl/pull/5346) is open for Qwen3-Next."
        ),
        cases=("qwen3", "qwen3_next", "qwen3_5_text"),
        measure=_neighbours,
    ),
    "packed-images": Row(
        title="positions of packed images",
        description=(
            "Log-probs of two sequences of 20 and 24 tokens with an image each, in one packed row, next to the "
            "log-probs that transformers gives for each alone: the largest difference, in float32. Qwen3-VL counts "
            "positions in time, height and width, and packed rows need a row of text positions in front of these. "
            "The collator of transformers leaves images out, and has positions of text alone (no upstream report "
            "known); the images are added to its row. verl gets positions as its agent loop makes them. TRL has an "
            "open request ([#4339](https://github.com/huggingface/trl/issues/4339))."
        ),
        cases=("qwen3_vl",),
        measure=_images,
    ),
    "critic-dropout": Row(
        title="dropout in the critic",
        description=(
            "Values of a qwen3 critic, whose config has no dropout, in two training passes of one batch: the root "
            "mean square of their difference, in per cent of that of the values. The default of transformers' token "
            "classifiers is a rate of 0.1; verl sets it to 0, and AReaL does not (no upstream report known). verl's "
            "critic is loaded with eager attention in place of FlashAttention."
        ),
        cases=("default", WITHOUT),
        measure=_dropout,
    ),
    "temperature": Row(
        title="temperature in bfloat16",
        description=(
            "Log-probs of 512 tokens at a temperature, next to the log-probs that float64 gives from the "
            "framework's own logits: the root mean square of their difference. The limit is the same error at "
            "temperature 0.5 or 0.25, by which bfloat16 divides without rounding, so that a softmax in bfloat16 "
            "does not count. verl divides in the dtype of the logits (no upstream report known). On CUDA, TRL has "
            "another kernel, which did not run."
        ),
        cases=TEMPERATURES,
        measure=_temperature,
    ),
}
