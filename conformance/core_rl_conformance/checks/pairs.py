"""Two train engines beside each other, on the same weights and the same batch."""

from __future__ import annotations

from core_rl_conformance.catalogue import check
from core_rl_conformance.diagnose import compare_tokens
from core_rl_conformance.subject import BUDGET, Subject, per_sequence


@check("I7.pair-logprobs", partner="train", each="layout")
def two_engines_have_the_same_logprobs(subject: Subject) -> None:
    """The log-probs of every token are those of the other engine.

    Why: two backends that differ on the same weights and batch leave open which is right.
    Look at: the engine that is off the oracle; this names it.
    """
    model, data = subject.model(), subject.data()
    expected = subject.outputs(model, data, "logprobs")
    got, other = (
        per_sequence(side.start(model).forward(data.batch(), BUDGET), "logprobs", data)
        for side in (subject, subject.peer)
    )
    subject.verify(compare_tokens("log-probs beside the other engine", got, other, expected.tolerance))
