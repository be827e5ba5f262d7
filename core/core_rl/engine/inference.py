"""`InferenceEngine`: the public methods of inference, the same for all engines, over the backend of a plugin."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast, final

from torch import Tensor

from core_rl.backend import inference_protocols as protocols
from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig
from core_rl.config.hub import with_local_model
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine import guards, inference_guards
from core_rl.engine.inference_guards import InferenceComponents
from core_rl.engine.sync import WeightUpdates
from core_rl.errors import EngineContractError, EngineStateError, RolloutError, UnsupportedCapability
from core_rl.registry.packages import warn_of_untried
from core_rl.registry.spec import EngineSpec
from core_rl.rollout.episodes import StalenessLimit
from core_rl.rollout.executor import WorkflowExecutor
from core_rl.rollout.workflow import AcceptFn, RolloutWorkflow


@final
class InferenceEngine:
    """A model that generates: in this process, or on servers that the backend talks to.

    One object serves the whole run. Its methods may be called from several threads and event loops. Constructing it
    raises `LayoutError`, `UnsupportedCapability` or `ConfigError` for a config that ``spec`` does not declare.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: InferenceEngineConfig,
        backend: InferenceBackend[Any],
        components: InferenceComponents | None = None,
    ) -> None:
        inference_guards.check_config(spec, config)
        self.spec = spec
        self.config = config
        self._backend = backend
        parts = components or InferenceComponents()
        self._require_capability = parts.require_capability
        self._gate = parts.gate()
        self._state = "new"
        self._lock = threading.Lock()
        self._version = 0
        self._incoming: int | None = None
        """The version of an update that is under way: tokens may carry it already."""
        self._launched = False
        self._rollouts: WorkflowExecutor | None = None

    def __init_subclass__(cls) -> None:
        raise EngineContractError(
            f"{cls.__module__}.{cls.__qualname__} is a subclass of InferenceEngine, which is final; write an "
            "InferenceBackend instead, see docs/write-an-inference-engine.md"
        )

    # ------------------------------------------------------------- life cycle

    def initialize(
        self, addr: str | Sequence[str] | None = None, ft_spec: FinetuneSpec | None = None
    ) -> None:
        """Load the model, or connect to the servers at ``addr`` (``host:port``, one or several).

        Servers at ``addr`` are the caller's, as after `launch_server`: the engine loads weights into them.

        Raises `ConfigError` when the model cannot be built, `EngineStateError` when called twice. After an error
        the engine is destroyed.
        """
        guards.require_state(self._state, "new", "initialize()")
        warn_of_untried(self.spec.name, self.spec.packages)
        context = self._fetched_context()
        addresses = (addr,) if isinstance(addr, str) else tuple(addr or ())
        try:
            limits = self._backend.build(context, addresses, ft_spec or FinetuneSpec())
            if not isinstance(limits, ModelLimits):
                raise EngineContractError(f"build() returned {limits!r}; it returns the model's ModelLimits")
        except BaseException:
            self._state = "destroyed"
            self._backend.teardown()
            raise
        self._limits = limits
        self._updates = WeightUpdates(self._install)
        self._state = "ready"

    def destroy(self) -> None:
        """Cancel requests in flight, free the model and stop launched servers; the engine cannot be used again.

        An update that waits for its sender fails; servers that go end an update that takes too long.
        """
        state, self._state = self._state, "destroyed"
        if state == "new" and self._launched:
            self._backend.teardown()
        if state == "ready":
            try:
                self._updates.close()
                if self._rollouts is not None:
                    self._rollouts.close()
            finally:
                self._gate.open()
                self._backend.teardown()

    def launch_server(
        self, count: int | None = None, processes: Sequence[protocols.MachineProcess] | None = None
    ) -> tuple[str, ...]:
        """Start ``count`` servers (by default ``layout.dp``) before `initialize`, which takes the addresses.

        They belong to this engine, also where another one is initialized with their addresses, and end with `destroy`.
        With ``processes``, of `core_rl.launch.machines.server_processes`, there is a server in each of them,
        on the machines of a cluster; `UnsupportedCapability` where the backend cannot place servers.
        """
        guards.require_state(self._state, "new", "launch_server()")
        self._require_capability(self.spec, Capability.LAUNCH_SERVER, "launch_server()")
        context = self._fetched_context()
        self._launched = True
        if processes is not None:
            if not isinstance(self._backend, protocols.SupportsServersOnMachines):
                raise UnsupportedCapability(
                    f"launch_server(): the backend of {self.spec.name!r} does not implement SupportsServersOnMachines; "
                    "start its servers by hand, and give initialize() their addresses"
                )
            return self._backend.launch_servers_on(context, processes)
        backend = cast("protocols.SupportsLaunchServer", self._backend)
        return backend.launch_server(context, self.config.layout.dp if count is None else count)

    def _fetched_context(self) -> InferenceContext[Any]:
        """Name and config, after a model that is named by a Hub id was downloaded."""
        self.config = with_local_model(self.config)
        return InferenceContext(name=self.spec.name, config=self.config)

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one server needs."""
        return self._backend.scheduling(self.config)

    @property
    def limits(self) -> ModelLimits:
        """The vocabulary and the context of the model."""
        guards.require_state(self._state, "ready", "limits")
        return self._limits

    # -------------------------------------------------------------- requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt; waits while the engine is paused.

        Raises `RolloutError` for a request that the model cannot take, or whose ``rid`` another one in flight has: the
        backend never gets it. Raises `EngineContractError` for a response that breaks the contract of `LLMResponse`.
        """
        started = time.perf_counter()
        with self._gate.named(request.rid):
            self._require_serving("agenerate()")
            for capability in sorted(request.sampling.needed_capabilities):
                self._require_capability(self.spec, capability, f"sampling with {capability.value}")
            inference_guards.check_request(request, self._limits)
            await self._gate.wait()
            self._require_serving("agenerate()")
            with self._gate.counted("agenerate()"):
                oldest = self._version
                response = await self._backend.agenerate(request)
        newest = max(self._version, self._incoming or 0)
        inference_guards.check_response(request, response, self._limits, range(oldest, newest + 1))
        return replace(response, latency_s=time.perf_counter() - started)

    def _require_serving(self, method: str) -> None:
        guards.require_state(self._state, "ready", method)
        self._gate.require_memory(method)

    def score(self, batch: SequenceBatch, temperature: float = 1.0) -> Tensor:
        """Log-probs of the given tokens at ``temperature``, float32 ``[T]``, 0 at first tokens.

        Raises `UnsupportedCapability` without ``score``, `BatchError` for ids or lengths that the model cannot take.
        """
        self._check_scoring(Capability.SCORE, "score()", batch, temperature)
        values = cast("protocols.SupportsScore", self._backend).score(batch, temperature)
        return inference_guards.check_scores("score()", values, [batch.num_tokens], batch)

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float = 1.0) -> TopLogprobs:
        """The ``k`` most likely tokens at the position of each token; see `score`."""
        self._check_scoring(Capability.TOP_LOGPROBS, "top_logprobs()", batch, temperature)
        if not 1 <= k <= self._limits.vocab_size:
            raise RolloutError(
                f"top_logprobs(k={k}); k is between 1 and the vocabulary's {self._limits.vocab_size}"
            )
        top = cast("protocols.SupportsTopLogprobs", self._backend).top_logprobs(batch, k, temperature)
        return inference_guards.check_top(top, k, batch)

    def _check_scoring(
        self, capability: Capability, method: str, batch: SequenceBatch, temperature: float
    ) -> None:
        self._require_serving(method)
        self._require_capability(self.spec, capability, method)
        guards.check_temperature(temperature)
        inference_guards.check_batch(batch, self._limits)

    # --------------------------------------------------------------- weights

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Receive the weights that a train engine uploads; the engine has ``meta.version`` when the future is done.

        Updates run in order. A failed update leaves the old weights and their version, and its error is the future's.
        An error that nobody read is raised by the next call of this or `set_version`, and else logged by `destroy`.

        Raises `UnsupportedCapability` for a method that is not declared, and
        `EngineStateError` for a version older than the current one. An engine with ``model.lora`` receives adapters
        over its model, by ``lora``; one without receives whole weights, by any other method.
        """
        guards.require_state(self._state, "ready", "update_weights()")
        guards.require_sync(self.spec, meta.method)
        if meta.delta:
            self._require_capability(self.spec, Capability.SYNC_DELTA, "WeightUpdateMeta.delta")
        inference_guards.check_sync(self.config, meta.method)
        if meta.version < self._version:
            raise EngineStateError(
                f"update_weights() to version {meta.version}, and the engine has {self._version}; versions rise. "
                "To return to an older one, call set_version() first"
            )
        return self._updates.submit(meta)

    def _install(self, meta: WeightUpdateMeta) -> None:
        self._incoming = meta.version
        try:
            cast("protocols.SupportsWeightUpdate", self._backend).update_weights(meta)
            self._version = meta.version
        finally:
            self._incoming = None
        self._version_changed()

    def set_version(self, version: int) -> None:
        """Give the present weights another version, as after a resume."""
        guards.require_state(self._state, "ready", "set_version()")
        self._updates.require_read()
        if version < 0:
            raise EngineStateError(f"set_version({version}); versions are not negative")
        # Tokens of the new version may arrive before the backend returns.
        before, self._incoming = self._incoming, max(version, self._incoming or 0)
        try:
            self._backend.set_version(version)
            self._version = version
        finally:
            self._incoming = before
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

        Requests in flight are interrupted by an engine that declares ``pause``; others finish them. Where the backend
        raises, the engine is not paused.
        """
        guards.require_state(self._state, "ready", "pause()")
        if not self._gate.close() or not self.spec.supports(Capability.PAUSE):
            return
        try:
            cast("protocols.SupportsPause", self._backend).pause()
        except BaseException:
            self._gate.open()
            raise

    def resume(self) -> None:
        """Let requests continue; an engine that is not paused ignores it."""
        guards.require_state(self._state, "ready", "resume()")
        if not self._gate.is_open and self.spec.supports(Capability.PAUSE):
            cast("protocols.SupportsPause", self._backend).resume()
        self._gate.open()

    def release_memory(self) -> None:
        """Give the accelerator's memory to the trainer. Raises `EngineStateError` while requests are in flight."""
        guards.require_state(self._state, "ready", "release_memory()")
        self._require_capability(self.spec, Capability.RELEASE_MEMORY, "release_memory()")
        self._gate.release_memory()
        cast("protocols.SupportsReleaseMemory", self._backend).release_memory()

    def resume_memory(self) -> None:
        """Take the memory back; the same weights serve as before."""
        guards.require_state(self._state, "ready", "resume_memory()")
        self._require_capability(self.spec, Capability.RELEASE_MEMORY, "resume_memory()")
        cast("protocols.SupportsReleaseMemory", self._backend).resume_memory()
        self._gate.resume_memory()

    # -------------------------------------------------------------- rollouts

    @property
    def rollouts(self) -> WorkflowExecutor:
        """The executor of episodes, with their counters and their state for a run checkpoint."""
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

        Raises `RolloutError` when an episode failed, or after ``timeout`` seconds; other finished episodes stay.
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
        no sample is accepted.
        """
        batches = self.rollouts.rollout(data, workflow, timeout, should_accept)
        if not batches:
            raise RolloutError(f"none of {len(data)} samples was accepted")
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
