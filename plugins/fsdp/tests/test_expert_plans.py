"""A plan of a run knows what expert parallelism gathers and keeps."""

from __future__ import annotations

import fsdp_support as support
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.config.layout import ParallelLayout
from core_rl.distributed import collectives
from core_rl.distributed.comm import Comm
from core_rl.toolkit.build import use_experts_kernel
from core_rl.toolkit.experts import dispatch_experts, expert_modules
from core_rl.toolkit.footprint import footprint_of
from core_rl_trainer.plan.report import estimate_memory

PLANNED = support.MOE | {
    "hidden_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
}


class TwoRanks(Comm):
    """This rank and a second rank with the same tokens, without a process group."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 2


def test_plan_counts_rows_for_remote_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """About what autograd keeps, within a tenth."""
    monkeypatch.setattr(collectives, "_all_gather", lambda value, comm, dim: torch.cat([value, value], dim))
    monkeypatch.setattr(collectives, "_reduce_scatter", lambda value, comm, dim: value.chunk(2, dim)[0])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PLANNED), dtype=torch.float32)
    use_experts_kernel(model, "grouped")
    for module in expert_modules(model).values():
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(parameter.detach().chunk(2)[0].clone()))
    dispatch_experts(model, model.model, TwoRanks())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    retained: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        retained[memory.data_ptr()] = 0 if memory.data_ptr() in weights else memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.arange(256)[None] % support.VOCABULARY, use_cache=False)
    assert output.last_hidden_state.requires_grad
    config = support.fsdp_config(ParallelLayout(dp=2, ep=2), model=PLANNED)
    planned = estimate_memory(config, footprint_of(config.model), 256)
    assert planned.activations == pytest.approx(sum(retained.values()), rel=0.1)


def test_plan_counts_gathered_experts_per_rank() -> None:
    experts = 2 * 6 * 3 * 24 * 16
    actual = []
    for ep in (1, 2):
        config = support.fsdp_config(ParallelLayout(dp=2, ep=ep), model=support.MOE)
        footprint = footprint_of(config.model)
        assert footprint.experts == experts
        actual.append(estimate_memory(config, footprint, 100).transient)
    # Two layers of three, and the gradients of one.
    assert actual[0] - actual[1] == pytest.approx(4 * 3 * experts / 2 / 3)
