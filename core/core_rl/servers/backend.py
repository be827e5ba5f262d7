"""`ServerBackend`: an inference backend over a fleet of servers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import aiohttp
import torch
from torch import Tensor

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.inference_protocols import MachineProcess
from core_rl.backend.meta import FinetuneSpec, Scheduling, WeightUpdateMeta
from core_rl.backend.tensors import check_shapes
from core_rl.checkpoint.manifest import MANIFEST
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.distributed.devices import wants_cuda
from core_rl.distributed.loop_thread import LoopThread
from core_rl.engine.delta_files import open_delta_update
from core_rl.errors import LayoutError, WeightsError
from core_rl.servers.adapters import ServedAdapter, ServedModel
from core_rl.servers.api import Api, requests_at_one_time
from core_rl.servers.calls import Requests
from core_rl.servers.config import ServerEngineConfig, ServerOptions, server_address
from core_rl.servers.fleet import Fleet, facts_of_running, require_servers
from core_rl.servers.process import PlacedServer, RunningServer, ServerProcess, reserve_ports
from core_rl.servers.server import SYNC_PROTOCOLS, Server, require_protocols
from core_rl.servers.weights import (
    BroadcastWeights,
    DiskWeights,
    TensorWeights,
    Weights,
    require_shared_memory_with,
)
from core_rl.servers.wire import Wire
from core_rl.weight_sync.buckets import Filling
from core_rl.weight_sync.delta import DeltaDecoder, DeltaWeights
from core_rl.weight_sync.messages import ReceiverRanks
from core_rl.weight_sync.tensor import ReceivedWeights
from core_rl.weight_sync.update import weight_update

__all__ = ["ServerBackend"]

C = TypeVar("C", bound=ServerEngineConfig)

SENT = "the weights that were sent"
KEEP_ALIVE_S = 2.0
"""An idle connection is closed here before a server does it, after 5 s: a request on its way would be lost."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", MANIFEST)


class ReceivedChanges:
    """Weights of the previous update with ``delta``, in the host memory of this process; see `DeltaDecoder`.

    By ``tensor`` and ``distributed`` they are the buckets that replaced servers load, and cost no more memory.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._decoder = DeltaDecoder()

    def forget(self) -> None:
        """Free the weights: the next update has to be full."""
        self._decoder.forget()

    def receive(self, meta: WeightUpdateMeta, timeout_s: float, install: Callable[[Weights], None]) -> None:
        """Have servers ``install`` the weights of an update by ``meta``.

        Raises `DeltaRefused`, and `WeightsError` for other names or shapes than the model's.
        """
        if meta.method == "disk":
            with open_delta_update(meta) as update:
                received = self._decoded(update.items())
                full = update.is_full
            install(DiskWeights.checked(meta, self._model.shapes) if full else self._written(received, meta))
        else:
            with weight_update(meta, base=self._decoder.base).receive(timeout_s) as buckets:
                items = ((name, tensor.clone()) for bucket in buckets for name, tensor in bucket)
                received = self._decoded(items)
                fillings = [Filling(meta.bucket_bytes, torch.device("cpu"))]  # in shared memory
                for name, tensor in received.tensors.items():
                    if not fillings[-1].fits(tensor):
                        fillings.append(Filling(meta.bucket_bytes, torch.device("cpu")))
                    fillings[-1].add(name, tensor)
                shared = [filling.tensors for filling in fillings]
                received = replace(received, tensors=dict(item for bucket in shared for item in bucket))
                kind = BroadcastWeights if meta.method == "distributed" else TensorWeights
                install(kind.arrived(meta.version, shared))
        self._decoder.commit(received, meta.version)

    def _decoded(self, items: Iterator[tuple[str, Tensor]]) -> DeltaWeights:
        received = self._decoder.decode(items)
        shapes = {name: tuple(tensor.shape) for name, tensor in received.tensors.items()}
        check_shapes(shapes, self._model.shapes, "the weights that were sent")
        return received

    def _written(self, received: DeltaWeights, meta: WeightUpdateMeta) -> DiskWeights:
        """A model directory with the weights, next to the update: servers see that place."""
        path = Path(meta.path or "")
        directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.served-", dir=path.parent))
        weights = DiskWeights(directory, meta.version, temporary=True)
        try:
            ignored = shutil.ignore_patterns(*WEIGHT_FILES)
            shutil.copytree(self._model.path, directory, ignore=ignored, dirs_exist_ok=True)
            write_tensors(directory, "model", received.tensors.items(), writes=True)
        except BaseException:
            weights.discard()
            raise
        return weights


class ServerBackend(InferenceBackend[C]):
    """Calls servers over HTTP, on one event loop in a thread of its own."""

    product: str
    """Name of the servers in messages."""
    wire: Wire
    server_class: type[Server]
    servers: tuple[Server, ...] = ()
    """The servers that the engine is connected to; before `build`, the launched servers."""

    def __init__(self) -> None:
        self.cleanup = ExitStack()
        """Resources that `teardown` closes."""

    @abstractmethod
    def served_model(self, config: C) -> ServedModel:
        """The model of ``config``, as servers read it; raises `ConfigError`."""

    @abstractmethod
    def start_server(self, config: C, model: ServedModel, port: int, key: str | None) -> ServerProcess:
        """Start the server of a `ServerEngineConfig.of_server`, which listens on ``port`` for clients with ``key``."""

    @classmethod
    def start(cls, config: C, port: int, key: str | None) -> ServerProcess:
        """Start the server of a `ServerEngineConfig.on_machine`, with the model that this machine has."""
        backend = cls()
        return backend.start_server(config, backend.served_model(config), port, key)

    # ------------------------------------------------------------ life cycle

    def launch_servers_on(
        self, context: InferenceContext[C], processes: Sequence[MachineProcess]
    ) -> tuple[str, ...]:
        starts = []
        for number, process in enumerate(processes):
            self.cleanup.callback(process.close)
            placed = PlacedServer(context.config, number, process, self.start)
            starts.append((placed.address, placed.start))
        return self.launch(starts, context.config.options)

    def launch_server(self, context: InferenceContext[C], count: int) -> tuple[str, ...]:
        config, options, model = context.config, context.config.options, self.served_model(context.config)
        configs, starts = [config.of_server(number) for number in range(count)], []
        for server_config, port in zip(configs, reserve_ports(options, count, self.cleanup), strict=True):
            start = partial(self.start_server, server_config, model, port, options.key)
            starts.append((f"{options.host}:{port}", start))
        return self.launch(starts, options)

    def launch(
        self, starts: Sequence[tuple[str, Callable[[], RunningServer]]], options: ServerOptions
    ) -> tuple[str, ...]:
        """Start a server at each address, and return the addresses as soon as all of them respond."""
        launched = []
        for address, start in starts:
            launched.append(self._server(address, options, start))
            self.cleanup.callback(launched[-1].stop)
        self.servers += tuple(launched)
        for server in launched:
            self.loop.wait(server.wait_until_up(options.start_timeout_s))
        return tuple(server.address for server in launched)

    def check_addresses(self, config: C) -> None:
        """Raise one `ConfigError` for the servers at ``options.addresses`` that cannot serve the model, or are not up.

        Nothing is changed on them.
        """
        options, model = config.options, self.served_model(config)
        _require_count(options.addresses, config.layout.dp)
        servers = [self._server(address, options, steered=options.take_over) for address in options.addresses]
        require_servers(self.loop.wait(facts_of_running(servers)), model, config.dtype, str(model.path))

    def build(
        self, context: InferenceContext[C], addresses: tuple[str, ...], ft_spec: FinetuneSpec
    ) -> ModelLimits:
        config = context.config
        options, dp = config.options, config.layout.dp
        self.model = self.served_model(config)
        # The caller launched the servers at ``addresses``; others started ``options.addresses``.
        steered = bool(addresses) or options.take_over
        addresses = tuple(map(server_address, addresses)) or options.addresses
        addresses = addresses or self.launch_server(context, dp)
        _require_count(addresses, dp)
        launched = {server.address: server for server in self.servers}
        self.servers = tuple(
            launched.get(address) or self._server(address, options, steered=steered) for address in addresses
        )
        self.fleet = Fleet(options, self.servers, self.model, config.dtype, DiskWeights(self.model.path, 0))
        self.cleanup.callback(lambda: self.loop.wait(self.fleet.close()))
        self.loop.wait(self.fleet.connect())
        self._changes = ReceivedChanges(self.model)
        limits = self.model.limits
        self._requests = Requests(self.fleet.pool, self.wire, limits, requests_at_one_time())
        return limits

    @cached_property
    def loop(self) -> LoopThread:
        """The thread of the event loop that all calls to servers run on."""
        loop = LoopThread(f"core-rl-{self.product.lower()}")
        self.cleanup.callback(loop.close)
        return loop

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        session = self.loop.wait(_session())
        self.cleanup.callback(lambda: self.loop.wait(session.close()))
        return session

    def _server(
        self,
        address: str,
        options: ServerOptions,
        start: Callable[[], RunningServer] | None = None,
        *,
        steered: bool = True,
    ) -> Server:
        api = Api(address, self._session, options.key, self.product)
        return self.server_class(api, options.update_timeout_s, start, steered=steered)

    def teardown(self) -> None:
        self.cleanup.close()

    def scheduling(self, config: C) -> Scheduling:
        gpus = config.layout.tp if wants_cuda(config.device) else 0
        return Scheduling(cpu=2, gpu=gpus, memory_mib=4096)

    # -------------------------------------------------------------- requests

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await asyncio.wrap_future(self.loop.run(self._requests.generate(request, self.model.eos)))

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        return self.loop.wait(self._requests.score(batch, temperature))

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        return self.loop.wait(self._requests.top(batch, k, temperature))

    # ----------------------------------------------------- weights and memory

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        require_protocols(self.server_class, SYNC_PROTOCOLS[meta.method])
        self.fleet.require_updatable(meta.method)
        if meta.delta:
            if meta.method == "tensor":
                require_shared_memory_with(self.servers)
            self._changes.receive(
                meta, self.fleet.update_timeout_s, lambda weights: self.loop.wait(self.fleet.install(weights))
            )
            return
        self._changes.forget()
        if meta.method == "disk":
            self.loop.wait(self.fleet.install(DiskWeights.checked(meta, self.model.shapes)))
        elif meta.method == "lora":
            self._receive_adapter(meta)
        else:
            self._receive_tensors(meta)

    def _receive_adapter(self, meta: WeightUpdateMeta) -> None:
        """Write the adapter to files, which servers load in addition to the previous adapter."""
        form = self.model.adapter
        assert form is not None  # the core checks it
        with weight_update(meta).receive(self.fleet.update_timeout_s) as received:
            assert received.adapter is not None
            received.adapter.require_fit(form.lora, lambda: self.model.digest)
            factors = {name: tensor.clone() for bucket in received for name, tensor in bucket}
            # The scheduler of a server dies of a wrong shape.
            shapes = {name: tuple(tensor.shape) for name, tensor in factors.items()}
            check_shapes(shapes, form.shapes, "the adapter that was sent")
            adapter = ServedAdapter.written(form, factors, meta)
            self.loop.wait(self.fleet.install_adapter(adapter))

    def _receive_tensors(self, meta: WeightUpdateMeta) -> None:
        """Pass buckets to the servers; they compute until the first one has arrived."""
        weights = (BroadcastWeights if meta.method == "distributed" else TensorWeights)(meta.version)

        def ranks() -> ReceiverRanks | None:
            return weights.receiver_ranks(self.loop.wait(self.fleet.ready_servers()))

        with weight_update(meta).receive(self.fleet.update_timeout_s, ranks) as received:
            if received.group is not None:
                self.loop.wait(weights.join(received.group))
            try:
                self._install(weights, received)
            finally:
                self.loop.wait(weights.leave())

    def _install(self, weights: TensorWeights, received: ReceivedWeights) -> None:
        installing: Future[None] | None = None
        missing = dict(self.model.shapes)
        try:
            for bucket in received:
                shapes = {name: tuple(tensor.shape) for name, tensor in bucket}
                # A server may die of a wrong shape.
                check_shapes(shapes, {name: missing.pop(name) for name in shapes if name in missing}, SENT)
                installing = installing or self.loop.run(self.fleet.install(weights))
                received.allow_broadcast()
                self.loop.wait(weights.add(bucket, received.device_memory, broadcast=received.broadcast))
            check_shapes({}, missing, SENT)
        except BaseException as error:
            # Servers that have some of the buckets are paused.
            self.loop.wait(weights.finish(WeightsError(f"the update broke off: {error}")))
            if installing is not None:
                installing.exception()
            raise
        self.loop.wait(weights.finish())
        assert installing is not None
        installing.result()

    def set_version(self, version: int) -> None:
        self.loop.wait(self.fleet.set_weight_version(version))

    def pause(self) -> None:
        self.loop.wait(self.fleet.pause())

    def resume(self) -> None:
        self.loop.wait(self.fleet.resume())


def _require_count(addresses: Sequence[str], dp: int) -> None:
    if len(addresses) != dp and dp > 1:
        raise LayoutError(f"layout.dp = {dp}, and there are {len(addresses)} servers; dp is their number")


async def _session() -> aiohttp.ClientSession:
    """A session of the running loop. `Requests` limits requests in flight; each has its own time limit."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
