"""The SGLang engine's own cost: requests against a bare HTTP client, and weights against a copy through shared memory.

    python benchmarks/sglang_client.py

Requests are the same on both sides, 64 in flight. Weights are those of a Qwen3 of 200 MB, sent by ``tensor`` to a real
server, against the same bytes written to shared memory and read from it once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path

import aiohttp
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))

from common.measure import compare

from core_rl import get_spec, load_config, load_engine
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.base import parse_config
from core_rl.config.engine import InferenceEngineConfig
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.weight_sync.sender import send_tensors
from core_rl_sglang.responses import generation_body

REQUESTS, IN_FLIGHT, PROMPT, COMPLETION = 256, 64, 32, 16
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
LARGE = {"hidden_size": 768, "num_hidden_layers": 6, "intermediate_size": 2048}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        requests_and_bare_http(Path(root), arguments.repeats)
        weight_sync_and_copy(Path(root), arguments.repeats)


def requests_and_bare_http(root: Path, repeats: int) -> None:
    """256 completions of 16 tokens."""
    engine, address, _ = started(root / "small", SMALL)
    sampling = SamplingParams(max_new_tokens=COMPLETION, ignore_eos=True)
    requests = [
        LLMRequest(input_ids=tuple((7 * n + t) % 500 for t in range(PROMPT)), sampling=sampling)
        for n in range(REQUESTS)
    ]
    sides = {
        "bare HTTP": lambda: asyncio.run(_bare(address, requests)),
        "sglang engine": lambda: asyncio.run(_ours(engine, requests)),
    }
    title = f"{REQUESTS} requests, {IN_FLIGHT} in flight, on a tiny model"
    compare(title, sides, REQUESTS * COMPLETION, base="bare HTTP", repeats=repeats)
    engine.destroy()


async def _bare(address: str, requests: list[LLMRequest]) -> None:
    gate = asyncio.Semaphore(IN_FLIGHT)
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession, number: int, request: LLMRequest) -> None:
        async with gate:
            body = generation_body(request, f"bare-{number}-{id(session)}")
            async with session.post(f"http://{address}/generate", json=body) as response:
                await response.json()

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(ask(session, number, request) for number, request in enumerate(requests)))


async def _ours(engine: InferenceEngine, requests: list[LLMRequest]) -> None:
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def ask(request: LLMRequest) -> None:
        async with gate:
            await engine.agenerate(request)

    await asyncio.gather(*map(ask, requests))


def weight_sync_and_copy(root: Path, repeats: int) -> None:
    """One update of all weights."""
    engine, _, tensors = started(root / "large", LARGE)
    size = sum(tensor.nbytes for tensor in tensors.values())
    sides = {
        "copy through shared memory": partial(_copied, tensors),
        "tensor sync": partial(_synced, engine, tensors, root / "rendezvous"),
    }
    title = f"weights of {size / 1e6:.0f} MB (speed is in bytes)"
    compare(title, sides, size, base="copy through shared memory", repeats=repeats)
    engine.destroy()


def _copied(tensors: dict[str, Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = shared_memory.SharedMemory(create=True, size=size)
    there, start = torch.frombuffer(memory.buf, dtype=torch.float32), 0
    for tensor in tensors.values():
        there[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        start += tensor.numel()
    there.clone()
    del there
    memory.close()
    memory.unlink()


def _synced(engine: InferenceEngine, tensors: dict[str, Tensor], point: Path) -> None:
    meta = WeightUpdateMeta(
        method="tensor", version=engine.get_version() + 1, path=str(point), bucket_bytes=64 * 2**20
    )
    arrival = engine.update_weights(meta)
    send_tensors(iter(tensors.items()), meta)
    arrival.result()


def started(path: Path, shape: dict[str, int]) -> tuple[InferenceEngine, str, dict[str, Tensor]]:
    """An engine with one server of a model of this ``shape``, and the model's tensors."""
    config = Qwen3Config(
        vocab_size=8192,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    spec = get_spec("sglang")
    values = {"model": {"path": str(path)}, "device": "cpu", "options": {"max_running_requests": IN_FLIGHT}}
    parsed = parse_config(load_config(spec), values)
    assert isinstance(parsed, InferenceEngineConfig)
    engine = load_engine(spec, parsed)
    (address,) = engine.launch_server(1)
    engine.initialize(address)
    return engine, address, {name: value.detach() for name, value in model.named_parameters()}


if __name__ == "__main__":
    main()
