"""Receiving weights and adapters from a train engine, and passing them to the servers of a fleet."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future
from pathlib import Path

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import check_shapes
from core_rl.distributed.loop_thread import LoopThread
from core_rl.errors import WeightsError
from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.broadcasts import BroadcastWeights
from core_rl.servers.fleet import Fleet
from core_rl.servers.model import ServedModel
from core_rl.servers.weights import DiskWeights, TensorWeights, require_shared_memory_with
from core_rl.weight_sync.group import ReceiverRanks
from core_rl.weight_sync.stream import ReceivedWeights, receiving

__all__ = ["WeightReceiver"]

SENT = "the weights that were sent"


class WeightReceiver:
    """Weight updates of ``fleet``, whose event loop is ``loop``; the methods run in another thread, and block."""

    def __init__(self, loop: LoopThread, fleet: Fleet, model: ServedModel) -> None:
        self._loop = loop
        self._fleet = fleet
        self._model = model
        self._timeout_s = fleet.pool.options.update_timeout_s

    def update(self, meta: WeightUpdateMeta) -> None:
        """Install the weights of ``meta`` on all servers; raises `WeightsError`, with the old ones installed."""
        if meta.method == "disk":
            self._loop.wait(self._fleet.install(DiskWeights.checked(meta, self._model.shapes)))
        elif meta.method == "lora":
            self._receive_adapter(meta)
        else:
            self._receive_tensors(meta)

    def _receive_adapter(self, meta: WeightUpdateMeta) -> None:
        """Write the adapter to files, which servers read in addition to those of the adapter before."""
        form = self._model.adapter
        assert form is not None  # the core checks it
        with receiving(meta, self._timeout_s) as received:
            assert received.adapter is not None
            received.adapter.require_fit(form.lora, lambda: self._model.digest)
            factors = {name: tensor.clone() for bucket in received for name, tensor in bucket}
            # The scheduler of a server dies of a wrong shape.
            found = {name: tuple(tensor.shape) for name, tensor in factors.items()}
            check_shapes(found, form.shapes, "the adapter that was sent")
            file = Path(meta.path or "")
            directory = Path(tempfile.mkdtemp(prefix=f".{file.name}.adapter-", dir=file.parent))
            form.write(factors, directory)
            self._loop.wait(self._fleet.install_adapter(ServedAdapter(meta.version, directory)))

    def _receive_tensors(self, meta: WeightUpdateMeta) -> None:
        """Pass buckets to the servers; they compute until the first one has arrived."""
        weights = (BroadcastWeights if meta.method == "distributed" else TensorWeights)(meta.version)

        def ranks() -> ReceiverRanks | None:
            servers = self._loop.wait(self._fleet.ready_servers())
            if meta.method == "tensor":
                require_shared_memory_with(servers)
            return weights.receiver_ranks(servers)

        with receiving(meta, self._timeout_s, ranks) as received:
            if received.group is not None:
                self._loop.wait(weights.join(received.group))
            try:
                self._pass_on(weights, received)
            finally:
                self._loop.wait(weights.leave())

    def _pass_on(self, weights: TensorWeights, received: ReceivedWeights) -> None:
        installing: Future[None] | None = None
        missing = dict(self._model.shapes)
        try:
            for bucket in received:
                found = {name: tuple(tensor.shape) for name, tensor in bucket}
                # A server may die of a wrong shape.
                check_shapes(found, {name: missing.pop(name) for name in found if name in missing}, SENT)
                installing = installing or self._loop.run(self._fleet.install(weights))
                received.allow_broadcast()
                self._loop.wait(weights.add(bucket, received.device_memory, broadcast=received.broadcast))
            check_shapes({}, missing, SENT)
        except BaseException as error:
            # Servers that have some of the buckets are paused.
            self._loop.wait(weights.finish(WeightsError(f"the update broke off: {error}")))
            if installing is not None:
                installing.exception()
            raise
        self._loop.wait(weights.finish())
        assert installing is not None
        installing.result()
