"""Recurrent, convolutional and linear attention layers restart at each packed sequence, in gradients as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import packed_logprobs, tiny_model, token_logprobs
from torch import Tensor, nn

from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.segments import Segments
from core_rl.toolkit.sequence_layers import StatefulLayers, stateful_layers

LENGTHS = (6, 1, 9, 2)
SEQUENCES = [(torch.arange(length) * 7 + length) % 97 for length in LENGTHS]


def weighted(values: list[Tensor]) -> Tensor:
    """An uneven sum: errors of single tokens do not cancel."""
    return (torch.cat(values) * torch.linspace(-1, 1, sum(map(len, values)))).sum()


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2", "minimax", "rwkv"])
def test_packed_sequences_equal_the_plain_model(family: str, tmp_path: Path) -> None:
    """Log-probs and all gradients, with activations computed again in the backward pass."""
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    register_packed_attention()
    model = build_model(ModelConfig(path=str(tmp_path)), seed=0, attn_implementation=PACKED_ATTENTION)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = PackedModel(model, "lm").train()
    actual, expected = packed_logprobs(packed, SEQUENCES), token_logprobs(plain, SEQUENCES)
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), rtol=1e-4, atol=1e-4)
    weighted(actual).backward()
    weighted(expected).backward()
    gradients = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name].grad, parameter.grad, rtol=1e-3, atol=1e-3 * scale, msg=name
            )


def test_adapter_in_stateful_layer_gets_gradient(tmp_path: Path) -> None:
    tiny_model("qwen3_5_text").save_pretrained(tmp_path)
    register_packed_attention()
    selected = ModelConfig(
        path=str(tmp_path), lora=LoraConfig(rank=2, target_modules=("in_proj_qkv", "out_proj"))
    )
    model = build_model(selected, seed=0, attn_implementation=PACKED_ATTENTION)
    packed = PackedModel(model, "lm")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    together = torch.autograd.grad(weighted(packed_logprobs(packed, SEQUENCES)), list(trained.values()))
    alone = [packed_logprobs(packed, [ids])[0] for ids in SEQUENCES]
    for local, second in zip(
        together, torch.autograd.grad(weighted(alone), list(trained.values())), strict=True
    ):
        assert second.abs().max() > 0
        torch.testing.assert_close(local, second, rtol=1e-3, atol=1e-3 * float(second.abs().max()))


class Sums(nn.Module):
    """A recurrence: each token gets the sum of those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(()))
        self.calls: list[torch.Size] = []

    def forward(self, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.calls.append(hidden.shape)
        return hidden.cumsum(1), hidden.sum(1)


def test_similar_lengths_share_a_call() -> None:
    trunk = nn.ModuleDict({"layer": Sums()})
    layer = trunk["layer"]
    StatefulLayers(trunk).begin(Segments((0, 3, 7, 8, 16)), torch.device("cpu"))
    hidden = torch.arange(16.0).view(1, 16, 1)
    actual, state = layer(hidden)
    expected = torch.cat([part.cumsum(0) for part in hidden[0].split([3, 4, 1, 8])])
    torch.testing.assert_close(actual[0], expected)
    assert state is None, "the state after the last token is of no sequence"
    assert layer.calls == [(1, 1, 1), (2, 4, 1), (1, 8, 1)]


def test_argument_without_token_entries_is_refused() -> None:
    trunk = nn.ModuleDict({"layer": Sums()})
    StatefulLayers(trunk).begin(Segments((0, 3, 7)), torch.device("cpu"))
    with pytest.raises(UnsupportedCapability, match=r"layer layer gets a tensor of shape \(1, 5\)"):
        trunk["layer"](torch.zeros(1, 7, 1), torch.zeros(1, 5))


def test_outer_stateful_layer_is_taken() -> None:
    outer = nn.Module()
    outer.conv = nn.Conv1d(2, 2, 2)
    outer.inner = Sums()
    trunk = nn.ModuleDict({"block": outer, "head": nn.Linear(2, 2)})
    assert list(stateful_layers(trunk)) == ["block"]
