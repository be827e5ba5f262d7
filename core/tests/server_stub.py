"""Stubs of servers with scripted responses, for faults that real ones show too rarely."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from torch import Tensor

from core_rl import get_spec, load_config, load_engine
from core_rl.config.base import parse_config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import ConfigError, WeightsError
from core_rl.servers.backend import ServerBackend
from core_rl.servers.process import bound
from core_rl_conformance.procedures.streaming import tensors_of

Handler = Callable[[web.Request, dict[str, Any]], Any]
S = TypeVar("S", bound="ServerStub")
LONGEST = 1024
"""Tokens that tiny models take: requests of some hundreds are still running when a test acts."""
ADAPTERS: dict[str, Any] = {
    "rank": 3,
    "alpha": 7,
    "rslora": True,
    "target_modules": ["k_proj", "up_proj", "o_proj"],
}
"""Adapter of a server, on layers that servers fuse with layers without an adapter."""


class ServerStub(ABC):
    """Speaks the interface of a server on a free port: each new token is 7, and updates succeed.

    ``faults`` maps a path to a function that runs instead of the usual response; it returns the response, and
    None is the usual one.
    """

    def __init__(self, model_path: str) -> None:
        self.model = self.model_path = model_path
        self.calls: Counter[str] = Counter()
        self.methods: list[tuple[str, str]] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, Handler] = {}
        self.label = "default"
        self.paused = self.hold = False
        self._reserved = bound("127.0.0.1", 0)
        """Its port, until `close`: while it is stopped, nobody answers there."""
        self.port: int = self._reserved.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def version(self) -> str:
        """The version of its weights."""
        return self.label.rpartition(":")[2]

    @property
    def changes(self) -> set[str]:
        """Paths of the calls that change something."""
        return {path for method, path in self.methods if method != "GET"}

    def start(self) -> None:
        """Listen; on the same port as before after `stop`."""
        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()

    def stop(self) -> None:
        """Close the port and all connections, as if the process had been killed; a new one knows nothing."""
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self.label, self.paused = "default", False

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._reserved.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        self.calls[request.path] += 1
        self.methods.append((request.method, request.path))
        self.bodies.append((request.path, body))
        fault = self.faults.get(request.path)
        if fault is not None:
            found = fault(request, body)
            found = await found if asyncio.iscoroutine(found) else found
            if found is not None:
                return found  # type: ignore[no-any-return]
        return await self.usual(request, body)

    @abstractmethod
    async def usual(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The response without a fault."""


def logged_calls(log: str) -> set[tuple[str, str]]:
    """Method and path of each call in the log of a real server."""
    return {(method, path) for method, path in re.findall(r'"([A-Z]+) (/[^ ?]*)[^"]* HTTP', log)}


def check_foreign_server(
    build: Callable[..., InferenceEngine], model: str, other: str, path: str, logs: Path
) -> None:
    """A real server of ``model``: engines of the ``other`` leave it alone, and its own engine draws by ``path``.

    ``model`` is a llama, and ``other`` a qwen3; ``logs`` is a directory.
    """
    owner = build(model, log_path=str(logs))
    try:
        (address,) = owner.launch_server()
        (log,) = logs.iterdir()
        start = log.stat().st_size

        def calls() -> set[tuple[str, str]]:
            return logged_calls(log.read_text()[start:])

        for take_over in (False, True):
            foreign = build(other, addresses=(address,), take_over=take_over)
            with pytest.raises(ConfigError, match=r"model_type = 'llama' \(model.path: 'qwen3'\)"):
                foreign.initialize()
        assert {method for method, _ in calls()} == {"GET"}
        guest = build(model, addresses=(address,))
        guest.initialize()
        try:
            (response,) = complete(guest, request(5, 8, 2))
            assert response.versions == (0,) * 4
            with pytest.raises(ConfigError, match=r"options.take_over = false: pause\(\)"):
                guest.pause()
        finally:
            guest.destroy()
        assert {called for method, called in calls() if method != "GET"} == {path}
    finally:
        owner.destroy()


@contextmanager
def running(made: list[S]) -> Iterator[list[S]]:
    """These stubs, which listen."""
    for stub in made:
        stub.start()
    try:
        yield made
    finally:
        for stub in made:
            stub.close()


def drop(request: web.Request, body: dict[str, Any]) -> None:
    """Close the connection without a response."""
    assert request.transport is not None
    request.transport.abort()


def slow(arrived: threading.Event | None = None) -> Handler:
    """A fault: no response for ten minutes; ``arrived`` is set when a request has come."""

    async def wait(_request: web.Request, _body: dict[str, Any]) -> None:
        if arrived is not None:
            arrived.set()
        await asyncio.sleep(600)

    return wait


def first(times: int, fault: Handler) -> Handler:
    """``fault`` for the first ``times`` calls, and the usual response after them."""
    left = [times]

    def sometimes(request: web.Request, body: dict[str, Any]) -> Any:
        left[0] -= 1
        return fault(request, body) if left[0] >= 0 else None

    return sometimes


def engine_of(name: str, **values: Any) -> InferenceEngine:
    """The engine ``name`` on the CPU."""
    spec = get_spec(name)
    config = parse_config(load_config(spec), {"device": "cpu", **values})
    assert isinstance(config, InferenceEngineConfig)
    return load_engine(spec, config)


@contextmanager
def connected_to(
    name: str, made: Sequence[ServerStub], lora: dict[str, Any] | None = None, **options: Any
) -> Iterator[InferenceEngine]:
    """The engine ``name`` at these servers; with ``lora`` it takes adapters."""
    engine = engine_of(
        name,
        model={"path": made[0].model, "lora": lora},
        layout={"dp": len(made)},
        options={"addresses": [stub.address for stub in made], "take_over": True, **options},
    )
    with initialized(engine):
        yield engine


@contextmanager
def initialized(engine: InferenceEngine) -> Iterator[InferenceEngine]:
    """``engine``, destroyed afterwards."""
    try:
        engine.initialize()
        yield engine
    finally:
        engine.destroy()


def shorten_wait(backend: ServerBackend[Any]) -> None:
    """Have the connected ``backend`` wait half a second for lost servers."""
    pool = backend.fleet.pool
    pool.options = pool.options.model_copy(update={"start_timeout_s": 0.5})


def request(*ids: int, **sampling: Any) -> LLMRequest:
    return LLMRequest(
        input_ids=ids or (1, 2, 3),
        sampling=SamplingParams(**{"max_new_tokens": 4, "ignore_eos": True, **sampling}),
    )


def complete(engine: InferenceEngine, *requests: LLMRequest) -> list[LLMResponse]:
    """The responses to ``requests``, which run at the same time."""

    async def all_of_them() -> list[LLMResponse]:
        return list(await asyncio.gather(*map(engine.agenerate, requests)))

    return asyncio.run(all_of_them())


def complete_during(
    engine: InferenceEngine, action: Callable[[], None], *requests: LLMRequest
) -> list[LLMResponse]:
    """The responses to ``requests``, which are in flight when ``action`` begins, on servers that are drawing tokens."""

    async def all_of_them() -> list[LLMResponse]:
        running = [asyncio.create_task(engine.agenerate(request)) for request in requests]
        while in_flight(engine) < len(requests):
            await asyncio.sleep(0.001)
        # They draw tokens when a later request has its own.
        short = replace(requests[0].sampling, max_new_tokens=2)
        await engine.agenerate(LLMRequest(input_ids=requests[0].input_ids, sampling=short))
        assert not any(task.done() for task in running), "give them more tokens"
        await asyncio.to_thread(action)
        return list(await asyncio.gather(*running))

    return asyncio.run(all_of_them())


def in_flight(engine: InferenceEngine) -> int:
    """Requests that ``engine`` has sent to its servers, and that have no response yet."""
    backend = engine._backend
    assert isinstance(backend, ServerBackend)
    return sum(server.in_flight for server in backend.servers)


def dying_stream(model: str) -> Iterator[tuple[str, Tensor]]:
    """The first weights of ``model``; then the trainer dies."""
    yield from list(tensors_of(Path(model)).items())[:6]
    raise WeightsError("the trainer died")


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
