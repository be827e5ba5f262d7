"""The calls of RL to one SGLang server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from torch import Tensor

from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.api import Refused
from core_rl.servers.config import Interrupt
from core_rl.servers.facts import ServerFacts
from core_rl.servers.server import PROBE_TIMEOUT_S, Server
from core_rl.servers.wire import readable
from core_rl.weight_sync.buckets import flat_bytes, start_of
from core_rl.weight_sync.cuda import DeviceMemory, Opened
from core_rl.weight_sync.messages import Bucket, GroupAddress, pickled_by_name

DTYPES: Mapping[str | None, str | None] = {"auto": None, "half": "float16", "float": "float32"}
"""Dtypes by their other names in ``--dtype``; ``auto`` depends on the model's config."""


class SGLangServer(Server):
    """A server of SGLang."""

    tested = frozenset({"0.5.23"})

    async def facts(self) -> ServerFacts:
        info = await self.api.get("/model_info", PROBE_TIMEOUT_S)
        about = await self.api.get("/server_info", PROBE_TIMEOUT_S)
        with readable([info, about], f"{self.address} is no SGLang server: it sent something"):
            return ServerFacts(
                path=str(info["model_path"]),
                label=str(info["weight_version"]),
                ranks=int(about["tp_size"]),
                device=str(about["device"]),
                tokenizer_path=info.get("tokenizer_path"),
                model_type=info.get("model_type"),
                architectures=tuple(info.get("architectures") or ()) or None,
                context_length=about.get("context_length"),
                dtype=DTYPES.get(about.get("dtype"), about.get("dtype")),
                settings={
                    # Defaults of the parameters that a request leaves out.
                    "--preferred-sampling-params": (info.get("preferred_sampling_params"), None),
                    "--quantization": (about.get("quantization"), None),
                },
                release=about.get("version"),
            )

    async def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self.api.post("/update_weight_version", body, PROBE_TIMEOUT_S)

    async def _pause(self, interrupt: Interrupt) -> None:
        # Retracted requests go back to the queue.
        await self.post("/pause_generation", {"mode": "retract" if interrupt == "continue" else "abort"})

    async def _continue(self) -> None:
        await self.api.post("/continue_generation", {}, PROBE_TIMEOUT_S)

    async def abort(self, rid: str) -> None:
        await self.post_if_up("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        await self.post_if_up("/pause_generation", {"mode": "abort"})

    async def flush_cache(self) -> None:
        await self.api.post("/flush_cache", {}, self.update_timeout_s, parse=False)

    async def load_directory(self, path: str) -> None:
        # Without a version, which the fleet gives to all servers once they have all loaded.
        await self.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    async def begin_update(self) -> None:
        await self.post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self.post("/end_weight_update", {})

    async def load_tensors(self, bucket: Bucket, memory: Sequence[DeviceMemory] = ()) -> None:
        # One for each rank: opening a name, or memory of a GPU, releases a reference that pickling has taken.
        flats: Sequence[Tensor | Opened] = list(map(Opened, memory)) or [flat_bytes(bucket)] * self.ranks
        payloads = [base64.b64encode(flattened_bucket(bucket, flat)).decode() for flat in flats]
        body = {
            "serialized_named_tensors": payloads,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self.post("/update_weights_from_tensor", body)

    async def join(self, group: GroupAddress, rank: int) -> None:
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
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group,
            "flush_cache": False,
        }
        await self.post("/update_weights_from_distributed", body)

    async def leave(self, group: str) -> None:
        await self.post_if_up("/destroy_weights_update_group", {"group_name": group})

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        try:
            await self.post("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})
        except Refused as error:
            if "already loaded" not in str(error):  # a server of which only the connection was lost
                raise

    async def unload_adapter(self, adapter: ServedAdapter) -> None:
        await self.post_if_up("/unload_lora_adapter", {"lora_name": adapter.name})

    async def release_memory(self) -> None:
        await self.post("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self.post("/resume_memory_occupation", {})


def flattened_bucket(bucket: Bucket, flat: Tensor | Opened) -> bytes:
    """``bucket`` as one buffer ``flat`` [n] of uint8, with names, shapes and places: SGLang's ``flattened_bucket``.

    SGLang (0.5.23) reads the attributes of its own class, which this environment lacks, and unpickles namespaces.
    """
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=(start := start_of(tensor)),
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        for name, tensor in bucket
    ]
    return pickled_by_name({"flattened_tensor": flat, "metadata": metadata})
