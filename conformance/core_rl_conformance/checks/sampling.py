"""What inference engines draw: whether it follows the distribution that was asked for."""

from __future__ import annotations

import torch

from core_rl.rollout.types import LLMRequest, LLMResponse, SamplingParams
from core_rl_conformance.catalogue import check
from core_rl_conformance.procedures.draws import FALSE_ALARMS, most_surprising
from core_rl_conformance.procedures.serving import ask, distributions
from core_rl_conformance.subject import Subject

DRAWS = 256


@check("I8.sampling", kind="inference", each="layout")
def tokens_follow_the_distribution(subject: Subject) -> None:
    """What is drawn follows ``softmax(logits / T)`` and nothing else, with seeds and without.

    Why: a temperature that never arrives, the defaults of the model's generation config (top-k, top-p,
    penalties), or one seed for a whole group leave log-probs right and the policy another one.
    Look at: which sampling parameters reach the server, also those that were not asked for; one random
    stream for each request.
    """
    model = subject.model()
    engine = subject.serve(model)
    prompts = _undecided(subject)
    for temperature, seeded, prompt in (
        (1.0, False, prompts[0]),
        (2.5, True, prompts[1]),
        (0.6, False, prompts[1]),
    ):
        requests = [
            LLMRequest(
                input_ids=prompt,
                sampling=SamplingParams(
                    max_new_tokens=1,
                    temperature=temperature,
                    ignore_eos=True,
                    seed=1000 * subject.case.seed + number if seeded else None,
                ),
            )
            for number in range(DRAWS)
        ]
        found = ask(engine, requests)
        drawn = [response.output_ids[0] for response in found]
        row = distributions(subject, model, found[:1], temperature)[0][0]
        surprise = most_surprising(drawn, row)
        how = (
            f"at temperature {temperature:g}, {'each with a seed of its own' if seeded else 'without seeds'}"
        )
        hint = "; all of them are equal: do requests share a seed?" if len(set(drawn)) == 1 else ""
        subject.require(surprise.tail > FALSE_ALARMS, f"{how}: {surprise}{hint}")


def _undecided(subject: Subject) -> list[tuple[int, ...]]:
    """The two prompts of some that leave most tokens possible: where much is possible, much can go wrong."""
    model = subject.model()
    candidates = subject.data(lengths=(2, 3, 4, 5, 6, 7) * 4, seed=5).rows
    asked = [
        LLMResponse(
            rid="", input_ids=row.ids, output_ids=(0,), logprobs=(0.0,), versions=(0,), stop_reason="stop"
        )
        for row in candidates
    ]
    rows = torch.cat(distributions(subject, model, asked))
    entropy = -(rows.exp() * rows).sum(-1)
    return [candidates[int(index)].ids for index in entropy.topk(2).indices]


@check("I8.groups", kind="inference", each="layout")
def requests_of_a_group_differ(subject: Subject) -> None:
    """Equal requests without a seed get different answers, also when they are asked one after another.

    Why: a group of equal samples has no advantage, so nothing is learned from it; a server that starts from one
    seed for each batch or request, or keeps answers, gives just that.
    Look at: the seed that goes with each request; caches of whole answers.
    """
    engine = subject.serve()
    prompt = _undecided(subject)[0]
    request = SamplingParams(max_new_tokens=16, temperature=1.7, ignore_eos=True)
    together = ask(engine, [LLMRequest(input_ids=prompt, sampling=request) for _ in range(8)])
    after = [ask(engine, [LLMRequest(input_ids=prompt, sampling=request)])[0] for _ in range(3)]
    for what, found in (("at one time", together), ("one after another", after)):
        different = {response.output_ids for response in found}
        subject.require(
            len(different) == len(found),
            f"{len(found)} equal requests {what} got {len(different)} different answers of 16 tokens",
        )
