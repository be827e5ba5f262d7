"""The distribution of the tokens that inference engines draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.procedures.draws import FALSE_ALARMS, most_surprising, most_surprising_bet
from core_rl_conformance.procedures.serving import as_response, ask, distributions, left_by_cut

DRAWS = 256
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


@check("I8.sampling", kind="inference", each="layout")
def tokens_follow_the_distribution(subject: EngineUnderTest) -> None:
    """Tokens are drawn from ``softmax(logits / T)`` and nothing else, with seeds and without.

    Why: a lost temperature, defaults of the generation config (top-k, top-p, penalties), or one seed for a group
    change the policy. The log-probs stay right.
    Look at: which sampling parameters reach the server, also defaults; one random
    stream for each request.
    """
    prompts = Prompts.of(subject)
    for temperature, seeded, which in ((1.0, False, 0), (2.5, True, 1), (0.6, False, 1), (0.3, False, 0)):
        prompt, row = prompts.undecided(temperature)[which]
        sampling = replace(ONE, temperature=temperature)
        seeds = (
            range(1000 * subject.case.seed, 1000 * subject.case.seed + DRAWS) if seeded else [None] * DRAWS
        )
        responses = drawn_by(subject, [(prompt, replace(sampling, seed=seed)) for seed in seeds])
        how = (
            f"at temperature {temperature:g}, {'each with a seed of its own' if seeded else 'without seeds'}"
        )
        verify_first_tokens(subject, how, responses, row)
    _verify_answers(subject, prompts)


def drawn_by(
    subject: EngineUnderTest, requests: Sequence[tuple[tuple[int, ...], SamplingParams]]
) -> list[LLMResponse]:
    """Answers of the engine to prompts, each with its own sampling."""
    engine = subject.serve(subject.model())
    return ask(engine, [LLMRequest(input_ids=prompt, sampling=sampling) for prompt, sampling in requests])


def verify_first_tokens(
    subject: EngineUnderTest, how: str, responses: Sequence[LLMResponse], row: Tensor
) -> None:
    """Require that the first tokens of answers to one prompt follow the log-probs ``row [V]``."""
    drawn = [response.output_ids[0] for response in responses]
    surprise = most_surprising(drawn, row)
    hint = "; all of them are equal: do requests share a seed?" if len(set(drawn)) == 1 else ""
    subject.require(surprise.tail > FALSE_ALARMS, f"{how}: {surprise}{hint}")


def _verify_answers(subject: EngineUnderTest, prompts: Prompts) -> None:
    """Later tokens are drawn as the first one is; penalties on repeated tokens change only later tokens."""
    sampling = replace(ONE, temperature=0.6, max_new_tokens=24)
    responses = drawn_by(subject, [(ids, sampling) for ids, _ in prompts.undecided(0.6)] * 2)
    rows = distributions(subject, subject.model(), responses, sampling.temperature)
    surprise = most_surprising_bet([response.output_ids for response in responses], rows)
    subject.require(
        surprise.tail > FALSE_ALARMS, f"in answers of {sampling.max_new_tokens} tokens: {surprise}"
    )


@check("I8.sampling-cut", kind="inference", each="layout")
def tokens_follow_what_the_cut_has_left(subject: EngineUnderTest) -> None:
    """With top-k or top-p, drawn tokens follow ``softmax(logits / T)`` over the tokens that are left, all of them.

    Why: top-p before the temperature, or a cut that keeps a token too few, gives another policy. All tokens are
    allowed, and their log-probs are right.
    Look at: the order of temperature, top-k and top-p; whether the token that reaches ``top_p`` is kept.
    """
    prompts = Prompts.of(subject)
    for temperature, cut in ((0.6, "top_p"), (1.7, "top_p"), (1.7, "top_k")):
        prompt, row = prompts.undecided(temperature)[0]
        sampling = replace(_clear_cut(row, cut), temperature=temperature)
        responses = drawn_by(subject, [(prompt, sampling)] * DRAWS)
        left = left_by_cut(row[None], sampling, 0.0)[0].log_softmax(-1)
        value = getattr(sampling, cut)
        how = f"at temperature {temperature:g} with {cut} = {value:.4g}, which leaves {int(left.isfinite().sum())}"
        verify_first_tokens(subject, f"{how} tokens", responses, left)


def _clear_cut(row: Tensor, cut: str) -> SamplingParams:
    """The cut of ``row [V]`` that rounding changes least: far from where it would keep one token more or less."""
    ordered = row.sort(descending=True).values
    if cut == "top_k":
        gaps = ordered[3:12] - ordered[4:13]
        return replace(ONE, top_k=4 + int(gaps.argmax()))
    sums = ordered.exp().cumsum(0)
    inside = (sums[:-1] > 0.35) & (sums[1:] < 0.9)
    place = int((sums.diff() * inside).argmax())
    return replace(ONE, top_p=float(sums[place] + sums[place + 1]) / 2)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts and their possible next tokens."""

    ids: list[tuple[int, ...]]
    rows: Tensor
    """Log-probs ``[n, V]`` at temperature 1."""

    @staticmethod
    def of(subject: EngineUnderTest) -> Prompts:
        ids = [row.ids for row in subject.data(lengths=(2, 3, 4, 5, 6, 7) * 4, seed=5).rows]
        return Prompts(
            ids=ids, rows=torch.cat(distributions(subject, subject.model(), list(map(as_response, ids))))
        )

    def undecided(self, temperature: float = 1.0) -> list[tuple[tuple[int, ...], Tensor]]:
        """Prompts with their log-probs, the most uncertain first: these show most mistakes."""
        rows = torch.log_softmax(self.rows / temperature, -1)
        entropy = -(rows.exp() * rows).sum(-1)
        return [(self.ids[index], rows[index]) for index in entropy.argsort(descending=True).tolist()]


@check("I8.groups", kind="inference", each="layout")
def requests_of_a_group_differ(subject: EngineUnderTest) -> None:
    """Equal requests without a seed get different answers, also when asked in sequence.

    Why: a group of equal samples has no advantage, so nothing is learned from it; a server that starts from one
    seed for each batch or request, or keeps answers, gives just that.
    Look at: the seed that goes with each request; caches of whole answers.
    """
    engine = subject.serve()
    prompt, _ = Prompts.of(subject).undecided()[0]
    request = SamplingParams(max_new_tokens=16, temperature=1.7, ignore_eos=True)
    together = ask(engine, [LLMRequest(input_ids=prompt, sampling=request) for _ in range(8)])
    after = [ask(engine, [LLMRequest(input_ids=prompt, sampling=request)])[0] for _ in range(3)]
    for label, responses in (("at one time", together), ("one after another", after)):
        different = {response.output_ids for response in responses}
        subject.require(
            len(different) == len(responses),
            f"{len(responses)} equal requests {label} got {len(different)} different answers of 16 tokens",
        )
