"""One server of a fleet: its interface, its process if it is ours, and the calls that RL needs."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from core_rl.errors import RolloutError
from core_rl.weight_sync.group import GroupAddress
from core_rl.weight_sync.messages import Bucket, pickled_by_name
from core_rl_sglang.adapters import Policy
from core_rl_sglang.api import Api, Refused, ServerTimeout, Unreachable
from core_rl_sglang.process import ServerProcess

__all__ = ["Server"]

logger = logging.getLogger(__name__)

POLL_S = 0.25
PROBE_TIMEOUT_S = 10.0
PROGRESS_EVERY_S = 10.0


class Server:
    """A server, which may be away for a while. Belongs to the event loop of its ``api``."""

    def __init__(
        self, api: Api, start: Callable[[], ServerProcess] | None, process: ServerProcess | None
    ) -> None:
        self.api = api
        self.address = api.address
        self.start = start
        """Starts it anew on the same port; None for a server that is not ours."""
        self.process = process
        self.in_flight = 0
        self.ready = False
        self.version = -1
        """The version of the weights that it was given."""
        self.ranks = 1
        """Its tensor-parallel degree."""
        self.failure: BaseException | None = None
        """Why it will not come back."""
        self.recovery: asyncio.Task[None] | None = None
        self.policy = Policy(0)
        """What new requests are answered with."""

    @contextmanager
    def busy(self) -> Iterator[Policy]:
        """Count a request, which is answered with the policy that comes."""
        policy = self.policy
        self.in_flight += 1
        policy.in_flight[self.address] += 1
        try:
            yield policy
        finally:
            self.in_flight -= 1
            policy.in_flight[self.address] -= 1

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server answers, and computes; says every 10 s that it does not yet.

        Raises `RolloutError` with the end of its log if it ends, and `ServerTimeout`.
        """
        started = said = time.monotonic()
        while True:
            if self.process is not None:
                self.process.require_alive(self.address)
            try:
                # Its answer to /health is a generated token, for which a server that somebody paused would wait.
                await self.go_on(PROBE_TIMEOUT_S)
                await self.api.get("/health", PROBE_TIMEOUT_S)
                return
            except (Unreachable, ServerTimeout, Refused) as error:
                now = time.monotonic()
                if now - started > timeout_s:
                    raise ServerTimeout(
                        f"SGLang server {self.address} is not ready after {timeout_s:g} s: {error}{self._log()}"
                    ) from error
                if now - said > PROGRESS_EVERY_S:
                    said = now
                    logger.warning("waiting for SGLang server %s: %.0f s", self.address, now - started)
            await asyncio.sleep(POLL_S)

    def _log(self) -> str:
        return "" if self.process is None else f"\nthe end of its log:\n{self.process.log_tail()}"

    async def served(self) -> tuple[str, str]:
        """The path and the version label of the weights that it serves."""
        info = await self.api.get("/model_info", PROBE_TIMEOUT_S)
        about = await self.api.get("/server_info", PROBE_TIMEOUT_S)
        try:
            self.ranks = int(about["tp_size"])
            return str(info["model_path"]), str(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{self.address} does not answer as an SGLang server does: {str(info)[:300]}"
            ) from error

    async def label(self, version: int) -> None:
        """Tokens from now on carry ``version``; requests in flight go on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.api.post("/update_weight_version", body, PROBE_TIMEOUT_S)
        self.version = version

    async def pause(self, mode: str, timeout_s: float) -> None:
        """Stop computing: requests go back to the queue (``retract``), or end as they are (``abort``)."""
        await self.api.post("/pause_generation", {"mode": mode}, timeout_s)

    async def go_on(self, timeout_s: float) -> None:
        """The inverse of `pause`: keys and values of what was in flight are computed anew."""
        await self.api.post("/continue_generation", {}, timeout_s)

    async def abort(self, rid: str) -> None:
        """Forget the request ``rid``; a server that cannot be reached has forgotten it."""
        try:
            await self.api.post("/abort_request", {"rid": rid}, PROBE_TIMEOUT_S)
        except RolloutError as error:
            logger.debug("request %s was not aborted: %s", rid, error)

    async def take_tensors(self, bucket: Bucket, timeout_s: float) -> None:
        """Copy ``bucket`` into the weights, between the beginning and the end of an update."""
        # One for each rank: whoever opens a name gives back a reference that pickling has taken.
        payloads = [base64.b64encode(pickled_by_name(bucket)).decode() for _ in range(self.ranks)]
        body = {"serialized_named_tensors": payloads, "flush_cache": False}
        await self.control("/update_weights_from_tensor", body, timeout_s)

    async def load_adapter(self, policy: Policy, timeout_s: float) -> None:
        """Read the adapter of ``policy``, beside those that are there."""
        body = {"lora_name": policy.name, "lora_path": policy.path}
        try:
            await self.control("/load_lora_adapter", body, timeout_s)
        except Refused as error:
            if "already loaded" not in error.message:  # a server of which only the connection was lost
                raise

    async def unload_adapter(self, policy: Policy) -> None:
        """Forget the adapter of ``policy``, which no request needs; a server that cannot do it has lost it before."""
        try:
            await self.control("/unload_lora_adapter", {"lora_name": policy.name}, PROBE_TIMEOUT_S)
        except RolloutError as error:
            logger.debug("the adapter %s was not unloaded: %s", policy.name, error)

    async def join(self, group: GroupAddress, rank: int, timeout_s: float) -> None:
        """Have its ranks join ``group``, the first of them as ``rank``; returns when all members are there."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self.control("/init_weights_update_group", body, timeout_s)

    async def take_broadcast(self, bucket: Bucket, group: str, timeout_s: float) -> None:
        """Copy into the weights what rank 0 of ``group`` broadcasts, which is ``bucket`` tensor by tensor."""
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group,
            "flush_cache": False,
        }
        await self.control("/update_weights_from_distributed", body, timeout_s)

    async def leave(self, group: str) -> None:
        """Leave ``group``: whoever waits for this server gets an error. One that cannot be reached has left."""
        try:
            await self.control("/destroy_weights_update_group", {"group_name": group}, PROBE_TIMEOUT_S)
        except RolloutError as error:
            logger.debug("the group %s was not left: %s", group, error)

    async def flush_cache(self, timeout_s: float) -> None:
        """Drop the keys and values of earlier weights."""
        await self.api.order("/flush_cache", {}, timeout_s)

    async def control(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """``POST`` one step of a weight update."""
        return await self.api.post(path, body, timeout_s)
