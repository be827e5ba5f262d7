"""A packed model over shared prefixes: the outputs and gradients of whole sequences, of fewer tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tiny_families import tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.packed import PackedModel

FAMILIES = ("qwen3", "llama", "gpt2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3")
TREES: Mapping[str, Sequence[Sequence[int]]] = {
    "group": [[5, 6, 7, 8, 9, 11, 12], [5, 6, 7, 8, 9, 13], [5, 6, 7, 8, 9, 14, 15, 16, 17, 18]],
    "levels": [[5, 6, 7, 8], [5, 6, 7, 9, 10], [5, 6, 7, 9, 11, 12], [5, 6, 13], [20, 21, 22]],
    "equal": [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]],
    "prefix of another": [[5, 6, 7, 8, 9, 10], [5, 6, 7], [5, 6, 7, 8], [5]],
    "one token": [[5, 6, 7], [5, 8], [9, 10, 11], [9, 12, 13, 14]],
}


def batch_of(rows: Sequence[Sequence[int]]) -> SequenceBatch:
    """Sequences with other masks and weights for each, also inside a shared prefix."""
    random = torch.Generator().manual_seed(0)
    return SequenceBatch.from_sequences(
        rows,
        tokens={
            "loss_mask": [torch.rand(len(row), generator=random) > 0.3 for row in rows],
            "weight": [torch.randn(len(row), generator=random) for row in rows],
        },
    )


def packed_model(family: str, head: Head = "lm") -> PackedModel:
    register_packed_attention()
    if head == "lm":
        return PackedModel(tiny_model(family, PACKED_ATTENTION), head)
    config = tiny_config(family)
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation=PACKED_ATTENTION)
    return PackedModel(model.float().eval(), head)


def results(
    model: PackedModel, batch: SequenceBatch, names: Sequence[OutputName], **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Outputs, and gradients of a weighted sum of the first one."""
    model.zero_grad()
    outputs = model(batch, names, 0.7, **options)
    weight = (
        batch["weight"]
        if len(outputs[names[0]]) == batch.num_tokens
        else torch.arange(1.0, batch.num_sequences + 1)
    )
    loss = (outputs[names[0]] * weight).sum() + sum(outputs[name].sum() for name in names[1:])
    loss.backward()
    return outputs, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def require_equal(
    model: PackedModel, batch: SequenceBatch, names: Sequence[OutputName], **options: Any
) -> None:
    expected, expected_grads = results(model, batch, names, **options)
    outputs, grads = results(model, batch, names, **options, share_prefixes=True)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        scale = max(1.0, float(expected_grad.abs().max()))
        torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_tokens_give_whole_sequences(family: str, tree: str) -> None:
    require_equal(packed_model(family), batch_of(TREES[tree]), ("logprobs", "entropy"))


@pytest.mark.parametrize("tree", TREES)
def test_masks_inside_shared_prefixes_count_alone(tree: str) -> None:
    require_equal(packed_model("qwen3"), batch_of(TREES[tree]), ("logprobs", "entropy"), trained_only=True)


@pytest.mark.parametrize(("head", "names"), [("value", ("values", "bootstrap")), ("reward", ("scores",))])
@pytest.mark.parametrize("tree", TREES)
def test_scalar_heads_read_shared_states(head: Head, names: Sequence[OutputName], tree: str) -> None:
    require_equal(packed_model("qwen3", head), batch_of(TREES[tree]), names)


def test_balance_counts_shared_tokens_for_each_sequence() -> None:
    model, batch = packed_model("qwen3_moe"), batch_of(TREES["levels"])
    require_equal(model, batch, ("logprobs", "aux_loss"))
    plain, shared = (model(batch, ("routing",), share_prefixes=shares)["routing"] for shares in (False, True))
    assert torch.equal(plain, shared)
    changed = plain.clone()
    changed[1] = changed[1].flip(-1) + 1 - changed[1]  # the second token of the first sequence goes elsewhere
    require_equal(model, batch.with_tokens(routing=changed % 4), ("logprobs",))


def test_fewer_tokens_are_computed() -> None:
    model, batch = packed_model("qwen3"), batch_of(TREES["group"])
    rows: list[int] = []
    model.model.base_model.register_forward_hook(
        lambda *call: rows.append(call[2].last_hidden_state.shape[1])
    )
    for shares in (False, True):
        model(batch, ("logprobs",), share_prefixes=shares)
    assert rows == [23, 13]


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_layers_with_state_are_refused(family: str) -> None:
    with pytest.raises(
        UnsupportedCapability, match=f"share_prefixes: the model type '{family}' has layers that carry"
    ):
        packed_model(family).check_sharing()
