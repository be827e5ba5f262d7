"""Options of `SamplingParams` in combinations: tokens, log-probs and ends of answers, with seeds and in groups."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice, product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from core_rl.checkpoint.end_tokens import end_tokens
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import UnsupportedCapability
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.sampling import DRAWS, ONE, Prompts, end_of, verify_first_tokens, write_texts
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_tokens, explain_tokens
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_conformance.inputs.covering import PAIRS, Combination, covering_array, shrink
from core_rl_conformance.procedures.draws import (
    CHANGES,
    FALSE_ALARMS,
    DrawnAnswers,
    clear_of_cut,
    left_by_cut,
    most_surprising_bet,
)
from core_rl_conformance.procedures.serving import answers, as_response, ask, expected_of, oracle_outputs
from core_rl_oracle.tolerance import EXACT, Tolerance

REQUESTS, AGAIN = 12, 3
"""Requests of each combination, and the number that is sent a second time: the size of the array."""
SEEDS = tuple(2**62 + number for number in range(REQUESTS))
"""They differ in bits that a float does not hold."""
THREES = 3
ALONE = 3
"""Times that a combination is asked for without others."""
OWN_MARGIN = 0.05
"""Rounding between two passes of one engine, in log-probs."""
TOKENS = 12
HOT = 1.7
"""A temperature at which no two answers are alike by chance."""
VALUES: Mapping[str, Mapping[str, Any]] = {
    "temperature": {"1": 1.0, "0": 0.0, "0.6": 0.6, "1.7": 1.7},
    "top_k": {"none": None, "1": 1, "5": 5},
    "top_p": {"1": 1.0, "0.7": 0.7, "0.000001": 1e-6},
    "min_p": {"0": 0.0, "0.1": 0.1},
    "presence_penalty": {"0": 0.0, "1.5": 1.5, "-1": -1.0},
    "repetition_penalty": {"1": 1.0, "1.6": 1.6, "0.7": 0.7},
    "logit_bias": {"none": (), "of three tokens": (-4.0, 1.5, 3.0)},
    "stop": {"none": (), "a text": ("never", "<{}>"), "a text across tokens": ("<{}><",)},
    "end": {"length": None, "EOS": None, "stop_token_ids": None, "one token": None},
    "seed": {"none": None, "one for each": None, "one for a prompt": None},
    "copies": {"1": 1, "4": 4, "12": 12},
}
"""Values of each option by their labels, the usual value first."""
MASKS = {
    ("temperature", "0"),
    ("top_k", "1"),
    ("top_p", "0.000001"),
    ("end", "one token"),
    ("stop", "a text"),
    ("stop", "a text across tokens"),
}
"""Values with which others have no effect, or a small one: pairs of the others occur without these."""
TOO_FEW = 0.6
"""Part of top-p that lacks the token that reaches it."""
NEEDS = {name: Capability(name) for name in ("min_p", *CHANGES)} | {"stop": Capability.STOP_STRINGS}
Answer = LLMResponse | None
"""None of a request that was refused."""


@check("I8.sampling-pairs", kind="inference", each="layout")
def sampling_options_hold_together(subject: EngineUnderTest) -> None:
    """With any two sampling options, tokens are drawn from the oracle's distribution, and have their log-probs.

    The order is presence penalty, repetition penalty, bias, temperature, top-k, top-p, min-p. Penalties count the
    response's tokens alone. Log-probs are of the distribution before the cut. An answer ends with the first token after
    which its text has a string of ``stop``, also across tokens. All combinations are in flight together,
    and some requests are sent twice. Equal requests with equal seeds have equal answers, where the
    engine can, and all others differ. A combination may be refused by an `UnsupportedCapability`.

    Why: top-p before top-k, a bias before the penalties, a penalty on the prompt's tokens (transformers), or one seed
    for a group give another policy; a stop text that is cut off leaves tokens without their log-probs, and log-probs
    after the cut are too large (TRL #4159). Each option alone may be right.
    Look at: the combination that the message names, reduced to the options that it needs; which tokens are counted;
    options of requests that share a batch; ids of biases, which JSON turns into texts.
    """
    _verify_array(subject, PAIRS)
    prompts = Prompts.of(subject)
    for mistake in _MISTAKEN_CUTS:
        if not mistake.min_p or subject.spec.supports(Capability.MIN_P):
            _verify_cut(subject, prompts, mistake)


@dataclass(frozen=True, kw_only=True)
class _MistakenCut:
    """A cut of log-probs, and the values of its options between which it differs most from the right one."""

    sentence: str
    left: Callable[[Tensor, SamplingParams], Tensor]
    top_k: int | None = None
    min_p: bool = True


def _min_p_first(rows: Tensor, one: SamplingParams) -> Tensor:
    first = left_by_cut(rows, replace(one, top_p=1.0), 0.0).log_softmax(-1)
    return left_by_cut(first, replace(one, min_p=0.0), 0.0)


_MISTAKEN_CUTS = (
    _MistakenCut(sentence="min_p cuts before top_p", left=_min_p_first),
    _MistakenCut(
        sentence="min_p has no effect",
        left=lambda rows, one: left_by_cut(rows, replace(one, min_p=0.0), 0.0),
        top_k=5,
    ),
    _MistakenCut(
        sentence="top_p keeps too few tokens",
        left=lambda rows, one: left_by_cut(rows, replace(one, top_p=TOO_FEW * one.top_p), 0.0),
        min_p=False,
    ),
)


def _verify_cut(subject: EngineUnderTest, prompts: Prompts, mistake: _MistakenCut) -> None:
    """Draw where ``mistake`` matters most."""
    model = subject.model()
    margin = 2 * expected_of(subject, model, list(map(as_response, prompts.ids))).tolerance.limit
    if subject.spec.supports(Capability.TOP_LOGPROBS):
        # The rows are the engine's own in a smaller dtype.
        margin = min(margin, OWN_MARGIN)
    candidates = []
    min_ps = (0.1, 0.2, 0.3, 0.4) if mistake.min_p else (0.0,)
    grid = product((0.6, 1.0, 1.7, 2.0), (0.5, 0.6, 0.7, 0.8, 0.9), min_ps)
    for temperature, top_p, min_p in grid:
        one = replace(ONE, temperature=temperature, top_k=mistake.top_k, top_p=top_p, min_p=min_p)
        rows = (prompts.rows / temperature).log_softmax(-1)
        right, wrong = left_by_cut(rows, one, 0.0).log_softmax(-1), mistake.left(rows, one).log_softmax(-1)
        lost = (right.exp() - wrong.exp()).clamp(min=0).sum(-1) * clear_of_cut(rows, one, margin)
        at = int(lost.argmax())
        candidates.append((float(lost[at]), prompts.ids[at], one, right[at], wrong[at]))
    most, prompt, sampling, left, wrongly = max(candidates, key=itemgetter(0))
    options = ("temperature", "top_k", "top_p", "min_p")
    label = f"with {', '.join(f'{name} = {getattr(sampling, name)}' for name in options if getattr(sampling, name))}"
    requests = [LLMRequest(input_ids=prompt, sampling=sampling) for _ in range(DRAWS if most else 0)]
    drawn = [answer for answer in _ask(subject.serve(model), requests) if answer is not None]
    if drawn:
        verify_first_tokens(subject, label, drawn, left, {mistake.sentence: wrongly})


@check("I8.sampling-threes", kind="inference", each="engine", quick=False)
def sampling_options_hold_in_threes(subject: EngineUnderTest) -> None:
    """The same with any three sampling options.

    Why: a sampler has a path of its own for requests with several cuts, and for those with penalties and seeds.
    Look at: `I8.sampling-pairs` first.
    """
    _verify_array(subject, THREES)


def _verify_array(subject: EngineUnderTest, strength: int) -> None:
    declared = {
        name: list(values) if name not in NEEDS or subject.spec.supports(NEEDS[name]) else list(values)[:1]
        for name, values in VALUES.items()
    }
    base = subject.model()
    if len(declared["stop"]) > 1:
        write_texts(subject.expected.models.directory(base), base.vocab_size)
    engine, prompts = subject.serve(base), Prompts.of(subject)
    array = _Array(subject=subject, engine=engine, prompts=prompts, has_seeds=_has_seeds(engine, prompts))
    effective = {name: [v for v in values if (name, v) not in MASKS] for name, values in declared.items()}
    usual = {name: values[0] for name, values in declared.items()}
    # Requests that differ in a single option share a batch, if any do.
    near = [usual, *({**usual, name: values[-1]} for name, values in effective.items() if len(values) > 1)]
    begin = covering_array(effective, subject.case.seed, begin=near)
    failure = array.failure(covering_array(declared, subject.case.seed, strength, begin))
    if failure is not None:
        row, error = failure
        smaller = shrink(row.options, usual, lambda options: array.failure([options]) is not None)
        for _ in range(ALONE):
            if alone := array.failure([smaller]):
                raise alone[1]
        replace(row, in_company=True).verify(subject, has_seeds=array.has_seeds)
        raise error


def _has_seeds(engine: InferenceEngine, prompts: Prompts) -> bool:
    """Whether a request with a seed has the same answer twice, alone: an engine may ignore seeds."""
    sampling = replace(ONE, max_new_tokens=TOKENS, temperature=HOT, seed=1)
    request = LLMRequest(input_ids=prompts.undecided()[0][0], sampling=sampling)
    first, second = (_ask(engine, [request])[0] for _ in range(2))
    return first is not None and second is not None and first.output_ids == second.output_ids


@dataclass(frozen=True, kw_only=True)
class _Array:
    """The engine, and prompts for combinations of options."""

    subject: EngineUnderTest
    engine: InferenceEngine
    prompts: Prompts
    has_seeds: bool

    def failure(self, combinations: Sequence[Combination]) -> tuple[_Row, AssertionError] | None:
        """The first of ``combinations`` that fails, with its error; all are in flight together."""
        rows = [self._row(options) for options in combinations]
        last = _ask(self.engine, [request for row in rows for request in row.requests[-AGAIN:]])
        again = [last[start : start + AGAIN] for start in range(0, len(last), AGAIN)]
        served = [
            replace(row, again=[one for one in some if one is not None])
            for row, some in zip(rows, again, strict=True)
            if None not in some
        ]
        crowd = iter(ask(self.engine, [request for row in served for request in row.requests]))
        answered = [replace(row, crowd=list(islice(crowd, REQUESTS))) for row in served]
        tolerances: dict[float, Tolerance] = {}
        for row in answered:
            temperature = row.sampling.logprob_temperature
            if temperature not in tolerances:
                alike = [a for r in answered for a in r.all if r.sampling.logprob_temperature == temperature]
                expected = expected_of(self.subject, self.subject.model(), alike[: 4 * REQUESTS], temperature)
                tolerances[temperature] = expected.tolerance
            judged = replace(row, tolerance=tolerances[temperature])
            try:
                judged.verify(self.subject, has_seeds=self.has_seeds)
            except AssertionError as error:
                return judged, error
        return None

    def _row(self, options: Combination) -> _Row:
        values = {name: VALUES[name][label] for name, label in options.items()}
        likely = self.prompts.rows.logsumexp(0).argsort(descending=True).tolist()
        biased = (likely[0], likely[1], likely[len(likely) // 2])
        biases = {
            label: tuple(zip(biased, values, strict=False)) for label, values in VALUES["logit_bias"].items()
        }
        sampling = SamplingParams(
            max_new_tokens=1 if options["end"] == "one token" else TOKENS,
            temperature=values["temperature"],
            top_k=values["top_k"],
            top_p=values["top_p"],
            min_p=values["min_p"],
            presence_penalty=values["presence_penalty"],
            repetition_penalty=values["repetition_penalty"],
            logit_bias=biases[options["logit_bias"]],
            stop=tuple(text.format(likely[3]) for text in values["stop"]),
            stop_token_ids=(0, likely[2], likely[5]) if options["end"] == "stop_token_ids" else (),
            ignore_eos=options["end"] != "EOS",
        )
        ids = [ids for ids, _ in self.prompts.undecided()][: REQUESTS // values["copies"]]
        # Prompts with one seed may draw the same tokens, where their distributions are alike.
        kinds = {"none": [None], "one for each": SEEDS, "one for a prompt": range(len(ids))}
        seeds = kinds[options["seed"]]
        requests = [
            LLMRequest(input_ids=ids[n % len(ids)], sampling=replace(sampling, seed=seeds[n % len(seeds)]))
            for n in range(REQUESTS)
        ]
        changes = [{name: value} for name in CHANGES[:2] for value in VALUES[name].values()]
        changes += [{"logit_bias": bias} for bias in biases.values()]
        return _Row(options=options, sampling=sampling, requests=requests, changes=changes)


def _ask(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[Answer]:
    """The answers to requests in flight together; None for each that is refused."""

    async def answer(request: LLMRequest) -> Answer:
        try:
            return (await answers(engine, [request]))[0]
        except UnsupportedCapability:
            return None

    async def gather() -> list[Answer]:
        return list(await asyncio.gather(*map(answer, requests)))

    return asyncio.run(gather())


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Requests with one combination of options, and their answers."""

    options: Combination
    sampling: SamplingParams
    requests: Sequence[LLMRequest]
    changes: Sequence[Mapping[str, Any]]
    """Fields with which other combinations change logits."""
    crowd: Sequence[LLMResponse] = ()
    """One for each request."""
    again: Sequence[LLMResponse] = ()
    """To the last requests, without the others next to them."""
    tolerance: Tolerance = EXACT
    """The allowed error of log-probs."""
    in_company: bool = False
    """Without requests that have other options, it does not fail."""

    @property
    def label(self) -> str:
        usual = {name: next(iter(values)) for name, values in VALUES.items()}
        unusual = [f"{name} = {value}" for name, value in self.options.items() if value != usual[name]]
        company = " (alone, the same requests pass)" * self.in_company
        return f"with {', '.join(unusual) or 'no option'}{company}"

    @property
    def all(self) -> list[LLMResponse]:
        return [*self.crowd, *self.again]

    def verify(self, subject: EngineUnderTest, *, has_seeds: bool) -> None:
        """Require the ends, draws and log-probs that the contract defines."""
        sampling, label, tolerance = self.sampling, self.label, self.tolerance
        for response in self.all:
            self._verify_end(subject, response)
        logits = oracle_outputs(subject, subject.model(), self.all, "logits")
        drawn = DrawnAnswers(sampling=sampling, responses=self.all, logits=logits, changes=self.changes)
        full = drawn.logprobs()
        margin = 2 * tolerance.limit
        left = [left_by_cut(rows, sampling, 0.0).log_softmax(-1) for rows in full]
        clear = [clear_of_cut(rows, sampling, margin) for rows in full]
        self._verify_draws(subject, drawn, full, margin)
        # Equal seeds draw the same again.
        streams = {
            (request.input_ids, number if (seed := request.sampling.seed) is None else -seed - 1): number
            for number, request in enumerate([*self.requests, *self.requests[-AGAIN:]])
        }
        surprise = most_surprising_bet(
            [self.all[number].output_ids for number in streams.values()],
            [left[number] for number in streams.values()],
            [clear[number] for number in streams.values()],
        )
        subject.require(surprise.tail > FALSE_ALARMS, f"{label}: {surprise}")
        got = [torch.tensor(response.logprobs) for response in self.all]
        expected = drawn.at(full)
        explain = partial(explain_tokens, got, expected, tolerance, partial(self._causes, drawn, left), None)
        subject.verify(compare_tokens(f"log-probs {label}", got, expected, tolerance, explain=explain))
        chances = [float(row[at].sum()) for row, at in zip(drawn.at(left), clear, strict=True)]
        # Rounding may change draws.
        self._verify_streams(subject, chances, has_seeds=has_seeds and subject.case.dtype == "float32")

    @staticmethod
    def _causes(drawn: DrawnAnswers, left: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        yield "log-probs of what the cut has left", drawn.at(left)
        for sentence, rows in drawn.mistakes():
            yield f"log-probs {sentence}", drawn.at(rows)

    def _verify_end(self, subject: EngineUnderTest, response: LLMResponse) -> None:
        """Require that the answer ends with its first end token, or with ``max_new_tokens``."""
        ends = set(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            base = subject.model()
            ends |= set(end_tokens(base.config(), str(subject.expected.models.directory(base))))
        ids, most = response.output_ids, self.sampling.max_new_tokens
        end = end_of(ids, ends, self.sampling.stop)
        subject.require(
            len(ids) == (end or most) and response.stop_reason == ("stop" if end else "length"),
            f"{self.label}, an answer of at most {most} tokens is {list(ids)}, and stop_reason = "
            f"{response.stop_reason!r}; tokens that end it are {sorted(ends)}, and texts (of such as '<7>') "
            f"{list(self.sampling.stop)}, and ignore_eos = {self.sampling.ignore_eos}",
        )

    def _verify_draws(
        self, subject: EngineUnderTest, drawn: DrawnAnswers, full: Sequence[Tensor], margin: float
    ) -> None:
        """Require that tokens are drawn from log-probs ``full``, each ``[n, V]``, as far as the cut leaves them."""
        for response, rows in zip(self.all, full, strict=True):
            left = left_by_cut(rows, self.sampling, margin).isfinite()
            for place, token in enumerate(response.output_ids):
                if not left[place, token]:
                    problem = f"{self.label}, token {token} was drawn at place {place} of an answer; only "
                    problem += f"{int(left[place].sum())} other tokens are left"
                    cause = drawn.wrong_cut(margin)
                    subject.require(False, f"{problem}\n{LOOKS_LIKE}{cause}" if cause else problem)

    def _verify_streams(self, subject: EngineUnderTest, chances: Sequence[float], *, has_seeds: bool) -> None:
        """Require equal answers of equal seeds, and others of other streams; ``chances`` are logs of probabilities."""
        label = self.label
        requests = [*self.requests, *self.requests[-AGAIN:]]
        same = different = 0
        for first, second in combinations(range(len(requests)), 2):
            if requests[first].input_ids != requests[second].input_ids:
                continue
            ids, seed = self.all[first].output_ids, requests[first].sampling.seed
            equal = ids == self.all[second].output_ids
            if seed is not None and seed == requests[second].sampling.seed:
                same, different = same + equal, different + (not equal)
                continue
            subject.require(
                not equal or chances[first] > math.log(FALSE_ALARMS),
                f"{label}, equal requests {first} and {second} got the same {len(ids)} tokens, whose probability is "
                f"{math.exp(chances[first]):.0e}: do requests share a seed or an answer?",
            )
        problem = (
            f"{label}, {different} of {same + different} pairs of requests with equal seeds got other tokens"
        )
        subject.require(not has_seeds or different <= same, problem)
