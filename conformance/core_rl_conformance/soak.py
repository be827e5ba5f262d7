"""Soak of a train engine: calls in any order, with sizes over powers of two, compared with the oracle.

A session with ``--soak=MINUTES`` runs this instead of the checks. Hypothesis draws the calls from the session's seed,
and reduces a failing sequence of them to a smaller one, for at most five minutes more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.errors import CoreRLError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import Check, check, check_of
from core_rl_conformance.engine_under_test import EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedGradients, Judged
from core_rl_conformance.hints.diagnose import compare_tokens
from core_rl_conformance.inputs.data import Ragged, Repeated
from core_rl_conformance.inputs.drawn import (
    LONGEST,
    Cut,
    Sequences,
    Start,
    cuts,
    few,
    losses,
    output_sets,
    sequences,
    sizes,
    starts,
    temperatures,
)
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import MeasurementRecord
from core_rl_conformance.procedures.adapters import verify_trained
from core_rl_conformance.procedures.moving import FORMATS, offload_and_onload, state, verify_state
from core_rl_conformance.procedures.state_machine import run_state_machine
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_oracle.oracle import AdamW

LOSS = TokenMeanLoss()
MOST_CALLS = 2**5
EXAMPLES = 8
"""Sequences of calls that one round of hypothesis draws."""
CALLS = 6
"""Calls of a sequence, at most."""


class Soak:
    """A soak of one engine: what all sequences of calls share."""

    def __init__(self, subject: EngineUnderTest, until: float) -> None:
        self.subject = subject
        self.until = until
        """The time, by ``time.monotonic()``, from which calls do nothing, unless a failing sequence is reduced."""
        self.failed = False
        self.calls: Counter[str] = Counter()
        """Number of calls of each kind."""
        self.worst: dict[str, MeasurementRecord] = {}
        profile = subject.case.target.profile
        self.families = subject.case.setting.suited(profile.families)
        self._numbers = count()

    @property
    def over(self) -> bool:
        return not self.failed and time.monotonic() >= self.until

    def begin(self, start: Start) -> EngineUnderTest:
        case = replace(self.subject.case, family=start.family, seed=self.subject.case.seed + start.draw)
        directory = self.subject.directory(f"calls-{self.number()}")
        return EngineUnderTest(case, self.subject.expected, directory)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """One call; a failing one ends the ranks, whose state is unknown then."""
        self.calls[name] += 1
        try:
            yield
        except (AssertionError, CoreRLError):
            self.failed = True
            self.subject.expected.discard(self.subject.spec.name)
            raise

    def number(self) -> int:
        return next(self._numbers)

    def keep(self, measurements: Iterable[MeasurementRecord]) -> None:
        """Keep the comparison of each kind that is closest to its limit."""
        for record in measurements:
            if record.what not in self.worst or record.ratio > self.worst[record.what].ratio:
                self.worst[record.what] = record


class EngineCalls(RuleBasedStateMachine):
    """Calls of one engine, each compared with the oracle or with the engine's earlier state."""

    soak: Soak
    subject: EngineUnderTest
    group: EngineGroup
    model: TinyModel
    judged: Judged
    """The weights that outputs follow: the model's, or the engine's export after steps."""
    optimizer: AdamW
    frozen: Sequence[str]

    @initialize(start=st.runner().flatmap(lambda machine: starts(machine.soak.families)))
    def begin(self, start: Start) -> None:
        if self.soak.over:
            return
        self.subject = subject = self.soak.begin(start)
        model = replace(subject.model(), longest=LONGEST, layers=5 if start.deep else None)
        self.model = self.judged = model.with_multiples(*subject.case.multiples)
        self.optimizer = start.optimizer()
        freezes = start.frozen and subject.spec.supports(Capability.FROZEN_PARAMETERS)
        patterns = [subject.first_layer] if freezes else []
        with self.soak.call("initialize"):
            optimizer = optimizer_config(self.optimizer)
            self.group = subject.start(self.model, optimizer=optimizer, frozen=patterns)
        names = self.group.tensor_shapes("master")
        self.frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]

    @rule(drawn=sequences(), cut=cuts, temperature=temperatures, names=output_sets)
    def forward(self, drawn: Sequences, cut: Cut, temperature: float, names: frozenset[OutputName]) -> None:
        """Every output of a batch that the engine declares."""
        if self.soak.over:
            return
        data, subject = self._data(drawn), self.subject
        if not subject.spec.supports(Capability.LOGITS):
            names = names - {"logits"} or frozenset({"logprobs"})
        with self.soak.call("forward"):
            output = self.group.forward(data.all.batch(), cut.of(data.all), tuple(sorted(names)), temperature)
            for name in sorted(names):
                expected = subject.outputs(self.judged, data.distinct, name, temperature)
                values = [expected.values[number] for number in data.order]
                got, places = per_sequence(output, name, data.all), subject.places(data.all)
                label = f"{name} of a drawn batch"
                subject.verify(compare_tokens(label, got, values, expected.tolerance, places))

    @rule(drawn=sequences(2**9, 16), cut=cuts, calls=sizes(MOST_CALLS))
    def forward_backward(self, drawn: Sequences, cut: Cut, calls: int) -> None:
        """Gradients of several calls that belong together, on many sequences."""
        if self.soak.over or not _trained(data := self._data(drawn)):
            return
        total = drawn.data(self.model.vocab_size, calls)
        self._verify_calls(
            TokenMeanLoss(), data.all, cut, calls, self.subject.gradients_of_many(self.judged, total)
        )

    @rule(drawn=few, cut=cuts, calls=sizes(4), loss=losses)
    def forward_backward_of_loss(self, drawn: Sequences, cut: Cut, calls: int, loss: CheckLoss) -> None:
        """Gradients of several calls that belong together, for any loss."""
        if self.soak.over or not _trained(data := self._data(drawn)):
            return
        total = drawn.data(self.model.vocab_size, calls).all
        self._verify_calls(loss, data.all, cut, calls, self.subject.gradients(self.judged, total, loss))

    def _verify_calls(
        self, loss: CheckLoss, data: Ragged, cut: Cut, calls: int, expected: ExpectedGradients
    ) -> None:
        batch, spec = data.batch(), loss.spec()
        weight, tokens = calls * loss.weight(batch), calls * sum(data.lengths)
        with self.soak.call("forward_backward"):
            self.group.optimizer_zero_grad()
            for _ in range(calls):
                metrics = self.group.forward_backward(
                    batch, spec, cut.of(data), total_weight=weight, total_tokens=tokens
                )
                label = "the loss of a drawn call"
                self.subject.verify_loss(label, metrics["loss"], expected)
            grads = self.group.named_tensors("grads")
            verify_trained(
                self.subject, "of drawn calls", grads, expected, lambda name: name not in self.frozen
            )
            self.group.optimizer_zero_grad()

    @rule(drawn=few, cut=cuts, loss=losses)
    def eval_batch(self, drawn: Sequences, cut: Cut, loss: CheckLoss) -> None:
        if self.soak.over or not _trained(data := self._data(drawn)):
            return
        with self.soak.call("eval_batch"):
            expected = self.subject.gradients(self.judged, data.all, loss)
            got = self.group.eval_batch(data.all.batch(), loss.spec(), cut.of(data.all))["loss"]
            label = "the loss of a drawn eval_batch()"
            self.subject.verify_loss(label, got, expected)

    @rule(drawn=few, updates=sizes(MOST_CALLS), cut=cuts, loss=losses, watched=st.booleans())
    def train(self, drawn: Sequences, updates: int, cut: Cut, loss: CheckLoss, watched: bool) -> None:
        """Updates; the watched ones are compared with a float64 AdamW, of others the next outputs."""
        if self.soak.over or not _trained(data := self._data(drawn)):
            return
        subject, group, batch = self.subject, self.group, data.all.batch()
        mb_spec = cut.of(data.all)
        with self.soak.call("train"):
            if watched:
                shadow = Shadow.of(group, self.optimizer, frozen=self.frozen)
                shadow.train(subject, group, [batch] * updates, loss.spec(), mb_spec)
                shadow.verify(subject, group, "after drawn updates")
            else:
                before = group.progress.updates
                for _ in range(updates):
                    group.train_batch(batch, loss.spec(), mb_spec)
                done = group.progress.updates - before
                subject.require(done == updates, f"{updates} train_batch() calls made {done} updates")
            self.judged = subject.snapshot(group, self.model, f"weights-{self.soak.number()}")

    @rule(format_=st.sampled_from(sorted(FORMATS)), drawn=sequences(64))
    def save_and_load(self, format_: CheckpointFormat, drawn: Sequences) -> None:
        """A checkpoint, an update that is forgotten, and the load."""
        if self.soak.over or not self.subject.spec.supports(FORMATS[format_]):
            return
        subject, group, data = self.subject, self.group, self._data(drawn)
        meta = SaveLoadMeta(path=str(subject.directory(f"saved-{self.soak.number()}")), format=format_)
        with self.soak.call(f"save and load {format_}"):
            before, progress = state(group), group.progress
            group.save(meta)
            group.train_batch(data.all.batch(), LOSS.spec(), MicroBatchSpec(count=1))
            group.load(meta)
            verify_state(subject, f"after a load of {format_!r}", group, before, progress)

    @rule(draw=st.integers(3, 5))
    def load_weights(self, draw: int) -> None:
        """Another model's weights, by ``format="hf"``."""
        if self.soak.over:
            return
        other = replace(self.model, seed=self.model.seed + draw)
        path = self.subject.expected.models.directory(other)
        with self.soak.call("load hf"):
            self.group.load(SaveLoadMeta(path=str(path), format="hf"))
        self.judged = other

    @rule()
    def offload(self) -> None:
        """To the host and back."""
        if self.soak.over or not self.subject.spec.supports(Capability.OFFLOAD):
            return
        with self.soak.call("offload"):
            offload_and_onload(self.subject, self.group, state(self.group))

    def teardown(self) -> None:
        """Keep the comparisons of a sequence that has started."""
        if hasattr(self, "subject"):
            self.soak.keep(self.subject.measurements)

    def _data(self, drawn: Sequences) -> Repeated:
        return drawn.data(self.model.vocab_size)


def _trained(data: Repeated) -> bool:
    return bool(data.distinct.batch().loss_mask.any())


def soak_check(seconds: float) -> Check:
    """The soak of ``seconds`` for each layout, as a check."""

    @check("contract.soak", each="layout")
    def soak(subject: EngineUnderTest) -> None:
        """Calls in any order, with sizes over powers of two, keep to the oracle.

        Why: thresholds: from 24 updates, position 1,023, 5 equal tokens or the 33rd micro-batch on, a fault begins
        that no fixed size shows.
        Look at: the calls of the message, the smallest that fail.
        """
        soak = Soak(subject, time.monotonic() + seconds)
        for round_ in count():
            if soak.over:
                break
            number = subject.case.seed * 1000 + round_
            run_state_machine(EngineCalls, {"soak": soak}, number, EXAMPLES, CALLS)
        subject.measurements += soak.worst.values()
        subject.require(bool(soak.calls), f"no call was made in {seconds:.0f} s")

    declared = check_of(soak)
    assert declared is not None
    return declared
