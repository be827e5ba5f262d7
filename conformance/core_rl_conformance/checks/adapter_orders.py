"""Inference engines after adapters, refused adapters, aborts, pauses, sleep and labels in any order."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.data.requests import LLMRequest
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CheckpointError, CoreRLError, EngineStateError, WeightsError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import Judged
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.adapters import send_adapter
from core_rl_conformance.procedures.state_machine import run_state_machine
from core_rl_conformance.procedures.streaming import LARGE_BUCKET
from core_rl_conformance.profile import NAMED_APART

EXAMPLES = 8
"""Sequences of calls."""
CALLS = 8
LONG = replace(serving.GREEDY, max_new_tokens=40)
SHARED_TOKENS = 40
"""More than a block of a prefix cache."""
TAILS = (1, 3)
"""Tokens after the shared prefix."""
REFUSALS: tuple[type[CoreRLError], ...] = (WeightsError, CheckpointError, EngineStateError)


class RouteOrders(RuleBasedStateMachine):
    """Calls of one engine that change its state, each where the interface allows it."""

    subject: EngineUnderTest
    engine: InferenceEngine
    model: Judged
    """The weights that tokens have to follow."""
    old: Judged
    version: int
    paused: bool
    asleep: bool

    @initialize()
    def begin(self) -> None:
        """Connect with the first weights."""
        self.paused = self.asleep = False
        self.model = self.old = self.subject.model()
        self.version = 0
        self.engine = self._serve()

    def _serve(self) -> InferenceEngine:
        return self.subject.serve(self.subject.model(), keep=False)

    @rule(draw=st.integers(1, 2))
    def update(self, draw: int) -> None:
        """Install other weights; an engine that is asleep may refuse."""
        try:
            new = self._install(draw)
        except (EngineStateError, WeightsError):
            if not self.asleep:
                raise
        else:
            self.old, self.model, self.version = self.model, new, self.version + 1
        self._verify_version("update_weights()")

    def _install(self, draw: int) -> Judged:
        """Update to the weights number ``draw`` with the next version, and return them."""
        new = replace(self.subject.model(), seed=self.subject.model().seed + 1000 * draw)
        serving.installed(self.engine, published(self.subject, new, self.version + 1))
        return new

    @rule()
    def fail_update(self) -> None:
        """Install weights that cannot be installed."""
        self._require_refusal()
        self._verify_version("a failed update")

    def _require_refusal(self) -> None:
        missing = WeightUpdateMeta(version=self.version + 1, path=str(self.subject.directory("nothing")))
        self.subject.require_error(
            REFUSALS,
            lambda: serving.installed(self.engine, missing),
            "an update from a directory that is not there raised no WeightsError or CheckpointError",
        )

    @precondition(lambda self: not self.asleep)
    @rule()
    def set_version(self) -> None:
        """Give the weights the next version."""
        self.version += 1
        self.engine.set_version(self.version)
        self._verify_version("set_version()")

    @rule()
    def pause_or_resume(self) -> None:
        """Pause, or resume after a pause."""
        (self.engine.resume if self.paused else self.engine.pause)()
        self.paused = not self.paused

    @precondition(lambda self: not self.paused)
    @rule(draw=st.integers(1, 2), label=st.booleans())
    def change_while_paused(self, draw: int, label: bool) -> None:
        """Pause, install other weights, perhaps label them, and resume."""
        self.pause_or_resume()
        self.update(draw)
        if label and not self.asleep:
            self.set_version()
        self.pause_or_resume()

    @precondition(lambda self: self.subject.spec.supports(Capability.RELEASE_MEMORY))
    @rule()
    def sleep_or_wake(self) -> None:
        """Release the memory, or take it back."""
        (self.engine.resume_memory if self.asleep else self.engine.release_memory)()
        self.asleep = not self.asleep

    @precondition(lambda self: self.subject.spec.supports(Capability.RELEASE_MEMORY) and not self.asleep)
    @rule(draw=st.integers(1, 2))
    def change_before_sleep(self, draw: int) -> None:
        """Install other weights, release the memory, and take it back."""
        self.update(draw)
        self.sleep_or_wake()
        self.sleep_or_wake()

    @precondition(lambda self: not (self.paused or self.asleep))
    @rule()
    def generate(self) -> None:
        """Draw greedy tokens, whose log-probs and versions are the last update's."""
        responses = serving.ask(self.engine, serving.few_requests(self.subject, serving.GREEDY))
        label = "of greedy tokens after these calls"
        serving.verify_served(self.subject, label, responses, self.model, self.old, self.version)

    @precondition(lambda self: not (self.paused or self.asleep))
    @rule(draw=st.integers(1, 2), while_paused=st.booleans())
    def change_after_abort(self, draw: int, while_paused: bool) -> None:
        """Abort requests in flight, perhaps interrupted ones; draw, install other weights, and draw again."""
        asyncio.run(self._abort(while_paused))
        self.generate()
        self.update(draw)
        self.generate()

    async def _abort(self, while_paused: bool) -> None:
        short, *long = serving.few_requests(self.subject, LONG, 20)
        first = [replace(short, sampling=serving.GREEDY)]
        answer = asyncio.ensure_future(serving.answers(self.engine, first))
        # The answer comes before the long ones, whether a server batches or queues.
        await serving.let_begin()
        running = [asyncio.ensure_future(self.engine.agenerate(request)) for request in long]
        await serving.let_begin()
        await answer
        async with serving.paused(self.engine) if while_paused else nullcontext():
            for task in running:
                task.cancel()
            ended, late = await asyncio.wait(running, timeout=CALL_TIMEOUT_S)
        errors = [task.exception() for task in ended if not task.cancelled()]
        problem = f"of {len(running)} aborted requests, {len(late)} did not end; errors: {errors}"
        self.subject.require(not late and not any(errors), problem)

    @precondition(lambda self: not (self.paused or self.asleep))
    @rule(draw=st.integers(1, 2), while_paused=st.booleans())
    def change_between_prefixes(self, draw: int, while_paused: bool) -> None:
        """Draw after a long prefix that prompts share, before and after other weights."""
        self._generate_shared()
        if while_paused:
            self.change_while_paused(draw, label=False)
        else:
            self.update(draw)
        self._generate_shared()

    def _generate_shared(self) -> None:
        prefix = self.subject.data(lengths=(SHARED_TOKENS,)).rows[0].ids
        tails = self.subject.data(lengths=TAILS, seed=1).rows
        requests = [LLMRequest(input_ids=prefix + tail.ids, sampling=serving.GREEDY) for tail in tails]
        # One after the other, so that the second meets the state after the first.
        responses = [serving.ask(self.engine, [request])[0] for request in requests]
        label = "of greedy tokens after a shared prefix"
        serving.verify_served(self.subject, label, responses, self.model, self.old, self.version)

    def _verify_version(self, call: str) -> None:
        serving.verify_version(self.subject, self.engine, self.version, f"after {call}")

    def teardown(self) -> None:
        """Take back memory and requests, and draw once more."""
        if not hasattr(self, "engine"):
            return
        if self.asleep:
            self.sleep_or_wake()
        if self.paused:
            self.pause_or_resume()
        self.generate()


@check("I13.route-orders", kind="inference", requires={Capability.SYNC_DISK}, each="engine", quick=False)
def states_follow_any_order_of_calls(subject: EngineUnderTest) -> None:
    """After updates, failed updates, aborts, labels, pauses and sleep in any order, tokens follow the last update.

    Also after prefixes that prompts share. A failing sequence is reduced to a smaller one, with its calls.

    Why: each call alone works; an update while a server is paused, or the first after a failed update or an abort, is
    lost or leaves cached prefixes, and the version says nothing about it (I13, I14).
    Look at: the calls of the message, and copies of weights, versions and prefixes that a pause, a sleep, a failure or
    an abort keeps.
    """
    run_state_machine(RouteOrders, {"subject": subject}, subject.case.seed, EXAMPLES, CALLS)


class AdapterOrders(RouteOrders):
    """The same calls, where an update is a new version of an adapter."""

    meetings = count()
    """A rendezvous for each update."""

    @property
    def kind(self) -> TinyAdapter:
        """The adapters that the engine takes."""
        return TinyAdapter(model=self.subject.model(), rslora=True)

    def _serve(self) -> InferenceEngine:
        return self.subject.serve(self.subject.model(), keep=False, adapter=self.kind)

    def _install(self, draw: int) -> Judged:
        new = replace(self.kind, seed=draw)
        send_adapter(self.engine, self._meta(), new)
        return new

    def _require_refusal(self) -> None:
        other = replace(self.kind, alpha=self.kind.alpha + 1)
        refused = partial(send_adapter, self.engine, self._meta(), other)
        problem = "an adapter of another alpha raised no WeightsError"
        self.subject.require_error(REFUSALS, refused, problem)

    def _meta(self) -> WeightUpdateMeta:
        point = self.subject.directory(f"meeting-{next(self.meetings)}")
        return WeightUpdateMeta(
            method="lora", version=self.version + 1, path=str(point), bucket_bytes=LARGE_BUCKET, verify=True
        )


@check(
    "I13.adapter-orders",
    kind="inference",
    requires={Capability.SYNC_LORA},
    families=NAMED_APART,
    each="engine",
    quick=False,
)
def adapters_follow_any_order_of_calls(subject: EngineUnderTest) -> None:
    """After adapters, aborts, labels, pauses and sleep in any order, tokens follow the base and the last adapter.

    Also after adapters that the engine refuses, and after prefixes that prompts share.

    Why: servers name and cache adapters apart from weights; what `I13.route-orders` shows of weights says nothing about
    adapters.
    Look at: the calls of the message, and the adapter that a pause, a sleep, a failure or an abort restores.
    """
    run_state_machine(AdapterOrders, {"subject": subject}, subject.case.seed, EXAMPLES, CALLS)
