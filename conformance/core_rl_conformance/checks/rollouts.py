"""Log-probs of inference engines: of the tokens that they draw, and of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, dropwhile

import torch
from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_tokens, explain_tokens
from core_rl_conformance.inputs.data import LENGTHS, Ragged
from core_rl_conformance.inputs.tiny_models import LONG_LENGTH, MAX_LENGTH, TinyModel
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.outputs import verify_overall

UP_TO_THE_CONTEXT = (64, *LENGTHS)
"""One sequence is as long as the models take."""
MOST_VALUES = 1 << 22
"""Log-probs of all tokens at some places: a server sends as many in about 100 MB of JSON."""
CROWDS = (1, 2, 64, 65)
"""Numbers of sequences at one time."""
SHORT = (3, 1, 1, 5, 2)


@check("I7.rollout-logprobs", kind="inference")
def rollout_logprobs_match_the_oracle(subject: EngineUnderTest) -> None:
    """The log-prob that comes with every generated token is the oracle's, in a crowd, alone, and asked again.

    Also in crowds of 1, 2, 64 and 65 requests, some of which have one token.

    Why: a trainer divides by these numbers; where they are off, every importance ratio is. Padding of
    requests that run together, and cached prefixes, change them a little and nothing fails (OpenRLHF #217).
    Look at: the alignment of log-probs and tokens, the first token after the prompt, padding and positions
    where requests share a batch, prefix caches.
    """
    model, data = subject.model(), subject.data()
    engine = subject.serve(model)
    requests = serving.requests_for(data)
    responses = serving.ask(engine, requests)
    label, late = "log-probs of tokens generated in a crowd", _late(subject, model, responses)
    serving.verify_logprobs(subject, label, model, responses, 1.0, late, plotted=True)
    alone = [serving.ask(engine, [requests[index]])[0] for index in serving.FEW]
    serving.verify_logprobs(subject, "log-probs of tokens generated alone", model, alone)
    serving.verify_logprobs(
        subject,
        "log-probs of tokens generated from the answers before",
        model,
        serving.ask(engine, serving.requests_for(serving.sequences_of(alone))),
    )
    few = replace(serving.PLAIN, max_new_tokens=2)
    for count, crowd in _crowds(subject):
        requests = serving.requests_for(crowd, few)
        responses = serving.ask(engine, requests)
        asked, got = ([one.input_ids for one in several] for several in (requests, responses))
        label = f"in a crowd of {count} short prompts"
        subject.require(asked == got, f"{label}, answers are not in the order of their requests")
        serving.verify_logprobs(subject, f"log-probs of tokens generated {label}", model, responses)


def _crowds(subject: EngineUnderTest) -> Iterator[tuple[int, Ragged]]:
    """Short sequences in each of `CROWDS`, some of them of one token."""
    data = subject.data(lengths=SHORT * (max(CROWDS) // len(SHORT)), seed=2)
    for count in CROWDS:
        yield count, data.select(range(count))


def _late(
    subject: EngineUnderTest, model: TinyModel, responses: Sequence[LLMResponse]
) -> dict[str, Callable[[], list[Tensor]]]:
    """The log-prob of the prompt's last token first, and so on; prompts of one token have none."""

    def moved() -> list[Tensor]:
        rows = subject.outputs(model, serving.sequences_of(responses), "logprobs").values
        pairs = zip(rows, responses, strict=True)
        return [row[len(response.input_ids) - 1 : -1] for row, response in pairs]

    return {"each token has the log-prob of the token before it": moved}


@check("I8.rollout-temperature", kind="inference")
def rollout_logprobs_are_tempered(subject: EngineUnderTest) -> None:
    """At a temperature T, log-probs of generated tokens follow ``softmax(logits / T)``; greedy ones at T = 1.

    Why: one side with the temperature and one without it makes every importance ratio wrong (NeMo-RL #316,
    verl #3133, OpenRLHF #857, TRL #3029, AReaL #581, slime #557).
    Look at: whether the server reports log-probs before or after it divides by the temperature, and its
    divisor for greedy decoding.
    """
    model, data = subject.model(), subject.data().select(serving.FEW)
    engine = subject.serve(model)
    for temperature in (0.6, 1.7):
        requests = serving.requests_for(data, replace(serving.PLAIN, temperature=temperature))
        label = f"log-probs of tokens generated at temperature {temperature:g}"
        serving.verify_logprobs(subject, label, model, serving.ask(engine, requests), temperature)
    greedy = serving.ask(engine, serving.requests_for(data, serving.GREEDY))
    serving.verify_logprobs(subject, "log-probs of greedy tokens", model, greedy)
    limit = serving.expected_of(subject, model, greedy).tolerance.limit
    for response, rows in zip(greedy, serving.distributions(subject, model, greedy), strict=True):
        for place, (token, row) in enumerate(zip(response.output_ids, rows, strict=True)):
            subject.require(
                float(row.max() - row[token]) <= 2 * limit,
                f"greedy decoding took token {token} at place {place} of the answer to a prompt of "
                f"{len(response.input_ids)} tokens, with log-prob {float(row[token]):.4f}; token "
                f"{int(row.argmax())} has {float(row.max()):.4f}",
            )


@check("I19.bos", kind="inference", each="layout")
def prompts_are_taken_as_they_are(subject: EngineUnderTest) -> None:
    """A prompt with BOS gets no other one, and one without gets none: token ids go in as they are.

    Why: a second BOS, or a first token unknown to the trainer, shifts all log-probs (I19). Log-probs of
    the answers show it, and nothing else.
    Look at: a server that adds special tokens to token ids, or strips them; a detour over text.
    """
    model = subject.model()
    bos, eos = model.config().bos_token_id, model.config().eos_token_id
    drawn = [row.ids for row in subject.data().select(serving.FEW).rows]
    plain = [tuple(dropwhile(lambda token: token == bos, ids)) or (eos,) for ids in drawn]
    prompts: dict[str, list[tuple[int, ...]]] = {
        "without BOS": plain,
        "with BOS": [(bos, *ids) for ids in plain],
        "with BOS twice": [(bos, bos, *ids) for ids in plain],
        "that end with EOS": [(*ids, eos) for ids in plain],
        "of one special token": [(bos,), (eos,)],
    }
    engine = subject.serve(model)
    for label, prompt_ids in prompts.items():
        requests = [LLMRequest(input_ids=ids, sampling=serving.PLAIN) for ids in prompt_ids]
        answers = serving.ask(engine, requests)
        serving.verify_logprobs(subject, f"log-probs after prompts {label}", model, answers)


@check("contract.rollout-limits", kind="inference", each="layout")
def answers_have_the_length_that_was_asked_for(subject: EngineUnderTest) -> None:
    """An answer that nothing stops has exactly ``max_new_tokens`` tokens, up to the end of the context.

    Why: an answer that is one token short, or cut at a default of the server, is taken for the policy's own
    and rewarded so.
    Look at: how ``max_new_tokens`` reaches the server, and ``ModelLimits``: the vocabulary is the model's, and a
    request that fills ``context_length`` must be possible.
    """
    model = subject.model()
    engine = subject.serve(model)
    limits = engine.limits
    problem = f"limits.vocab_size is {limits.vocab_size}; the model has {model.vocab_size} tokens"
    subject.require(limits.vocab_size == model.vocab_size, problem)
    context = limits.context_length or MAX_LENGTH
    if subject.case.target.model_dir:
        # A published model's context takes the oracle too long.
        context = min(context, LONG_LENGTH)
    ids = subject.data(lengths=(context - 1,)).rows[0].ids
    lengths = [(1, 1), (1, 5), (7, 2), (9, context - 9), (1, context - 1), (context - 1, 1)]
    requests = [
        LLMRequest(input_ids=ids[:length], sampling=replace(serving.PLAIN, max_new_tokens=count))
        for length, count in lengths
    ]
    responses = serving.ask(engine, requests)
    for response, (length, count) in zip(responses, lengths, strict=True):
        subject.require(
            len(response.output_ids) == count and response.stop_reason == "length",
            f"max_new_tokens = {count} after a prompt of {length} tokens gave {len(response.output_ids)} tokens "
            f"and stop_reason = {response.stop_reason!r}; expected {count} and 'length'",
        )
    serving.verify_logprobs(subject, "log-probs of short and long answers", model, responses)


@check("I7.score", kind="inference", requires={Capability.SCORE})
def scores_match_the_oracle(subject: EngineUnderTest) -> None:
    """``score`` gives the oracle's log-prob of every token at temperature 1, 0.6 and 0.05, also when asked again.

    Also of 1, 2, 64 and 65 sequences, some of which have one token. The caller's batch stays as it was.

    Why: a reference policy on a server that is off by one position, or without the temperature, makes every
    KL term wrong.
    Look at: the alignment (a value at ``t`` belongs to token ``t``), the first token of each sequence (0), the
    temperature, sequences that share a cached prefix.
    """
    model, data = subject.model(), subject.given_data(UP_TO_THE_CONTEXT, 1000 * subject.case.seed)
    engine, batch = subject.serve(model), data.batch()
    for temperature, when in ((1.0, ""), (0.6, ""), (0.05, ""), (1.0, ", asked again")):
        expected = subject.outputs(model, data, "logprobs", temperature)
        got = list(engine.score(batch, temperature).split(data.lengths))
        label = f"scores at temperature {temperature:g}{when}"
        subject.verify_tokens(label, got, expected, subject.places(data))
        verify_overall(subject, label, got, expected)
        unchanged = torch.equal(batch.input_ids, data.batch().input_ids)
        subject.require(unchanged, "score() changed input_ids of the caller's batch")
    for count, crowd in _crowds(subject):
        got = list(engine.score(crowd.batch()).split(crowd.lengths))
        expected = subject.outputs(model, crowd, "logprobs")
        subject.verify_tokens(f"scores of {count} short sequences", got, expected, subject.places(crowd))


@check("I7.top-logprobs", kind="inference", requires={Capability.TOP_LOGPROBS})
def top_logprobs_match_the_oracle(subject: EngineUnderTest) -> None:
    """``top_logprobs`` gives the most likely tokens at the place of each token, best first, with their log-probs.

    Why: distillation and exact KL read the whole distribution; ids that are off by one position or log-probs
    without the temperature look plausible.
    Look at: the alignment, the order, the temperature, and padded rows of the vocabulary.
    """
    model, data = subject.model(), subject.given_data(UP_TO_THE_CONTEXT, 1000 * subject.case.seed)
    ends = enumerate(accumulate(data.lengths))
    data = data.select(
        [number for number, end in ends if not number or end * model.vocab_size <= MOST_VALUES]
    )
    engine, batch = subject.serve(model), data.batch()
    for temperature in (1.0, 0.6):
        expected = subject.outputs(model, data, "logprobs", temperature)
        truth = subject.expected.oracle(model).evaluate(data.for_oracle(), temperature)
        full = [torch.log_softmax(outputs["logits"], -1) for outputs in truth]
        for count in (1, 5, model.vocab_size):
            top = engine.top_logprobs(batch, count, temperature)
            label = f"top {count} log-probs at temperature {temperature:g}"
            # Ties may come in any order.
            pairs = zip(top.ids.split(data.lengths), top.logprobs.split(data.lengths), strict=True)
            rows = [(ids[1:], logprobs[1:]) for ids, logprobs in pairs]
            subject.require(
                all(bool(ids.sort(-1).values.diff(dim=-1).all()) for ids, _ in rows),
                f"{label}: a token comes twice at one place",
            )
            got = [logprobs for _, logprobs in rows]
            best = [every[1:].topk(top.ids.shape[1], dim=-1).values for every in full]
            causes = partial(_without_temperature, full, temperature, top.ids.shape[1])
            explain = partial(explain_tokens, got, best, expected.tolerance, causes, None)
            subject.verify(compare_tokens(label, got, best, expected.tolerance, explain=explain))
            of_ids = [every[1:].gather(1, ids) for every, (ids, _) in zip(full, rows, strict=True)]
            subject.verify(compare_tokens(f"{label}, of the ids that came", got, of_ids, expected.tolerance))


def _without_temperature(
    full: Sequence[Tensor], temperature: float, count: int
) -> Iterator[tuple[str, list[Tensor]]]:
    cold = [(every[1:] * temperature).log_softmax(-1) for every in full]
    yield "log-probs without the temperature", [every.topk(count, dim=-1).values for every in cold]
