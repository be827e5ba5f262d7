"""Known shapes of errors in token outputs: the wrong values, and their tokens.

Each shape is a small function. A changed value must explain every wrong token; a set of
tokens is named only if it holds all wrong ones, at least half of it is wrong, and tokens outside of
it are right. The smallest of several such sets counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core_rl_conformance.hints.tokens import LOOKS_LIKE, Tokens, constant_factor, show_factor
from core_rl_oracle.tolerance import Tolerance, largest_difference

Place = tuple[str, Tensor]
"""A sentence, and the tokens that it speaks of, bool ``[T]``."""

PERIODS = (512, 256, 128, 64, 32, 16, 8)
"""Lengths of chunks that kernels work in."""
SMALLEST_BUFFER = 32
"""Shorter patterns more likely belong to a single sequence."""


def _by_mask(tokens: Tokens) -> Iterator[Place]:
    if tokens.places is None:
        return
    trained = tokens.places.trained
    yield "only tokens that are not trained (loss_mask 0) are wrong", ~trained
    yield "only trained tokens (loss_mask 1) are wrong", trained
    order = trained.cumsum(0)
    starts = torch.tensor([0, *tokens.lengths[:-1]]).cumsum(0)
    before = (order - trained.long())[starts][tokens.sequence]
    total = torch.zeros(len(tokens.lengths), dtype=torch.long).index_add(0, tokens.sequence, trained.long())
    mask = order - before
    yield "only the first trained token of a sequence is wrong", trained & (mask == 1)
    yield "only the last trained token of a sequence is wrong", trained & (mask == total[tokens.sequence])


def _by_end(tokens: Tokens) -> Iterator[Place]:
    yield "only the first token of a sequence is wrong", tokens.position == 0
    yield "only the last token of a sequence is wrong", tokens.last


def _by_position(tokens: Tokens) -> Iterator[Place]:
    positions = tokens.position[tokens.wrong]
    low, high = int(positions.min()), int(positions.max())
    if low == high:
        yield f"only position {low} of sequences is wrong", tokens.position == low
    elif low == 2:
        sentence = "position 1, which attends to one token alone, is right and later ones are not"
        yield sentence, tokens.position >= low
    elif low > 2:
        yield f"only positions from {low} on are wrong", tokens.position >= low
    if low <= 1 and high > 1:
        yield f"only positions up to {high} are wrong", tokens.position <= high


def _by_chunk(tokens: Tokens) -> Iterator[Place]:
    """Every so many tokens, in the sequence or in the pack of a rank."""
    order = tokens.position
    yield from _periodic(order, tokens, "of a sequence")
    rank = torch.zeros_like(order) if tokens.places is None else tokens.places.rank
    packed = torch.zeros_like(order)
    for number in rank.unique():
        mask = rank == number
        packed[mask] = torch.arange(int(mask.sum()))
    yield from _periodic(packed, tokens, "of the packed tokens of a rank")


def _periodic(order: Tensor, tokens: Tokens, label: str) -> Iterator[Place]:
    places = order[tokens.wrong].unique()
    if len(places) < 2:
        return
    for period in PERIODS:
        rest = places % period
        if bool((rest == rest[0]).all()):
            shown = ", ".join(str(int(place)) for place in places[:3]) + (", ..." if len(places) > 3 else "")
            sentence = f"only every {period}th position {label} is wrong ({shown})"
            yield sentence, order % period == rest[0]


def _by_shard_edge(tokens: Tokens) -> Iterator[Place]:
    """Next to where consecutive tokens of a micro-batch go to the next rank, however a rest is spread."""
    if tokens.places is None:
        return
    order, packed = tokens.places.order, tokens.places.packed
    for count in tokens.places.shards:
        for starts in _shard_starts(order, packed, count):
            label = f"the edges of the shards that {count} ranks have of the packed tokens"
            yield f"only the first tokens after {label} are wrong", starts
            ends = torch.zeros_like(starts)
            ends[:-1] = starts[1:] & (order[1:] == order[:-1] + 1)
            yield f"only the last tokens before {label} are wrong", ends
            yield f"only tokens at {label} are wrong", starts | ends


def _shard_starts(order: Tensor, packed: Tensor, count: int) -> Iterator[Tensor]:
    """Bool ``[T]``: the first token of each shard but the first, for both usual ways to cut."""
    small, rest = packed // count, packed % count
    number = torch.arange(1, count)[:, None]
    yield (order == number * small + torch.minimum(number, rest)).any(0) & (order > 0)
    yield (order == number * -(-packed // count)).any(0) & (order > 0)


def _by_id(tokens: Tokens) -> Iterator[Place]:
    if tokens.places is None:
        return
    ids, size = tokens.places.ids, tokens.places.vocab_size
    if tokens.scalars:
        last = ids[tokens.wrong].unique()
        if len(last) == 1:
            yield f"only sequences that end with the id {_name(int(last[0]), size)} are wrong", ids == last[0]
        return
    previous = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    previous[tokens.position == 0] = -1
    for values, label in ((ids, "with"), (previous, "right after")):
        wrong_ids = values[tokens.wrong].unique()
        if len(wrong_ids) == 1:
            yield (
                f"only tokens {label} the id {_name(int(wrong_ids[0]), size)} are wrong",
                values == wrong_ids[0],
            )
    for special in (0, 1, 2, size - 1):
        seen = _seen_before(ids == special, tokens)
        sentence = f"only tokens after one with the id {_name(special, size)} in their sequence are wrong"
        yield sentence, seen


def _name(value: int, size: int) -> str:
    return f"{value} (the last of the vocabulary)" if value == size - 1 else str(value)


def _seen_before(marked: Tensor, tokens: Tokens) -> Tensor:
    parts = [part.cumsum(0) - part.long() > 0 for part in marked.split(tokens.lengths)]
    return torch.cat(parts)


def _by_size(tokens: Tokens) -> Iterator[Place]:
    """Errors from some token, sequence or id on: the end of a buffer or an integer."""
    if tokens.places is None:
        return
    places = tokens.places
    # First tokens, which are always right, belong to what follows.
    wrong = tokens.wrong.clone()
    wrong[:-1] |= wrong[1:] & (tokens.position[:-1] == 0)
    for order, label in ((places.number, "sequences"), (places.order, "tokens")):
        low = int(order[wrong].min())
        if low >= SMALLEST_BUFFER:
            yield f"{LOOKS_LIKE}a limit: only {label} from number {low} of a pass on are wrong", order >= low
    for most in (2**16 - 1, 2**15 - 1):
        seen = _seen_before(places.ids > most, tokens)
        sentence = f"only tokens after an id above {most:,} in their sequence are wrong"
        yield f"{LOOKS_LIKE}ids of 16 bits: {sentence}", seen


def _by_rank(tokens: Tokens) -> Iterator[Place]:
    if tokens.places is None:
        return
    rank = tokens.places.rank
    wrong_ranks = rank[tokens.wrong].unique()
    if len(wrong_ranks) == 1:
        mask = rank == wrong_ranks[0]
        count = len(tokens.sequence[mask].unique())
        sentence = (
            f"all wrong values belong to the {count} sequences of data-parallel rank {int(wrong_ranks[0])}"
        )
        yield sentence, mask


def _by_sequence(tokens: Tokens) -> Iterator[Place]:
    lengths, wrong_sequences = tokens.length[tokens.wrong], tokens.sequence[tokens.wrong].unique()
    if len(wrong_sequences) == 1:
        place = int(wrong_sequences[0])
        yield f"only sequence {place} ({tokens.lengths[place]} tokens) is wrong", tokens.sequence == place
    low, high = int(lengths.min()), int(lengths.max())
    yield f"only sequences of {low} and more tokens are wrong", tokens.length >= low
    yield f"only sequences of at most {high} tokens are wrong", tokens.length <= high
    sentence = "the first sequence is right and later ones are not"
    yield sentence, tokens.sequence > 0
    if tokens.places is not None:
        rank = tokens.places.rank
        firsts = torch.stack([tokens.sequence[rank == number].min() for number in rank.unique()])
        yield f"{sentence} (on each rank)", ~torch.isin(tokens.sequence, firsts)


PLACES: tuple[Callable[[Tokens], Iterator[Place]], ...] = (
    _by_end,
    _by_mask,
    _by_id,
    _by_position,
    _by_chunk,
    _by_shard_edge,
    _by_size,
    _by_rank,
    _by_sequence,
)


def token_hints(tokens: Tokens, explained: Sequence[str] = ()) -> list[str]:
    """Hints on the shape and the positions of the wrong values; at most one line for each.

    What ``explained`` the values replaces the shape.
    """
    single = int(tokens.wrong.sum()) < 2  # no pattern
    shapes, places = ((_not_finite, _zero), (_by_sequence,)) if single else (VALUES, PLACES)
    if tokens.scalars and not single:
        places = (_by_id, _by_rank, _by_sequence)
    value = None if explained else next((text for shape in shapes if (text := shape(tokens))), None)
    hints = list(explained) if value is None else [LOOKS_LIKE + value]
    matching = [part for shape in places for part in shape(tokens) if _explains(part[1], tokens)]
    if matching:
        hints.append(min(matching, key=lambda part: int(part[1].sum()))[0])
    elif not hints and not single:
        hints += [trend for shape in TRENDS if (trend := shape(tokens))][:1]
    return hints


def _explains(inside: Tensor, tokens: Tokens) -> bool:
    """All wrong tokens are inside, half of those inside are wrong, and some outside are right."""
    # First tokens are 0 by definition, hence nearly always right: they prove nothing.
    counted = (tokens.position > 0) | tokens.wrong | tokens.scalars
    if bool((tokens.wrong & ~inside).any()) or not bool((~inside & counted).any()):
        return False
    return 2 * int(tokens.wrong.sum()) >= int((inside & counted).sum())


# ------------------------------------------------------- the values


def _not_finite(tokens: Tokens) -> str | None:
    finite = torch.isfinite(tokens.got[tokens.wrong]).flatten(1 if tokens.got.dim() > 1 else 0)
    return "they are not finite" if not bool(finite.any()) else None


def _zero(tokens: Tokens) -> str | None:
    return "they are all zero" if not bool(tokens.got[tokens.wrong].any()) else None


def _shifted(tokens: Tokens) -> str | None:
    if tokens.got.dim() > 1:
        return None
    pairs = list(zip(tokens.got.split(tokens.lengths), tokens.expected.split(tokens.lengths), strict=True))
    pairs = [(left, right) for left, right in pairs if len(left) > 2]
    for late, place in ((True, "late"), (False, "early")):
        parts = [(left[1:], right[:-1]) if late else (left[:-1], right[1:]) for left, right in pairs]
        if parts and all(tokens.tolerance.allows(largest_difference(left, right)) for left, right in parts):
            return f"every value stands one position too {place}; a value at t belongs to token t"
    return None


def _permuted(tokens: Tokens) -> str | None:
    """Equal as multisets: sorting brings the best partners together."""
    if tokens.got.dim() > 1 or not _same_sorted(tokens.got, tokens.expected, tokens.tolerance):
        return None
    parts = zip(tokens.got.split(tokens.lengths), tokens.expected.split(tokens.lengths), strict=True)
    if all(_same_sorted(left, right, tokens.tolerance) for left, right in parts):
        return "each sequence has its own values, in another order"
    return (
        "the values are right and belong to other sequences: the order is not restored after a sort or a cut"
    )


def _same_sorted(left: Tensor, right: Tensor, tolerance: Tolerance) -> bool:
    return tolerance.allows(largest_difference(left.sort().values, right.sort().values))


def _multiplied(tokens: Tokens) -> str | None:
    factor = constant_factor(tokens.got[tokens.wrong], tokens.expected[tokens.wrong], tokens.tolerance)
    label = "everything is" if bool(tokens.wrong[tokens.position > 0].all()) else "the wrong ones are"
    return None if factor is None else f"{label} multiplied by {show_factor(factor)}"


def _moved(tokens: Tokens) -> str | None:
    difference = (tokens.got - tokens.expected)[tokens.wrong]
    middle = float(difference.median())
    allowed = 1e-3 * abs(middle) + 2 * tokens.tolerance.limit
    same = abs(middle) > 5 * tokens.tolerance.limit and bool(((difference - middle).abs() <= allowed).all())
    return f"the wrong ones are all off by {middle:+.6g}" if same else None


def _rounded(tokens: Tokens) -> str | None:
    """Numbers of half precision, other than whole ones."""
    for dtype in (torch.bfloat16, torch.float16) if bool(tokens.got.frac().any()) else ():
        if torch.equal(tokens.got.to(dtype).double(), tokens.got):
            return f"each number is one of {str(dtype).removeprefix('torch.')}: kept in it, or rounded to it"
    return None


VALUES: tuple[Callable[[Tokens], str | None], ...] = (
    _not_finite,
    _zero,
    _shifted,
    _permuted,
    _multiplied,
    _moved,
    _rounded,
)


# ----------------------------------------------------- how errors are spread


def _grows(tokens: Tokens) -> str | None:
    """Whether errors grow from quarter to quarter of the sequences."""
    error = _errors(tokens)
    counted = (tokens.position > 0) & (tokens.length >= 12)
    if not bool(counted.any()) or not bool(torch.isfinite(error).all()):
        return None
    quarter = (4 * tokens.position // tokens.length)[counted]
    means = [float(error[counted][quarter == number].mean()) for number in range(4)]
    grows = all(later > earlier for earlier, later in zip(means, means[1:], strict=False))
    if not grows or means[3] < 3 * means[0]:
        return None
    return (
        f"errors grow with the position: {means[0]:.1e} on average in the first quarter of sequences, "
        f"{means[3]:.1e} in the last"
    )


def _small(tokens: Tokens) -> str | None:
    """Whether most values are wrong, and all of them by little; rounding points both ways."""
    share = float(_errors(tokens).max() / tokens.expected.abs().max())
    if not share < 1 / 64 or 2 * int(tokens.wrong.sum()) < int((tokens.position > 0).sum()):
        return None
    difference = (tokens.got - tokens.expected)[tokens.wrong]
    by_chance = 3 * float(difference.std()) / difference.numel() ** 0.5
    rounding = abs(float(difference.mean())) <= by_chance
    text = f"errors are everywhere and small, {share:.1e} of the largest value at most"
    return (
        f"{LOOKS_LIKE}rounding to a smaller dtype: {text}" if rounding else f"{text}, mostly in one direction"
    )


def _errors(tokens: Tokens) -> Tensor:
    error = (tokens.got - tokens.expected).abs()
    return error.flatten(1).amax(1) if error.dim() > 1 else error


TRENDS: tuple[Callable[[Tokens], str | None], ...] = (_grows, _small)
