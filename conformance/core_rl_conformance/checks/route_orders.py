"""Inference engines after updates, failed updates, pauses, sleep and labels in any order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import CheckpointError, EngineStateError, WeightsError
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.updates import published
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import serving
from core_rl_conformance.procedures.state_machine import run_state_machine

EXAMPLES = 8
"""Sequences of calls."""
CALLS = 8
GREEDY = replace(serving.PLAIN, temperature=0.0)


class RouteOrders(RuleBasedStateMachine):
    """Calls of one engine that change its state, each where the interface allows it."""

    subject: EngineUnderTest
    engine: InferenceEngine
    model: TinyModel
    """The weights that tokens have to follow."""
    old: TinyModel
    version: int
    paused: bool
    asleep: bool

    def __init_subclass__(cls, subject: EngineUnderTest) -> None:
        cls.subject = subject

    @initialize()
    def begin(self) -> None:
        """Connect with the first weights."""
        self.paused = self.asleep = False
        self.model = self.old = self.subject.model()
        self.version = 0
        self.engine = self.subject.serve(self.model, keep=False)

    @rule(draw=st.integers(1, 2))
    def update(self, draw: int) -> None:
        """Install other weights; an engine that is asleep may refuse."""
        new = replace(self.subject.model(), seed=self.subject.model().seed + 1000 * draw)
        meta = published(self.subject, new, self.version + 1)
        try:
            serving.installed(self.engine, meta)
        except (EngineStateError, WeightsError):
            if not self.asleep:
                raise
        else:
            self.old, self.model, self.version = self.model, new, meta.version
        self._verify_version("update_weights()")

    @rule()
    def fail_update(self) -> None:
        """Install weights from a directory that does not exist."""
        missing = WeightUpdateMeta(version=self.version + 1, path=str(self.subject.directory("nothing")))
        self.subject.require_error(
            (WeightsError, CheckpointError, EngineStateError),
            lambda: serving.installed(self.engine, missing),
            "an update from a directory that is not there raised no WeightsError or CheckpointError",
        )
        self._verify_version("a failed update")

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
        responses = serving.ask(self.engine, serving.few_requests(self.subject, GREEDY))
        label = "of greedy tokens after these calls"
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


@check("I13.route-orders", kind="inference", requires=[Capability.SYNC_DISK], each="engine", quick=False)
def states_follow_any_order_of_calls(subject: EngineUnderTest) -> None:
    """After updates, failed updates, labels, pauses and sleep in any order, tokens follow the last update.

    Why: each call alone works; an update while a server is paused, or the first after a failed one, is lost, and the
    version says nothing about it (I13, I14). A failing sequence is reduced to a smaller one, with its calls.
    Look at: the calls of the message, and copies of weights and versions that a pause, a sleep or a failure keeps.
    """

    class Calls(RouteOrders, subject=subject):
        """The calls of this check."""

    run_state_machine(Calls, subject.case.seed, EXAMPLES, CALLS)
