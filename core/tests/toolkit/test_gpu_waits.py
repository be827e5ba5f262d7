"""Nothing in a pass waits for a GPU: on the meta device, whatever asks a tensor for its values raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_families import tiny_config
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from core_rl.backend.loss import count_sequences, count_tokens
from core_rl.backend.metrics import Metric, merge_metrics
from core_rl.backend.steps import MicroBatches
from core_rl.config.engine import Head
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName, masked_sum
from core_rl.distributed import collectives
from core_rl.distributed.comm import Comm
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.experts import dispatch_experts, expert_modules
from core_rl.toolkit.packed import PackedModel

META = torch.device("meta")
FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_5_text")
OUTPUTS: dict[Head, tuple[OutputName, ...]] = {
    "lm": ("logprobs", "entropy"),
    "value": ("values",),
    "reward": ("scores",),
}


class Copies(TorchFunctionMode):
    """Notes what brings values from the CPU to the device while a block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = [value for value in args if isinstance(value, Tensor)]
        arrives = isinstance(result, Tensor) and result.device == META
        if self.inside and arrives and not any(value.device == META for value in arguments):
            name = getattr(func, "__name__", str(func))
            if arguments or name in ("tensor", "as_tensor"):
                self.found.append(name)
        return result

    @contextmanager
    def watching(self, blocks: list[nn.Module]) -> Iterator[None]:
        def enter(*_: Any) -> None:
            self.inside += 1

        def leave(*_: Any) -> None:
            self.inside -= 1

        hooks = [
            hook
            for block in blocks
            for hook in (block.register_forward_pre_hook(enter), block.register_forward_hook(leave))
        ]
        with self:
            yield
        for hook in hooks:
            hook.remove()


class TwoRanks(Comm):
    """This rank and a second rank with the same tokens, without a process group."""

    @property
    def rank(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return 2


def batch() -> SequenceBatch:
    ids = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]
    masks = [[0, 1, 0, 1, 1], [0, 0], [0, 1, 1, 0]]
    return SequenceBatch.from_sequences(ids, tokens={LOSS_MASK: masks})


def model_on_meta(family: str, head: Head) -> PackedModel:
    register_packed_attention()
    kind: Any = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    config = tiny_config(family)
    config.num_labels = 1
    with META:
        model = kind.from_config(config, attn_implementation=PACKED_ATTENTION, dtype=torch.bfloat16)
    return PackedModel(model, head).train()


def blocks_of(model: PackedModel) -> list[nn.Module]:
    names = set(model.model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core_rl.toolkit.cuda.on_cuda", lambda tensor: True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_pass_waits_for_nothing(family: str, checkpointing: bool) -> None:
    model, copies = model_on_meta(family, "lm"), Copies()
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    (micro_batch,) = MicroBatches(batch(), [[2, 0, 1]], META).items
    with copies.watching(blocks_of(model)):
        output = ModelOutput(**model(micro_batch, OUTPUTS["lm"], trained_only=True))
        masked = output.masked(micro_batch.loss_mask)
        total = masked_sum(masked["logprobs"] + masked["entropy"], micro_batch.loss_mask) + output.zero_loss()
        total.backward()
    assert copies.found == []
    assert any(parameter.grad is not None for parameter in model.parameters())


def spread_experts(model: PackedModel) -> None:
    """Let the model have half of its experts, and another rank the others."""
    for module in expert_modules(model).values():
        for name, parameter in [*module.named_parameters()]:
            setattr(module, name, nn.Parameter(parameter.detach().chunk(2)[1]))
    dispatch_experts(model, model.model.base_model, TwoRanks())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_host_never_waits_for_remote_experts(
    family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives have no kernels on the meta device, and their results have the shape of their inputs."""
    monkeypatch.setattr(collectives, "_all_gather", lambda value, comm, dim: torch.cat([value, value], dim))
    monkeypatch.setattr(collectives, "_reduce_scatter", lambda value, comm, dim: value.chunk(2, dim)[1])
    model, copies = model_on_meta(family, "lm"), Copies()
    spread_experts(model)
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    (micro_batch,) = MicroBatches(batch(), [[2, 0, 1]], META).items
    with copies.watching(blocks_of(model)):
        output = ModelOutput(**model(micro_batch, ("logprobs",), trained_only=True))
        masked_sum(output["logprobs"], micro_batch.loss_mask).backward()
    assert copies.found == []
    grads = [weight.grad for module in expert_modules(model).values() for weight in module.parameters()]
    assert grads and all(grad is not None for grad in grads)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_a_scalar_head_waits_for_nothing(head: Head) -> None:
    model = model_on_meta("qwen3", head)
    model(batch().to(META), OUTPUTS[head])


def test_loads_of_experts_are_balanced_without_waiting() -> None:
    model = model_on_meta("qwen3_moe", "lm")
    actual = model(batch().to(META), ("aux_loss", "routing"))
    actual["aux_loss"].backward()


def test_micro_batch_weights_are_counted_on_cpu() -> None:
    real = MicroBatches(batch(), [[0, 1], [], [2]], META).real()
    assert [(count_tokens(part), count_sequences(part)) for part in real] == [(3.0, 1.0), (2.0, 1.0)]


def test_metrics_of_a_pass_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are on an accelerator; a value of another size is the loss's fault, as before."""
    copies: list[torch.Size] = []
    monkeypatch.setattr(Tensor, "is_cpu", False)
    original = Tensor.cpu

    def noted(tensor: Tensor) -> Tensor:
        copies.append(tensor.shape)
        return original(tensor)

    monkeypatch.setattr(Tensor, "cpu", noted)
    parts = [
        {"mean": Metric.mean(torch.tensor(3.0), torch.tensor(2)), "max": Metric.max(torch.tensor([5.0]))},
        {"mean": Metric.mean(5.0, 2.0), "max": Metric.max(7.0)},
    ]
    merged = {name: metric.result() for name, metric in merge_metrics(parts).items()}
    assert merged == {"mean": 2.0, "max": 7.0}
    assert copies == [(3,)]


def test_waits_inside_blocks_are_detected() -> None:
    """Of a copy and a tensor that is made in a block, and of none outside."""

    class Makes(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.tensor(1.0, device=META) + torch.ones(()).to(META)

    block, copies = Makes(), Copies()
    with copies.watching([block]):
        block(torch.zeros(2, device=META) + torch.ones(2).to(META))
    assert copies.found == ["tensor", "to"]


@pytest.mark.parametrize("name", ["loss_mask", "not_first", "position_ids"])
def test_moved_batches_cache_derived_values(name: str) -> None:
    original = batch()
    moved = original.to(META)
    assert getattr(moved, name) is getattr(moved, name)
    assert getattr(moved, name).shape == getattr(original, name).shape
    changed = moved.with_tokens(other=torch.zeros(len(original.input_ids), device=META))
    assert getattr(changed, name) is not getattr(moved, name)
