"""Known shapes of errors in named tensors: what the wrong ones are, and which parameters or parts they are.

As for tokens: a set of parameters, or a part of each, is named only if it holds all that is wrong and
leaves out something that is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl_conformance.hints.tokens import constant_factor, show_factor
from core_rl_oracle.tolerance import Tolerance

__all__ = ["Named", "named_hints"]

LAYER = re.compile(r"\.(\d+)\.")
KINDS = {
    "biases are": re.compile(r"\.bias$"),
    "norms are": re.compile(r"norm|\.ln_"),
    "embeddings are": re.compile(r"embed|\.wte\.|\.wpe\."),
    "the head is": re.compile(r"^(lm_head|score)\."),
    "attention parameters are": re.compile(r"attn"),
    "MLP parameters are": re.compile(r"mlp"),
}
EMBEDDING = re.compile(r"embed_tokens|\.wte\.")
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


def named_hints(named: Named, since: Mapping[str, Tensor] | None = None) -> list[str]:
    """Hints on the shape of the errors, the wrong tensors, and the wrong part of each; one line at most for each.

    ``since`` are the tensors before a step: hints then describe the change.
    """
    value = next((sentence for shape in VALUES if (sentence := shape(_change(named, since)))), None)
    where = "" if since is None else "in what the steps changed, "
    hints = [] if value is None else [f"it looks like: {where}{value}"]
    wrong, everything = set(named.wrong), set(named.expected)
    sets = [part for shape in SETS for part in shape(named) if wrong <= part[1] and part[1] < everything]
    sets = [part for part in sets if 2 * len(wrong) >= len(part[1])]
    if sets:
        hints.append(min(sets, key=lambda part: len(part[1]))[0])
    hints += [sentence for shape in PARTS if (sentence := shape(named))][:1]
    if len(wrong) < len(everything):
        hints.append("wrong: " + ", ".join(named.wrong[:6]) + (", ..." if len(wrong) > 6 else ""))
    return hints


def _change(named: Named, since: Mapping[str, Tensor] | None) -> Named:
    if since is None:
        return named
    before = {name: since[name].double() for name in named.expected}
    return Named(
        got={name: named.got[name].double() - value for name, value in before.items()},
        expected={name: named.expected[name].double() - value for name, value in before.items()},
        tolerances=named.tolerances,
        wrong=named.wrong,
    )


# ------------------------------------------------------- what the tensors are


def _not_finite(named: Named) -> str | None:
    bad = [name for name in named.wrong if not bool(torch.isfinite(named.got[name]).all())]
    return f"not finite ({len(bad)} of {len(named.expected)})" if len(bad) == len(named.wrong) else None


def _zero(named: Named) -> str | None:
    zero = not any(bool(named.got[name].any()) for name in named.wrong)
    return f"all zero ({len(named.wrong)} of {len(named.expected)})" if zero else None


def _multiplied(named: Named) -> str | None:
    factors = [
        constant_factor(named.got[name], named.expected[name], named.tolerances[name]) for name in named.wrong
    ]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors) or max(known) - min(known) > 2e-3 * abs(max(known, key=abs)):
        return None
    return f"all of them are multiplied by {show_factor(sorted(known)[len(known) // 2])}"


def _exchanged(named: Named) -> str | None:
    """A tensor that stands under another one's name."""
    pairs = []
    for name in named.wrong:
        limit = named.tolerances[name].limit
        owner = next((o for o in named.expected if _equal(named.got[name], named.expected[o], limit)), None)
        if owner is None:
            return None
        pairs.append(f"{name} holds {owner}")
    return f"each is another one: {', '.join(pairs[:3])}{', ...' if len(pairs) > 3 else ''}"


def _transposed(named: Named) -> str | None:
    square = all(value.dim() == 2 and value.shape[0] == value.shape[1] for value in _wrong_ones(named))
    same = square and all(
        _equal(named.got[name].T, named.expected[name], named.tolerances[name].limit) for name in named.wrong
    )
    return "each is transposed" if same else None


def _equal(left: Tensor, right: Tensor, limit: float) -> bool:
    same_shape = left.shape == right.shape
    return same_shape and bool(((left.double() - right.double()).abs() <= limit).all())


def _wrong_ones(named: Named) -> list[Tensor]:
    return [named.expected[name] for name in named.wrong]


VALUES: tuple[Callable[[Named], str | None], ...] = (
    _not_finite,
    _zero,
    _multiplied,
    _exchanged,
    _transposed,
)

# ------------------------------------------------------------ which they are


def _by_layer(named: Named) -> Iterator[tuple[str, set[str]]]:
    layers: dict[int, set[str]] = {}
    for name in named.expected:
        if found := LAYER.search(name):
            layers.setdefault(int(found.group(1)), set()).add(name)
    for layer, names in layers.items():
        yield f"only parameters of layer {layer} are wrong", names
    if layers:
        yield (
            "only parameters of the layers are wrong; embedding, last norm and head are right",
            set().union(*layers.values()),
        )


def _by_kind(named: Named) -> Iterator[tuple[str, set[str]]]:
    for what, pattern in KINDS.items():
        names = {name for name in named.expected if pattern.search(name)}
        note = ", which layouts replicate" if what in ("biases are", "norms are") else ""
        yield f"only {what} wrong{note}", names
    for module in dict.fromkeys(name.rsplit(".", 2)[-2] for name in named.expected if name.count(".") > 1):
        yield f"only {module} is wrong", {name for name in named.expected if f".{module}." in name}


def _by_dimension(named: Named) -> Iterator[tuple[str, set[str]]]:
    vectors = {name for name, value in named.expected.items() if value.dim() < 2}
    yield "only vectors (norms, biases) are wrong, which layouts replicate", vectors
    yield "only matrices are wrong; vectors (norms, biases) are right", set(named.expected) - vectors


def _by_tie(named: Named) -> Iterator[tuple[str, set[str]]]:
    if not any(KINDS["the head is"].search(name) for name in named.expected):
        tied = {name for name in named.expected if EMBEDDING.search(name)}
        yield "only the embedding is wrong, which is tied to the head: are both uses in it?", tied


SETS: tuple[Callable[[Named], Iterator[tuple[str, set[str]]]], ...] = (
    _by_tie,
    _by_kind,
    _by_layer,
    _by_dimension,
)

# --------------------------------------------------------- which part of each


def _few_rows(named: Named) -> str | None:
    """Single rows of one matrix: token ids, where it is an embedding or a head."""
    if len(named.wrong) != 1 or named.expected[named.wrong[0]].dim() < 2:
        return None
    name = named.wrong[0]
    rows = _indices(named.outside(name), 0).tolist()
    if len(rows) > 4 or len(rows) == len(named.expected[name]):
        return None
    ids = (
        ", which are token ids"
        if KINDS["embeddings are"].search(name) or KINDS["the head is"].search(name)
        else ""
    )
    return f"only rows {rows} of {len(named.expected[name])} of {name} are wrong{ids}"


def _shard(named: Named) -> str | None:
    """The same part of every wrong tensor: the shard of one rank."""
    for dimension, what in ((0, "first"), (1, "second")):
        for count in RANKS:
            parts = {_part(named, name, dimension, count) for name in named.wrong}
            if len(parts) == 1 and None not in parts:
                number = next(iter(parts))
                return (
                    f"all wrong entries are in part {number} (from 0) of {count} equal parts of the {what} "
                    "dimension: the shard of one rank?"
                )
    return None


def _part(named: Named, name: str, dimension: int, count: int) -> int | None:
    """The number of the part that holds all wrong entries of ``name``, half of its indices at least."""
    wrong = named.outside(name)
    if wrong.dim() <= dimension or wrong.shape[dimension] < count:
        return None
    size = -(-wrong.shape[dimension] // count)
    found = _indices(wrong, dimension)
    numbers = (found // size).unique()
    return int(numbers[0]) if len(numbers) == 1 and 2 * len(found) >= size else None


def _edges(named: Named) -> str | None:
    """The rows next to the cuts between shards, or the last one, which padding follows."""
    for dimension, what in ((0, "first"), (1, "second")):
        if any(value.dim() <= dimension for value in _wrong_ones(named)):
            continue
        found = {name: set(_indices(named.outside(name), dimension).tolist()) for name in named.wrong}
        sizes = {name: named.expected[name].shape[dimension] for name in named.wrong}
        if all(sizes[name] > 1 and rows == {sizes[name] - 1} for name, rows in found.items()):
            return f"only the last index of the {what} dimension is wrong: uneven shards, or padding?"
        for count in RANKS[::-1]:
            if all(
                sizes[name] > 2 * count and rows <= _next_to_cuts(sizes[name], count)
                for name, rows in found.items()
            ):
                return f"only indices next to the cuts into {count} shards of the {what} dimension are wrong"
    return None


def _next_to_cuts(size: int, count: int) -> set[int]:
    cuts = range(-(-size // count), size, -(-size // count))
    return {place for cut in cuts for place in (cut - 1, cut)}


def _indices(wrong: Tensor, dimension: int) -> Tensor:
    """The indices along ``dimension`` that hold a wrong entry."""
    others = [other for other in range(wrong.dim()) if other != dimension]
    return (wrong.any(dim=others) if others else wrong).nonzero()[:, 0]


PARTS: tuple[Callable[[Named], str | None], ...] = (_few_rows, _edges, _shard)
