"""Fields of `SamplingParams` that some inference engines lack: tokens drawn with them, and its log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.sampling import (
    DRAWS,
    ONE,
    STEPS,
    Prompts,
    drawn_by,
    find_path,
    verify_first_tokens,
)
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_tokens
from core_rl_conformance.procedures.draws import FALSE_ALARMS, most_surprising_bet
from core_rl_conformance.procedures.serving import ask, expected_of, left_by_cut, raw_logits, verify_logprobs

LONG = replace(ONE, max_new_tokens=24, temperature=0.8)


@check("I8.min-p", kind="inference", requires={Capability.MIN_P}, each="layout")
def tokens_are_drawn_from_those_that_min_p_leaves(subject: EngineUnderTest) -> None:
    """With ``min_p``, drawn tokens follow ``softmax(logits / T)`` over the tokens that are likely enough.

    Log-probs belong to the full distribution, as with top-k and top-p.

    Why: a fraction of the largest probability before the temperature, or a lost threshold, gives another policy.
    Look at: the order of temperature and cut; the name of the field that the server expects.
    """
    prompts = Prompts.of(subject)
    for temperature in (0.6, 1.7):
        prompt, row = prompts.undecided(temperature)[0]
        sampling = replace(ONE, temperature=temperature, min_p=_clear_min_p(row))
        responses = drawn_by(subject, [(prompt, sampling)] * DRAWS)
        left = left_by_cut(row[None], sampling, 0.0)[0].log_softmax(-1)
        how = f"at temperature {temperature:g} with min_p = {sampling.min_p:.4g}"
        verify_first_tokens(
            subject, f"{how}, which leaves {int(left.isfinite().sum())} tokens", responses, left
        )
        verify_logprobs(subject, f"log-probs {how}", subject.model(), responses, temperature)


def _clear_min_p(row: Tensor) -> float:
    """The fraction that rounding changes least: in the middle of the largest gap among the likely tokens."""
    ordered = row.sort(descending=True).values[3:12]
    place = int((ordered[:-1] - ordered[1:]).argmax())
    return math.exp(float(ordered[place] + ordered[place + 1]) / 2 - float(row.max()))


@check("I8.logit-bias", kind="inference", requires={Capability.LOGIT_BIAS}, each="layout")
def biases_are_added_to_logits(subject: EngineUnderTest) -> None:
    """``logit_bias`` is added to the logits before the temperature, at every token, and is in the log-probs.

    Why: a bias that is lost, or that counts after the temperature, draws tokens that were excluded.
    Look at: the ids, which JSON turns into texts; biases of requests that share a batch.
    """
    prompt, row = Prompts.of(subject).undecided()[0]
    order = row.argsort(descending=True).tolist()
    bias = ((order[0], -4.0), (order[1], 1.5), (order[len(order) // 2], 3.0))
    how, sampling = f"with logit_bias = {dict(bias)}", replace(ONE, logit_bias=bias)
    responses = drawn_by(subject, [(prompt, sampling)] * DRAWS)
    verify_first_tokens(subject, how, responses, _changed(row, (), sampling).log_softmax(-1))
    _verify_changed(subject, replace(LONG, logit_bias=bias), how)


@check("I8.presence-penalty", kind="inference", requires={Capability.PRESENCE_PENALTY}, each="layout")
def the_presence_penalty_is_subtracted_once(subject: EngineUnderTest) -> None:
    """``presence_penalty`` is subtracted once from the logits of tokens that the response has, and of no others.

    Why: a penalty on the tokens of the prompt too, or one for each time, is another distribution.
    Look at: which tokens are counted; the order of penalty and temperature.
    """
    _verify_changed(subject, replace(LONG, presence_penalty=1.5), "with presence_penalty = 1.5")


@check("I8.repetition-penalty", kind="inference", requires={Capability.REPETITION_PENALTY}, each="layout")
def the_repetition_penalty_scales_logits(subject: EngineUnderTest) -> None:
    """``repetition_penalty`` divides positive logits of tokens that the response has, and multiplies negative ones.

    Why: transformers counts the tokens of the prompt too, SGLang the tokens of the response: under one name, two
    policies.
    Look at: which tokens are counted; negative logits.
    """
    _verify_changed(subject, replace(LONG, repetition_penalty=1.6), "with repetition_penalty = 1.6")


def _verify_changed(subject: EngineUnderTest, sampling: SamplingParams, how: str) -> None:
    """Require that answers are drawn from the changed logits, and have their log-probs."""
    prompts = [ids for ids, _ in Prompts.of(subject).undecided(sampling.temperature)]
    plain = replace(sampling, presence_penalty=0.0, repetition_penalty=1.0, logit_bias=())
    # Next to requests of another kind: options of a request leave its neighbours alone.
    requests = [(ids, parameters) for ids in prompts for parameters in (sampling, plain)]
    answers = drawn_by(subject, requests)
    for parameters, responses, label in (
        (sampling, answers[::2], how),
        (plain, answers[1::2], f"next to requests {how}"),
    ):
        rows = _changed_rows(subject, responses, parameters)
        surprise = most_surprising_bet([response.output_ids for response in responses], rows)
        subject.require(surprise.tail > FALSE_ALARMS, f"{label}: {surprise}")
        _verify_values(subject, f"log-probs {label}", responses, rows, parameters.temperature)


def _changed_rows(
    subject: EngineUnderTest, responses: Sequence[LLMResponse], sampling: SamplingParams
) -> list[Tensor]:
    """The oracle's log-probs of all tokens, float64 ``[n, V]``, from changed logits, for each of ``found``."""
    return [
        torch.stack(
            [
                (_changed(row, response.output_ids[:place], sampling) / sampling.temperature).log_softmax(-1)
                for place, row in enumerate(rows)
            ]
        )
        for response, rows in zip(responses, raw_logits(subject, subject.model(), responses), strict=True)
    ]


def _changed(row: Tensor, before: Sequence[int], sampling: SamplingParams) -> Tensor:
    """The logits ``row [V]`` after the tokens ``before`` of the response, one token at a time."""
    row = row.clone()
    for token in sorted(set(before)):
        row[token] -= sampling.presence_penalty
        factor = 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
        row[token] *= factor
    for token, bias in sampling.logit_bias:
        row[token] += bias
    return row


def _verify_values(
    subject: EngineUnderTest,
    label: str,
    responses: Sequence[LLMResponse],
    rows: Sequence[Tensor],
    temperature: float,
) -> None:
    required = [
        row.gather(1, torch.tensor(response.output_ids)[:, None]).squeeze(1)
        for response, row in zip(responses, rows, strict=True)
    ]
    tolerance = expected_of(subject, subject.model(), responses, temperature).tolerance
    got = [torch.tensor(response.logprobs) for response in responses]
    subject.verify(compare_tokens(label, got, required, tolerance))


@check("I19.stop-strings", kind="inference", requires={Capability.STOP_STRINGS}, each="layout")
def answers_end_with_the_token_that_completes_a_text(subject: EngineUnderTest) -> None:
    """An answer ends with the first token after which its text has a string of ``stop``, also across tokens.

    That token and its log-prob are part of the answer; the prompt's text does not count.

    Why: a stop text that is cut off leaves tokens that were drawn without their log-probs, or log-probs of none.
    Look at: servers that trim the text; texts that begin in one token and end in another.
    """
    base = subject.model()
    path = find_path(subject.expected.oracle(base), base.vocab_size, base.seed)
    _tokenizer(base.vocab_size).save_pretrained(subject.expected.models.directory(base))
    engine = subject.serve(base)
    place = path.ids.index(path.stops[0])
    across = f"{path.ids[place - 1]}>" + f"<{path.stops[0]}"
    first = next(n for n in range(1, STEPS) if f"{path.ids[n - 1]}><{path.ids[n]}" == across)
    greedy = SamplingParams(max_new_tokens=STEPS, temperature=0.0, ignore_eos=True)
    table: tuple[tuple[tuple[str, ...], tuple[int, ...], str], ...] = (
        ((f"<{path.stops[0]}>",), path.ids[: place + 1], "stop"),
        ((across,), path.ids[: first + 1], "stop"),
        (("never", f"<{path.stops[0]}>"), path.ids[: place + 1], "stop"),
        (("never",), path.ids, "length"),
    )
    responses = ask(
        engine,
        [LLMRequest(input_ids=path.prompt, sampling=replace(greedy, stop=stop)) for stop, _, _ in table],
    )
    for response, (stop, ids, reason) in zip(responses, table, strict=True):
        subject.require(
            (response.output_ids, response.stop_reason) == (ids, reason),
            f"with stop = {list(stop)}, greedy decoding gave {list(response.output_ids)} and stop_reason = "
            f"{response.stop_reason!r}; expected {list(ids)} and {reason!r} (the text of token 7 is '<7>')",
        )
    verify_logprobs(subject, "log-probs of answers that end with a text", base, responses)


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Each token's text is its id in angle brackets."""
    tokenizer = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(vocab_size)}, unk_token="<0>"))  # noqa: S106
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
