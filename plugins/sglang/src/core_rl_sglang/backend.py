"""`SGLangBackend`: an inference backend over a fleet of SGLang servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import cached_property, partial

import aiohttp
from torch import Tensor

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.inference_protocols import MachineProcess
from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, PartialResponse
from core_rl.distributed.devices import device_type, wants_cuda
from core_rl.errors import LayoutError
from core_rl.rollout.loop_thread import LoopThread
from core_rl_sglang.api import Api
from core_rl_sglang.calls import Requests
from core_rl_sglang.config import SglangConfig, SglangOptions
from core_rl_sglang.file_limit import requests_at_one_time
from core_rl_sglang.fleet import Fleet
from core_rl_sglang.model import ServedModel
from core_rl_sglang.placed import PlacedServer
from core_rl_sglang.process import RunningServer, ServerProcess, free_ports
from core_rl_sglang.receiving import WeightReceiver
from core_rl_sglang.scores import Scorer
from core_rl_sglang.server import Server
from core_rl_sglang.weights import DiskWeights

__all__ = ["SGLangBackend"]

KEEP_ALIVE_S = 2.0
"""An idle connection is closed here before a server does it, after 5 s: a request on its way would be lost."""


class SGLangBackend(InferenceBackend[SglangConfig]):
    """Calls SGLang servers over HTTP, on one event loop in a thread of its own."""

    servers: tuple[Server, ...] = ()
    """The servers that the engine is connected to; before `build`, those that it has launched."""

    def __init__(self) -> None:
        self._cleanup = ExitStack()

    # ------------------------------------------------------------ life cycle

    def launch_server(self, context: InferenceContext[SglangConfig], count: int) -> tuple[str, ...]:
        config, options, model = context.config, context.config.options, _served(context.config)
        launched = []
        configs = [config.of_server(number) for number in range(count)]
        for own, port in zip(configs, free_ports(options, count), strict=True):
            start = partial(ServerProcess, own, model, port, options.key)
            launched.append(self._server(f"{options.host}:{port}", options, start))
            self._cleanup.callback(launched[-1].stop)
        self.servers += tuple(launched)
        return self._when_up(launched, options)

    def launch_servers_on(
        self, context: InferenceContext[SglangConfig], processes: Sequence[MachineProcess]
    ) -> tuple[str, ...]:
        options, launched = context.config.options, []
        for number, process in enumerate(processes):
            self._cleanup.callback(process.close)
            placed = PlacedServer(context.config, number, process)
            launched.append(self._server(placed.address, options, placed.start))
            self._cleanup.callback(launched[-1].stop)
        self.servers += tuple(launched)
        return self._when_up(launched, options)

    def _when_up(self, launched: Sequence[Server], options: SglangOptions) -> tuple[str, ...]:
        """The addresses of ``launched``, as soon as all of them respond."""
        for server in launched:
            self._loop.wait(server.wait_until_up(options.start_timeout_s))
        return tuple(server.address for server in launched)

    def build(
        self, context: InferenceContext[SglangConfig], addresses: tuple[str, ...], ft_spec: FinetuneSpec
    ) -> ModelLimits:
        config = context.config
        options, dp = config.options, config.layout.dp
        self.model = _served(config)
        addresses = addresses or options.addresses or self.launch_server(context, dp)
        if len(addresses) != dp and dp > 1:
            raise LayoutError(f"layout.dp = {dp}, and there are {len(addresses)} servers; dp is their number")
        own = {server.address: server for server in self.servers}
        self.servers = tuple(own.get(address) or self._server(address, options) for address in addresses)
        self._fleet = Fleet(options, self.servers, DiskWeights(self.model.path, 0))
        self._cleanup.callback(lambda: self._loop.wait(self._fleet.close()))
        self._loop.wait(self._fleet.connect())
        self._requests = Requests(self._fleet.pool, requests_at_one_time())
        self._scorer = Scorer(self._requests, self.model.limits.vocab_size)
        self._receiver = WeightReceiver(self._loop, self._fleet, self.model)
        return self.model.limits

    @cached_property
    def _loop(self) -> LoopThread:
        loop = LoopThread("core-rl-sglang")
        self._cleanup.callback(loop.close)
        return loop

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        session = self._loop.wait(_session())
        self._cleanup.callback(lambda: self._loop.wait(session.close()))
        return session

    def _server(
        self, address: str, options: SglangOptions, start: Callable[[], RunningServer] | None = None
    ) -> Server:
        return Server(Api(address, self._session, options.key), options.update_timeout_s, start)

    def teardown(self) -> None:
        self._cleanup.close()

    def scheduling(self, config: SglangConfig) -> Scheduling:
        gpus = config.layout.tp if wants_cuda(config.device) else 0
        return Scheduling(cpu=2, gpu=gpus, memory_mib=4096)

    # -------------------------------------------------------------- requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await asyncio.wrap_future(self._loop.run(self._requests.generate(request, self.model.eos)))

    async def astream(self, request: LLMRequest) -> AsyncGenerator[PartialResponse | LLMResponse]:
        """Parts of a response as they come, and last the response; a server lost after the first is an error."""
        parts: asyncio.Queue[PartialResponse | LLMResponse | None] = asyncio.Queue()
        callers_loop = asyncio.get_running_loop()

        async def pump() -> None:
            try:
                async with aclosing(self._requests.stream(request, self.model.eos)) as stream:
                    async for part in stream:
                        callers_loop.call_soon_threadsafe(parts.put_nowait, part)
            finally:
                callers_loop.call_soon_threadsafe(parts.put_nowait, None)

        running = self._loop.run(pump())
        try:
            while (part := await parts.get()) is not None:
                yield part
            running.result()
        finally:
            running.cancel()

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self._loop.wait(self._scorer.score(batch, temperature))

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        return self._loop.wait(self._scorer.top(batch, k, temperature))

    # ----------------------------------------------------- weights and memory

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._receiver.update(meta)

    def set_version(self, version: int) -> None:
        self._loop.wait(self._fleet.set_weight_version(version))

    def pause(self) -> None:
        self._loop.wait(self._fleet.pause())

    def resume(self) -> None:
        self._loop.wait(self._fleet.resume())

    def release_memory(self) -> None:
        self._loop.wait(self._fleet.release_memory())

    def resume_memory(self) -> None:
        self._loop.wait(self._fleet.resume_memory())


def _served(config: SglangConfig) -> ServedModel:
    on_cpu = device_type(config.device) == "cpu"
    return ServedModel.of(config.model, config.layout.tp if on_cpu else 0)


async def _session() -> aiohttp.ClientSession:
    """A session of the running loop. `Requests` limits what is in flight; each has a time limit of its own."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
