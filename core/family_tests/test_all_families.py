"""Every causal language model of transformers on packed batches: right, or refused by name; `nox -s families`.

The reference is the plain model with eager attention, one sequence at a time. The verdicts are compared with
`docs/model-families.md`, or written to it where the environment variable `WRITE_FAMILIES` is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tiny_families import (
    FAMILIES,
    ROTARY_SCALINGS,
    has_rotary_scaling,
    packed_logprobs,
    tiny_model,
    token_logprobs,
    with_rotary_scaling,
)
from torch import Tensor
from transformers import PreTrainedModel

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import check_packing
from core_rl.toolkit.packed import PackedModel

PAGE = Path(__file__).parents[2] / "docs" / "model-families.md"
TABLE = "<!-- verdicts -->\n"
ORIGINAL_LENGTH = 10
"""Positions beyond which rotary scaling begins."""
SEQUENCES = [torch.arange(8) * 5 % 97, (torch.arange(12) * 7 + 40) % 97]
"""Longer than the sliding windows of the tiny models."""
TOLERANCE = 1e-3
"""Of log-probs in nats and, relative to the largest entry of a tensor, of gradients; both float32. Leaks are of 0.03
nats and more, rounding of 1e-5."""


@dataclass(frozen=True, order=True)
class Verdict:
    """The line of one family on the page."""

    result: str
    """``right``, ``refused`` or ``not built``."""
    reason: str = ""


def judge(family: str, directory: Path, scaling: str | None = None) -> Verdict:
    """Compare the packed model with the plain one; raises `AssertionError` where both are computed and differ.

    With ``scaling``, a kind of rotary scaling, whose length is between those of the sequences.
    """
    # What transformers raises for a config whose defaults do not fit together, or a package that is missing, is of
    # many types; such a family is listed and not judged.
    try:
        config = None if scaling is None else with_rotary_scaling(family, scaling, length=ORIGINAL_LENGTH)
        plain = tiny_model(family, config=config)
        expected = token_logprobs(plain, SEQUENCES)
        plain.save_pretrained(directory)
    except Exception as error:  # noqa: BLE001
        return Verdict("not built", f"{type(error).__name__}: {_first_line(error)}")
    register_packed_attention()
    try:
        model = build_model(ModelConfig(path=str(directory)), seed=0, attn_implementation=PACKED_ATTENTION)
        packed = PackedModel(model, "lm")
        check_packing(packed, "float32")
    except (ConfigError, UnsupportedCapability) as error:
        reason = str(error).partition(";")[0].splitlines()[0].replace(f" {str(directory)!r}", "")
        return Verdict("refused", reason.partition(" for this kind of AutoModel")[0])
    found = packed_logprobs(packed, SEQUENCES)
    largest = max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))
    assert largest <= TOLERANCE, f"{family}: log-probs are off by {largest:.2g}"
    assert (off := _gradients_off(plain, expected, model, found)) <= TOLERANCE, (
        f"{family}: gradients: {off:.2g}"
    )
    layers = sorted({type(layer).__name__ for layer in packed.stateful.layers.values()})
    return Verdict("right", f"each sequence alone in {', '.join(layers)}" if layers else "")


def _gradients_off(
    plain: PreTrainedModel, expected: list[Tensor], packed: PreTrainedModel, found: list[Tensor]
) -> float:
    """The largest difference of the gradients of an uneven sum of log-probs, relative to each tensor's largest."""
    for values in (expected, found):
        sum((part * torch.linspace(-1, 1, len(part))).sum() for part in values).backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in packed.named_parameters()}
    scale = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    errors = [0.0]
    for name, parameter in plain.named_parameters():
        own, other = parameter.grad, gradients[name]
        if own is None and other is None:
            continue
        own = torch.zeros_like(parameter) if own is None else own
        other = torch.zeros_like(parameter) if other is None else other
        largest = max(float(own.abs().max()), 1e-3 * scale)
        errors.append(float((own - other).abs().max()) / largest)
    return max(errors)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:120] if lines else ""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """The verdicts so far."""
    return {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_right_or_refused(family: str, verdicts: dict[str, Verdict], tmp_path: Path) -> None:
    """No family is accepted and wrong."""
    verdicts[family] = judge(family, tmp_path)


@pytest.mark.parametrize("scaling", ROTARY_SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_scaling_is_right_or_refused(family: str, scaling: str, tmp_path: Path) -> None:
    """No kind of rotary scaling is accepted and wrong, next to longer sequences."""
    if has_rotary_scaling(family):
        judge(family, tmp_path, scaling)


def test_page_lists_the_verdicts(verdicts: dict[str, Verdict]) -> None:
    """The documentation lists the verdicts."""
    assert set(verdicts) == set(FAMILIES), "run all families"
    head, mark, _ = PAGE.read_text().partition(TABLE)
    page = head + mark + table(verdicts)
    if os.environ.get("WRITE_FAMILIES"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, (
        "docs/model-families.md is of other verdicts: run WRITE_FAMILIES=1 nox -s families"
    )


def table(verdicts: dict[str, Verdict]) -> str:
    """The part of the page that is measured."""
    lines = [f"\nMeasured with transformers {transformers.__version__}.\n"]
    counts = {
        result: sum(v.result == result for v in verdicts.values())
        for result in ("right", "refused", "not built")
    }
    lines.append(", ".join(f"{count} {result}" for result, count in counts.items()) + ", none wrong.\n")
    plain = sorted(family for family, verdict in verdicts.items() if verdict == Verdict("right"))
    lines.append(f"**Right**: {', '.join(plain)}.\n")
    for title, chosen in SECTIONS:
        lines += [f"| {title} | |", "| --- | --- |"]
        rows = sorted((family, verdict) for family, verdict in verdicts.items() if chosen(verdict))
        lines += [f"| {family} | {verdict.reason.replace('|', '/')} |" for family, verdict in rows]
        lines.append("")
    return "\n".join(lines)


SECTIONS: list[tuple[str, Callable[[Verdict], bool]]] = [
    (
        "right, with layers that have a state",
        lambda verdict: verdict.result == "right" and bool(verdict.reason),
    ),
    ("refused", lambda verdict: verdict.result == "refused"),
    ("not built from a tiny config", lambda verdict: verdict.result == "not built"),
]
