"""Bytes that an export of Megatron's states moves, at 8 and at 64 ranks: each byte once, to the writer alone.

The engine computes the boxes. A stage is built on the meta device, and all of its ranks have parameters
of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron_support as support
import pytest
import torch
import torch.distributed as dist
from published_models import QWEN3_30B
from recorded_ranks import Recorder, recorded_traffic, whole_model
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm
from core_rl.state.gather import BUCKET_BYTES
from core_rl_megatron import cpu_shim, parallel_state
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.modules import PackedGPT, build_chunk
from core_rl_megatron.naming import boxes_of
from core_rl_megatron.options import groups_experts
from core_rl_megatron.sharded_state import CheckpointTensors, MegatronState
from core_rl_megatron.translation import transformer_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep8": {"dp": 8, "ep": 8},
    "tp2 pp4 ep8 dp8": {"tp": 2, "pp": 4, "ep": 8, "dp": 8, "sequence_parallel": True},
}


def stage_of(model: PreTrainedModel, config: MegatronConfig, rank: int) -> PackedGPT:
    """The layers of ``rank``, without memory, in bfloat16."""
    world = Comm(None, torch.device("cpu"))
    dist.init_process_group("fake", rank=rank, world_size=config.layout.world_size, store=FakeStore())
    try:
        parallel_state.join_groups(world, config.layout, 1)
        with cpu_shim.building(), torch.device("meta"):
            actual, grouped = transformer_config(config, model.config), groups_experts(config, model.config)
            chunk = build_chunk(actual, model, config.model.head, None, grouped=grouped)
        chunk.bfloat16()
        return chunk
    finally:
        parallel_state.leave_groups()
        dist.destroy_process_group()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("apart", [False, True], ids=["grouped", "apart"])
def test_only_the_writer_receives_and_each_byte_once(layout: str, apart: bool) -> None:
    options = {"moe_grouped_gemm": False} if apart else {}
    fields = QWEN3_30B | {"num_hidden_layers": 4, "num_experts": 32}
    config = support.config(layout=LAYOUTS[layout], options=options, model=fields)
    assert isinstance(config, MegatronConfig)
    cpu_shim.install(torch.device("cpu"))
    model = whole_model(fields)
    tensors = CheckpointTensors.of(model, ModelConfig(config=fields))
    degrees = config.layout
    stages = [stage_of(model, config, stage * degrees.dp * degrees.tp) for stage in range(degrees.pp)]

    @contextmanager
    def state_of(comm: Recorder) -> Iterator[MegatronState]:
        yield MegatronState(tensors, boxes_on(stages, degrees, comm.rank), None, comm)

    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    traffic = recorded_traffic(degrees.world_size, state_of)
    assert 0 < traffic.received[0] <= 1.1 * size
    assert traffic.received.total() == traffic.received[0] == traffic.sent.total()
    assert traffic.largest <= max(BUCKET_BYTES, largest)


def boxes_on(stages: list[PackedGPT], layout: ParallelLayout, rank: int) -> dict[nn.Parameter, Any]:
    """The boxes of ``rank``: tensor parallel ranks are neighbours, then those of expert parallelism, then stages."""
    stage, inside = divmod(rank, layout.dp * layout.tp)
    return dict(boxes_of(stages[stage], inside % layout.tp, inside % layout.ep))
