"""Accelerators of vLLM servers, memory of a trainer's GPU, and the addresses that servers listen on."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_support import CUDA, OWN, FakeGpu, environment, gpu
from transformers import LlamaConfig
from vllm_support import VllmStub, connected, stubs, tiny_model

from core_rl import get_spec, load_config
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl.servers.adapters import ServedModel
from core_rl.servers.server import Server
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.procedures.streaming import tensors_of
from core_rl_vllm.backend import (
    CPU_CACHE_BYTES,
    VllmConfig,
    arguments_of,
    cpu_cache_bytes,
    require_cpu_heads,
    visible_devices,
)

__all__ = ["gpu"]

NAMES = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
KEY = "${env:CORE_RL_TEST_VLLM_KEY}"


def config(model: str, **fields: Any) -> VllmConfig:
    actual = parse_config(
        load_config(get_spec("vllm")), {"model": {"path": model}, "device": "cpu", **fields}
    )
    assert isinstance(actual, VllmConfig)
    return actual


@pytest.mark.parametrize(
    ("fields", "number", "visible", "arguments"),
    [
        ({}, 0, "GPU-a,GPU-b,GPU-c,GPU-d", {"--tensor-parallel-size": "1"}),
        ({"layout": {"dp": 3}}, 2, "GPU-c,GPU-a,GPU-b,GPU-d", {}),
        ({"layout": {"dp": 2, "tp": 2}}, 1, "GPU-c,GPU-d,GPU-a,GPU-b", {"--tensor-parallel-size": "2"}),
        ({"layout": {"tp": 2}, "devices": [3, 1]}, 0, "GPU-d,GPU-b,GPU-a,GPU-c", {}),
        (
            {"options": {"memory_fraction": 0.4}},
            0,
            "GPU-a,GPU-b,GPU-c,GPU-d",
            {"--gpu-memory-utilization": "0.4"},
        ),
    ],
)
def test_each_server_has_accelerators_of_its_own(
    tmp_path: Path, fields: dict[str, Any], number: int, visible: str, arguments: dict[str, str]
) -> None:
    server = config(tiny_model(tmp_path), **fields).of_server(number)
    assert visible_devices(server.devices, NAMES) == visible
    actual = arguments_of(server, ServedModel.of(server.model, "vllm"), 1234, "cuda")
    assert arguments.items() <= dict(pairwise(actual)).items()
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(actual)


def test_absent_accelerators_are_named() -> None:
    with pytest.raises(ConfigError, match=r"devices = \[3, 4\]: there are 4 GPUs, and no \[4\]"):
        visible_devices((3, 4), NAMES)


def test_colocated_server_needs_memory_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"device": "auto", "shares_devices": True}
    path = tiny_model(tmp_path)
    config(path, **shared)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"devices \[0\], which other engines share.*memory_fraction"):
        config(path, **shared)
    config(path, **shared, options={"memory_fraction": 0.4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_open_memory_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, dtype: torch.dtype
) -> None:
    weights = tensors_of(Path(tiny_model(tmp_path, seed=1)))
    tensors = {name: value.to(dtype) for name, value in weights.items()}
    monkeypatch.setattr(Server, "cuda", lambda self: environment(gpus=("one", "another")))
    with stubs(tmp_path) as (stub,):
        stub.device, stub.ranks = "cuda", 2
        with connected([stub]) as engine:
            meta = WeightUpdateMeta(
                method="tensor", version=3, path=str(tmp_path / "meet"), bucket_bytes=4096
            )
            arrival = engine.update_weights(meta)
            weight_update(meta).send(iter(tensors.items()), device=CUDA)
            arrival.result(20)
    handles = [info["opening"][1] for infos in updates(stub) for info in infos]
    assert len(handles) == len(set(handles)), "each rank opens a share of its own"
    for rank in range(2):
        actual = [pair for infos in updates(stub) for pair in opened(gpu, infos[rank])]
        assert [name for name, _ in actual] == list(tensors)
        assert {value.dtype for _, value in actual} == {dtype}
        assert all(torch.equal(value, tensors[name]) for name, value in actual)


def updates(stub: VllmStub) -> list[list[dict[str, Any]]]:
    return [body["update_info"] for path, body in stub.bodies if path == "/update_weights"]


def opened(gpu: FakeGpu, info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    uuid, handle, *_ = info["opening"]
    flat = gpu.open[handle]
    assert (uuid, info["size"]) == (OWN, flat.numel())
    views = []
    for name, dtype, shape, start in info["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        end = start + torch.Size(shape).numel() * kind.itemsize
        views.append((name, flat[start:end].view(kind).view(shape)))
    return views


PRIVATE = {"private_network": True}
ADDRESSES: list[tuple[str, dict[str, Any], str | None]] = [
    ("127.0.0.1", {}, None),
    ("10.0.0.5", {}, r"host = '10.0.0.5': vLLM's key does not protect .*, or private_network to true"),
    ("10.0.0.5", {"api_key": KEY}, "or private_network to true"),
    ("10.0.0.5", PRIVATE, "host = '10.0.0.5' without api_key"),
    ("10.0.0.5", {**PRIVATE, "api_key": KEY}, None),
]


@pytest.mark.parametrize(("host", "options", "message"), ADDRESSES)
def test_reachable_servers_need_a_private_network(
    tmp_path: Path, host: str, options: dict[str, Any], message: str | None
) -> None:
    path = tiny_model(tmp_path)
    placed = config(path, options=options)
    if message is None:
        assert config(path, options={"host": host, **options}).options.host == host
        assert placed.on_machine(0, (2,), host).options.host == host
        return
    with pytest.raises(ConfigError, match=message):
        config(path, options={"host": host, **options})
    with pytest.raises(ConfigError, match=f"options: .*{message}"):
        placed.on_machine(0, (2,), host)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 32}, None),
        ({"head_dim": 8}, "head_dim = 8"),
        ({"head_dim": None}, "head_dim = 16"),
        ({"head_dim": 8, "kv_lora_rank": 4}, None),
    ],
)
def test_heads_beyond_cpu_kernels_are_refused(sizes: dict[str, int | None], message: str | None) -> None:
    model = LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    model.update(sizes)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        require_cpu_heads(model)


@pytest.mark.parametrize(
    ("layers", "heads", "context", "itemsize", "expected"),
    [
        (2, 1, 1024, 4, CPU_CACHE_BYTES),
        (30, 3, 8193, 4, 8448 * 30 * 3 * 64 * 2 * 4),
        (30, None, 8193, 2, 8448 * 30 * 9 * 64 * 2 * 2),
    ],
)
def test_cpu_cache_takes_a_full_context(
    layers: int, heads: int | None, context: int, itemsize: int, expected: int
) -> None:
    model = LlamaConfig(
        hidden_size=576, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=heads
    )
    assert cpu_cache_bytes(model, context, itemsize) == expected
