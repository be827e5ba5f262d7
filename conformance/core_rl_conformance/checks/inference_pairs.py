"""Two inference engines compared with each other, with the same weights and prompts; the oracle names the wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.data.requests import LLMResponse
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.pairs import PairFinding, pair_tokens, partners_part, verify_pair
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.procedures import serving

GIVEN = (Capability.SCORE, Capability.TOP_LOGPROBS)
TEMPERATURES = (1.0, 0.7)
TOP = 5


@dataclass(frozen=True, kw_only=True)
class Given:
    """Log-probs of given tokens, one tensor for each sequence."""

    scores: list[Tensor]
    """``[L]``."""
    top: list[Tensor]
    """``[L - 1, k]``, best first, of the tokens after the first."""
    full: list[Tensor]
    """``[L - 1, V]``, in the order of ids."""


@check("I7.pair-scores", kind="inference", partner="inference", requires=GIVEN, partner_requires=GIVEN)
def two_engines_score_alike(subject: EngineUnderTest) -> None:
    """``score`` and ``top_logprobs`` equal the other engine's: of given tokens, the best ones and the whole vocabulary.

    Why: a policy on one server and its reference or teacher on another must differ by their weights alone; what
    the servers add to the difference becomes a reward.
    Look at: the engine that is off the oracle, which the message names; then its own I7.score and I7.top-logprobs.
    """
    model, data = subject.model(), subject.data()
    for temperature in TEMPERATURES:
        with partners_part(subject):
            partner = _given(subject.peer, data, temperature)
        ours = _given(subject, data, temperature)
        expected = subject.outputs(model, data, "logprobs", temperature)
        rows = subject.expected.oracle(model).evaluate(data.for_oracle(), temperature)
        full = [torch.log_softmax(row["logits"][1:], -1) for row in rows]
        best = [row.topk(TOP).values for row in full]
        at = f"at temperature {temperature:g}"
        quantities = [
            pair_tokens(f"scores {at}", ours.scores, partner.scores, expected),
            # By rank: engines may order equal log-probs, and ids with them, in any way.
            pair_tokens(f"top {TOP} log-probs {at}", ours.top, partner.top, replace(expected, values=best)),
            pair_tokens(
                f"log-probs of all tokens {at}", ours.full, partner.full, replace(expected, values=full)
            ),
        ]
        verify_pair(subject, quantities)


def _given(side: EngineUnderTest, data: Ragged, temperature: float) -> Given:
    model, batch = side.model(), data.batch()
    engine = side.serve(model)
    top = engine.top_logprobs(batch, TOP, temperature)
    every = engine.top_logprobs(batch, model.vocab_size, temperature)
    ordered = torch.zeros_like(every.logprobs).scatter(1, every.ids, every.logprobs)
    return Given(
        scores=list(engine.score(batch, temperature).split(data.lengths)),
        top=[row[1:] for row in top.logprobs.split(data.lengths)],
        full=[row[1:] for row in ordered.split(data.lengths)],
    )


@check("I8.pair-greedy", kind="inference", partner="inference", each="layout")
def two_engines_decode_alike(subject: EngineUnderTest) -> None:
    """Greedy decoding takes the other engine's tokens, with the same log-probs, up to equally likely tokens.

    Why: an evaluation on another server must measure the policy; defaults of one server, such as a penalty or a
    temperature, change its answers.
    Look at: the engine that is off the oracle, which the message names; then its own I8.rollout-temperature.
    """
    model, data = subject.model(), subject.data()
    requests = serving.requests_for(data, replace(serving.PLAIN, temperature=0.0))
    with partners_part(subject):
        partner = serving.ask(subject.peer.serve(model), requests)
    verify_pair(subject, _pair_answers(subject, serving.ask(subject.serve(model), requests), partner))


def _pair_answers(
    subject: EngineUnderTest, ours: Sequence[LLMResponse], partner: Sequence[LLMResponse]
) -> list[PairFinding]:
    """Answers up to the first token that differs: behind it the engines have read other tokens."""
    pairs = list(zip(ours, partner, strict=True))
    common = [_common(left.output_ids, right.output_ids) for left, right in pairs]
    rows = [
        row[: n + 1]
        for row, n in zip(serving.distributions(subject, subject.model(), ours), common, strict=True)
    ]
    outputs = subject.outputs(subject.model(), serving.sequences_of(ours), "logprobs")
    drawn = serving.generated(outputs.values, ours)
    # Each of two tokens may be off by the tolerance before they change places.
    ranked = replace(
        outputs, values=[row.max(-1).values for row in rows], tolerance=outputs.tolerance + outputs.tolerance
    )
    return [
        pair_tokens(
            "the oracle's log-probs of greedy tokens, and the largest",
            [_at(row, response) for row, response in zip(rows, ours, strict=True)],
            [_at(row, response) for row, response in zip(rows, partner, strict=True)],
            ranked,
        ),
        pair_tokens(
            "log-probs of greedy tokens",
            [torch.tensor(response.logprobs[:n]) for response, n in zip(ours, common, strict=True)],
            [torch.tensor(response.logprobs[:n]) for response, n in zip(partner, common, strict=True)],
            replace(outputs, values=[row[:n] for row, n in zip(drawn, common, strict=True)]),
        ),
    ]


def _common(ours: Sequence[int], partner: Sequence[int]) -> int:
    """The number of equal tokens at the start."""
    pairs = enumerate(zip(ours, partner, strict=True))
    return next((place for place, (left, right) in pairs if left != right), len(ours))


def _at(rows: Tensor, response: LLMResponse) -> Tensor:
    """The values ``[n]`` of ``rows [n, V]`` at the first tokens of the answer."""
    return rows.gather(1, torch.tensor(response.output_ids[: len(rows)])[:, None])[:, 0]
