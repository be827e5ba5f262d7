"""The calls of RL to one vLLM server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch.multiprocessing.reductions import reduce_storage

from core_rl.backend.meta import SyncMethod
from core_rl.errors import ConfigError
from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.api import Refused
from core_rl.servers.config import Interrupt
from core_rl.servers.facts import ServerFacts, ServerLimits
from core_rl.servers.server import PROBE_TIMEOUT_S, Server
from core_rl.servers.wire import readable
from core_rl.weight_sync.buckets import flat_bytes, start_of
from core_rl.weight_sync.cuda import DEVICE, DeviceMemory
from core_rl.weight_sync.messages import Bucket, GroupAddress, shared_by_name
from core_rl_vllm.wire import PREFIX

INFO_TIMEOUT_S = 120.0
TRANSFER = {"backend": "core_rl"}
"""``--weight-transfer-config`` of servers with core-rl-vllm-server."""
TEMPERATURES = (0.01, 2.0)
"""The positive temperatures that vLLM draws at: it raises lower ones, and refuses higher ones."""
REFUSED: Mapping[SyncMethod, str] = {
    "tensor": "vLLM's own transfer 'ipc' reads GPU memory alone, and unpickles what it is sent",
    "distributed": (
        "vLLM's own transfer 'nccl' joins a group with GPUs alone, and waits without limit for a trainer that has died"
    ),
}
"""Methods of weight sync that vLLM has no safe transfer for."""
REMEDY = (
    "install core-rl-vllm-server into the server's environment, and start it with --weight-transfer-config "
    f"'{json.dumps(TRANSFER)}'"
)


class VllmServer(Server):
    """A server of vLLM in development mode, with core-rl-vllm-server or as vLLM is (`_limits`)."""

    tested = frozenset({"0.32.0"})

    async def facts(self) -> ServerFacts:
        try:
            weights = await self.api.get("/weight_info", PROBE_TIMEOUT_S)
            size = await self.api.get("/get_world_size?include_dp=false", PROBE_TIMEOUT_S)
        except Refused as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self.name} has no routes for weights; start it with VLLM_SERVER_DEV_MODE=1, and with "
                "--enable-scale-out"
            ) from error
        models = await self.api.get("/v1/models", PROBE_TIMEOUT_S)
        release = await self.api.get("/version", PROBE_TIMEOUT_S)
        # The first response takes seconds. A launched server has the arguments of this engine.
        config = None if self.start else await self.api.get("/server_info?config_format=json", INFO_TIMEOUT_S)
        with readable(
            [weights, size, models, release, config], f"{self.address} is no vLLM server: it sent something"
        ):
            device = "cpu" if self.cuda() is None else "cuda"
            if config:
                device = str(config["vllm_config"]["device_config"]["device"]).partition(":")[0]
            return ServerFacts(
                path=str(models["data"][0]["root"]),
                label=str(weights["weight_version"]),
                ranks=int(size["world_size"]),
                device=device,
                context_length=models["data"][0].get("max_model_len"),
                release=release.get("version"),
                limits=_limits(config, device),
                **_settings(config),
            )

    async def set_label(self, label: str) -> None:
        await self.api.post("/update_weight_version", {"new_version": label}, PROBE_TIMEOUT_S)

    async def _pause(self, interrupt: Interrupt) -> None:
        await self.post(f"/pause?mode={'keep' if interrupt == 'continue' else 'abort'}", {})

    async def _continue(self) -> None:
        await self.api.post("/resume", {}, PROBE_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        await self.post_if_up("/abort_requests", {"request_ids": [PREFIX + rid]})

    async def flush_cache(self) -> None:
        # Running requests go back to the queue, and compute the keys and values of their tokens anew.
        await self.post("/reset_prefix_cache?reset_running_requests=true", {})

    async def load_directory(self, path: str) -> None:
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self.flush_cache()

    async def begin_update(self) -> None:
        try:
            await self.post("/start_weight_update", {})
        except Refused as error:
            if "already active" not in str(error):
                raise
            # The client of an earlier update is gone.
            await self.end_update()
            await self.post("/start_weight_update", {})

    async def end_update(self) -> None:
        try:
            await self.post("/finish_weight_update", {})
        except Refused as error:
            # vLLM ends an update of which a part has failed.
            if "without a matching" not in str(error):
                raise

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        tensors = _tensors(bucket)
        sources = list(map(on_gpu, memory)) or [_named(bucket) for _ in range(self.ranks)]
        infos = [{**source, "tensors": tensors} for source in sources]
        await self.post("/update_weights", {"update_info": infos})

    async def join(self, group: GroupAddress, rank: int) -> None:
        await self.post("/init_weight_transfer_engine", {"init_info": {**asdict(group), "rank_offset": rank}})

    async def load_broadcast(self, bucket: Bucket, group: str) -> None:
        await self.post("/update_weights", {"update_info": {"tensors": _tensors(bucket)}})

    async def leave(self, group: str) -> None:
        await self.post_if_up("/shutdown_weight_transfer_engine", {})

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        try:
            await self.api.post("/v1/load_lora_adapter", body, self.update_timeout_s, parse=False)
        except Refused as error:
            if "already been loaded" not in str(error):  # a server of which only the connection was lost
                raise

    async def unload_adapter(self, adapter: ServedAdapter) -> None:
        await self.post_if_up("/v1/unload_lora_adapter", {"lora_name": adapter.name})


def _settings(config: Any) -> dict[str, Any]:
    """Fields of `ServerFacts` in the response to ``/server_info``."""
    if config is None:
        return {}
    model = config["vllm_config"]["model_config"]
    required: dict[str, object] = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "override_generation_config": {},
        "hf_overrides": {},
        "quantization": None,
    }
    dtype = model.get("dtype")
    return {
        "tokenizer_path": model.get("tokenizer"),
        "dtype": dtype and str(dtype).removeprefix("torch."),
        "settings": {
            f"--{name.replace('_', '-')}": (model.get(name, value), value) for name, value in required.items()
        },
    }


def _limits(config: Any, device: str) -> ServerLimits:
    """The limits of a server that the response ``config`` to ``/server_info`` shows without core-rl-vllm-server.

    vLLM does not start with the transfer engine ``core_rl`` unless the plugin has registered it.
    """
    if (
        config is None
        or (config["vllm_config"].get("weight_transfer_config") or {}).items() >= TRANSFER.items()
    ):
        return ServerLimits(min_p_last=False, remedy="or draw with another engine")
    return ServerLimits(
        temperatures=TEMPERATURES,
        full_distribution=False,
        refused=REFUSED,
        # On CPUs vLLM multiplies by a copy of each head's weights, which an update of the embedding does not renew.
        updates_tied_heads=device != "cpu",
        remedy=REMEDY,
    )


def _tensors(bucket: Bucket) -> list[tuple[str, str, list[int], int]]:
    """Name, dtype, shape and first byte of each tensor."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start_of(tensor))
        for name, tensor in bucket
    ]


def on_gpu(memory: DeviceMemory) -> dict[str, Any]:
    """``memory`` for one process, which opens it once."""
    _, shape, *_ = memory.arguments
    opening = [part.hex() if isinstance(part, bytes) else part for part in memory.arguments[DEVICE:]]
    return {"opening": opening, "size": shape.numel()}


def _named(bucket: Bucket) -> dict[str, Any]:
    """The name of the memory of ``bucket`` for one process, which opens it once."""
    with shared_by_name():
        _, (_, manager, handle, size) = reduce_storage(flat_bytes(bucket).untyped_storage())
    return {"manager": manager.decode(), "handle": handle.decode(), "size": size}
