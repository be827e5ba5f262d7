"""`SGLangBackend`: an inference backend over a fleet of SGLang servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import aiohttp
from torch import Tensor

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, PartialResponse
from core_rl.distributed.process_group import pick_device
from core_rl.errors import LayoutError
from core_rl.rollout.loop_thread import LoopThread
from core_rl_sglang.api import Api
from core_rl_sglang.calls import Requests
from core_rl_sglang.config import SglangConfig
from core_rl_sglang.fleet import Fleet
from core_rl_sglang.model import ServedModel
from core_rl_sglang.process import free_ports
from core_rl_sglang.receiving import WeightReceiver
from core_rl_sglang.scores import Scorer
from core_rl_sglang.server import Server, start_server
from core_rl_sglang.weights import DiskWeights

__all__ = ["SGLangBackend"]

_Result = TypeVar("_Result")

KEEP_ALIVE_S = 2.0
"""An idle connection is closed here before a server does it, after 5 s: a request on its way would be lost."""


class SGLangBackend(InferenceBackend[SglangConfig]):
    """Calls SGLang servers over HTTP, on one event loop in a thread of its own."""

    _loop: LoopThread | None = None
    _connected: Fleet | None = None
    _own: tuple[Server, ...] = ()

    # ------------------------------------------------------------ life cycle

    def launch_server(self, context: InferenceContext[SglangConfig], count: int) -> tuple[str, ...]:
        config, model = context.config, _served(context.config)
        ports = free_ports(config.options, count)
        self._open_loop()
        self._own = tuple(start_server(config, model, port, self._session) for port in ports)
        for server in self._own:
            self._wait(server.wait_until_up(config.options.start_timeout_s))
        return tuple(server.address for server in self._own)

    def build(
        self, context: InferenceContext[SglangConfig], addresses: tuple[str, ...], ft_spec: FinetuneSpec
    ) -> ModelLimits:
        config = context.config
        options, dp = config.options, config.layout.dp
        self.model = _served(config)
        addresses = addresses or options.addresses or self.launch_server(context, dp)
        if len(addresses) != dp and dp > 1:
            raise LayoutError(f"layout.dp = {dp}, and there are {len(addresses)} servers; dp is their number")
        loop = self._open_loop()
        own = {server.address: server for server in self._own}
        servers = [own.get(a) or Server(Api(a, self._session, options.key), None, None) for a in addresses]
        fleet = Fleet(options, servers, self._session, DiskWeights(self.model.path, 0))
        self._connected = fleet
        self._wait(fleet.connect())
        self._requests = Requests(fleet.pool)
        self._scorer = Scorer(self._requests, self.model.limits.vocab_size, options.request_timeout_s)
        self._receiver = WeightReceiver(loop, fleet, self.model, config.model.lora, options.update_timeout_s)
        return self.model.limits

    def _open_loop(self) -> LoopThread:
        if self._loop is None:
            self._loop = LoopThread("core-rl-sglang")
            self._session = self._wait(_session())
        return self._loop

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        assert self._loop is not None
        return self._loop.run(work).result()

    @property
    def _fleet(self) -> Fleet:
        assert self._connected is not None
        return self._connected

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers that the engine is connected to; before `build`, those that it has launched."""
        return self._own if self._connected is None else self._connected.pool.servers

    def teardown(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            closing = self._session.close() if self._connected is None else self._connected.close()
            loop.run(closing).result()
            loop.close()
        for server in self._own:
            if server.process is not None:
                server.process.stop()
        self._own = ()

    def scheduling(self, config: SglangConfig) -> Scheduling:
        gpus = config.layout.tp if pick_device(config.device, 0).type == "cuda" else 0
        return Scheduling(cpu=2, gpu=gpus, memory_mib=4096)

    # -------------------------------------------------------------- requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        assert self._loop is not None
        return await asyncio.wrap_future(self._loop.run(self._requests.generate(request, self.model.eos)))

    async def astream(self, request: LLMRequest) -> AsyncGenerator[PartialResponse | LLMResponse]:
        """Parts of a response as they come, and last the response; a server lost after the first is an error."""
        assert self._loop is not None
        parts: asyncio.Queue[PartialResponse | LLMResponse | None] = asyncio.Queue()
        callers_loop = asyncio.get_running_loop()

        def put(part: PartialResponse | LLMResponse | None) -> None:
            callers_loop.call_soon_threadsafe(parts.put_nowait, part)

        running = self._loop.run(_pump(self._requests.stream(request, self.model.eos), put))
        try:
            while (part := await parts.get()) is not None:
                yield part
            running.result()
        finally:
            running.cancel()

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._wait(self._scorer.score(batch, temperature))

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        return self._wait(self._scorer.top(batch, k, temperature))

    # ----------------------------------------------------- weights and memory

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._receiver.update(meta)

    def set_version(self, version: int) -> None:
        self._wait(self._fleet.set_weight_version(version))

    def pause(self) -> None:
        self._wait(self._fleet.pause())

    def resume(self) -> None:
        self._wait(self._fleet.resume())

    def release_memory(self) -> None:
        self._wait(self._fleet.release_memory())

    def resume_memory(self) -> None:
        self._wait(self._fleet.resume_memory())


def _served(config: SglangConfig) -> ServedModel:
    on_cpu = pick_device(config.device, 0).type == "cpu"
    return ServedModel.of(config.model, config.layout.tp if on_cpu else 0)


async def _pump(
    stream: AsyncGenerator[PartialResponse | LLMResponse],
    put: Callable[[PartialResponse | LLMResponse | None], None],
) -> None:
    """Put all parts of ``stream``, and None at its end or failure."""
    try:
        async with aclosing(stream):
            async for part in stream:
                put(part)
    finally:
        put(None)


async def _session() -> aiohttp.ClientSession:
    """A session of the running loop, without a limit on requests in flight; each has a time limit of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
