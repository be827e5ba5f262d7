"""Settings of the optimizer by checkpoint name, and Muon on whole matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_support as support
import pytest
import torch
from torch import Tensor, nn

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.parameter_rules import ParameterOptions, ParameterRules
from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig, OptimizerConfig
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import CheckpointMismatch, ConfigError, UnsupportedCapability
from core_rl.reference import SPEC, ReferenceConfig

LOSS = LossSpec(fn=support.weighted_nll)
EMBEDDING, QUERIES, NORM = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.input_layernorm.weight",
)
SHAPES = {
    EMBEDDING: (61, 16),
    QUERIES: (16, 16),
    NORM: (16,),
    "model.norm.weight": (16,),
    "score.weight": (1, 16),
}
RULES = [
    ({}, EMBEDDING, ("adamw", 1.0, 0.1)),
    ({}, NORM, ("adamw", 1.0, 0.0)),
    ({"type": "muon"}, QUERIES, ("muon", 1.0, 0.1)),
    ({"type": "muon"}, EMBEDDING, ("adamw", 1.0, 0.1)),
    ({"type": "adamw_8bit"}, NORM, ("adamw_8bit", 1.0, 0.0)),
    ({"type": "adamw_8bit", "rules": [{"pattern": "*norm*", "type": "adamw"}]}, NORM, ("adamw", 1.0, 0.0)),
    ({"type": "muon"}, "score.weight", ("adamw", 1.0, 0.1)),
    ({"type": "muon"}, NORM, ("adamw", 1.0, 0.0)),
    ({"rules": [{"pattern": "*norm*", "weight_decay": 0.5}]}, NORM, ("adamw", 1.0, 0.5)),
    ({"type": "muon", "rules": [{"pattern": "*.q_proj.*", "type": "adamw"}]}, QUERIES, ("adamw", 1.0, 0.1)),
    (
        {"rules": [{"pattern": "*.layers.0.*", "lr_factor": 0.1, "weight_decay": 0.3}]},
        QUERIES,
        ("adamw", 0.1, 0.3),
    ),
    (
        {
            "rules": [
                {"pattern": "*.0.*", "lr_factor": 0.1},
                {"pattern": "*", "weight_decay": 0.0, "lr_factor": 0.0},
            ]
        },
        QUERIES,
        ("adamw", 0.0, 0.0),
    ),
]
REFUSED = [
    ({"rules": [{"pattern": "*"}]}, "sets nothing; give it lr_factor, weight_decay or type"),
    ({"rules": [{"pattern": "*", "lr": 0.1}]}, "unknown field 'rules.0.lr'.*lr_factor"),
    ({"rules": [{"pattern": "*", "lr_factor": float("nan")}]}, "lr_factor"),
    ({"rules": [{"pattern": "*", "weight_decay": -1}]}, "weight_decay"),
    ({"muon": {"momentum": 1.0}}, "muon.momentum"),
]


@pytest.mark.parametrize(("fields", "name", "expected"), RULES)
def test_settings_of_a_parameter(fields: dict[str, Any], name: str, expected: tuple[Any, ...]) -> None:
    rules = ParameterRules(OptimizerConfig(weight_decay=0.1, **fields))
    assert rules.of(name, SHAPES[name]) == ParameterOptions(*expected)


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_wrong_rules_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_config(OptimizerConfig, fields)


def test_muon_is_for_matrices() -> None:
    rules = ParameterRules(OptimizerConfig(rules=({"pattern": "model.layers.*", "type": "muon"},)))
    with pytest.raises(
        ConfigError, match=r"input_layernorm.weight' has the shape \[16\]; narrow the pattern"
    ):
        rules.of(NORM, SHAPES[NORM])


def _engine(
    optimizer: Mapping[str, Any], model: Mapping[str, Any] = support.TINY, **fields: Any
) -> TrainEngine:
    section = ModelConfig(config=dict(model), **fields)
    return support.engine(
        ReferenceConfig(model=section, optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer}))
    )


@pytest.mark.parametrize("frozen", [(), ("model.embed_tokens.*",)])
def test_unmatched_rule_pattern_is_refused(frozen: tuple[str, ...]) -> None:
    pattern = "model.embed_tokens.*" if frozen else "model.embedding.*"
    with pytest.raises(ConfigError, match=re.escape(f"the pattern '{pattern}' matches no trained parameter")):
        _engine({"rules": [{"pattern": pattern, "lr_factor": 0.1}]}, frozen=frozen)


def test_fused_parameters_need_a_common_rule() -> None:
    """Experts are one parameter in memory."""
    model = support.TINY | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }
    with pytest.raises(
        ConfigError,
        match=r"(?s)differ for .*experts.0.gate_proj.* and .*one parameter in memory, '.*gate_up_proj'",
    ):
        _engine({"rules": [{"pattern": "*.gate_proj.weight", "lr_factor": 0.1}]}, model)
    engine = _engine({"type": "muon", "rules": [{"pattern": "*.experts.*", "lr_factor": 0.1}]}, model)
    assert engine.tensor_shapes("momentum")["model.layers.0.mlp.experts.3.gate_proj.weight"] == (8, 16)
    engine.destroy()


@pytest.mark.parametrize(
    ("capability", "optimizer"),
    [
        (Capability.MUON, {"type": "muon"}),
        (Capability.MUON, {"rules": [{"pattern": QUERIES, "type": "muon"}]}),
        (Capability.OPTIMIZER_RULES, {"rules": [{"pattern": QUERIES, "lr_factor": 0.5}]}),
    ],
)
def test_undeclared_rules_and_muon_are_refused(capability: Capability, optimizer: dict[str, Any]) -> None:
    spec = replace(SPEC, capabilities=SPEC.capabilities - {capability})
    with pytest.raises(UnsupportedCapability, match=capability.value):
        load_engine(spec, support.config(OptimizerConfig(**optimizer)))


def _tensors(engine: TrainEngine, kind: str) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.named_tensors(kind) if value is not None}


@pytest.mark.parametrize(
    "muon",
    [{}, {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "original", "ns_steps": 3}],
    ids=["default", "other"],
)
def test_muon_takes_the_steps_of_torch(muon: dict[str, Any]) -> None:
    """Compare with torch's code, with its iterations in float32 instead of bfloat16."""
    engine = _engine({"type": "muon", "weight_decay": 0.1, "max_grad_norm": None, "muon": muon})
    local = {name: nn.Parameter(value) for name, value in _tensors(engine, "master").items()}
    local = {name: value for name, value in local.items() if name in engine.tensor_shapes("momentum")}
    settings = {"adjust_lr_fn": "match_rms_adamw", **muon}
    optimizer = torch.optim.Muon(local.values(), lr=1e-2, weight_decay=0.1, **settings)
    for seed in range(3):
        engine.forward_backward(support.batch(seed), LOSS, MicroBatchSpec(count=1))
        grads = _tensors(engine, "grads")
        engine.optimizer_step()
        for name, parameter in local.items():
            parameter.grad = grads[name]
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            optimizer.step()
    moved = _tensors(engine, "master")
    engine.destroy()
    assert len(local) == 14
    for name, parameter in local.items():
        torch.testing.assert_close(moved[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_checkpoint_of_different_optimizer_is_refused(tmp_path: Path) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "checkpoint"), format="portable")
    engine = _engine({})
    engine.save(meta)
    engine.destroy()
    engine = _engine({"type": "muon"})
    with pytest.raises(
        CheckpointMismatch, match="another optimizer, with exp_avg, exp_avg_sq, and this one has"
    ):
        engine.load(meta)
    engine.load(replace(meta, with_optimizer=False))
    engine.destroy()
