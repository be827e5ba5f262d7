"""The float64 Muon against torch's own, and the names of known mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from core_rl_conformance.hints.mistakes import Steps
from core_rl_conformance.procedures.mixed import FUSED, likely_mistake, of_fused, of_shards
from core_rl_oracle.muon import MixedOptimizer, Settings, hidden_matrix, mixed_tolerances
from core_rl_oracle.oracle import AdamW, OptimizerState

SHAPES = {
    "embed_tokens.weight": (11, 8),
    "layers.0.q_proj.weight": (8, 8),
    "layers.0.k_proj.weight": (4, 8),
    "layers.0.v_proj.weight": (4, 8),
    "layers.0.down_proj.weight": (8, 12),
    "layers.0.norm.weight": (8,),
}
ADAMW = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)
GENERATOR = torch.Generator().manual_seed(0)


def _tensors() -> dict[str, Tensor]:
    return {
        name: torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for name, shape in SHAPES.items()
    }


START = _tensors()
GRADS = [_tensors() for _ in range(3)]
RATES = [1e-2, 8e-3, 6e-3]
DEFAULTS = {
    name: Settings(muon=hidden_matrix(name, value), weight_decay=0.1 * (value.dim() >= 2))
    for name, value in START.items()
}
RULED = {
    **DEFAULTS,
    "layers.0.q_proj.weight": Settings(muon=True, lr_factor=0.3, weight_decay=0.5),
    "embed_tokens.weight": Settings(lr_factor=2.0, weight_decay=0.0),
}
CONFIG = MixedOptimizer(adamw=ADAMW, settings=RULED)
BEGIN = OptimizerState.start(START, [name for name, setting in RULED.items() if setting.muon])
STEPS = Steps(config=CONFIG, start=BEGIN, grads=GRADS, rates=RATES)


@pytest.mark.parametrize(
    "fields",
    [{}, {"nesterov": False, "momentum": 0.7, "ns_steps": 3, "adjust_lr_fn": "original"}],
    ids=["default", "other"],
)
def test_the_oracle_is_torchs_muon_in_float64(fields: dict[str, Any]) -> None:
    settings = {name: Settings(muon=value.dim() == 2, weight_decay=0.1) for name, value in START.items()}
    config = MixedOptimizer(adamw=replace(ADAMW, max_grad_norm=None), settings=settings, **fields)
    state = OptimizerState.start(START, [name for name, setting in settings.items() if setting.muon])
    parameters = {name: nn.Parameter(value.clone()) for name, value in START.items() if value.dim() == 2}
    optimizer = torch.optim.Muon(
        parameters.values(), weight_decay=0.1, **{"adjust_lr_fn": "match_rms_adamw", **fields}
    )
    for grads, rate in zip(GRADS, RATES, strict=True):
        config.step(state, grads, rate)
        optimizer.param_groups[0]["lr"] = rate
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(state.params[name], parameter.detach(), rtol=1e-9, atol=1e-12, msg=name)


def test_remaining_parameters_take_adamw_steps() -> None:
    settings = {name: Settings(weight_decay=0.1 * (value.dim() >= 2)) for name, value in START.items()}
    state, expected = OptimizerState.start(START), OptimizerState.start(START)
    config = MixedOptimizer(adamw=ADAMW, settings=settings)
    for grads, rate in zip(GRADS, RATES, strict=True):
        assert config.step(state, grads, rate) == ADAMW.step(expected, grads, rate)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sentence", "config"),
    [
        ("a shard, 1 of 2 parts", replace(CONFIG, updates=partial(of_shards, parts=2, dim=0, factor=True))),
        ("a shard, 1 of 4 parts", replace(CONFIG, updates=partial(of_shards, parts=4, dim=1, factor=False))),
        ("with q, k and v", replace(CONFIG, updates=partial(of_fused, pattern=FUSED["q, k and v"]))),
        ("without Nesterov", replace(CONFIG, nesterov=False)),
        ("the rules are ignored", replace(CONFIG, settings=DEFAULTS)),
    ],
)
def test_known_mistakes_are_named(sentence: str, config: MixedOptimizer) -> None:
    allowed = mixed_tolerances(BEGIN, STEPS.state(), CONFIG, GRADS, RATES)["params"]
    wrong = {name: value.float() for name, value in replace(STEPS, config=config).state().params.items()}
    assert sentence in str(likely_mistake(STEPS, wrong, allowed, DEFAULTS, ranks=4))


def _off(got: Mapping[str, Tensor], state: OptimizerState) -> list[str]:
    allowed = mixed_tolerances(BEGIN, state, CONFIG, GRADS, RATES)["params"]
    return [
        name
        for name, value in got.items()
        if float((value - state.params[name]).abs().max()) > allowed[name].limit
    ]


def test_a_thousandth_is_more_than_rounding() -> None:
    right = STEPS.state()
    noisy = {name: value * (1 + 1e-3 * hidden_matrix(name, value)) for name, value in right.params.items()}
    assert not _off({name: value.float() for name, value in right.params.items()}, right)
    assert _off(noisy, right) == [name for name, setting in RULED.items() if setting.muon]
