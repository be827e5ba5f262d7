"""Causes that a message names from more than the values: chance, a mistake of the oracle's, the line of a crash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.hints.diagnose import explain_loss, explain_named, explain_tokens
from core_rl_conformance.hints.mistakes import explain_norm
from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import SequenceMeanLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.session.items import last_line
from core_rl_oracle.oracle import Gradients
from core_rl_oracle.tolerance import Tolerance

SMALL = Tolerance(baseline=1e-6, floor=1e-6)
GOT = [torch.tensor([0.0, -1.0, -2.0])]
RIGHT = [torch.zeros(3)]
WRONG = Gradients(loss=2.0, weight=1.0, grads={"weight": torch.ones(3, dtype=torch.float64)})


WITHOUT_EFFECT = (
    "activation_function is gelu_pytorch",
    "num_experts_per",
    "norm_topk",
    "routed",
    "rope_theta",
)
"""Two activations are one, rotations are short, and short sequences of one family choose no expert."""


def _same() -> list[Tensor]:
    return GOT


def test_nondeterminism_is_explained_first() -> None:
    moved = [GOT[0] + torch.tensor([0.0, 0.0, 0.1])]
    message = explain_tokens(GOT, RIGHT, SMALL, lambda: iter([("a mistake", GOT)]), lambda: moved)
    assert message is not None and message.startswith("not deterministic") and "1.0e-01" in message
    assert explain_tokens(GOT, RIGHT, SMALL, lambda: iter([("a mistake", GOT)]), _same) == "a mistake"
    assert explain_tokens(GOT, RIGHT, SMALL, lambda: iter([("a mistake", moved)]), None) is None


def test_mistake_in_some_values_is_explained() -> None:
    got = [torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-3.0])]
    right = [torch.tensor([0.0, -1.5, -2.5]), torch.tensor([-3.0])]
    wrong = [torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-4.0])]
    assert explain_tokens(got, right, SMALL, lambda: iter([("a mistake", wrong)]), None) == "a mistake"
    assert explain_tokens(got, wrong, SMALL, lambda: iter([("a mistake", right)]), None) is None


def test_losses_and_gradients_are_explained() -> None:
    grads, limits = {"weight": torch.ones(3)}, {"weight": SMALL}
    assert explain_loss(2.0, 1.0, SMALL, lambda: iter([("a mistake", WRONG)]), None) == "a mistake"
    assert explain_loss(1.0, 1.5, SMALL, lambda: iter([("a mistake", WRONG)]), lambda: (1.0, grads)) is None
    message = explain_loss(2.0, 1.0, SMALL, lambda: iter([("a mistake", WRONG)]), lambda: (2.5, grads))
    assert message is not None and message.startswith("not deterministic")
    assert explain_loss(2.0, 2.0 - 2e-5, SMALL, lambda: iter([("a mistake", WRONG)]), None) == "a mistake"
    assert explain_loss(2.0 + 4e-6, 2.0 - 1e-5, SMALL, lambda: iter([("a mistake", WRONG)]), None) is None
    assert explain_named(grads, limits, lambda: iter([("a mistake", WRONG)]), None) == "a mistake"
    message = explain_named(grads, limits, lambda: iter(()), lambda: (2.0, {"weight": torch.zeros(3)}))
    assert message is not None and message.startswith("not deterministic")


@pytest.mark.parametrize(
    ("counts", "cause"),
    [
        ([1.0, 1.0, 0.0, 1.0], "gradients in which sequences 2 count 0 times"),
        ([0.5, 2.0, 0.5, 2.0], "gradients in which sequences 0, 2 count 0.5 times; 1, 3 count 2 times"),
        ([2.0, 2.0, 2.0, 2.0], None),
    ],
)
def test_uneven_counts_of_sequences_are_named(counts: list[float], cause: str | None) -> None:
    draw = torch.Generator().manual_seed(0)
    shares = [
        {"a": torch.randn(2000, 2, generator=draw), "b": torch.randn(7, generator=draw)} for _ in counts
    ]
    labels = [(str(number), share) for number, share in enumerate(shares)]
    got = {
        name: torch.stack([c * share[name] for c, share in zip(counts, shares, strict=True)]).sum(0)
        for name in ("a", "b")
    }
    limits = dict.fromkeys(got, SMALL)
    assert explain_named(got, limits, lambda: iter(()), None, lambda: iter(labels)) == cause
    moved = {**got, "b": got["b"] + 0.1}
    assert explain_named(moved, limits, lambda: iter(()), None, lambda: iter(labels)) is None
    few = {"b": torch.randn(7, generator=draw)}
    assert explain_named(few, limits, lambda: iter(()), None, lambda: iter(labels)) is None


@pytest.mark.parametrize(
    ("pattern", "count", "cause"),
    [
        ("lm_head", 0, "the norm counts the head 0 times"),
        ("norm", 2, "the norm counts norms 2 times"),
        (r"layers\.1", 3, "the norm counts layer 1 3 times"),
        (r"experts\.[01]", 0, "the norm counts experts 0, 1 0 times"),
        ("head|norm", 0.5, None),
    ],
)
def test_parts_miscounted_by_norms_are_named(pattern: str, count: float, cause: str | None) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = ("norm", "self_attn.q_proj", *(f"mlp.experts.{expert}.up_proj" for expert in range(4)))
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in parts]
    grads = {name: torch.randn(3, generator=draw, dtype=torch.float64) for name in (*names, "lm_head.weight")}
    counts = {name: count if re.search(pattern, name) else 1 for name in grads}
    got = sum(counts[name] * float(grad.square().sum()) for name, grad in grads.items()) ** 0.5
    assert explain_norm(got, grads, SMALL) == cause
    wide = Tolerance(baseline=1.0, floor=0.0)
    assert explain_norm(got + 1e-3, grads, wide) is None


@pytest.mark.parametrize(
    "family", ["gemma2", "qwen3_moe", "gpt2", "granite_swa", "deepseek_v3", "gemma4_text"]
)
def test_misread_options_change_outputs(family: str, tmp_path: Path) -> None:
    model = TinyModel(family=family)
    data = ragged(model.vocab_size, 0).for_oracle()[:4]
    with ExpectedValues(tmp_path) as expected:
        right = torch.cat([row["logprobs"] for row in expected.oracle(model).evaluate(data)])
        changes = {}
        for sentence, oracle in expected.mistaken_oracles(model):
            wrong = torch.cat([row["logprobs"] for row in oracle.evaluate(data)])
            changes[sentence] = float((wrong - right).abs().max())
    without = [sentence for sentence, change in changes.items() if change < 1e-7]
    assert len(changes) > 2 and not [s for s in without if not s.startswith(WITHOUT_EFFECT)]


def test_loss_mistakes_cover_temperature_and_entropy() -> None:
    assert [sentence for sentence, _ in SequenceMeanLoss().mistakes([])] == []
    message = " ".join(sentence for sentence, _ in TokenMeanLoss(temperature=0.8).mistakes([]))
    assert "the temperature 0.8 is left out" in message and "entropy" in message


TRACEBACK = """Traceback (most recent call last):
  File "/x/core_rl/launch/worker.py", line 62, in _answer
    return pack_reply(fn(states[engine_id], *args))
           ^^^^^^^^^^^^^^^^^^^
  File "/home/me/mine/engine.py", line 7, in run
    loss = self.model(ids)
           ^^^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
    return forward_call(*args, **kwargs)
ValueError: no
"""
STACKS = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 90 in linear
  File "/home/me/mine/engine.py", line 9 in run
  File "/x/core_rl/engine/step.py", line 3 in _run

Thread 0x00008f (most recent call first):
  File "/home/me/mine/other.py", line 1 in wait
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, "/home/me/mine/engine.py, line 7, in run: loss = self.model(ids)"),
        (STACKS, "/home/me/mine/engine.py, line 9, in run"),
        ("rank 0 ended with exit code 3", None),
    ],
)
def test_the_last_line_of_the_engine_is_found(text: str, line: str | None) -> None:
    assert last_line(text) == line


def test_one_of_equal_sequences_is_named() -> None:
    first, second = torch.randn(2, 2000, generator=torch.Generator().manual_seed(0))
    shares = [("0", {"a": first}), ("1", {"a": second}), ("2", {"a": second})]
    cause = explain_named({"a": first + second}, {"a": SMALL}, lambda: iter(()), None, lambda: iter(shares))
    assert cause == "gradients in which sequences 1 count 0 times"
