"""Requests to inference engines, and comparisons of their log-probs with the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import EngineStateError, UnsupportedCapability, WeightsError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedOutputs, Judged, Snapshot
from core_rl_conformance.findings import reproduced_tokens
from core_rl_conformance.hints import updates
from core_rl_conformance.hints.diagnose import EXPLAINED, MOST_ROWS, compare_tokens, explain_tokens
from core_rl_conformance.inputs.data import Ragged, Row
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import LostRequests
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_oracle.tolerance import Tolerance, largest_difference

Guesses = Mapping[str, Callable[[], list[Tensor]]]
"""Explanations of a wrong result: a sentence, and the log-probs that would prove it."""
FEW = (0, 1, 3, 4, 7, 10)
"""Sequences of unequal lengths, the shortest and the longest among them."""
PLAIN = SamplingParams(max_new_tokens=8, ignore_eos=True)
GREEDY = replace(PLAIN, temperature=0.0)
MOST_LIKELY = 256
"""Tokens that are asked for at each place: all of a tiny model's."""
MOST_AT_ONCE = 256
"""Requests in flight."""
MOST_SHOWN = 8
"""Unanswered requests in a message."""
TOKEN_S = 2.0
"""Further seconds for each token of the longest answer: servers have large models and busy machines, too."""


# ------------------------------------------------------------------- asking


def requests_for(
    data: Ragged, sampling: SamplingParams = PLAIN, longest: int | None = None
) -> list[LLMRequest]:
    """One request for each sequence of ``data`` (its first ``longest`` tokens), without a seed."""
    return [
        LLMRequest(
            input_ids=row.ids[:longest],
            sampling=sampling,
            media={} if row.images is None else row.images.media(),
        )
        for row in data.rows
    ]


def few_requests(
    subject: EngineUnderTest, sampling: SamplingParams = PLAIN, longest: int | None = None
) -> list[LLMRequest]:
    """Requests for a `FEW` of the usual sequences."""
    return requests_for(subject.data().select(FEW), sampling, longest)


def versions_of(responses: Sequence[LLMResponse]) -> set[int]:
    """The versions that the tokens of ``responses`` carry."""
    return {version for response in responses for version in response.versions}


async def answers(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """All answers, asked for at one time; raises the errors of `gathered`."""
    longest = max((request.sampling.max_new_tokens for request in requests), default=0)
    return await gathered([asyncio.ensure_future(engine.agenerate(request)) for request in requests], longest)


async def gathered(tasks: Sequence[asyncio.Task[LLMResponse]], longest: int) -> list[LLMResponse]:
    """The answers of ``tasks``, each of up to ``longest`` tokens; no task runs afterwards.

    Raises `LostRequests` with their number if some take longer than answers of such lengths should.
    """
    timeout_s = CALL_TIMEOUT_S + longest * TOKEN_S
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        answered = [task.result() for task in tasks if task.done()]
        lost = [number for number, task in enumerate(tasks, start=1) if not task.done()]
    finally:
        for task in tasks:
            task.cancel()
    if lost:
        shown = ", ".join(map(str, lost[:MOST_SHOWN])) + ", ..." * (len(lost) > MOST_SHOWN)
        raise LostRequests(
            f"{len(answered)} of {len(tasks)} requests were answered within {timeout_s:g} s; "
            f"unanswered, by the order of sending: {shown}"
        )
    return answered


def ask(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """The answers to any number of requests, of which many are in flight at one time."""
    responses = []
    for start in range(0, len(requests), MOST_AT_ONCE):
        responses += asyncio.run(answers(engine, requests[start : start + MOST_AT_ONCE]))
    return responses


async def meanwhile(
    engine: InferenceEngine,
    requests: Sequence[LLMRequest],
    update: Callable[[], None],
    *,
    in_pause: bool = False,
) -> list[LLMResponse]:
    """The answers to requests that are in flight while ``update`` runs, or wait for the end of a pause."""
    async with paused(engine) if in_pause else nullcontext():
        running = asyncio.ensure_future(answers(engine, requests))
        await let_begin()
        await asyncio.to_thread(update)
    return await running


@asynccontextmanager
async def paused(engine: InferenceEngine) -> AsyncIterator[None]:
    """A pause of ``engine``, which ends with the context."""
    await asyncio.to_thread(engine.pause)
    try:
        yield
    finally:
        await asyncio.to_thread(engine.resume)


async def let_begin() -> None:
    """Let tasks that were made just now send their requests."""
    for _ in range(3):
        await asyncio.sleep(0)


def installed(engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
    """Update the weights and wait; raises the error of the update, `LostRequests` if it never ends."""
    try:
        engine.update_weights(meta).result(CALL_TIMEOUT_S)
    except FutureTimeout as error:
        raise LostRequests(f"update_weights() did not end within {CALL_TIMEOUT_S:g} s") from error


# ---------------------------------------------------------------- comparing


def sequences_of(
    responses: Sequence[LLMResponse], before: tuple[int, ...] = (), prompts: Ragged | None = None
) -> Ragged:
    """Prompt and answer of each response as one sequence, with the tokens ``before`` it.

    With the images of ``prompts``, one for each response.
    """
    images = [row.images for row in prompts.rows] if prompts else [None] * len(responses)
    rows = []
    for response, pictures in zip(responses, images, strict=True):
        ids = before + response.input_ids + response.output_ids
        mask, advantages = (True,) * len(ids), (0.0,) * len(ids)
        rows.append(Row(ids=ids, mask=mask, advantages=advantages, target=0.0, images=pictures))
    return Ragged(tuple(rows))


def generated(values: Sequence[Tensor], responses: Sequence[LLMResponse]) -> list[Tensor]:
    """The part ``[n, ...]`` of each sequence's values ``[L, ...]`` that belongs to generated tokens."""
    pairs = zip(values, responses, strict=True)
    return [value[len(value) - len(response.output_ids) :] for value, response in pairs]


def expected_of(
    subject: EngineUnderTest,
    weights: Judged,
    responses: Sequence[LLMResponse],
    temperature: float = 1.0,
    prompts: Ragged | None = None,
) -> ExpectedOutputs:
    """The log-probs of the generated tokens of ``responses``, with the images of ``prompts``.

    Its computation is that of whole sequences.
    """
    outputs = subject.outputs(weights, sequences_of(responses, prompts=prompts), "logprobs", temperature)
    return replace(
        outputs,
        values=generated(outputs.values, responses),
        variants=[generated(variant, responses) for variant in outputs.variants],
        mistakes=lambda: ((known, generated(values, responses)) for known, values in outputs.mistakes()),
    )


def distributions(
    subject: EngineUnderTest, weights: Judged, responses: Sequence[LLMResponse], temperature: float = 1.0
) -> list[Tensor]:
    """The oracle's log-probs of all tokens, float64 ``[n, V]``, where each of the ``n`` generated ones was drawn."""
    rows = oracle_outputs(subject, weights, responses, "logits", temperature)
    return [torch.log_softmax(part, -1) for part in rows]


def oracle_outputs(
    subject: EngineUnderTest,
    weights: Judged,
    responses: Sequence[LLMResponse],
    name: str,
    temperature: float = 1.0,
    before: tuple[int, ...] = (),
) -> list[Tensor]:
    """The oracle's output ``name`` at generated tokens, with ``before`` each prompt; equal answers only once."""
    distinct = {(answer.input_ids, answer.output_ids): answer for answer in responses}
    sequences = sequences_of(list(distinct.values()), before).for_oracle()
    rows = dict(zip(distinct, subject.expected.oracle(weights).evaluate(sequences, temperature), strict=True))
    return generated([rows[answer.input_ids, answer.output_ids][name] for answer in responses], responses)


def as_response(prompt: tuple[int, ...]) -> LLMResponse:
    """An answer of one token, any one, to ask `distributions` what could stand there."""
    return LLMResponse(
        rid="", input_ids=prompt, output_ids=(0,), logprobs=(0.0,), versions=(0,), stop_reason="stop"
    )


def verify_logprobs(
    subject: EngineUnderTest,
    label: str,
    weights: Judged,
    responses: Sequence[LLMResponse],
    temperature: float = 1.0,
    guesses: Guesses | None = None,
    *,
    plotted: bool = False,
    prompts: Ragged | None = None,
    old: Judged | None = None,
    earlier: Sequence[Judged] = (),
) -> None:
    """Compare the log-prob of every generated token with the oracle's at ``temperature``.

    ``prompts`` have the images of each prompt.

    Where they differ, the message names the first of the ``guesses``, and of some mistakes that are known
    from the field, explains it; and after an update from ``old`` weights, a mistake of updates. ``earlier`` ones
    had the same version.
    """
    expected = expected_of(subject, weights, responses, temperature, prompts)
    got = [torch.tensor(response.logprobs) for response in responses]

    def mistakes() -> Iterator[tuple[str, Sequence[Tensor]]]:
        yield from _guessed(guesses)
        stale = [(weights, updates.SAME_LABEL) for weights in earlier]
        for side, name in ([] if old is None else [(old, updates.BEFORE)]) + stale:
            before = expected_of(subject, side, responses, temperature, prompts).values
            yield from updates.stale_answers(got, expected.values, before, tolerance, name)
        yield from _exchanged(got, expected.values, tolerance)
        if prompts is None:
            yield from _known_mistakes(subject, weights, responses, temperature)
        yield from expected.mistakes()
        if old is not None:
            yield from _update_mistakes(subject, responses, weights, old)

    of, tolerance = expected.computation, expected.tolerance
    explain = partial(explain_tokens, got, expected.values, tolerance, mistakes, None)
    finding = compare_tokens(
        label,
        got,
        expected.values,
        tolerance,
        keep_points=plotted,
        explain=explain,
        prompts=_prompt_lengths(responses),
    )
    left, right = _after_prompts(got, responses), _after_prompts(expected.values, responses)
    subject.verify(reproduced_tokens(subject.case, finding, of, left, right, tolerance))


def _exchanged(
    got: Sequence[Tensor], right: Sequence[Tensor], tolerance: Tolerance
) -> Iterator[updates.Mistake]:
    """Log-probs of the answers to other requests."""
    values, pairs = list(right), []
    near = EXPLAINED * tolerance.limit
    for number, value in enumerate(got):
        rows = [n for n, row in enumerate(right) if len(row) == len(value)]
        place = next((n for n in rows if largest_difference(value, right[n]) <= near), number)
        if largest_difference(value, right[number]) > near and place != number:
            values[number] = right[place]
            pairs.append(f"{number} has those of {place}")
    yield f"log-probs of answers to other requests: {', '.join(pairs[:MOST_ROWS])}", values


def _prompt_lengths(responses: Sequence[LLMResponse]) -> list[int]:
    return [len(response.input_ids) for response in responses]


def _after_prompts(values: Sequence[Tensor], responses: Sequence[LLMResponse]) -> list[Tensor]:
    """``values`` of generated tokens after zeros for the tokens of prompts, which are not compared."""
    pairs = zip(values, responses, strict=True)
    return [torch.cat([torch.zeros(len(response.input_ids)), value]) for value, response in pairs]


def verify_served(
    subject: EngineUnderTest,
    label: str,
    responses: Sequence[LLMResponse],
    model: Judged,
    old: Judged | None,
    version: int,
    earlier: Sequence[Judged] = (),
) -> None:
    """Verify that tokens carry ``version`` and have the log-probs of ``model``; ``old``, ``earlier`` are mistakes."""
    carried = versions_of(responses)
    subject.require(
        carried == {version}, f"{label}, tokens carry the versions {sorted(carried)}, not {version}"
    )
    verify_logprobs(subject, f"log-probs {label}", model, responses, old=old, earlier=earlier)


def _update_mistakes(
    subject: EngineUnderTest, responses: Sequence[LLMResponse], new: Judged, old: Judged
) -> Iterator[updates.Mistake]:
    """Mistakes of an update from ``old`` to ``new`` weights that leave some of the old ones in use."""
    for weights in (new, old):
        if isinstance(weights, TinyAdapter) or weights.vision:
            return
        if isinstance(weights, Snapshot) and weights.adapter is not None:
            return
    before, after = subject.expected.oracle(old), subject.expected.own_oracle(new)
    answers = [(r.input_ids + r.output_ids, len(r.input_ids)) for r in responses]
    yield from updates.stale_prefixes(before, after, answers)
    sequences = sequences_of(responses).for_oracle()
    for sentence in updates.mixed_weights(before, after):
        rows = after.evaluate(sequences)
        yield sentence, generated([row["logprobs"] for row in rows], responses)


def verify_scores(
    subject: EngineUnderTest,
    label: str,
    engine: InferenceEngine,
    data: Ragged,
    model: Judged,
    old: Judged | None = None,
) -> None:
    """Verify that log-probs of ``data``, as each declared call gives them, are of ``model``; ``old`` is a mistake.

    An engine that takes adapters may refuse to score.
    """
    expected, calls = subject.outputs(model, data, "logprobs"), list[tuple[str, Tensor]]()
    try:
        if subject.spec.supports(Capability.SCORE):
            calls.append(("scores", engine.score(data.batch())))
        if subject.spec.supports(Capability.TOP_LOGPROBS):
            calls.append(("top log-probs", _among_most_likely(engine, data.batch(), expected.values)))
    except UnsupportedCapability:
        if engine.config.model.lora is None:
            raise
    if old is not None:
        before, mistakes = subject.outputs(old, data, "logprobs"), expected.mistakes
        expected = replace(expected, mistakes=lambda: chain(mistakes(), [(updates.BEFORE, before.values)]))
    for name, values in calls:
        subject.verify_tokens(f"{name} {label}", values.split(data.lengths), expected, subject.places(data))


def _among_most_likely(engine: InferenceEngine, batch: SequenceBatch, expected: Sequence[Tensor]) -> Tensor:
    """Log-probs of the tokens ``[T]`` by ``top_logprobs``, and as ``expected`` where it leaves a token out."""
    top = engine.top_logprobs(batch, min(engine.limits.vocab_size, MOST_LIKELY))
    given = top.ids == batch.input_ids[:, None]
    logprobs = top.logprobs.where(given, torch.zeros(())).sum(1)
    return logprobs.where(given.any(1), torch.cat(list(expected)).to(logprobs))


def verify_by_version(
    subject: EngineUnderTest,
    label: str,
    responses: Sequence[LLMResponse],
    weights: Mapping[int, Judged],
    guesses: Guesses | None = None,
) -> None:
    """Verify that answers are complete, and that each token has the log-prob of the ``weights`` of its version."""
    cut = [response for response in responses if response.stop_reason != "length"]
    subject.require(not cut, f"{label}: {len(cut)} of {len(responses)} answers were cut short")
    carried = versions_of(responses)
    subject.require(
        carried <= set(weights), f"{label}: tokens carry {sorted(carried)}, not {sorted(weights)}"
    )
    sides = {version: expected_of(subject, side, responses) for version, side in weights.items()}
    required = [
        torch.stack([sides[version].values[number][place] for place, version in enumerate(response.versions)])
        for number, response in enumerate(responses)
    ]
    tolerance = max((side.tolerance for side in sides.values()), key=lambda tolerance: tolerance.limit)
    got = [torch.tensor(response.logprobs) for response in responses]

    def mistakes() -> Iterator[tuple[str, Sequence[Tensor]]]:
        yield from _guessed(guesses)
        yield from _kept_cache(subject, responses, weights, required)
        if len(sides) == 1:
            yield from next(iter(sides.values())).mistakes()

    def explain() -> str | None:
        values = {version: side.values for version, side in sides.items()}
        versions = [response.versions for response in responses]
        known = updates.explain_versions(got, versions, values, tolerance)
        return known or explain_tokens(got, required, tolerance, mistakes, None)

    prompts = _prompt_lengths(responses)
    subject.verify(compare_tokens(label, got, required, tolerance, explain=explain, prompts=prompts))


def _guessed(guesses: Guesses | None) -> Iterator[updates.Mistake]:
    return ((sentence, values()) for sentence, values in (guesses or {}).items())


def _kept_cache(
    subject: EngineUnderTest,
    responses: Sequence[LLMResponse],
    weights: Mapping[int, Judged],
    required: list[Tensor],
) -> Iterator[updates.Mistake]:
    """Requests in flight that go on over an update with keys and values of the weights before."""
    if not all(isinstance(model, TinyModel) and not model.vision for model in weights.values()):
        return
    oracles = {version: subject.expected.oracle(model) for version, model in weights.items()}
    tokens = [(r.input_ids + r.output_ids, len(r.input_ids), r.versions) for r in responses]
    wrong = [
        values if len(set(answer[2])) < 2 else updates.kept_in_flight(oracles, *answer)
        for values, answer in zip(required, tokens, strict=True)
    ]
    sentence = "requests in flight keep keys and values of the weights before the update, and do not compute them anew"
    yield sentence, wrong


def verify_version(
    subject: EngineUnderTest, engine: InferenceEngine | EngineGroup, version: int, when: str
) -> None:
    """Require that the version of ``engine`` equals the driver's last value."""
    actual = engine.get_version()
    subject.require(actual == version, f"get_version() is {actual} {when}; the driver set {version}")


def _known_mistakes(
    subject: EngineUnderTest, weights: Judged, responses: Sequence[LLMResponse], temperature: float
) -> Iterator[updates.Mistake]:
    logprobs = partial(oracle_outputs, subject, weights, responses, "logprobs")
    config = subject.expected.oracle(weights).model.config.get_text_config()
    bos = config.bos_token_id
    if temperature != 1.0:
        advice = subject.case.target.raw_logprobs
        sentence = "log-probs at temperature 1: the temperature is missing"
        yield f"{sentence}; {advice}" if advice else sentence, logprobs()
    longest = max(len(row.ids) for row in sequences_of(responses).rows)
    if bos is not None and longest < config.max_position_embeddings:
        yield f"an extra BOS (id {bos}) stands before each prompt", logprobs(temperature, (bos,))


def arrives_asleep(engine: InferenceEngine, update: Callable[[], None]) -> bool:
    """Whether ``engine``, whose memory is released meanwhile, takes an update and does not refuse it."""
    with asleep(engine):
        try:
            update()
        except (EngineStateError, WeightsError):
            return False
    return True


@contextmanager
def asleep(engine: InferenceEngine) -> Iterator[None]:
    """Memory of ``engine`` is released until the context ends."""
    engine.release_memory()
    try:
        yield
    finally:
        engine.resume_memory()
