"""Distribution of cases over the workers of pytest-xdist."""

from __future__ import annotations

import pytest

from core_rl_conformance.session.session import unit_of

CHECKS = "conformance/core_rl_conformance/checks"


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("gradients.py::I1.gradients[mine-dp1-qwen3-float32]", "gradients qwen3-float32"),
        ("gradients.py::I4.grad-norm[mine-dp4-hybrid-qwen3_moe-bfloat16]", "gradients qwen3_moe-bfloat16"),
        ("gradients.py::I4.grad-norm[a-b-2-dp2tp2-gpt2-float32]", "gradients gpt2-float32"),
        ("pairs.py::I2.pair-gradients[mine-dp1-qwen2-float32-with-other-dp2]", "pairs qwen2-float32"),
        ("scores.py::I7.scores[served-dp1-qwen3-float32]", "qwen3-float32"),
        ("rollout_pairs.py::I12.pair[mine-dp1-llama-float32-with-served-dp1]", "llama-float32"),
    ],
)
def test_cases_sharing_state_stay_together(nodeid: str, unit: str) -> None:
    assert unit_of(f"{CHECKS}/{nodeid}", ["served"]) == unit
