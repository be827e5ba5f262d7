"""`InferenceEngine`: the public methods, the same for all engines, over the hooks of a plugin."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from core_rl.backend.inference_hooks import InferenceHooks, ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig
from core_rl.config.hub import with_local_model
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine import guards, inference_guards
from core_rl.errors import EngineContractError, EngineStateError, RolloutError
from core_rl.registry.spec import EngineSpec
from core_rl.rollout.executor import WorkflowExecutor
from core_rl.rollout.staleness import StalenessLimit
from core_rl.rollout.workflow import AcceptFn, RolloutWorkflow

__all__ = ["InferenceEngine", "ModelLimits", "TopLogprobs"]


class InferenceEngine(InferenceHooks):
    """A model that generates: in this process, or on servers that this object talks to.

    One object serves the whole run. Its methods may be called from several threads and event loops.
    Rollouts (`submit`, `wait`, `rollout`, `prepare_batch`) are the core's; a plugin subclasses this and fills
    in the hooks of `InferenceHooks`, and overrides no public method.
    """

    def __init__(self, spec: EngineSpec, config: InferenceEngineConfig) -> None:
        inference_guards.check_config(spec, config)
        self.spec = spec
        self.config = config
        self._state = "new"
        self._lock = threading.Lock()
        self._version = 0
        self._incoming: int | None = None
        """The version of an update that is under way: tokens may carry it already."""
        self._gate: Future[None] | None = None
        """While paused, what new requests wait for."""
        self._in_flight = 0
        self._released = False
        self._launched = False
        self._rollouts: WorkflowExecutor | None = None

    # ------------------------------------------------------------- life cycle

    def initialize(
        self, addr: str | Sequence[str] | None = None, ft_spec: FinetuneSpec | None = None
    ) -> None:
        """Load the model, or connect to the servers at ``addr`` (``host:port``, one or several).

        Raises `ConfigError` when the model cannot be built, `EngineStateError` when called twice.
        """
        guards.require_state(self._state, "new", "initialize()")
        self.config = with_local_model(self.config)
        addresses = (addr,) if isinstance(addr, str) else tuple(addr or ())
        self._limits: ModelLimits = self._build(addresses, ft_spec or FinetuneSpec())
        if not isinstance(self._limits, ModelLimits):
            raise EngineContractError(
                f"_build returned {self._limits!r}; it returns the ModelLimits of the model"
            )
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="core-rl-weights")
        self._state = "ready"

    def destroy(self) -> None:
        """Cancel what is in flight, free the model and stop launched servers; the engine cannot be used again."""
        if self._state == "new" and self._launched:
            self._teardown()
        if self._state == "ready":
            self._state = "destroyed"
            self._updates.shutdown()
            try:
                if self._rollouts is not None:
                    self._rollouts.close()
            finally:
                self._open_gate()
                self._teardown()
        self._state = "destroyed"

    def launch_server(self, count: int | None = None) -> tuple[str, ...]:
        """Start ``count`` servers (by default ``layout.dp``) before `initialize`, which takes the addresses.

        They are this engine's, also where another one is initialized with their addresses, and end with `destroy`.
        """
        guards.require_state(self._state, "new", "launch_server()")
        guards.require_capability(self.spec, Capability.LAUNCH_SERVER, "launch_server()")
        self.config = with_local_model(self.config)
        self._launched = True
        return self._launch_server(self.config.layout.dp if count is None else count)

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one server needs."""
        return self._scheduling()

    @property
    def limits(self) -> ModelLimits:
        """The vocabulary and the context of the model."""
        guards.require_state(self._state, "ready", "limits")
        return self._limits

    # -------------------------------------------------------------- requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt; waits while the engine is paused.

        Raises `RolloutError` for a request that the model cannot take (it never reaches the engine),
        `EngineContractError` for an answer that breaks the contract of `LLMResponse`.
        """
        self._require_serving("agenerate()")
        inference_guards.check_request(request, self._limits)
        started = time.perf_counter()
        while (gate := self._gate) is not None:
            # Shielded: one cancelled request must not open the gate of the others.
            await asyncio.shield(asyncio.wrap_future(gate))
        with self._counted():
            oldest = self._version
            response = await self._agenerate(request)
        incoming = self._incoming
        newest = max(self._version, -1 if incoming is None else incoming)
        inference_guards.check_response(request, response, self._limits, oldest=oldest, newest=newest)
        return replace(response, latency_s=time.perf_counter() - started)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._require_serving("agenerate()")
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _require_serving(self, method: str) -> None:
        guards.require_state(self._state, "ready", method)
        if self._released:
            raise EngineStateError(f"{method} while the memory is released; call resume_memory() first")

    def score(self, batch: SequenceBatch, temperature: float = 1.0) -> Tensor:
        """Log-probs of the given tokens at ``temperature``, float32 ``[T]``, 0 at first tokens.

        Raises `UnsupportedCapability` without ``score``, `BatchError` for ids or lengths that the model cannot take.
        """
        self._require_serving("score()")
        guards.require_capability(self.spec, Capability.SCORE, "score()")
        guards.check_temperature(temperature)
        inference_guards.check_batch(batch, self._limits)
        values = self._score(batch, temperature)
        return inference_guards.check_scores("_score", values, [batch.num_tokens], batch)

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float = 1.0) -> TopLogprobs:
        """The ``k`` most likely tokens at the place of each token; see `score`."""
        self._require_serving("top_logprobs()")
        guards.require_capability(self.spec, Capability.TOP_LOGPROBS, "top_logprobs()")
        guards.check_temperature(temperature)
        inference_guards.check_batch(batch, self._limits)
        if not 1 <= k <= self._limits.vocab_size:
            raise RolloutError(
                f"top_logprobs(k={k}); k is between 1 and the vocabulary's {self._limits.vocab_size}"
            )
        return inference_guards.check_top(self._top_logprobs(batch, k, temperature), k, batch)

    # --------------------------------------------------------------- weights

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Take the weights that a train engine uploads; the engine has ``meta.version`` when the future is done.

        Updates run one after another. A failed one leaves the old weights and their version, and its
        error is the future's. Raises `UnsupportedCapability` for a method that is not declared, and
        `EngineStateError` for a version older than the current one. An engine with ``model.lora`` takes adapters over
        its model, by ``lora``; one without takes whole weights, by any other method.
        """
        guards.require_state(self._state, "ready", "update_weights()")
        guards.require_sync(self.spec, meta.method)
        inference_guards.check_sync(self.config, meta.method)
        if meta.version < self._version:
            raise EngineStateError(
                f"update_weights() to version {meta.version}, and the engine has {self._version}; versions rise. "
                "To go back, call set_version() first"
            )
        return self._updates.submit(self._install, meta)

    def _install(self, meta: WeightUpdateMeta) -> None:
        self._incoming = meta.version
        try:
            self._update_weights(meta)
            self._version = meta.version
        finally:
            self._incoming = None
        self._version_changed()

    def set_version(self, version: int) -> None:
        """Give the weights that are there another version, as after a resume."""
        guards.require_state(self._state, "ready", "set_version()")
        if version < 0:
            raise EngineStateError(f"set_version({version}); versions are not negative")
        self._set_version(version)
        self._version = version
        self._version_changed()

    def get_version(self) -> int:
        """The version of the weights; only the driver raises it."""
        return self._version

    def _version_changed(self) -> None:
        if self._rollouts is not None:
            self._rollouts.wake()

    # ------------------------------------------------------- pause and memory

    def pause(self) -> None:
        """Hold back new requests until `resume`, and return at once.

        Requests in flight are interrupted by an engine that declares ``pause``; others finish them.
        """
        guards.require_state(self._state, "ready", "pause()")
        with self._lock:
            if self._gate is not None:
                return
            self._gate = Future()
        if self.spec.supports(Capability.PAUSE):
            self._pause()

    def resume(self) -> None:
        """Let requests go on; nothing happens to an engine that is not paused."""
        guards.require_state(self._state, "ready", "resume()")
        if self._gate is not None and self.spec.supports(Capability.PAUSE):
            self._resume()
        self._open_gate()

    def _open_gate(self) -> None:
        with self._lock:
            gate, self._gate = self._gate, None
        if gate is not None:
            gate.set_result(None)

    def release_memory(self) -> None:
        """Give the accelerator's memory to the trainer. Raises `EngineStateError` while requests are in flight."""
        guards.require_state(self._state, "ready", "release_memory()")
        guards.require_capability(self.spec, Capability.RELEASE_MEMORY, "release_memory()")
        with self._lock:
            if self._in_flight:
                raise EngineStateError(
                    f"release_memory() with {self._in_flight} requests in flight; wait for them"
                )
            self._released = True
        self._release_memory()

    def resume_memory(self) -> None:
        """Take the memory back; the same weights answer as before."""
        guards.require_state(self._state, "ready", "resume_memory()")
        guards.require_capability(self.spec, Capability.RELEASE_MEMORY, "resume_memory()")
        self._resume_memory()
        self._released = False

    # -------------------------------------------------------------- rollouts

    @property
    def rollouts(self) -> WorkflowExecutor:
        """What runs the episodes: their counters, and their state for a run checkpoint."""
        guards.require_state(self._state, "ready", "rollouts")
        with self._lock:
            if self._rollouts is None:
                limit = StalenessLimit(
                    max_concurrent=self.config.max_concurrent_rollouts,
                    consumer_batch_size=self.config.consumer_batch_size,
                    max_head_offpolicyness=self.config.max_head_offpolicyness,
                )
                self._rollouts = WorkflowExecutor(self, limit, self.get_version)
            return self._rollouts

    def submit(
        self, data: Mapping[str, Any], workflow: RolloutWorkflow, should_accept: AcceptFn | None = None
    ) -> int:
        """Queue one sample; it runs when the bound on staleness allows. Returns the episode's number.

        ``should_accept`` sees the episode's sequences; where it is false, the episode counts as rejected.
        """
        return self.rollouts.submit(data, workflow, should_accept)

    def wait(self, count: int, timeout: float | None = None) -> SequenceBatch:
        """The sequences of ``count`` accepted episodes in the order of submission.

        Raises `RolloutError` when an episode failed, or after ``timeout`` seconds; what else is done stays.
        """
        return SequenceBatch.concat(self.rollouts.wait(count, timeout))

    def rollout(
        self,
        data: Sequence[Mapping[str, Any]],
        workflow: RolloutWorkflow,
        timeout: float | None = None,
        should_accept: AcceptFn | None = None,
    ) -> SequenceBatch:
        """Run all samples now, without a bound on staleness; sequences of those accepted in the order of ``data``.

        Raises `RolloutError` for the first episode that fails, after ``timeout`` seconds, and when
        there is no accepted sample.
        """
        batches = self.rollouts.rollout(data, workflow, timeout, should_accept)
        if not batches:
            raise RolloutError(f"none of {len(data)} samples was accepted; there is nothing to return")
        return SequenceBatch.concat(batches)

    def prepare_batch(
        self,
        loader: Iterator[Sequence[Mapping[str, Any]]],
        workflow: RolloutWorkflow,
        timeout: float | None = None,
        should_accept: AcceptFn | None = None,
    ) -> SequenceBatch:
        """The next ``consumer_batch_size`` accepted episodes, while later ones run ahead as far as staleness allows.

        ``loader`` yields lists of samples and belongs to the driver, which passes the same iterator each
        time. With ``max_head_offpolicyness = 0`` nothing runs ahead; rejected episodes are replaced.
        """
        return SequenceBatch.concat(self.rollouts.prepare(loader, workflow, timeout, should_accept))
