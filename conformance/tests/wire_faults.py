"""Faults of the wire between a client and a correct server, and the check that kills each."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fault_proxy import Bend, Body
from safetensors.torch import load_file, save_file

GENERATE, UPDATE, LABEL = "/inference/v1/generate", "/collective_rpc", "/update_weight_version"
BEYOND = 127
"""The largest token id that a signed byte has."""


@dataclass(frozen=True, kw_only=True)
class WireFault:
    """One fault of the wire."""

    name: str
    bend: Callable[[], Bend]
    killed_by: str
    says: str
    """A regular expression that the failure must match."""


# ----------------------------------------------------------- requests


class Sampling(Bend):
    """Sampling parameters are changed by ``change(parameters)``."""

    def __init__(self, change: Callable[[Body], Body]) -> None:
        self._change = change

    def request(self, path: str, body: Body) -> Body:
        fields = body.get("sampling_params", {})
        if path != GENERATE or "prompt_logprobs" in fields:
            return body
        return {**body, "sampling_params": {**fields, **self._change(fields)}}


def fixed(**values: Any) -> Callable[[], Bend]:
    """Sampling parameters have ``values``, whatever is asked for."""
    return partial(Sampling, lambda _fields: values)


class Prompt(Bend):
    """Token ids of prompts are changed by ``change(ids)``."""

    def __init__(self, change: Callable[[list[int]], list[int]]) -> None:
        self._change = change

    def request(self, path: str, body: Body) -> Body:
        return {**body, "token_ids": self._change(body["token_ids"])} if path == GENERATE else body


# ----------------------------------------------------------- responses


class Answer(Bend):
    """The choice of a response is changed by ``change(request, choice)``."""

    def __init__(self, change: Callable[[Body, Body], Body]) -> None:
        self._change = change

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or "prompt_logprobs" in body["sampling_params"]:
            return content
        (choice,) = content["choices"]
        return {**content, "choices": [{**choice, **self._change(body, choice)}]}


def logprobs(change: Callable[[Body, list[float]], list[float]]) -> Callable[[], Bend]:
    """Log-probs of drawn tokens are changed by ``change(request, values)``."""

    def changed(body: Body, choice: Body) -> Body:
        entries = choice["logprobs"]["content"]
        values = change(body, [entry["logprob"] for entry in entries])
        pairs = zip(entries, values, strict=False)
        return {"logprobs": {"content": [{**entry, "logprob": value} for entry, value in pairs]}}

    return partial(Answer, changed)


def tokens(change: Callable[[Body, list[Body]], list[Body]]) -> Callable[[], Bend]:
    """Drawn tokens, each with its log-prob, are changed by ``change(choice, entries)``."""

    def changed(_body: Body, choice: Body) -> Body:
        entries = change(choice, choice["logprobs"]["content"])
        return {
            "token_ids": [entry["token_id"] for entry in entries],
            "logprobs": {"content": entries},
            "weight_versions": [{**span, "end": len(entries)} for span in choice["weight_versions"]],
        }

    return partial(Answer, changed)


def reason(change: Callable[[Body], str]) -> Callable[[], Bend]:
    """The finish reason is ``change(choice)``."""
    return partial(Answer, lambda _body, choice: {"finish_reason": change(choice)})


def spans(change: Callable[[str], str]) -> Callable[[], Bend]:
    """Labels of versions are changed by ``change(label)``."""

    def changed(_body: Body, choice: Body) -> Body:
        return {
            "weight_versions": [{**s, "version": change(s["version"])} for s in choice["weight_versions"]]
        }

    return partial(Answer, changed)


def wrapped(ids: list[int]) -> list[int]:
    """``ids``, each beyond a signed byte too small by one."""
    return [token - (token > BEYOND) for token in ids]


def next_version(label: str) -> str:
    """``label`` of the version after its own."""
    run, _, version = label.rpartition(":")
    return f"{run}:{int(version) + 1}" if version.isdecimal() else label


class FromACache(Bend):
    """A response comes again for each equal request; ``key(body)`` are the fields that are compared."""

    def __init__(self, key: Callable[[Body], object]) -> None:
        self._key = key
        self._responses: dict[str, Body] = {}

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE:
            return content
        kind = "prompt_logprobs" in body["sampling_params"]
        return self._responses.setdefault(repr((kind, self._key(body))), content)


class OfTheRequestBefore(Bend):
    """Each request gets the answer to the request before, which has as many tokens."""

    def __init__(self) -> None:
        self._before: dict[int, Body] = {}

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or "prompt_logprobs" in body["sampling_params"]:
            return content
        count = body["sampling_params"]["max_tokens"]
        before, self._before[count] = self._before.get(count, content), content
        return before


class LabelsOfTheMoment(Bend):
    """Tokens carry the label that the weights have when the response is sent."""

    _label: str | None = None

    def request(self, path: str, body: Body) -> Body:
        self._label = body["new_version"] if path == LABEL else self._label
        return body

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or self._label is None or "weight_versions" not in content["choices"][0]:
            return content
        (choice,) = content["choices"]
        spans = [{**span, "version": self._label} for span in choice["weight_versions"]]
        return {**content, "choices": [{**choice, "weight_versions": spans}]}


class EndsAtAPause(Bend):
    """A request that a pause interrupts ends with half of its tokens."""

    _pauses = 0

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def request(self, path: str, body: Body) -> Body:
        self._pauses += path == "/pause"
        if path == GENERATE:
            self._begun[body["request_id"]] = self._pauses
        return body

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or self._begun[body["request_id"]] == self._pauses:
            return content
        cut = tokens(lambda _, entries: entries[: len(entries) // 2])().response(path, body, content)
        return {**cut, "choices": [{**choice, "finish_reason": "abort"} for choice in cut["choices"]]}


class AbortsAllByOne(Bend):
    """An abort ends all requests in flight."""

    _aborted = 0

    def request(self, path: str, body: Body) -> Body:
        self._aborted += path == "/abort_requests"
        return body

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or not self._aborted or "choices" not in content:
            return content
        return {**content, "choices": [{**choice, "finish_reason": "abort"} for choice in content["choices"]]}


# ----------------------------------------------------------- scores


class PromptLogprobs(Bend):
    """Log-probs of prompts are changed by ``change(positions)``."""

    def __init__(self, change: Callable[[list[Body]], list[Body]]) -> None:
        self._change = change

    def response(self, path: str, body: Body, content: Body) -> Body:
        if path != GENERATE or "prompt_logprobs" not in body["sampling_params"]:
            return content
        return {**content, "prompt_logprobs": [None, *self._change(content["prompt_logprobs"][1:])]}


def each_entry(change: Callable[[float], float]) -> Callable[[], Bend]:
    """All log-probs of prompts are changed by ``change(value)``."""

    def changed(positions: list[Body]) -> list[Body]:
        return [
            {token: {**entry, "logprob": change(entry["logprob"])} for token, entry in position.items()}
            for position in positions
        ]

    return partial(PromptLogprobs, changed)


def one_late(positions: list[Body]) -> list[Body]:
    """The log-prob of each position's first token is that of the position before."""
    values = [next(iter(position.values())) for position in positions]
    return [
        {**position, next(iter(position)): value}
        for position, value in zip(positions, [*values[:1], *values], strict=False)
    ]


def swapped(positions: list[Body]) -> list[Body]:
    """The two most likely tokens have each other's log-prob."""

    def swap(position: Body) -> Body:
        first, second, *_ = [*sorted(position, key=lambda token: -position[token]["logprob"]), "", ""]
        return {**position, first: position[second], second: position[first]} if second else position

    return list(map(swap, positions))


# ----------------------------------------------------------- weights


class Swallows(Bend):
    """Calls of ``path`` are acknowledged, and never sent."""

    def __init__(self, path: str) -> None:
        self._path = path

    def request(self, path: str, body: Body) -> Body | None:
        return None if path == self._path else body


class Loads(Bend):
    """Updates load the directory ``change(before, new)``, of the update and of its predecessor."""

    def __init__(self, change: Callable[[Path | None, Path], Path]) -> None:
        self._change = change
        self._before: Path | None = None

    def request(self, path: str, body: Body) -> Body:
        if path != UPDATE:
            return body
        new = Path(body["kwargs"]["weights_path"])
        loaded = self._change(self._before, new)
        self._before = _copied(new, lambda _number: True, new)
        return {**body, "kwargs": {"weights_path": str(loaded)}}


def _copied(new: Path, takes: Callable[[int], bool], old: Path) -> Path:
    """A directory with tensors of ``new``, by their number in the order of names, or of ``old``."""
    made = Path(tempfile.mkdtemp(prefix="mixed-"))
    first, second = load_file(new / "model.safetensors"), load_file(old / "model.safetensors")
    mixed = {name: (first if takes(number) else second)[name] for number, name in enumerate(sorted(first))}
    save_file(mixed, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_bytes((new / "config.json").read_bytes())
    return made


def half(before: Path | None, new: Path) -> Path:
    """Every second tensor is that of the update before."""
    return new if before is None else _copied(new, lambda number: number % 2 == 0, before)


def the_one_before(before: Path | None, new: Path) -> Path:
    """The weights of the update before."""
    return before or new


LOGPROBS, TEMPERED = "I7.rollout-logprobs", "I8.rollout-temperature"
PAIRS = "I8.sampling-pairs"
DRAWN, STOP, LIMITS, BOS = "I8.sampling", "I19.stop", "contract.rollout-limits", "I19.bos"
SCORE, TOP, ARRIVE, VERSIONS = "I7.score", "I7.top-logprobs", "I12.receive-disk", "contract.rollout-versions"


def _table() -> list[tuple[str, Callable[[], Bend], str, str]]:
    """Name, bend, check and words of the message."""

    def bfloat16(value: float) -> float:
        return float(torch.tensor(value).bfloat16())

    def greedy(body: Body) -> bool:
        return bool(body["sampling_params"]["temperature"] == 0.0)

    return [
        (
            "temperature dropped",
            fixed(temperature=1.0),
            TEMPERED,
            "the temperature is missing|greedy decoding",
        ),
        (
            "temperature 0 taken for none",
            partial(Sampling, lambda f: {"temperature": f["temperature"] or 1.0}),
            TEMPERED,
            r"greedy decoding took token \d+|greedy",
        ),
        (
            "low temperatures are greedy",
            partial(Sampling, lambda f: {"temperature": f["temperature"] * (f["temperature"] >= 0.5)}),
            DRAWN,
            "at temperature 0.3",
        ),
        ("top-p ignored", fixed(top_p=1.0), PAIRS, "other tokens are left"),
        ("top-k ignored", fixed(top_k=0), PAIRS, "other tokens are left"),
        ("min-p ignored", fixed(min_p=0.0), PAIRS, "with .*min_p = "),
        ("logit bias ignored", fixed(logit_bias={}), PAIRS, "with .*logit_bias = "),
        ("one seed for all", fixed(seed=1), PAIRS, "do requests share a seed"),
        (
            "top-k of 20 by default",
            partial(Sampling, lambda f: {"top_k": f["top_k"] or 20}),
            DRAWN,
            "draws; expected|tokens came",
        ),
        (
            "top-p of 0.8 by default",
            partial(Sampling, lambda f: {"top_p": min(f["top_p"], 0.8)}),
            DRAWN,
            "came .* times in 256 draws",
        ),
        ("stop tokens ignored", fixed(stop_token_ids=[]), STOP, "and stop_reason = 'length'"),
        (
            "one stop token taken",
            partial(Sampling, lambda f: {"stop_token_ids": f["stop_token_ids"][:1]}),
            STOP,
            "and stop_reason = 'length'",
        ),
        (
            "answers of 16 tokens at most",
            partial(Sampling, lambda f: {"max_tokens": min(f["max_tokens"], 16)}),
            LIMITS,
            "after 16 of \\d+ tokens",
        ),
        (
            "prompt without its first token",
            partial(Prompt, lambda ids: ids[1:] or ids),
            LOGPROBS,
            "log-probs",
        ),
        ("extra BOS", partial(Prompt, lambda ids: [1, *ids]), BOS, "extra BOS"),
        ("BOS stripped", partial(Prompt, lambda ids: ids[ids[0] == 1 :] or ids), BOS, "with BOS"),
        ("prompt cut to 24 tokens", partial(Prompt, lambda ids: ids[-24:]), LOGPROBS, "log-probs"),
        ("prompt reversed", partial(Prompt, lambda ids: ids[::-1]), LOGPROBS, "log-probs"),
        ("prompt ids beyond a byte off by one", partial(Prompt, wrapped), LOGPROBS, "log-probs"),
        (
            "log-probs of the token before",
            logprobs(lambda _, values: [-1.0, *values[:-1]]),
            LOGPROBS,
            "(position|token) (too late|before it)",
        ),
        (
            "a log-prob too few",
            logprobs(lambda _, values: values[:-1]),
            LOGPROBS,
            "log-probs are of other tokens",
        ),
        ("log-probs in bfloat16", logprobs(lambda _, v: list(map(bfloat16, v))), LOGPROBS, "log-probs"),
        ("log-probs to base 2", logprobs(lambda _, v: [x / math.log(2) for x in v]), LOGPROBS, "log-probs"),
        (
            "greedy tokens are certain",
            logprobs(lambda body, values: [0.0] * len(values) if greedy(body) else values),
            TEMPERED,
            "log-probs of greedy tokens",
        ),
        (
            "stop token missing",
            tokens(lambda choice, e: e[:-1] if choice["finish_reason"] == "stop" and e[1:] else e),
            STOP,
            "decoding gave",
        ),
        (
            "last token missing",
            tokens(lambda _, entries: entries[:-1] or entries),
            LIMITS,
            "after 4 of 5 tokens",
        ),
        (
            "last token twice",
            tokens(lambda _, entries: [*entries, entries[-1]]),
            LIMITS,
            "2 tokens; max_new_tokens = 1",
        ),
        (
            "drawn ids beyond a byte off by one",
            tokens(lambda _, entries: [{**e, "token_id": wrapped([e["token_id"]])[0]} for e in entries]),
            LOGPROBS,
            "log-probs",
        ),
        ("length for a stop", reason(lambda _: "length"), STOP, "stop_reason = 'length' after 2 of 8 tokens"),
        ("stop for a length", reason(lambda _: "stop"), LIMITS, "stop_reason = 'stop'"),
        ("abort for a length", reason(lambda _: "abort"), LIMITS, "stop_reason = 'abort'"),
        ("answers of the request before", OfTheRequestBefore, LOGPROBS, "log-probs"),
        (
            "answers from a cache",
            partial(FromACache, lambda body: (body["token_ids"], body["sampling_params"])),
            PAIRS,
            "or an answer",
        ),
        (
            "answers from a cache by length",
            partial(FromACache, lambda b: len(b["token_ids"])),
            SCORE,
            "gave scores that cannot be read",
        ),
        ("an abort ends all", AbortsAllByOne, "contract.rollout-cancel", "abort"),
        ("scores of the token before", partial(PromptLogprobs, one_late), SCORE, "scores"),
        ("scores in bfloat16", each_entry(bfloat16), SCORE, "scores"),
        ("scores of half a temperature", each_entry(lambda value: 2 * value), SCORE, "scores"),
        (
            "most likely tokens left out",
            partial(PromptLogprobs, lambda ps: [dict(list(p.items())[:5]) for p in ps]),
            TOP,
            "top 5 log-probs",
        ),
        ("most likely tokens swapped", partial(PromptLogprobs, swapped), TOP, "top"),
        ("labels of the version after", spans(next_version), VERSIONS, "versions"),
        ("labels swallowed", partial(Swallows, LABEL), VERSIONS, "has weights of the version 'default'"),
        ("an update swallowed", partial(Swallows, UPDATE), ARRIVE, "weights before the update"),
        ("half an update", partial(Loads, half), ARRIVE, "after the update"),
        ("updates one late", partial(Loads, the_one_before), ARRIVE, "after the update"),
        ("labels of the moment", LabelsOfTheMoment, "I14.update-in-flight", "whose version tokens carry"),
        ("answers end at a pause", EndsAtAPause, "I14.interrupted", "do not have the 40 tokens"),
        ("a pause swallowed", partial(Swallows, "/pause"), "I14.interrupted", "before resume"),
    ]


WIRE_FAULTS = [
    WireFault(name=name, bend=bend, killed_by=check, says=says) for name, bend, check, says in _table()
]
