"""The chunked kernel against the plain formula in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core_rl.toolkit.token_logprobs import HeadMap, token_logits, token_logprobs


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadMap) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = torch.log_softmax(logits / head.temperature, dim=-1)
    return log_p, -(log_p.exp() * log_p).sum(-1)


CASES = [
    pytest.param(HeadMap(), False, id="plain"),
    pytest.param(HeadMap(temperature=0.6), True, id="bias and temperature"),
    pytest.param(HeadMap(temperature=1.7, softcap=3.0), False, id="soft cap"),
    pytest.param(HeadMap(scale=0.25, temperature=0.9), True, id="scale"),
]


@pytest.mark.parametrize(("head", "with_bias"), CASES)
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("keep_bytes", [0, 2**20])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_values_and_gradients(
    head: HeadMap, with_bias: bool, chunk: int, keep_bytes: int, with_entropy: bool
) -> None:
    torch.manual_seed(chunk)
    count, width, vocabulary = 7, 5, 13
    exact = [torch.randn(count, width), torch.randn(vocabulary, width) * 2]
    if with_bias:
        exact.append(torch.randn(vocabulary))
    targets = torch.randint(0, vocabulary, (count,))
    upstream = torch.randn(2, count)

    single = [t.clone().requires_grad_() for t in exact]
    logprobs, entropy = token_logprobs(
        single[0],
        single[1],
        targets,
        bias=single[2] if with_bias else None,
        head=head,
        with_entropy=with_entropy,
        chunk=chunk,
        keep_bytes=keep_bytes,
    )
    assert (entropy is not None) == with_entropy and logprobs.dtype == torch.float32
    entropy = torch.zeros(count) if entropy is None else entropy
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()

    double = [t.double().requires_grad_() for t in exact]
    log_p, expected_entropy = plain(double[0], double[1], double[2] if with_bias else None, head)
    expected_entropy = expected_entropy * with_entropy
    expected = log_p.gather(1, targets[:, None]).squeeze(1)
    (expected * upstream[0].double() + expected_entropy * upstream[1].double()).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for got, want in zip(single, double, strict=True):
        assert got.grad is not None and want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2e-5, atol=2e-5)
    logits = token_logits(single[0], single[1], bias=single[2] if with_bias else None, head=head)
    torch.testing.assert_close(torch.log_softmax(logits, -1).double(), log_p, rtol=1e-5, atol=1e-5)


def test_no_rows_give_zero_gradients_and_stay_connected() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_zero_probability_keeps_entropy_finite() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-1e30], [0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([0]), with_entropy=True)
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert entropy.item() == pytest.approx(0.6931472, abs=1e-6)
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_bfloat16_inputs_give_float32_log_probs() -> None:
    hidden, weight = torch.randn(6, 8).bfloat16(), torch.randn(11, 8).bfloat16().requires_grad_()
    targets = torch.randint(0, 11, (6,))
    logprobs, _ = token_logprobs(hidden, weight, targets, chunk=2)
    expected = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
