"""Inference engines after adapters, refused adapters, aborts, pauses, sleep and labels in any order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.engine.inference import InferenceEngine
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.route_orders import REFUSALS, RouteOrders, run_orders
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import Judged
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.procedures.adapters import send_adapter
from core_rl_conformance.procedures.streaming import LARGE_BUCKET
from core_rl_conformance.profile import NAMED_APART


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
            method="lora",
            version=self.version + 1,
            path=str(point),
            bucket_bytes=LARGE_BUCKET,
            verify=True,
        )


@check(
    "I13.adapter-orders",
    kind="inference",
    requires=[Capability.SYNC_LORA],
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
    run_orders(AdapterOrders, subject)
