"""An inference engine next to another engine: one policy, and weights on their way; the oracle names the wrong one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMResponse, SamplingParams
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import Check, check, check_of
from core_rl_conformance.checks.pairs import PairFinding, pair_tokens, partners_part, verify_pair
from core_rl_conformance.engine_under_test import BUDGET, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedOutputs, Snapshot
from core_rl_conformance.hints.diagnose import compare_tokens, explain_tokens
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.moving import train

SYNC = {Capability.SYNC_DISK}
STILL = {"lr": 0.0, "weight_decay": 0.1}
GIVEN = {Capability.SCORE, Capability.TOP_LOGPROBS}
TEMPERATURES = (1.0, 0.7)
TOP = 5
SCORES, BEST, ALL = "scores", f"top {TOP} log-probs", "log-probs of all tokens"


def _verify_sides(
    subject: EngineUnderTest,
    label: str,
    trained: Sequence[Tensor],
    rolled: Sequence[Tensor],
    expected: ExpectedOutputs,
) -> None:
    """Compare both engines with the oracle, then with each other; the message names the wrong engine."""
    truth, tolerance = expected.values, expected.tolerance
    sides = {
        f"the train engine {subject.spec.name!r}": trained,
        f"the rollout engine {subject.peer.spec.name!r}": rolled,
    }
    findings = {
        name: compare_tokens(
            f"{label} of {name}",
            got,
            truth,
            tolerance,
            explain=partial(explain_tokens, got, truth, tolerance, expected.mistakes, None),
        )
        for name, got in sides.items()
    }
    right = [name for name, finding in findings.items() if finding.problem is None]
    for name, finding in findings.items():
        if finding.problem is not None:
            verdict = f"{right[0]} agrees with the oracle" if right else "both engines are off the oracle"
            problem = f"{name} is off the oracle, and {verdict}\n{finding.problem}"
            subject.verify(replace(finding, problem=problem))
        subject.verify(finding)
    subject.verify(
        compare_tokens(f"{label}, one engine compared with the other", rolled, trained, tolerance + tolerance)
    )


@check("I8.score-vs-train", partner="inference", requires=SYNC, partner_requires=SYNC, each="layout")
def rollout_and_train_logprobs_agree(subject: EngineUnderTest) -> None:
    """Log-probs of generated tokens equal the train engine's for the same ids.

    Why: the importance ratio of a fresh sample must be 1; a temperature on one side alone, or a prompt that
    one side sees differently, makes it noise (NeMo-RL #316, verl #3133, OpenRLHF #857, TRL #3029, AReaL #581,
    slime #557).
    Look at: the engine that is off the oracle; this names it.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    engine = subject.peer.serve(model, keep=False)
    train(group, subject, [1])
    meta = WeightUpdateMeta(version=1, path=str(subject.directory("sync")))
    group.upload_weights(meta)
    serving.installed(engine, meta)
    truth = subject.snapshot(group, model, "truth")
    for temperature in (1.0, 0.7):
        sampling = SamplingParams(max_new_tokens=8, temperature=temperature, ignore_eos=True)
        responses = serving.ask(engine, serving.requests_for(subject.data(), sampling))
        sequences = serving.sequences_of(responses)
        expected = serving.expected_of(subject, truth, responses, temperature)
        output = group.forward(sequences.batch(), BUDGET, ("logprobs",), temperature)
        trained = [
            row[len(response.input_ids) :]
            for row, response in zip(per_sequence(output, "logprobs", sequences), responses, strict=True)
        ]
        rolled = [torch.tensor(response.logprobs) for response in responses]
        label = f"log-probs of generated tokens at temperature {temperature:g}"
        _verify_sides(subject, label, trained, rolled, expected)


@check(
    "I8.full-distribution",
    partner="inference",
    requires={Capability.LOGITS},
    partner_requires={Capability.TOP_LOGPROBS},
    each="layout",
)
def full_distributions_agree(subject: EngineUnderTest) -> None:
    """The log-probs of the whole vocabulary are the same in both engines, at every token.

    Why: the log-prob of drawn tokens cannot show an error in the others, which exact KL and distillation read.
    Look at: the engine that is off the oracle; padded rows of the vocabulary, and the temperature.
    """
    model, data, temperature = subject.model(), subject.data(), 0.7
    output = subject.start(model).forward(data.batch(), BUDGET, ("logits",), temperature)
    trained = [torch.log_softmax(row[1:], -1) for row in per_sequence(output, "logits", data)]
    top = subject.peer.serve(model).top_logprobs(data.batch(), model.vocab_size, temperature)
    ordered = torch.zeros_like(top.logprobs).scatter(1, top.ids, top.logprobs)
    rolled = [row[1:] for row in ordered.split(data.lengths)]
    truth = subject.expected.oracle(model).evaluate(data.for_oracle(), temperature)
    expected = [torch.log_softmax(row["logits"][1:], -1) for row in truth]
    tolerance = subject.outputs(model, data, "logprobs", temperature).tolerance
    of_all = ExpectedOutputs(values=expected, variants=[], tolerance=tolerance)
    _verify_sides(subject, "log-probs of all tokens", trained, rolled, of_all)


@check("I12.sync-end-to-end", partner="inference", requires=SYNC, partner_requires=SYNC)
def trained_weights_arrive(subject: EngineUnderTest) -> None:
    """After each step and sync, the rollout engine draws from the weights that the train engine has, as its version.

    Why: weights of the step before, of some tensors only, or a version that one side counts by itself
    (verl #7014, #5801, AReaL #941, prime-rl #1901).
    Look at: whether the files in the sync directory hold the train engine's weights (the sender), or the
    rollout engine serves something else than the files (the receiver); this check separates them.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    engine = subject.peer.serve(model, keep=False)
    before = subject.snapshot(group, model, "truth-0")
    for version in (1, 2):
        train(group, subject, [version])
        path = subject.directory(f"sync-{version}")
        meta = WeightUpdateMeta(version=version, path=str(path), verify=True)
        group.upload_weights(meta)
        serving.installed(engine, meta)
        group.set_version(version)
        responses = serving.ask(engine, serving.few_requests(subject))
        carried = serving.versions_of(responses)
        versions = {"the train engine": group.get_version(), "the rollout engine": engine.get_version()}
        subject.require(
            carried == {version} == set(versions.values()),
            f"after sync {version}, tokens carry {sorted(carried)}, and get_version() is {versions}",
        )
        truth = subject.snapshot(group, model, f"truth-{version}")
        _verify_arrived(subject, version, responses, truth, path, before)
        before = truth


def _verify_arrived(
    subject: EngineUnderTest,
    version: int,
    responses: Sequence[LLMResponse],
    truth: Snapshot,
    path: Path,
    before: Snapshot,
) -> None:
    logprobs = partial(serving.oracle_outputs, subject, responses=responses, name="logprobs")
    guesses = {
        # First: files of the weights before the sync fit both.
        "log-probs of the files in the sync directory: the sender wrote other weights than it has": (
            partial(logprobs, Snapshot(path))
        ),
        "log-probs of the weights before the sync: the receiver did not take the new ones": (
            partial(logprobs, before)
        ),
    }
    label = f"log-probs of tokens generated after sync {version}"
    serving.verify_logprobs(subject, label, truth, responses, 1.0, guesses)


def standstill_checks(steps: int) -> list[Check]:
    """``steps`` steps at learning rate 0: of a train engine alone, and with syncs to an inference engine."""

    @check("I12.standstill", each="layout", any_model=True)
    def weights_stay(subject: EngineUnderTest) -> None:
        """No step at learning rate 0 moves a weight by a single bit.

        Why: decay or moments that do not heed the rate, or weights that come back from another dtype, change a policy
        between two steps that should be equal.
        Look at: the first tensor that moved, and what writes it between the steps.
        """
        group = subject.start(optimizer=STILL)
        start = _weights_of(group)
        for step in range(1, steps + 1):
            _train_in_place(subject, group, start, step)

    @check(
        "I12.standstill-sync",
        kind="inference",
        partner="train",
        requires=SYNC,
        partner_requires=SYNC,
        each="layout",
        any_model=True,
    )
    def served_weights_stay(subject: EngineUnderTest) -> None:
        """Weight syncs between steps at learning rate 0 do not move what the inference engine serves.

        Why: a sync that rounds, scales or merges again adds an error each time.
        Look at: the sync after which log-probs leave the first model; if I12.standstill passes, what the receiver
        converts.
        """
        model, sampling = subject.model(), SamplingParams(max_new_tokens=8, ignore_eos=True)
        with partners_part(subject):
            group = subject.peer.start(model, optimizer=STILL)
        start = _weights_of(group)
        engine = subject.serve(model, keep=False)
        for step in range(1, steps + 1):
            meta = WeightUpdateMeta(version=step, path=str(subject.directory(f"sync-{step}")))
            with partners_part(subject):
                _train_in_place(subject.peer, group, start, step)
                group.upload_weights(meta)
            serving.installed(engine, meta)
            responses = serving.ask(engine, serving.requests_for(subject.data(), sampling))
            label = f"log-probs of tokens generated after sync {step} at learning rate 0"
            serving.verify_logprobs(subject, label, model, responses, 1.0)

    return [declared for function in (weights_stay, served_weights_stay) if (declared := check_of(function))]


def _weights_of(group: EngineGroup) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in group.named_tensors("master").items()}


def _train_in_place(
    subject: EngineUnderTest, group: EngineGroup, start: Mapping[str, Tensor], step: int
) -> None:
    """A step at learning rate 0, after which the weights still equal ``start``."""
    train(group, subject, [step])
    label = f"weights after step {step} at learning rate 0"
    subject.verify_same(label, group.named_tensors("master"), start)


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
        # The best by rank: engines may order equal log-probs, and ids with them, in any way.
        truth = {SCORES: expected.values, BEST: [row.topk(TOP).values for row in full], ALL: full}
        quantities = [
            pair_tokens(
                f"{label} at temperature {temperature:g}",
                ours[label],
                partner[label],
                replace(expected, values=values),
            )
            for label, values in truth.items()
        ]
        verify_pair(subject, quantities)


def _given(side: EngineUnderTest, data: Ragged, temperature: float) -> dict[str, list[Tensor]]:
    """Of each sequence its scores ``[L]``, and after the first token the best ``[L - 1, k]`` and all ``[L - 1, V]``."""
    model, batch = side.model(), data.batch()
    engine = side.serve(model)
    top = engine.top_logprobs(batch, TOP, temperature)
    every = engine.top_logprobs(batch, model.vocab_size, temperature)
    ordered = torch.zeros_like(every.logprobs).scatter(1, every.ids, every.logprobs)

    return {
        SCORES: list(engine.score(batch, temperature).split(data.lengths)),
        BEST: [row[1:] for row in top.logprobs.split(data.lengths)],
        ALL: [row[1:] for row in ordered.split(data.lengths)],
    }


@check("I8.pair-greedy", kind="inference", partner="inference", each="layout")
def two_engines_decode_alike(subject: EngineUnderTest) -> None:
    """Greedy decoding takes the other engine's tokens, with the same log-probs, up to equally likely tokens.

    Why: an evaluation on another server must measure the policy; defaults of one server, such as a penalty or a
    temperature, change its answers.
    Look at: the engine that is off the oracle, which the message names; then its own I8.rollout-temperature.
    """
    model, data = subject.model(), subject.data()
    requests = serving.requests_for(data, serving.GREEDY)
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
