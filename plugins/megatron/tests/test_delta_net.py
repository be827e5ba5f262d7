"""Gated DeltaNet of hybrid models: stand-ins for its kernels, refusals by version, and boundaries of sequences."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import megatron_support as support
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

from core_rl.errors import CoreRLError, LayoutError, UnsupportedCapability
from core_rl_megatron.config import MegatronConfig
from core_rl_megatron.translation import check_model_layout
from core_rl_megatron.versions import packs_delta_net

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 40,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "vocab_size": 64,
}
NEXT: dict[str, Any] = HYBRID | {
    "model_type": "qwen3_next",
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
TP_SP: dict[str, object] = {"tp": 2, "sequence_parallel": True}
packed = pytest.mark.skipif(not packs_delta_net(), reason="Megatron-Core packs Gated DeltaNet from 0.18 on")


def _check(
    layout: dict[str, object],
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    model: Mapping[str, Any] = MappingProxyType(HYBRID),
) -> None:
    monkeypatch.setattr("importlib_metadata.version", lambda name: version)
    config = support.config(layout=layout)
    assert isinstance(config, MegatronConfig)
    check_model_layout(config, AutoConfig.for_model(**model))


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1"])
@pytest.mark.parametrize("model", [HYBRID, NEXT])
def test_versions_without_packing_are_refused(
    version: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedCapability, match=r"from 0\.18 on: take Python 3\.12 and pip install"):
        _check({}, version, monkeypatch, model)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"cp": 2}, "cp=2 of Gated DeltaNet"),
        ({"tp": 2}, "tp=2 without sequence_parallel"),
        ({"tp": 4, "sequence_parallel": True}, "tp=4 does not divide linear_num_key_heads=2"),
    ],
)
def test_layouts_that_divide_its_state_are_refused(
    layout: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LayoutError, match=message):
        _check(layout, "0.19.2", monkeypatch)
    _check(TP_SP, "0.19.2", monkeypatch)


@pytest.mark.parametrize(
    ("layout", "changes", "error", "message"),
    [
        ({"cp": 2}, {}, LayoutError, "cp=2 of Gated DeltaNet"),
        ({"tp": 2}, {}, LayoutError, "tp=2 without sequence_parallel"),
        (TP_SP, {"linear_num_key_heads": 1}, LayoutError, "tp=2 does not divide linear_num_key_heads=1"),
        (
            TP_SP,
            {"shared_expert_intermediate_size": 7},
            LayoutError,
            "tp=2 does not divide shared_expert_intermediate_size=7",
        ),
        ({"dp": 3, "ep": 3}, {}, LayoutError, "ep=3 does not divide num_experts=4"),
        (
            {},
            {"shared_expert_intermediate_size": 0},
            UnsupportedCapability,
            "shared_expert_intermediate_size=0",
        ),
    ],
)
def test_unfit_mixtures_are_refused(
    layout: dict[str, object],
    changes: dict[str, int],
    error: type[CoreRLError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _check(TP_SP, "0.19.2", monkeypatch, NEXT)
    with pytest.raises(error, match=message):
        _check(layout, "0.19.2", monkeypatch, NEXT | changes)


@pytest.mark.parametrize(
    "option", [{"overlap_param_gather": True}, {"transformer_impl": "transformer_engine"}]
)
def test_options_without_support_are_refused(
    option: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib_metadata.version", lambda name: "0.19.2")
    config = support.config(options=option | {"distributed_optimizer": True})
    assert isinstance(config, MegatronConfig)
    with pytest.raises(UnsupportedCapability, match=f"options.{next(iter(option))}"):
        check_model_layout(config, AutoConfig.for_model(**HYBRID))


BOUNDS = torch.tensor([0, 7, 8, 8, 80], dtype=torch.int32)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@packed
def test_convolution_matches_transformers_for_each_sequence() -> None:
    delta_net = importlib.import_module("core_rl_megatron.delta_net")
    theirs = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    x, weight = _drawn(1, 80, 6), _drawn(6, 4)
    options = {"initial_state": None, "output_final_state": False}
    actual, _ = delta_net.causal_conv1d(x, weight, None, activation="silu", cu_seqlens=BOUNDS, **options)
    for start, end in ((0, 7), (7, 8), (8, 80)):
        alone = theirs.causal_conv1d_fn(x[:, start:end].mT, weight, None, activation="silu").mT
        torch.testing.assert_close(actual[:, start:end], alone[:, : end - start], rtol=1e-6, atol=1e-6)


@packed
def test_rule_matches_transformers_for_each_sequence() -> None:
    delta_net = importlib.import_module("core_rl_megatron.delta_net")
    theirs = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    query, key, value = _drawn(1, 80, 4, 6), _drawn(1, 80, 4, 7)[..., :6], _drawn(1, 80, 4, 5)
    g, beta = -F.softplus(_drawn(1, 80, 4)), _drawn(1, 80, 5)[..., :4].sigmoid()
    options = {"initial_state": None, "output_final_state": False}
    actual, _ = delta_net.gated_delta_rule(
        delta_net.l2norm(query),
        delta_net.l2norm(key),
        value,
        g=g,
        beta=beta,
        cu_seqlens=BOUNDS,
        use_qk_l2norm_in_kernel=False,
        **options,
    )
    for start, end in ((0, 7), (7, 8), (8, 80)):
        part = [tensor[:, start:end] for tensor in (query, key, value)]
        gates = {"g": g[:, start:end], "beta": beta[:, start:end]}
        alone, _ = theirs.torch_chunk_gated_delta_rule(
            *part, **gates, use_qk_l2norm_in_kernel=True, **options
        )
        torch.testing.assert_close(actual[:, start:end], alone, rtol=1e-5, atol=2e-6)


@packed
def test_layer_gets_the_packed_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it Megatron runs across the boundaries of sequences, and nothing fails."""
    delta_net = importlib.import_module("core_rl_megatron.delta_net")
    seen: list[Any] = []

    def forward(*_: object, packed_seq_params: Any) -> tuple[None, None]:
        seen.append(packed_seq_params)
        return None, None

    monkeypatch.setattr(delta_net.GatedDeltaNet, "forward", forward)
    layer = object.__new__(delta_net.PackedDeltaNet)
    segments = SimpleNamespace(starts=BOUNDS.to)
    layer.forward(torch.zeros(80, 1, 40), None, packed_seq_params=SimpleNamespace(segments=segments))
    (params,) = seen
    assert params.qkv_format == "thd" and torch.equal(params.cu_seqlens_q, BOUNDS)
