"""`SglangEngine`: the hooks of an inference engine, over a fleet of SGLang servers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.backend.tensors import check_shapes
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.distributed.process_group import pick_device
from core_rl.engine import inference_guards
from core_rl.engine.inference import InferenceEngine, ModelLimits, TopLogprobs
from core_rl.errors import ConfigError, LayoutError, WeightsError
from core_rl.rollout.loop_thread import LoopThread
from core_rl.weight_sync.stream import ReceivedWeights, receiving
from core_rl_sglang.adapters import Policy
from core_rl_sglang.answers import Piece
from core_rl_sglang.broadcasts import BroadcastWeights
from core_rl_sglang.calls import Requests
from core_rl_sglang.config import SglangConfig
from core_rl_sglang.fleet import Fleet, make_api
from core_rl_sglang.model import ServedModel
from core_rl_sglang.process import ServerProcess, arguments_of, free_port, require_free
from core_rl_sglang.scores import Scorer
from core_rl_sglang.server import Server
from core_rl_sglang.weights import DiskWeights, TensorWeights

__all__ = ["SglangEngine"]

_Result = TypeVar("_Result")

SENT = "the weights that were sent"
KEEP_ALIVE_S = 2.0
"""An idle connection is closed here before a server does it, after 5 s: a request on its way would be lost."""


class SglangEngine(InferenceEngine):
    """Talks to SGLang servers over HTTP. All of it happens on one event loop in a thread of its own."""

    config: SglangConfig
    _loop: LoopThread | None = None
    _fleet: Fleet | None = None
    _own: tuple[Server, ...] = ()

    # ------------------------------------------------------------ life cycle

    def _launch_server(self, count: int) -> tuple[str, ...]:
        model = self._served()
        ports = self._ports(count)
        self._open_loop()
        self._own = tuple(self._started(model, port) for port in ports)
        for server in self._own:
            self._wait(server.wait_until_up(self.config.options.start_timeout_s))
        return tuple(server.address for server in self._own)

    def _served(self) -> ServedModel:
        on_cpu = pick_device(self.config.device, 0).type == "cpu"
        return ServedModel.of(self.config.model, self.config.layout.tp if on_cpu else 0)

    def _ports(self, count: int) -> tuple[int, ...]:
        options = self.config.options
        if not options.ports:
            return tuple(free_port(options.host) for _ in range(count))
        if len(options.ports) != count:
            raise ConfigError(
                f"options.ports = {options.ports} for {count} servers; give one for each, or none"
            )
        for port in options.ports:
            require_free(options.host, port)
        return options.ports

    def _started(self, model: ServedModel, port: int) -> Server:
        options = self.config.options
        device = pick_device(self.config.device, 0).type
        arguments = arguments_of(self.config, model, port, device)
        key = None if options.api_key is None else options.api_key.get_secret_value()
        address = f"{options.host}:{port}"
        log = None if options.log_path is None else Path(options.log_path) / f"sglang-{port}.log"
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        start: Callable[[], ServerProcess] = partial(
            ServerProcess, self.config.server_python, arguments, key, device, log, self.config.layout.tp
        )
        process = start()
        return Server(make_api(address, self._session, options), start, process)

    def _build(self, addresses: tuple[str, ...], ft_spec: FinetuneSpec) -> ModelLimits:
        self._model = self._served()
        try:
            return self._connected(addresses or self.config.options.addresses)
        except BaseException:
            self._teardown()
            raise

    def _connected(self, addresses: tuple[str, ...]) -> ModelLimits:
        if not addresses:
            addresses = self._launch_server(self.config.layout.dp)
        dp = self.config.layout.dp
        if len(addresses) != dp and dp > 1:
            raise LayoutError(f"layout.dp = {dp}, and there are {len(addresses)} servers; dp is their number")
        self._open_loop()
        own = {server.address: server for server in self._own}
        options = self.config.options
        servers = [own.get(a) or Server(make_api(a, self._session, options), None, None) for a in addresses]
        self._fleet = self._wait(_fleet(options, servers, self._session))
        self._wait(self._fleet.connect(DiskWeights(self._model.path, 0)))
        self._requests = Requests(self._fleet)
        self._scorer = Scorer(self._requests, self._model.limits.vocab_size, options.request_timeout_s)
        return self._model.limits

    def _open_loop(self) -> None:
        if self._loop is None:
            self._loop = LoopThread("core-rl-sglang")
            self._session = self._wait(_session())

    def _run(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        assert self._loop is not None
        return self._loop.run(work)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return self._run(work).result()

    def _teardown(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            closing = self._fleet.close() if self._fleet is not None else self._session.close()
            loop.run(closing).result()
            loop.close()
        for server in self._own:
            if server.process is not None:
                server.process.stop()
        self._own = ()

    def _scheduling(self) -> Scheduling:
        gpus = self.config.layout.tp if pick_device(self.config.device, 0).type == "cuda" else 0
        return Scheduling(cpu=2, gpu=gpus, memory_mib=4096)

    # -------------------------------------------------------------- requests

    async def _agenerate(self, request: LLMRequest) -> LLMResponse:
        return await asyncio.wrap_future(self._run(self._requests.generate(request, self._model.eos)))

    async def astream(self, request: LLMRequest) -> AsyncGenerator[Piece | LLMResponse]:
        """The pieces of an answer as they come, and last the answer itself, whose tokens are what counts.

        Closing the generator before its end aborts the request. See `InferenceEngine.agenerate` for what is raised;
        a server that is lost after the first piece is an error.
        """
        self._require_serving("astream()")
        inference_guards.check_request(request, self._limits)
        parts: asyncio.Queue[Piece | LLMResponse | None] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def put(part: Piece | LLMResponse | None) -> None:
            here.call_soon_threadsafe(parts.put_nowait, part)

        running = self._run(_pumped(self._requests.stream(request, self._model.eos), put))
        try:
            with self._counted():
                while (part := await parts.get()) is not None:
                    yield part
                running.result()
        finally:
            running.cancel()

    def _score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._wait(self._scorer.score(batch, temperature))

    def _top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        return self._wait(self._scorer.top(batch, k, temperature))

    # --------------------------------------------------------------- weights

    def _update_weights(self, meta: WeightUpdateMeta) -> None:
        assert self._fleet is not None
        if meta.method == "disk":
            self._wait(self._fleet.install(DiskWeights.checked(meta, self._model.shapes)))
        elif meta.method == "lora":
            self._receive_adapter(self._fleet, meta)
        else:
            self._receive(self._fleet, meta)

    def _receive_adapter(self, fleet: Fleet, meta: WeightUpdateMeta) -> None:
        """Write what a train engine sends to files, which servers read beside those of the adapter before."""
        form, lora = self._model.adapter, self.config.model.lora
        assert form is not None
        assert lora is not None  # the core asks only then
        with receiving(meta, self.config.options.update_timeout_s) as received:
            assert received.adapter is not None
            received.adapter.require_fit(lora, lambda: self._model.digest)
            factors = {name: tensor.clone() for bucket in received for name, tensor in bucket}
            # The scheduler of a server dies of a wrong shape.
            found = {name: tuple(tensor.shape) for name, tensor in factors.items()}
            check_shapes(found, form.shapes, "the adapter that was sent")
            point = Path(meta.path or "")
            directory = Path(tempfile.mkdtemp(prefix=f".{point.name}.adapter-", dir=point.parent))
            form.write(factors, directory)
            self._wait(fleet.adopt(Policy(meta.version, directory)))

    def _receive(self, fleet: Fleet, meta: WeightUpdateMeta) -> None:
        """Pass on what a train engine sends; servers go on computing until the first of it is here."""
        limit_s = self.config.options.update_timeout_s
        weights = self._wait(_kept(meta))
        with receiving(meta, limit_s, lambda: weights.seats(self._wait(fleet.settled()))) as received:
            if received.group is not None:
                self._wait(weights.invite(received.group, limit_s))
            try:
                self._pass_on(fleet, weights, received)
            finally:
                self._wait(weights.dismiss())

    def _pass_on(self, fleet: Fleet, weights: TensorWeights, received: ReceivedWeights) -> None:
        installing: Future[None] | None = None
        missing = dict(self._model.shapes)
        try:
            for bucket in received:
                found = {name: tuple(tensor.shape) for name, tensor in bucket}
                # A server may die of a wrong shape.
                check_shapes(found, {name: missing.pop(name) for name in found if name in missing}, SENT)
                installing = installing or self._run(fleet.install(weights))
                received.go()
                self._wait(weights.add(bucket, broadcast=received.broadcast))
            check_shapes({}, missing, SENT)
        except BaseException as error:
            # Servers that have taken a part are paused in the middle of it.
            self._wait(weights.finish(WeightsError(f"the update broke off: {error}")))
            if installing is not None:
                installing.exception()
            raise
        self._wait(weights.finish())
        assert installing is not None
        installing.result()

    def _set_version(self, version: int) -> None:
        assert self._fleet is not None
        self._wait(self._fleet.label(version))

    # ------------------------------------------------------- pause and memory

    def _pause(self) -> None:
        assert self._fleet is not None
        self._wait(self._fleet.pause())

    def _resume(self) -> None:
        assert self._fleet is not None
        self._wait(self._fleet.resume())

    def _release_memory(self) -> None:
        assert self._fleet is not None
        self._wait(self._fleet.release_memory())

    def _resume_memory(self) -> None:
        assert self._fleet is not None
        self._wait(self._fleet.resume_memory())


async def _pumped(
    stream: AsyncGenerator[Piece | LLMResponse], put: Callable[[Piece | LLMResponse | None], None]
) -> None:
    """Put all that ``stream`` yields, and None at its end or failure."""
    try:
        async with aclosing(stream):
            async for part in stream:
                put(part)
    finally:
        put(None)


async def _session() -> aiohttp.ClientSession:
    """Made on the loop that it belongs to; any number of requests at one time, each with a limit of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def _kept(meta: WeightUpdateMeta) -> TensorWeights:
    return (BroadcastWeights if meta.method == "distributed" else TensorWeights)(meta.version)


async def _fleet(options: Any, servers: list[Server], session: aiohttp.ClientSession) -> Fleet:
    return Fleet(options, servers, session)
