"""Properties over batches that hypothesis draws: what holds for fixed batches holds for any."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import CoreRLError, GroupError, RankFailed
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest, per_sequence
from core_rl_conformance.findings import reproduced, reproduced_tokens, scalar_finding
from core_rl_conformance.hints.diagnose import Finding, compare_named, compare_tokens, explain_named
from core_rl_conformance.inputs.data import Ragged, Row, drawn_row
from core_rl_conformance.inputs.losses import TokenMeanLoss

LONGEST = 40
MOST_ROWS = 4
MASKS = ("all", "last", "none", "some")
LOSS = TokenMeanLoss(temperature=0.8)
DRAWN = 6
"""Number of drawn batches."""
MOST_RUNS = 60
"""After so many batches a failing one is not made smaller any more."""


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
        return drawn_row(rng, [tokens.randrange(vocab_size) for _ in range(self.length)], mask[self.trained])


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


@check("I1.any-batch", each="layout")
def any_batch_follows_the_oracle(subject: EngineUnderTest) -> None:
    """Log-probs, loss and gradients of any ragged batch, with any mask and cut into micro-batches, are the oracle's.

    Why: an empty micro-batch, a single trained token, or a rank without work takes its own code path. Benchmark
    batches never take it (SkyRL #1296, verl #5591).
    Look at: the lines of the message, which build the smallest batch that fails; ``squeeze``, slices and
    means over one element or none; branches on the number of tokens.
    """
    trial = _Trial(subject)
    try:
        _search(subject.case.seed, trial)
    except _Wrong as wrong:
        subject.verify(wrong.finding)
    for finding in trial.worst.values():
        subject.verify(finding)


def _search(number: int, trial: Callable[[DrawnBatch], None]) -> None:
    """Call ``trial`` with the edges and with drawn batches; a failing one is made smaller."""

    @seed(number)
    @settings(
        max_examples=DRAWN,
        database=None,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(batches())
    def run(drawn: DrawnBatch) -> None:
        trial(drawn)

    for edge in EDGES:
        run = example(edge)(run)
    run()


class _Wrong(AssertionError):
    """A finding with a problem, on its way through hypothesis."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.problem)
        self.finding = finding


class _Trial:
    """Runs each batch once, and remembers what came: hypothesis runs the smallest failing one again."""

    def __init__(self, subject: EngineUnderTest) -> None:
        self.worst: dict[str, Finding] = {}
        """Finding closest to its limit, of each kind."""
        self._subject = subject
        self._model = subject.model()
        self._group = subject.start(self._model)
        self._outcomes: dict[DrawnBatch, Exception | None] = {}
        self._ended = False

    def __call__(self, drawn: DrawnBatch) -> None:
        if drawn not in self._outcomes:
            if self._ended or len(self._outcomes) >= MOST_RUNS:
                return
            self._outcomes[drawn] = self._run(drawn)
        error = self._outcomes[drawn]
        if error is not None:
            raise error

    def _run(self, drawn: DrawnBatch) -> Exception | None:
        """The problem with this batch, if any, and the code that builds the batch."""
        code = drawn.code(self._model.vocab_size)
        try:
            for finding in self._findings(drawn):
                if finding.problem is not None:
                    return _Wrong(replace(finding, problem=f"{finding.problem}\nthe batch:\n{code}"))
                known = self.worst.get(finding.what)
                if known is None or finding.error * known.limit > known.error * finding.limit:
                    self.worst[finding.what] = finding
        except CoreRLError as error:
            self._ended = isinstance(error, GroupError) and not isinstance(error, RankFailed)
            if self._ended and any(self._outcomes.values()):
                # The group did not survive an earlier failure, which is the one to tell.
                return None
            error.add_note(f"The batch:\n{code}")
            return error
        return None

    def _findings(self, drawn: DrawnBatch) -> Iterator[Finding]:
        subject, group, data = self._subject, self._group, drawn.ragged(self._model.vocab_size)
        group.optimizer_zero_grad()
        output = group.forward(data.batch(), drawn.cut, temperature=LOSS.temperature)
        got = per_sequence(output, "logprobs", data)
        logprobs = subject.outputs(self._model, data, "logprobs", LOSS.temperature)
        label = "log-probs of a drawn batch"
        finding = compare_tokens(label, got, logprobs.values, logprobs.tolerance, subject.places(data))
        note = f", cut by {drawn.cut}"
        truth, tolerance = logprobs.values, logprobs.tolerance
        yield reproduced_tokens(subject.case, finding, logprobs.computation, got, truth, tolerance, note)
        if not bool(data.batch().loss_mask.any()):
            return
        expected = subject.gradients(self._model, data, LOSS)
        metrics = group.forward_backward(data.batch(), LOSS.spec(), drawn.cut)
        label = "the loss of a drawn batch"
        yield scalar_finding(subject.case, "loss", label, metrics["loss"], expected, note=note)
        values = group.named_tensors("grads"), expected.oracle.grads, expected.tolerances
        explain = partial(
            explain_named, values[0], expected.tolerances, expected.mistakes, None, expected.shares
        )
        finding = compare_named("gradients of a drawn batch", *values, explain=explain)
        yield reproduced(subject.case, finding, expected.computation, *values, note)
