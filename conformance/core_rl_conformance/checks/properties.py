"""Properties over drawn batches: what holds for the fixed ones holds for any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import HealthCheck, Phase, example, given, seed, settings

from core_rl.errors import CoreRLError, GroupError, RankFailed
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest, per_sequence
from core_rl_conformance.hints.diagnose import Finding, compare_named, compare_scalar, compare_tokens
from core_rl_conformance.inputs.drawn import EDGES, DrawnBatch, batches
from core_rl_conformance.inputs.losses import TokenMeanLoss

LOSS = TokenMeanLoss(temperature=0.8)
DRAWN = 6
"""Number of drawn batches."""
MOST_RUNS = 60
"""After so many batches a failing one is not made smaller any more."""


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
        yield compare_tokens(label, got, logprobs.values, logprobs.tolerance, subject.places(data))
        if not bool(data.batch().loss_mask.any()):
            return
        expected = subject.gradients(self._model, data, LOSS)
        metrics = group.forward_backward(data.batch(), LOSS.spec(), drawn.cut)
        yield compare_scalar(
            "the loss of a drawn batch", metrics["loss"], expected.oracle.loss, expected.loss
        )
        grads = group.named_tensors("grads")
        yield compare_named("gradients of a drawn batch", grads, expected.oracle.grads, expected.tolerances)
