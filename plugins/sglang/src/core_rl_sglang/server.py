"""One server of a fleet: its interface, its process if this engine started it, and the calls that RL needs."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from core_rl.errors import RolloutError
from core_rl.weight_sync.accelerators import CudaEnvironment
from core_rl.weight_sync.buckets import flat_bytes
from core_rl.weight_sync.device_memory import DeviceMemory, Opened
from core_rl.weight_sync.group import GroupAddress
from core_rl.weight_sync.messages import Bucket
from core_rl_sglang.adapters import ServedAdapter
from core_rl_sglang.api import Api, Refused, ServerTimeout, Unreachable
from core_rl_sglang.payloads import flattened_bucket
from core_rl_sglang.process import RunningServer
from core_rl_sglang.responses import readable

__all__ = ["FRESH", "PROBE_TIMEOUT_S", "Server"]

logger = logging.getLogger(__name__)

FRESH = "default"
"""The weight version of a server that was given no weights since it started."""
POLL_S = 0.25
PROBE_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 10.0


class Server:
    """A server, which may be unreachable for a while. Belongs to the event loop of its ``api``."""

    def __init__(
        self, api: Api, update_timeout_s: float, start: Callable[[], RunningServer] | None = None
    ) -> None:
        self.api = api
        self.address = api.address
        self.host = api.address.rpartition(":")[0].strip("[]")
        self._update_timeout_s = update_timeout_s
        self.start = start
        """Starts it again on the same port; None for a server that somebody else started."""
        self.process = None if start is None else start()
        self.in_flight = 0
        self.ready = False
        self.version = -1
        """The version of the weights that it was given."""
        self.weights_intact = True
        """False from the beginning of a weight update until its success: the server must not compute."""
        self._pausing = asyncio.Lock()
        """Held by a pause and its opposite: the one that is called later has the last effect."""
        self.ranks = 1
        """Its tensor-parallel degree."""
        self.device = ""
        """Where it computes: ``cpu`` or ``cuda``."""
        self.failure: BaseException | None = None
        """The error after which it will not come back."""
        self.recovery: asyncio.Task[None] | None = None
        self.adapter = ServedAdapter(0)
        """The adapter of new requests, or none."""

    @contextmanager
    def busy(self) -> Iterator[ServedAdapter]:
        """Count a request in flight, which uses the adapter that is yielded."""
        adapter = self.adapter
        self.in_flight += 1
        adapter.in_flight += 1
        try:
            yield adapter
        finally:
            self.in_flight -= 1
            adapter.in_flight -= 1

    def cuda(self) -> CudaEnvironment | None:
        """The CUDA environment of its ranks; None without CUDA, and where somebody else started it."""
        return None if self.process is None else self.process.cuda()

    def stop(self) -> None:
        """End its process, if it is one of this engine."""
        if self.process is not None:
            self.process.stop()

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server responds, and computes where its weights allow it; logs a warning every 10 s.

        Raises `RolloutError` with the end of its log if it ends, and `ServerTimeout`.
        """
        started = logged = time.monotonic()
        while True:
            if self.process is not None:
                self.process.require_alive(self.address)
            try:
                await self._probe()
                return
            except (Unreachable, ServerTimeout, Refused) as error:
                now = time.monotonic()
                if now - started > timeout_s:
                    log = "" if self.process is None else f"\n{self.process.log_tail()}"
                    raise ServerTimeout(
                        f"SGLang server {self.address} is not ready after {timeout_s:g} s: {error}{log}"
                    ) from error
                if now - logged > PROGRESS_EVERY_S:
                    logged = now
                    logger.warning("waiting for SGLang server %s: %.0f s", self.address, now - started)
            await asyncio.sleep(POLL_S)

    async def _probe(self) -> None:
        if not self.weights_intact:
            _, weight_version = await self.served()
            # A server that has started again has whole weights.
            self.weights_intact = weight_version == FRESH
        if self.weights_intact:
            # The response of /health is a generated token, for which a server that somebody paused would wait.
            await self.continue_generation()
            await self.api.get("/health", PROBE_TIMEOUT_S)

    async def served(self) -> tuple[str, str]:
        """The path and the version of the weights that it serves, as the server calls them."""
        info = await self.api.get("/model_info", PROBE_TIMEOUT_S)
        about = await self.api.get("/server_info", PROBE_TIMEOUT_S)
        with readable([info, about], f"{self.address} is no SGLang server: it sent something"):
            self.ranks, self.device = int(about["tp_size"]), str(about["device"])
            return str(info["model_path"]), str(info["weight_version"])

    async def set_weight_version(self, version: int) -> None:
        """Tokens from now on carry ``version``; requests in flight continue."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.api.post("/update_weight_version", body, PROBE_TIMEOUT_S)
        self.version = version

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """``POST`` a step of a weight update, within the time limit of one; raises as `Api.post` does."""
        await self.api.post(path, body, self._update_timeout_s)

    async def pause(self, mode: str) -> None:
        """Stop computing: requests go back to the queue (``retract``), or end as they are (``abort``)."""
        async with self._pausing:
            await self.post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Compute again after `pause`: keys and values of requests in flight are computed anew.

        Ignored while its weights are not whole.
        """
        async with self._pausing:
            if self.weights_intact:
                await self.api.post("/continue_generation", {}, PROBE_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        """Abort the request ``rid``; a server that cannot be reached has lost it."""
        await self._post_if_up("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """Abort all requests, and stop computing; a server that cannot be reached has lost them."""
        await self._post_if_up("/pause_generation", {"mode": "abort"})

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        """Copy ``bucket`` into the weights, between the beginning and the end of an update.

        Its ranks read it in ``memory``, one for each, and without any in shared memory.
        """
        # One for each rank: opening a name, or memory of a GPU, releases a reference that pickling has taken.
        flats: Sequence[Tensor | Opened] = list(map(Opened, memory)) or [flat_bytes(bucket)] * self.ranks
        payloads = [base64.b64encode(flattened_bucket(bucket, flat)).decode() for flat in flats]
        body = {
            "serialized_named_tensors": payloads,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self.post("/update_weights_from_tensor", body)

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        """Load ``adapter`` in addition to those that are loaded."""
        try:
            await self.post("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})
        except Refused as error:
            if "already loaded" not in str(error):  # a server of which only the connection was lost
                raise

    async def unload_adapter(self, adapter: ServedAdapter) -> None:
        """Unload ``adapter``, which no request needs; a server that cannot do it has lost it before."""
        await self._post_if_up("/unload_lora_adapter", {"lora_name": adapter.name})

    async def join(self, group: GroupAddress, rank: int) -> None:
        """Have its ranks join ``group``, the first of them as ``rank``; returns when all members have joined."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self.post("/init_weights_update_group", body)

    async def load_broadcast(self, bucket: Bucket, group: str) -> None:
        """Copy the broadcasts of rank 0 of ``group`` into the weights: ``bucket``, tensor by tensor."""
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group,
            "flush_cache": False,
        }
        await self.post("/update_weights_from_distributed", body)

    async def leave(self, group: str) -> None:
        """Leave ``group``: ranks that wait for this server get an error. One that cannot be reached has left."""
        await self._post_if_up("/destroy_weights_update_group", {"group_name": group})

    async def flush_cache(self) -> None:
        """Drop the keys and values of earlier weights."""
        await self.api.post("/flush_cache", {}, self._update_timeout_s, parse=False)

    async def _post_if_up(self, path: str, body: dict[str, Any]) -> None:
        """``POST`` the end of something that a server which cannot be reached has lost anyway."""
        try:
            await self.api.post(path, body, PROBE_TIMEOUT_S)
        except RolloutError as error:
            logger.debug("%s %s had no effect: %s", path, body, error)
