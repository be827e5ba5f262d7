"""No rank ever holds a full copy of the model: not while it loads, not while it exports.

Four ranks, a model of some 230 MB. The allowed growth of a rank is stated as a
fraction of the full model. The last test measures a way of loading that does hold full copies, so
that the probe is known to see one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from memory_probe import peaks_of
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.meta import SaveLoadMeta
from core_rl.checkpoint import tensor_files
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.state.gather import BUCKET_BYTES
from core_rl_fsdp.config import FSDPConfig
from core_rl_fsdp.engine import FSDPBackend

RANKS = 4
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 4001,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MMAP_THRESHOLD = -3
"""Setting of ``mallopt``: M_MMAP_THRESHOLD of malloc.h."""
FILE_BYTES = 64 * 2**20
"""`tensor_files.MAX_FILE_BYTES` in these tests: a quarter of the model, and more than any tensor of it."""
SLACK = 0.1
"""Overhead in the size of a full model: python objects, the process group, the allocator's cache."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, in several files."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.float32)
    model.save_pretrained(path, max_shard_size="100MB")
    return path


@pytest.fixture(scope="module")
def full(directory: Path) -> int:
    """Bytes of the full model in float32."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert 200e6 < size < 400e6
    return size


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(RANKS), timeout_s=300) as ranks:
        ranks.run(give_back_at_once)
        ranks.run(write_small_files)
        yield ranks


def give_back_at_once(engine: TrainEngine) -> None:
    """Let the C library return freed blocks of 1 MiB and more to the system, so that the probe sees memory in use."""
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**20) == 1


def write_small_files(engine: TrainEngine) -> None:
    """Let an export be many files: the rank that writes keeps a single file in memory."""
    tensor_files.MAX_FILE_BYTES = FILE_BYTES


def leave_out_the_probe(engine: TrainEngine) -> None:
    """Let loading be measured alone: the probe of a packed model is a forward pass, which gathers weights."""
    FSDPBackend.verify = lambda self: None  # type: ignore[method-assign]


def config(path: Path) -> FSDPConfig:
    return FSDPConfig(
        model=ModelConfig(path=str(path)), optimizer=None, layout=ParallelLayout(dp=RANKS), device="cpu"
    )


@pytest.mark.nightly
def test_loading_and_exporting_bound_memory(
    group: EngineGroup, directory: Path, full: int, tmp_path: Path
) -> None:
    """Loading takes a rank's own quarter; an export two buckets, and on the rank that writes one file more.

    The buckets are the tensors that arrive, and gloo's copy of them.
    """
    group.run(leave_out_the_probe)
    with peaks_of(group.pids) as loading:
        group.initialize(config=config(directory))
    assert max(loading.growth) < (1 / RANKS + SLACK) * full, [growth / full for growth in loading.growth]
    with peaks_of(group.pids) as exporting:
        group.save(SaveLoadMeta(path=str(tmp_path / "export"), format="hf"))
    writer, *rest = exporting.growth
    assert max(rest) < 2 * BUCKET_BYTES + SLACK * full, [growth / full for growth in rest]
    assert FILE_BYTES < writer < FILE_BYTES + 2 * BUCKET_BYTES + SLACK * full, writer / full
    assert len(list((tmp_path / "export").glob("model-*.safetensors"))) > 3
    saved = TensorFiles(tmp_path / "export", "model")
    original = TensorFiles(directory, "model")
    assert set(saved.names()) == set(original.names())
    assert all(torch.equal(saved.read(name), original.read(name)) for name in original.names())


@pytest.mark.nightly
def test_the_probe_sees_a_full_copy(group: EngineGroup, full: int) -> None:
    """Weights that no file gives are drawn in full on every rank."""
    drawn = FSDPConfig(
        model=ModelConfig(config=MODEL), optimizer=None, layout=ParallelLayout(dp=RANKS), device="cpu"
    )
    with peaks_of(group.pids) as loading:
        group.initialize(config=drawn)
    assert min(loading.growth) > 0.9 * full, [growth / full for growth in loading.growth]
