"""Scores of given tokens by inference engines."""

from __future__ import annotations

import torch

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.config.capability import Capability
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_tokens
from core_rl_conformance.inputs.data import LENGTHS, Ragged
from core_rl_conformance.procedures.outputs import verify_overall
from core_rl_oracle.tolerance import Tolerance

UP_TO_THE_CONTEXT = (64, *LENGTHS)
"""One sequence is as long as the models take."""


@check("I7.score", kind="inference", requires=[Capability.SCORE])
def scores_match_the_oracle(subject: EngineUnderTest) -> None:
    """``score`` gives the oracle's log-prob of every token at temperature 1 and others, also when asked again.

    Why: a reference policy on a server that is off by one position, or without the temperature, makes every
    KL term wrong.
    Look at: the alignment (a value at ``t`` belongs to token ``t``), the first token of each sequence (0), the
    temperature, sequences that share a cached prefix.
    """
    model, data = subject.model(), subject.data(lengths=UP_TO_THE_CONTEXT)
    engine = subject.serve(model)
    for temperature, when in ((1.0, ""), (0.6, ""), (1.0, ", asked again")):
        expected = subject.outputs(model, data, "logprobs", temperature)
        got = list(engine.score(data.batch(), temperature).split(data.lengths))
        label = f"scores at temperature {temperature:g}{when}"
        subject.verify_tokens(label, got, expected, subject.places(data))
        verify_overall(subject, label, got, expected)


@check("I7.top-logprobs", kind="inference", requires=[Capability.TOP_LOGPROBS])
def top_logprobs_match_the_oracle(subject: EngineUnderTest) -> None:
    """``top_logprobs`` gives the most likely tokens at the place of each token, best first, with their log-probs.

    Why: distillation and exact KL read the whole distribution; ids that are off by one position or log-probs
    without the temperature look plausible.
    Look at: the alignment, the order, the temperature, and padded rows of the vocabulary.
    """
    model, data = subject.model(), subject.data(lengths=UP_TO_THE_CONTEXT)
    engine = subject.serve(model)
    for temperature in (1.0, 0.6):
        expected = subject.outputs(model, data, "logprobs", temperature)
        rows = subject.expected.oracle(model).evaluate(data.for_oracle(), temperature)
        full = [torch.log_softmax(row["logits"], -1) for row in rows]
        for count in (1, 5, model.vocab_size):
            top = engine.top_logprobs(data.batch(), count, temperature)
            label = f"top {count} log-probs at temperature {temperature:g}"
            verify_top(subject, label, top, data, full, expected.tolerance)


def verify_top(
    subject: EngineUnderTest,
    label: str,
    top: TopLogprobs,
    data: Ragged,
    full: list[torch.Tensor],
    tolerance: Tolerance,
) -> None:
    """Compare with ``full``, the log-probs ``[L, V]`` of all tokens at each place; ties may come in any order."""
    __tracebackhide__ = True
    count = top.ids.shape[1]
    pairs = zip(top.ids.split(data.lengths), top.logprobs.split(data.lengths), strict=True)
    rows = [(ids[1:], logprobs[1:]) for ids, logprobs in pairs]
    subject.require(
        all(len(set(row.tolist())) == count for ids, _ in rows for row in ids),
        f"{label}: a token comes twice at one place",
    )
    got = [logprobs for _, logprobs in rows]
    best = [every[1:].topk(count, dim=-1).values for every in full]
    subject.verify(compare_tokens(label, got, best, tolerance))
    expected_values = [every[1:].gather(1, ids) for every, (ids, _) in zip(full, rows, strict=True)]
    subject.verify(compare_tokens(f"{label}, of the ids that came", got, expected_values, tolerance))
