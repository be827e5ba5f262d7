"""Calls to one server."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from core_rl.servers.config import Interrupt
from core_rl.servers.facts import ServerFacts
from core_rl.servers.server import PROBE_TIMEOUT_S, Server
from core_rl.servers.wire import readable
from core_rl.weight_sync.cuda import DeviceMemory
from core_rl.weight_sync.messages import Bucket, pickled_by_name


class PlainServer(Server):
    """A server; it caches no keys and values."""

    health_path = "/health"

    async def facts(self) -> ServerFacts:
        model = await self.api.get("/model", PROBE_TIMEOUT_S)
        with readable(model, f"{self.address} is no plain server: it sent something"):
            return ServerFacts(path=model["path"], label=model["version"], device=model["device"])

    async def set_label(self, label: str) -> None:
        await self.api.post("/version", {"version": label}, PROBE_TIMEOUT_S)

    async def _pause(self, interrupt: Interrupt) -> None:
        await self.post("/pause", {"abort": interrupt == "abort"})

    async def _continue(self) -> None:
        await self.api.post("/resume", {}, PROBE_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        await self.post_if_up("/abort", {"id": rid})

    async def flush_cache(self) -> None:
        """There is none."""

    async def load_directory(self, path: str) -> None:
        await self.post("/load", {"path": path})

    async def begin_update(self) -> None:
        """Nothing to prepare: parts are copied into the weights."""

    async def end_update(self) -> None:
        """Nothing to finish."""

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        # One pickle for each process that opens it.
        await self.post("/tensors", {"bucket": base64.b64encode(pickled_by_name(bucket)).decode()})
