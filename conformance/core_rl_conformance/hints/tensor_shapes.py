"""Known shapes of errors in named tensors: the wrong values, and their parameters or parts.

As for tokens: a set of parameters, or a part of each, is named only if it holds all that is wrong and
leaves out something that is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl_conformance.hints.tokens import LOOKS_LIKE, constant_factor, show_factor
from core_rl_oracle.tolerance import Tolerance

LAYER = re.compile(r"\.(\d+)\.")
KINDS = {
    "biases are": re.compile(r"\.bias$"),
    "norms are": re.compile(r"norm|\.ln_"),
    "embeddings are": re.compile(r"embed|\.wte\.|\.wpe\."),
    "the head is": re.compile(r"^(lm_head|score)\."),
    "attention parameters are": re.compile(r"attn"),
    "experts are": re.compile(r"\.experts\."),
    "MLP parameters are": re.compile(r"mlp"),
}
EMBEDDING = re.compile(r"embed_tokens|\.wte\.")
HALVES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Dtypes of half precision, and what several roundings to each are off by, in parts of the largest value."""
LIMITS = (2**16, 2**15)
"""Numbers of rows that an index of 16 bits, without and with a sign, counts up to."""
RANKS = (8, 4, 3, 2)
"""Numbers of shards that a dimension may be cut into."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Compared tensors by name."""

    got: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    tolerances: Mapping[str, Tolerance]
    wrong: Sequence[str]

    def outside(self, name: str) -> Tensor:
        """Bool: which entries of ``name`` are wrong."""
        difference = (self.got[name].double() - self.expected[name].double()).abs()
        return ~(difference <= self.tolerances[name].limit)


def named_hints(comparison: Named, since: Mapping[str, Tensor] | None = None) -> list[str]:
    """Hints on the shape of the errors, the wrong tensors, and the wrong part of each; one line at most for each.

    ``since`` are the tensors before a step or a load: hints then describe the change.
    """
    changed = next((sentence for shape in VALUES if (sentence := shape(_change(comparison, since)))), None)
    value = next((sentence for shape in (*VALUES, _rounded) if (sentence := shape(comparison))), None)
    if changed and since is not None:
        value = f"in the change, {changed}"
    hints = [] if value is None else [LOOKS_LIKE + value]
    wrong, everything = set(comparison.wrong), set(comparison.expected)
    sets = [part for shape in SETS for part in shape(comparison) if wrong <= part[1] and part[1] < everything]
    sets = [part for part in sets if 2 * len(wrong) >= len(part[1])]
    if sets:
        hints.append(min(sets, key=lambda part: len(part[1]))[0])
    hints += [sentence for shape in PARTS if (sentence := shape(comparison))][:1]
    if len(wrong) < len(everything):
        hints.append("wrong: " + ", ".join(comparison.wrong[:6]) + (", ..." if len(wrong) > 6 else ""))
    return hints


def _change(comparison: Named, since: Mapping[str, Tensor] | None) -> Named:
    if since is None or not comparison.expected.keys() <= since.keys():
        return comparison
    before = {name: since[name].double() for name in comparison.expected}
    return Named(
        got={name: comparison.got[name].double() - value for name, value in before.items()},
        expected={name: comparison.expected[name].double() - value for name, value in before.items()},
        tolerances=comparison.tolerances,
        wrong=comparison.wrong,
    )


# ------------------------------------------------------- values of the tensors


def _not_finite(comparison: Named) -> str | None:
    bad = [name for name in comparison.wrong if not bool(torch.isfinite(comparison.got[name]).all())]
    return (
        f"not finite ({len(bad)} of {len(comparison.expected)})"
        if len(bad) == len(comparison.wrong)
        else None
    )


def _zero(comparison: Named) -> str | None:
    """All of the wrong tensors, or some, where others are wrong because nothing flows back through these."""
    zero = [name for name in comparison.wrong if not bool(comparison.got[name].any())]
    if len(zero) == len(comparison.wrong):
        return f"all zero ({len(zero)} of {len(comparison.expected)})"
    return f"nothing reaches {', '.join(zero[:3])}{', ...' * (len(zero) > 3)}: all zero" if zero else None


def _multiplied(comparison: Named) -> str | None:
    factors = [
        constant_factor(comparison.got[name], comparison.expected[name], comparison.tolerances[name])
        for name in comparison.wrong
    ]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors) or max(known) - min(known) > 2e-3 * abs(max(known, key=abs)):
        return None
    factor = sorted(known)[len(known) // 2]
    return None if abs(factor - 1.0) < 2e-3 else f"all of them are multiplied by {show_factor(factor)}"


def _exchanged(comparison: Named) -> str | None:
    """A tensor that stands under another one's name."""
    pairs = []
    for name in comparison.wrong:
        limit = comparison.tolerances[name].limit
        owner = next(
            (o for o in comparison.expected if _equal(comparison.got[name], comparison.expected[o], limit)),
            None,
        )
        if owner is None:
            return None
        pairs.append(f"{name} holds {owner}")
    return f"each is another one: {', '.join(pairs[:3])}{', ...' if len(pairs) > 3 else ''}"


def _transposed(comparison: Named) -> str | None:
    square = all(value.dim() == 2 and value.shape[0] == value.shape[1] for value in _wrong_ones(comparison))
    same = square and all(
        _equal(comparison.got[name].T, comparison.expected[name], comparison.tolerances[name].limit)
        for name in comparison.wrong
    )
    return "each is transposed" if same else None


def _equal(left: Tensor, right: Tensor, limit: float) -> bool:
    same_shape = left.shape == right.shape
    return same_shape and bool(((left.double() - right.double()).abs() <= limit).all())


def _wrong_ones(comparison: Named) -> list[Tensor]:
    return [comparison.expected[name] for name in comparison.wrong]


def _rounded(comparison: Named) -> str | None:
    """Numbers of half precision, as near to the expected ones as some roundings leave them."""
    for dtype, steps in HALVES.items():
        of_dtype = [_of(dtype, comparison.got[name]) for name in comparison.wrong]
        expected = [_of(dtype, value) for value in _wrong_ones(comparison)]
        near = all(
            _equal(comparison.got[name], value, steps * float(value.abs().max()))
            for name, value in zip(comparison.wrong, _wrong_ones(comparison), strict=True)
        )
        if near and all(of_dtype) and not any(expected):
            return f"each number is one of {str(dtype).removeprefix('torch.')}: kept in it, or rounded to it"
    return None


def _of(dtype: torch.dtype, value: Tensor) -> bool:
    return torch.equal(value.to(dtype).to(value.dtype), value)


VALUES: tuple[Callable[[Named], str | None], ...] = (_not_finite, _zero, _multiplied, _exchanged, _transposed)

# ------------------------------------------------------------ which they are


def _by_layer(comparison: Named) -> Iterator[tuple[str, set[str]]]:
    layers: dict[int, set[str]] = {}
    for name in comparison.expected:
        if match := LAYER.search(name):
            layers.setdefault(int(match.group(1)), set()).add(name)
    for layer, names in layers.items():
        yield f"only parameters of layer {layer} are wrong", names
    if layers:
        yield (
            "only parameters of the layers are wrong; embedding, last norm and head are right",
            set().union(*layers.values()),
        )


def _by_kind(comparison: Named) -> Iterator[tuple[str, set[str]]]:
    if not any(KINDS["the head is"].search(name) for name in comparison.expected):
        tied = {name for name in comparison.expected if EMBEDDING.search(name)}
        yield "only the embedding is wrong, which is tied to the head", tied
    for label, pattern in KINDS.items():
        names = {name for name in comparison.expected if pattern.search(name)}
        yield f"only {label} wrong", names
    for module in dict.fromkeys(
        name.rsplit(".", 2)[-2] for name in comparison.expected if name.count(".") > 1
    ):
        yield f"only {module} is wrong", {name for name in comparison.expected if f".{module}." in name}


def _by_dimension(comparison: Named) -> Iterator[tuple[str, set[str]]]:
    vectors = {name for name, value in comparison.expected.items() if value.dim() < 2}
    yield "only vectors (norms, biases) are wrong", vectors
    yield "only matrices are wrong; vectors (norms, biases) are right", set(comparison.expected) - vectors


SETS: tuple[Callable[[Named], Iterator[tuple[str, set[str]]]], ...] = (_by_kind, _by_layer, _by_dimension)

# --------------------------------------------------------- which part of each


def _few_rows(comparison: Named) -> str | None:
    """Single rows of one matrix: token ids, where it is an embedding or a head."""
    if len(comparison.wrong) != 1 or comparison.expected[comparison.wrong[0]].dim() < 2:
        return None
    name = comparison.wrong[0]
    rows = _indices(comparison.outside(name), 0).tolist()
    if len(rows) > 4 or len(rows) == len(comparison.expected[name]):
        return None
    ids = (
        ", which are token ids"
        if KINDS["embeddings are"].search(name) or KINDS["the head is"].search(name)
        else ""
    )
    return f"only rows {rows} of {len(comparison.expected[name])} of {name} are wrong{ids}"


def _late_rows(comparison: Named) -> str | None:
    """Rows of one matrix behind the last row of a small index."""
    if len(comparison.wrong) != 1:
        return None
    name = comparison.wrong[0]
    first = int(_indices(comparison.outside(name), 0)[0])
    limit = next((limit for limit in LIMITS if limit <= first), None)
    return (
        None if limit is None else f"only rows from {limit:,} on of {name} are wrong, the first is {first:,}"
    )


def _shard(comparison: Named) -> str | None:
    """The same part of every wrong tensor: the shard of one rank."""
    for dimension, label in ((0, "first"), (1, "second")):
        for count in RANKS:
            parts = {_part(comparison, name, dimension, count) for name in comparison.wrong}
            if len(parts) == 1 and None not in parts:
                number = next(iter(parts))
                return (
                    f"all wrong entries are in part {number} (from 0) of {count} equal parts of the {label} "
                    "dimension"
                )
    return None


def _part(comparison: Named, name: str, dimension: int, count: int) -> int | None:
    """The number of the part that holds all wrong entries of ``name``, half of its indices at least."""
    wrong = comparison.outside(name)
    if wrong.dim() <= dimension or wrong.shape[dimension] < count:
        return None
    size = -(-wrong.shape[dimension] // count)
    positions = _indices(wrong, dimension)
    numbers = (positions // size).unique()
    return int(numbers[0]) if len(numbers) == 1 and 2 * len(positions) >= size else None


def _edges(comparison: Named) -> str | None:
    """The rows next to the cuts between shards, or the last one, which padding follows."""
    for dimension, label in ((0, "first"), (1, "second")):
        if any(value.dim() <= dimension for value in _wrong_ones(comparison)):
            continue
        positions = {
            name: set(_indices(comparison.outside(name), dimension).tolist()) for name in comparison.wrong
        }
        sizes = {name: comparison.expected[name].shape[dimension] for name in comparison.wrong}
        if all(sizes[name] > 1 and rows == {sizes[name] - 1} for name, rows in positions.items()):
            return f"only the last index of the {label} dimension is wrong"
        for count in RANKS[::-1]:
            if all(
                sizes[name] > 2 * count and rows <= _next_to_cuts(sizes[name], count)
                for name, rows in positions.items()
            ):
                return f"only indices next to the cuts into {count} shards of the {label} dimension are wrong"
    return None


def _next_to_cuts(size: int, count: int) -> set[int]:
    cuts = range(-(-size // count), size, -(-size // count))
    return {place for cut in cuts for place in (cut - 1, cut)}


def _indices(wrong: Tensor, dimension: int) -> Tensor:
    """The indices along ``dimension`` that hold a wrong entry."""
    dimensions = [axis for axis in range(wrong.dim()) if axis != dimension]
    return (wrong.any(dim=dimensions) if dimensions else wrong).nonzero()[:, 0]


PARTS: tuple[Callable[[Named], str | None], ...] = (_few_rows, _late_rows, _edges, _shard)
