"""Distribution of the tokens that inference engines draw, and the ends of answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures.draws import FALSE_ALARMS, most_surprising, most_surprising_bet
from core_rl_conformance.procedures.serving import (
    as_response,
    ask,
    distributions,
    generated,
    installed,
    sequences_of,
    verify_logprobs,
)
from core_rl_oracle.float64 import float64_only
from core_rl_oracle.oracle import Oracle

DRAWS = 256
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
STEPS = 8
"""Tokens of a path."""
PROMPTS = 512
OTHER_SEED = 1000
"""Several servers have the numbers that follow a config's seed."""


@check("I8.sampling", kind="inference", each="layout")
def tokens_follow_the_distribution(subject: EngineUnderTest) -> None:
    """Tokens are drawn from ``softmax(logits / T)`` and nothing else, with seeds and without.

    Requests without a seed draw other tokens from a new engine with another ``config.seed``.

    Why: a lost temperature, defaults of the generation config (top-k, top-p, penalties), or one seed for a group
    change the policy. The log-probs stay right. With one seed for all, each run draws the same tokens.
    Look at: which sampling parameters reach the server, also defaults; one random stream for each request;
    ``config.seed`` on its way to the server.
    """
    prompts = Prompts.of(subject)
    for temperature, seeded, which in ((1.0, False, 0), (2.5, True, 1), (0.6, False, 1), (0.3, False, 0)):
        prompt, row = prompts.undecided(temperature)[which]
        sampling, first = replace(ONE, temperature=temperature), 1000 * subject.case.seed
        # They differ in bits that 16 do not hold.
        seeds = [number << 20 if seeded else None for number in range(first, first + DRAWS)]
        responses = drawn_by(subject, [(prompt, replace(sampling, seed=seed)) for seed in seeds])
        seeding = "each with a seed of its own" if seeded else "without seeds"
        how = f"at temperature {temperature:g}, {seeding}"
        verify_first_tokens(subject, how, responses, row)
    _verify_answers(subject, prompts)


def drawn_by(
    subject: EngineUnderTest, requests: Sequence[tuple[tuple[int, ...], SamplingParams]]
) -> list[LLMResponse]:
    """Answers of the engine to prompts, each with its own sampling."""
    engine = subject.serve(subject.model())
    return ask(engine, [LLMRequest(input_ids=prompt, sampling=sampling) for prompt, sampling in requests])


def verify_first_tokens(
    subject: EngineUnderTest,
    how: str,
    responses: Sequence[LLMResponse],
    row: Tensor,
    mistakes: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Require that the first tokens of answers to one prompt follow the log-probs ``row [V]``.

    A failure names ``mistakes``, by sentence, whose log-probs they follow.
    """
    drawn = [response.output_ids[0] for response in responses]
    surprise = most_surprising(drawn, row)
    hint = "; all of them are equal: do requests share a seed?" if len(set(drawn)) == 1 else ""
    for sentence, wrong in mistakes.items():
        hint += f"\n{LOOKS_LIKE}{sentence}" * (most_surprising(drawn, wrong).tail > FALSE_ALARMS)
    subject.require(surprise.tail > FALSE_ALARMS, f"{how}: {surprise}{hint}")


def _verify_answers(subject: EngineUnderTest, prompts: Prompts) -> None:
    """Later tokens are drawn as the first one is, by two seeds; penalties on repeated tokens change only later ones."""
    sampling = replace(ONE, temperature=0.6, max_new_tokens=24)
    requests = [(ids, sampling) for ids, _ in prompts.undecided(0.6)]
    setting = subject.case.setting
    setting = replace(setting, options={**setting.options, "seed": OTHER_SEED})
    responses = drawn_by(subject.of(replace(subject.case, setting=setting)), requests)
    responses += drawn_by(subject, requests)  # by a new engine
    ids = [response.output_ids for response in responses]
    problem = f"requests without seeds draw the same tokens with config.seed = {OTHER_SEED} as without it"
    subject.require(ids[: len(requests)] != ids[len(requests) :], problem)
    rows = policy_rows(subject, responses, sampling.temperature)
    surprise = most_surprising_bet(ids, rows)
    where = f"in answers of {sampling.max_new_tokens} tokens"
    subject.require(surprise.tail > FALSE_ALARMS, f"{where}: {surprise}")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts and their possible next tokens."""

    ids: list[tuple[int, ...]]
    rows: Tensor
    """Log-probs ``[n, V]`` at temperature 1."""

    @staticmethod
    def of(subject: EngineUnderTest) -> Prompts:
        ids = [row.ids for row in subject.data(lengths=(2, 3, 4, 5, 6, 7) * 4, seed=5).rows]
        return Prompts(ids=ids, rows=torch.cat(policy_rows(subject, list(map(as_response, ids)))))

    def undecided(self, temperature: float = 1.0) -> list[tuple[tuple[int, ...], Tensor]]:
        """Prompts with their log-probs, the most uncertain first: these show most mistakes."""
        rows = torch.log_softmax(self.rows / temperature, -1)
        entropy = -(rows.exp() * rows).sum(-1)
        return [(self.ids[index], rows[index]) for index in entropy.argsort(descending=True).tolist()]


def policy_rows(
    subject: EngineUnderTest, responses: Sequence[LLMResponse], temperature: float = 1.0
) -> list[Tensor]:
    """Log-probs ``[n, V]`` that the engine must draw the ``n`` tokens of each response from: the oracle's.

    In a smaller dtype, rounding moves tokens across a cut, and these are the engine's own log-probs at temperature 1,
    which I7.top-logprobs compares with the oracle's; the oracle's again for an engine that does not report them.
    """
    if subject.case.dtype == "float32" or not subject.spec.supports(Capability.TOP_LOGPROBS):
        return distributions(subject, subject.model(), responses, temperature)
    data, vocab_size = sequences_of(responses), subject.model().vocab_size
    top = subject.serve(subject.model()).top_logprobs(data.batch(), vocab_size)
    rows = torch.zeros(top.logprobs.shape, dtype=torch.float64).scatter(1, top.ids, top.logprobs.double())
    parts = generated(rows.split(data.lengths), responses)
    return [torch.log_softmax(part / temperature, -1) for part in parts]


@dataclass(frozen=True, kw_only=True)
class GreedyPath:
    """A prompt and the most likely tokens after it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    stops: tuple[int, int]
    """Two tokens of ``ids``, each in the order of its first place, neither of them at the first place."""


def find_path(oracle: Oracle, vocab_size: int, seed: int) -> GreedyPath:
    """The prompt, of many, with the clearest most likely token at every step.

    So that an engine in a smaller dtype takes the same tokens. Raises `ValueError` if no path has two
    tokens to stop at.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (PROMPTS, 3), generator=generator)
    margins = []
    with torch.no_grad(), float64_only():
        for _ in range(STEPS):
            logits = oracle.model(input_ids=ids, use_cache=False).logits[:, -1]
            best = logits.topk(2)
            margins.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    clearest = torch.stack(margins).min(0).values.argsort(descending=True).tolist()
    for index in clearest:
        prompt, path = tuple(ids[index, :3].tolist()), tuple(ids[index, 3:].tolist())
        new = [place for place, token in enumerate(path) if token not in path[:place] and place]
        if len(new) > 1 and new[0] < STEPS - 2:
            return GreedyPath(prompt=prompt, ids=path, stops=(path[new[0]], path[new[-1]]))
    raise ValueError(f"none of {PROMPTS} prompts leads to three different tokens in {STEPS} steps")


def write_texts(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer: the text of each token is its id in angle brackets."""
    tokenizer = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(vocab_size)}, unk_token="<0>"))  # noqa: S106
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def end_of(ids: Sequence[int], tokens: Collection[int], texts: Sequence[str]) -> int | None:
    """The number of ``ids`` up to the first that is in ``tokens`` or completes any of ``texts``; None without any."""
    so_far = zip(ids, accumulate(f"<{token}>" for token in ids), strict=True)
    ends = (
        n for n, (token, text) in enumerate(so_far, 1) if token in tokens or any(t in text for t in texts)
    )
    return next(ends, None)


@check("I19.stop", kind="inference", each="layout")
def answers_end_with_their_stop_token(subject: EngineUnderTest) -> None:
    """An answer ends with EOS (unless ``ignore_eos``) or a token of ``stop_token_ids``, and that token has a log-prob.

    EOS is each id of the config's list, and ends an answer as each of ``stop_token_ids`` does. Texts of
    ``stop`` count in the response alone, and may have many tokens. So it is after an update, too.

    Why: an answer without its EOS never teaches the policy to stop, and an answer that runs on is
    rewarded for unread tokens (I19). An answer that ends as its tokens run out is finished, and not cut off.
    Look at: servers that drop the stop token or its log-prob from their response; the EOS of the config, which is
    a list in many models; lists of which only the first id is taken, or that replace earlier ids; where the
    response begins in the text that is searched for ``stop``, also with prompts of several lengths.
    """
    base = subject.model()
    path = find_path(subject.expected.oracle(base), base.vocab_size, base.seed)
    unused = next(token for token in range(base.vocab_size) if token not in path.ids)
    eos_ids = (unused, path.stops[0])
    model = replace(base, eos=eos_ids)
    table = _ways_to_stop(path, unused)
    if subject.spec.supports(Capability.STOP_STRINGS):
        write_texts(subject.expected.models.directory(model), model.vocab_size)
        table += _texts_to_stop(path)
    greedy = SamplingParams(max_new_tokens=STEPS, temperature=0.0)
    rows = [
        (
            _option_names(note, changes),
            path.ids[start:],
            LLMRequest(input_ids=path.prompt + path.ids[:start], sampling=replace(greedy, **changes)),
        )
        for note, changes, start in table
    ]
    engine = subject.serve(model, keep=False)
    responses = _verified_ends(subject, engine, "with", eos_ids, rows)
    if subject.spec.supports(Capability.SYNC_DISK):
        installed(engine, published(subject, model, 1))
        responses = _verified_ends(subject, engine, "after an update, with", eos_ids, rows)
    verify_logprobs(subject, "log-probs of answers with their stop token", model, responses)


Ways = list[tuple[str, dict[str, Any], int]]
"""A note, options of a request, and the number of the path's tokens in its prompt."""


def _ways_to_stop(path: GreedyPath, unused: int) -> Ways:
    eos, late = path.stops
    return [
        ("EOS on the way", {}, 0),
        ("EOS on the way", {"ignore_eos": True}, 0),
        ("EOS drawn on the way", {"ignore_eos": True, "temperature": 1.0, "top_k": 1}, 0),
        ("", {"stop_token_ids": path.ids[:1]}, 0),
        ("", {"stop_token_ids": (late,), "ignore_eos": True}, 0),
        ("EOS before it", {"stop_token_ids": (late,)}, 0),
        ("", {"stop_token_ids": (eos, late), "ignore_eos": True}, 0),
        ("", {"stop_token_ids": (unused, late), "ignore_eos": True}, 0),
        ("EOS as the last token", {"max_new_tokens": path.ids.index(eos) + 1}, 0),
        ("", {"stop_token_ids": path.ids[:1], "max_new_tokens": 1}, 0),
        ("", {"max_new_tokens": 1}, 0),
    ]


def _texts_to_stop(path: GreedyPath) -> Ways:
    # After 0 and 2 tokens of the path, a text begins in the prompt and ends in the first new token.
    changes = {"stop": (f"><{path.ids[0]}>", f"><{path.ids[2]}>"), "max_new_tokens": STEPS - 2}
    long = "".join(f"<{token}>" for token in path.ids[1:-1])
    return [
        ("EOS on the way", {"stop": ("never",)}, 0),
        ("", {"stop": ("never",), "stop_token_ids": path.stops[1:], "ignore_eos": True}, 0),
        *((f"a prompt of {3 + n} tokens", {**changes, "ignore_eos": True}, n) for n in range(3)),
        ("a text of many tokens", {"stop": (long,), "ignore_eos": True}, 0),
    ]


def _option_names(note: str, changes: dict[str, Any]) -> str:
    options = [name if value is True else f"{name} = {value}" for name, value in changes.items()]
    return " and ".join(filter(None, [*options, note]))


def _verified_ends(
    subject: EngineUnderTest,
    engine: InferenceEngine,
    when: str,
    eos_ids: tuple[int, int],
    rows: Sequence[tuple[str, tuple[int, ...], LLMRequest]],
) -> list[LLMResponse]:
    """The answers of ``rows``: the label of each, the tokens that follow its prompt, and the request."""
    unused, eos = eos_ids
    responses = ask(engine, [request for *_, request in rows])
    for response, (label, path, request) in zip(responses, rows, strict=True):
        sampling = request.sampling
        ids = path[: sampling.max_new_tokens]
        end = end_of(ids, (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (eos,))), sampling.stop)
        reason = "stop" if end else "length"
        subject.require(
            (response.output_ids, response.stop_reason) == (ids[:end], reason),
            f"{when} {label}, decoding gave {list(response.output_ids)} and stop_reason = "
            f"{response.stop_reason!r}; expected {list(ids[:end])} and {reason!r} (EOS is {unused} or {eos})",
        )
    return responses


@check("I19.eos-trained", each="layout")
def eos_is_trained_where_padding_has_its_id(subject: EngineUnderTest) -> None:
    """EOS in the loss mask has log-prob and gradient like any token, also if padding has its id.

    Why: a mask of every token with the padding's id never trains EOS, and the policy does not
    learn to stop (TRL #3200). And most models of transformers look padding up without a gradient (``padding_idx``):
    with an embedding of another make, gradient norms of two backends differ, and both seem right.
    Look at: masks that are derived from token ids instead of ``cu_seqlens`` and ``loss_mask``; the row of the padding
    token in the gradient of the input embedding.
    """
    model = replace(subject.model(), pad_is_eos=True)
    eos = model.config().eos_token_id
    assert isinstance(eos, int)
    data = subject.data().ending_in(eos)
    group = subject.start(model)
    subject.verify_logprobs("with EOS inside", group, model, data)
    subject.verify_backward("with EOS inside", group, model, data, TokenMeanLoss(), MicroBatchSpec(count=2))
