"""Messages between stages: Megatron's on CUDA, and the engine's on gloo."""

from __future__ import annotations

from typing import Any

import megatron_support as support
import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from transformers import AutoConfig

from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.schedule import StageMessages
from core_rl_megatron.translation import transformer_config


@pytest.mark.parametrize("on_cuda", [False, True])
def test_stages_send_in_batches_on_nccl_alone(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_cuda)
    config = support.config(layout={"pp": 2}).model_copy(update={"device": "auto"})
    assert isinstance(config, MegatronConfig)
    actual = transformer_config(config, AutoConfig.for_model(**(config.model.config or {})))
    assert actual.batch_p2p_comm is on_cuda
    assert actual.use_cpu_initialization is not on_cuda


def test_shapes_of_activations_are_megatrons_matter_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[Any, ...]] = []

    def upstream(messages: StageMessages, *arguments: Any) -> tuple[list[int], list[int]]:
        requested.append(arguments)
        return [1, 2, 3], [4, 5, 6]

    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", upstream)
    messages = object.__new__(StageMessages)
    messages._device = torch.device("cuda", 0)
    assert messages._communicate_shapes(None, None, True, False) == ([1, 2, 3], [4, 5, 6])
    assert requested == [(None, None, True, False)]
