"""Batches that hypothesis draws, and each of them as code to paste."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.inputs.data import Ragged, Row

__all__ = ["EDGES", "DrawnBatch", "DrawnRow", "batches"]

LONGEST = 40
MOST_ROWS = 4
MASKS = ("all", "last", "none", "some")


@dataclass(frozen=True)
class DrawnRow:
    """One sequence, by its length and by which of its tokens are trained; the rest follows from both."""

    length: int
    trained: str

    def row(self, number: int, vocab_size: int, group: bool = False) -> Row:
        """The sequence, as the ``number``-th of a batch; in a ``group``, with the ids of all others of its length."""
        rng = random.Random(f"{number} {self.length} {self.trained}")
        tokens = random.Random(self.length) if group else rng
        mask = {
            "all": (True,) * self.length,
            "last": (*(False,) * (self.length - 1), True),
            "none": (False,) * self.length,
            "some": tuple(rng.random() < 0.5 for _ in range(self.length)),
        }
        return Row(
            ids=tuple(tokens.randrange(vocab_size) for _ in range(self.length)),
            mask=mask[self.trained],
            advantages=tuple(rng.randrange(-128, 129) / 64 for _ in range(self.length)),
            target=rng.randrange(-128, 129) / 64,
        )


@dataclass(frozen=True)
class DrawnBatch:
    """A ragged batch and its cut into micro-batches."""

    rows: tuple[DrawnRow, ...]
    cut: MicroBatchSpec
    group: bool = False
    """Rows of one length have the same ids, as samples of one prompt may, and other masks and advantages."""

    def ragged(self, vocab_size: int) -> Ragged:
        """The sequences."""
        return Ragged(tuple(row.row(number, vocab_size, self.group) for number, row in enumerate(self.rows)))

    def code(self, vocab_size: int) -> str:
        """Lines of Python that build exactly this batch and this cut."""
        data = self.ragged(vocab_size)
        cut = f"count={self.cut.count}" if self.cut.count else f"max_tokens={self.cut.max_tokens}"
        lines = [
            "import torch",
            "from core_rl import MicroBatchSpec, SequenceBatch",
            "",
            "batch = SequenceBatch.from_sequences(",
            f"    {[list(row.ids) for row in data.rows]},",
            "    tokens={",
            f'        "loss_mask": [torch.tensor(row) for row in {[list(row.mask) for row in data.rows]}],',
            f'        "advantages": [torch.tensor(row) for row in {[list(row.advantages) for row in data.rows]}],',
            "    },",
            f'    sequences={{"target": torch.tensor({[row.target for row in data.rows]})}},',
            ")",
            f"mb_spec = MicroBatchSpec({cut})",
        ]
        return "\n".join(lines)


@st.composite
def batches(draw: st.DrawFn) -> DrawnBatch:
    """One to four sequences of 1 to 40 tokens, with a number of micro-batches or a budget that all fit.

    In half of the batches all have one length, and in half of those the same ids.
    """
    lengths = st.one_of(st.sampled_from((1, 2)), st.integers(1, LONGEST))
    row = st.builds(DrawnRow, lengths, st.sampled_from(MASKS))
    rows = tuple(draw(st.lists(row, min_size=1, max_size=MOST_ROWS)))
    alike, group = draw(st.booleans()), draw(st.booleans())
    if alike:
        rows = tuple(replace(part, length=rows[0].length) for part in rows)
    longest = max(part.length for part in rows)
    count = st.integers(1, MOST_ROWS + 1).map(lambda number: MicroBatchSpec(count=number))
    budget = st.integers(longest, 2 * longest).map(lambda number: MicroBatchSpec(max_tokens=number))
    return DrawnBatch(rows, draw(st.one_of(count, budget)), group)


def _of_one_length(length: int, *masks: str) -> tuple[DrawnRow, ...]:
    return tuple(DrawnRow(length, trained) for trained in masks)


MANY = (DrawnRow(2, "all"), DrawnRow(3, "last"), DrawnRow(1, "all"), DrawnRow(3, "all")) * 14
"""More sequences, and with a large count more micro-batches, than batches of these checks have elsewhere."""

EDGES = (
    # Micro-batches of which one has nothing to predict.
    DrawnBatch((DrawnRow(7, "all"), DrawnRow(1, "all"), DrawnRow(1, "none")), MicroBatchSpec(count=2)),
    # Exactly one trained token in a micro-batch, and in all.
    DrawnBatch((DrawnRow(9, "some"), DrawnRow(2, "last")), MicroBatchSpec(max_tokens=9)),
    DrawnBatch((DrawnRow(5, "none"), DrawnRow(6, "last")), MicroBatchSpec(count=1)),
    # Micro-batches without any padding: two sequences of one length, or three.
    DrawnBatch(_of_one_length(9, "all", "some"), MicroBatchSpec(count=1)),
    DrawnBatch(_of_one_length(7, "some", "all", "all"), MicroBatchSpec(count=1)),
    # The same ids several times, with other masks and advantages.
    DrawnBatch(_of_one_length(8, "all", "some", "last", "all"), MicroBatchSpec(count=1), group=True),
    # Many short sequences, in one micro-batch and in many.
    DrawnBatch(MANY, MicroBatchSpec(count=1)),
    DrawnBatch(MANY, MicroBatchSpec(count=16)),
)
"""Corners that are tried in every session, whatever is drawn."""
