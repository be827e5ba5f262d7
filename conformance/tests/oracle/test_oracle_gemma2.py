"""The oracle's Gemma 2 compared with one written by hand, feature by feature."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core_rl_conformance.inputs.tiny_models import TinyModel, build
from core_rl_oracle.oracle import Oracle, OracleSequence

MODEL = TinyModel(family="gemma2", seed=3)
CONFIG = MODEL.config()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm of each row; the weight is added to 1."""
    return torch.stack(
        [(1 + weight) * row / math.sqrt(float(row @ row) / len(row) + CONFIG.rms_norm_eps) for row in x]
    )


def rotated(x: Tensor, position: int) -> Tensor:
    half, out = len(x) // 2, torch.zeros_like(x)
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def capped(value: float, cap: float) -> float:
    return cap * math.tanh(value / cap)


def attended(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """All heads ``[L, heads * D]``; a token sees ``window`` tokens, itself included."""
    size, groups = CONFIG.head_dim, CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    rows = []
    for t in range(len(q)):
        heads = []
        for head in range(CONFIG.num_attention_heads):
            span = slice(head * size, head * size + size)
            key = slice(head // groups * size, head // groups * size + size)
            seen = range(max(0, t - window + 1), t + 1)
            products = [float(rotated(q[t, span], t) @ rotated(k[s, key], s)) for s in seen]
            scores = [capped(p / math.sqrt(CONFIG.query_pre_attn_scalar), 2.0) for p in products]
            total = math.fsum(map(math.exp, scores))
            weights = torch.tensor([math.exp(score) / total for score in scores], dtype=torch.float64)
            heads.append(weights @ v[list(seen), key])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """GEGLU with the tanh form of the GELU (arXiv:1606.08415)."""
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def projected(x: Tensor, name: str, p: dict[str, Tensor]) -> Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def by_hand(p: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The logits ``[L, V]``."""
    x = torch.stack([p["model.embed_tokens.weight"][token] for token in ids]) * math.sqrt(CONFIG.hidden_size)
    for layer, window in enumerate((5, len(ids))):
        at = f"model.layers.{layer}."
        h = norm(x, p[f"{at}input_layernorm.weight"])
        q, k, v = (projected(h, f"{at}self_attn.{name}_proj", p) for name in "qkv")
        out = projected(attended(q, k, v, window), f"{at}self_attn.o_proj", p)
        x = x + norm(out, p[f"{at}post_attention_layernorm.weight"])
        h = norm(x, p[f"{at}pre_feedforward_layernorm.weight"])
        gate, up = (h @ p[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = gated(gate, up) @ p[f"{at}mlp.down_proj.weight"].T
        x = x + norm(out, p[f"{at}post_feedforward_layernorm.weight"])
    raw = norm(x, p["model.norm.weight"]) @ p["model.embed_tokens.weight"].T
    return 8.0 * torch.tanh(raw / 8.0)


def test_gemma2_matches_formulas_written_by_hand(tmp_path: Path) -> None:
    model = build(MODEL)
    model.save_pretrained(tmp_path)
    parameters = {name: value.detach().double() for name, value in model.named_parameters()}
    ids = [3, 7, 7, 0, 12, 5, 91, 156, 1, 2, 44]
    logits = by_hand(parameters, ids)
    outputs = Oracle(tmp_path).evaluate([OracleSequence(input_ids=ids)])[0]
    torch.testing.assert_close(outputs["logits"][1:], logits[:-1], rtol=1e-11, atol=1e-11)
    log_p = torch.log_softmax(logits, dim=-1)
    for t in range(1, len(ids)):
        assert float(outputs["logprobs"][t]) == pytest.approx(float(log_p[t - 1, ids[t]]), abs=1e-11)


@pytest.mark.parametrize(
    "change", [{"sliding_window": 64}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None}]
)
def test_every_feature_of_it_changes_the_outputs(tmp_path: Path, change: dict[str, object]) -> None:
    """A window that no sequence fills, or a cap that no score comes near, would hide an engine without it."""
    build(MODEL).save_pretrained(tmp_path)
    ids = OracleSequence(input_ids=[3, 7, 7, 0, 12, 5, 91, 156, 1, 2, 44])
    expected = Oracle(tmp_path).evaluate([ids])[0]["logits"]
    config = type(CONFIG).from_pretrained(tmp_path)
    for name, value in change.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    changed = Oracle(tmp_path).evaluate([ids])[0]["logits"]
    assert float((changed - expected).abs().max()) > 0.1
