"""Names, shapes and plans of published models at their real sizes, without weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from published_models import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_70B, QWEN3_235B
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.checkpoint.tensor_files import MAX_FILE_BYTES
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.distributed.collectives import buckets
from core_rl.errors import UnsupportedCapability
from core_rl.state.gather import BUCKET_BYTES
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import LocalPart
from core_rl.toolkit.footprint import footprint_of
from core_rl.toolkit.lora import adapter_shapes

HEADER_LIMIT = 100_000_000
"""The longest header that safetensors reads, in bytes."""
RANKS = 24


@dataclass(frozen=True)
class Published:
    """Figures of a model: published ones, and what follows from its config."""

    config: dict[str, Any]
    parameters: int
    tensors: int
    """Tensors that transformers writes."""
    adapted: int
    """Layers that an adapter on all linear layers of the trunk has; experts have none."""
    inner: int
    """Numbers that a layer keeps of each token; see `Footprint.inner`."""


MODELS = {
    "llama-70b": Published(LLAMA_70B, 70_553_706_496, 3 + 80 * 9, 80 * 7, 3 * 8192 + 2 * 1024 + 4 * 28672),
    "qwen3-235b": Published(
        QWEN3_235B,
        235_093_634_560,
        3 + 94 * (9 + 128 * 3),
        94 * 4,
        3 * 64 * 128 + 2 * 4 * 128 + 8 * (4 * 1536 + 2 * 4096),
    ),
    "gpt-oss-120b": Published(
        GPT_OSS_120B, 116_829_156_672, 3 + 36 * 17, 36 * 4, 3 * 64 * 64 + 2 * 8 * 64 + 4 * 6 * 2880
    ),
    # 671,026,419,200 with the corrections of its routers, which are buffers.
    "deepseek-v3": Published(
        DEEPSEEK_V3,
        671_026_419_200 - 58 * 256,
        3 + 61 * 9 + 3 * 3 + 58 * (1 + 3 + 256 * 3),
        61 * 5,
        128 * (192 + 192 + 128 + 2 * 128) + 8 * (4 * 2048 + 2 * 7168),
    ),
}
DAILY = ["llama-70b", "qwen3-235b", "gpt-oss-120b"]
EACH = [*DAILY, pytest.param("deepseek-v3", marks=pytest.mark.nightly)]


@cache
def held_and_layout(name: str) -> tuple[dict[str, tuple[int, ...]], CheckpointLayout]:
    """In-memory names and shapes, and the checkpoint layout."""
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name].config))
    stored = {local: tuple(parameter.shape) for local, parameter in built.named_parameters()}
    return stored, CheckpointLayout.of(built)


def checkpoint_shapes(name: str) -> dict[str, tuple[int, ...]]:
    stored, layout = held_and_layout(name)
    return layout.shapes(stored)


def header_bytes(shapes: dict[str, tuple[int, ...]], itemsize: int) -> int:
    """The length of the header of one safetensors file with tensors of these shapes."""
    at, header = 0, {}
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return len(json.dumps(header))


@pytest.mark.parametrize("name", EACH)
def test_names_and_shapes_match_published_checkpoint(name: str) -> None:
    shapes = checkpoint_shapes(name)
    assert len(shapes) == MODELS[name].tensors
    assert sum(map(math.prod, shapes.values())) == MODELS[name].parameters


@pytest.mark.parametrize("name", EACH)
def test_files_and_buckets_keep_their_bounds(name: str) -> None:
    shapes = checkpoint_shapes(name)
    sizes = {local: 2 * math.prod(shape) for local, shape in shapes.items()}
    for limit in (MAX_FILE_BYTES, BUCKET_BYTES):
        groups = list(buckets(shapes, sizes.values(), limit))
        assert [local for group in groups for local in group] == list(shapes)
        assert all(len(group) == 1 or sum(sizes[local] for local in group) <= limit for group in groups)
        assert len(groups) >= sum(sizes.values()) / max(limit, *sizes.values())
        if limit == MAX_FILE_BYTES:
            headers = [header_bytes({local: shapes[local] for local in group}, 2) for group in groups]
            assert max(headers) < HEADER_LIMIT


@pytest.mark.parametrize(
    "name",
    [
        "llama-70b",
        "gpt-oss-120b",
        pytest.param("qwen3-235b", marks=pytest.mark.nightly),
        pytest.param("deepseek-v3", marks=pytest.mark.nightly),
    ],
)
def test_shards_of_rows_tile_every_tensor(name: str) -> None:
    """As FSDP cuts: ranks have rows of each parameter, and of fused experts some experts and no others."""
    stored, layout = held_and_layout(name)
    actual: Counter[str] = Counter()
    for local, shape in stored.items():
        rows = -(-shape[0] // RANKS)
        for start in range(0, shape[0], rows):
            part = torch.empty((min(rows, shape[0] - start), *shape[1:]), device="meta")
            for written, _, box in layout.local(
                local, LocalPart(part, (start, *(0,) * (len(shape) - 1))), shape
            ):
                actual[written] += box.numel()
    assert actual == {local: math.prod(shape) for local, shape in checkpoint_shapes(name).items()}


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-120b",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in MODELS if name != "gpt-oss-120b"),
    ],
)
def test_all_linear_adapter_is_readable(name: str) -> None:
    shapes = adapter_shapes(AutoConfig.for_model(**MODELS[name].config), LoraConfig(rank=1))
    assert len(shapes) == 2 * MODELS[name].adapted
    assert header_bytes(shapes, 4) < HEADER_LIMIT


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EACH)
def test_a_memory_plan_counts_the_whole_model(name: str) -> None:
    actual = footprint_of(ModelConfig(config=MODELS[name].config))
    assert actual.parameters == actual.trained == MODELS[name].parameters
    assert actual.inner == MODELS[name].inner


def test_a_vision_language_model_is_refused() -> None:
    with pytest.raises(UnsupportedCapability, match=r"qwen3_vl is more than a text model; set model\.vision"):
        footprint_of(ModelConfig(config={"model_type": "qwen3_vl"}))
