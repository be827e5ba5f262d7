"""Models, batches and cuts that a soak draws, with sizes over powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl_conformance.inputs.data import Ragged, Repeated, Row, ragged
from core_rl_conformance.inputs.losses import SequenceMeanLoss, TokenMeanLoss
from core_rl_oracle.oracle import AdamW

LONGEST = 2**10 + 1
"""Tokens of a sequence, at most."""
MOST_TOKENS = 2**12
"""Tokens of a batch, at most: few of its sequences differ, so that the oracle computes these alone."""
MOST_CUTS = 2**6
TOKENS = ("drawn", "equal", "in pairs", "small")
MASKS = ("all", "last", "holes", "none")
TEMPERATURES = (1.0, 0.5, 0.8, 1.7)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Numbers from 1 to ``most``: powers of two, and their neighbours."""
    powers = [2**power for power in range(most.bit_length())]
    return st.sampled_from(
        sorted({n for power in powers for n in (power - 1, power, power + 1) if 1 <= n <= most})
    )


@dataclass(frozen=True)
class Sequences:
    """``number`` sequences, equal but for three: two of ``length`` tokens and one of half of it, in turns."""

    number: int
    length: int
    tokens: str
    trained: str
    draw: int

    def data(self, vocab_size: int, times: int = 1) -> Repeated:
        """The rows, ``times`` in a row; equal for equal fields."""
        rows = ragged(vocab_size, self.draw, (self.length, self.length, (self.length + 1) // 2)).rows
        distinct = Ragged(tuple(self._changed(row, vocab_size) for row in rows[: self.number]))
        order = [number % len(distinct.rows) for number in range(self.number)]
        return Repeated.of(distinct, order * times)

    def _changed(self, row: Row, vocab_size: int) -> Row:
        places = range(len(row.ids))
        ids = {
            "drawn": row.ids,
            "equal": tuple(row.ids[0] for _ in places),
            "in pairs": tuple(row.ids[place // 2] for place in places),
            "small": tuple(token % min(4, vocab_size) for token in row.ids),
        }
        mask = {
            "all": tuple(True for _ in places),
            "last": tuple(place == places[-1] for place in places),
            "holes": row.mask,
            "none": tuple(False for _ in places),
        }
        return replace(row, ids=ids[self.tokens], mask=mask[self.trained])


@st.composite
def sequences(draw: st.DrawFn, most_tokens: int = MOST_TOKENS, most: int = MOST_TOKENS) -> Sequences:
    """At most ``most`` sequences, with at most ``most_tokens`` tokens in all."""
    length = draw(sizes(min(LONGEST, most_tokens)))
    return Sequences(
        number=draw(sizes(min(most, most_tokens // length))),
        length=length,
        tokens=draw(st.sampled_from(TOKENS)),
        trained=draw(st.sampled_from(MASKS)),
        draw=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Cut:
    """Micro-batches, by their number or by a budget that is ``times`` the longest sequence."""

    number: int | None = None
    times: int = 1

    def of(self, data: Ragged) -> MicroBatchSpec:
        """The cut of ``data``."""
        if self.number is not None:
            return MicroBatchSpec(count=self.number)
        return MicroBatchSpec(max_tokens=self.times * max(data.lengths))


cuts = st.one_of(st.builds(Cut, sizes(MOST_CUTS)), st.builds(Cut, st.none(), st.integers(1, 4)))


@dataclass(frozen=True)
class Start:
    """The model and the optimizer that an engine begins with."""

    family: str
    draw: int
    deep: bool
    rate: float
    clip: float | None
    frozen: bool

    def optimizer(self) -> AdamW:
        """AdamW with these settings; a large epsilon keeps updates smooth."""
        return AdamW(lr=self.rate, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=self.clip)


def starts(families: Sequence[str]) -> st.SearchStrategy[Start]:
    """Models of these families, shallow or deep, with or without clipping and frozen parameters."""
    rates, clips = st.sampled_from((1e-3, 3e-2)), st.sampled_from((None, 0.02))
    return st.builds(
        Start, st.sampled_from(families), st.integers(0, 2), st.booleans(), rates, clips, st.booleans()
    )


temperatures = st.sampled_from(TEMPERATURES)
few = sequences(16)
"""Sequences that the oracle computes one by one, for any loss."""
output_names: tuple[OutputName, ...] = ("logprobs", "entropy", "logits")
output_sets = st.frozensets(st.sampled_from(output_names), min_size=1)
losses = st.one_of(
    st.builds(TokenMeanLoss, temperature=temperatures, entropy_coef=st.sampled_from((0.0, 0.25))),
    st.builds(SequenceMeanLoss, temperature=temperatures),
)
