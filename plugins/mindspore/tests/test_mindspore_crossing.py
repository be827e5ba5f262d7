"""Memory that torch and MindSpore share, and faults of MindSpore that the engine works around."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import mindspore
import pytest
import torch
from mindspore import Parameter, mint, ops
from torch import Tensor

from core_rl_mindspore.crossing import launch_in_order, loss_of_torch, to_mindspore, to_torch


@pytest.fixture(autouse=True)
def in_order() -> None:
    launch_in_order()


def test_both_frameworks_see_writes_at_once() -> None:
    """Of a product that takes some time."""
    weight = Parameter(mint.zeros((700, 700)), name="weight")
    view = to_torch(weight)
    ops.assign_add(weight, mint.matmul(to_mindspore(torch.ones(700, 700)), mint.ones((700, 700))))
    assert bool((view == 700).all())
    view.fill_(3.0)
    assert bool((to_torch(weight + 1.0) == 4.0).all())


def squares_and_sums(leaves: Sequence[Tensor]) -> Tensor:
    squared, summed = leaves
    return (squared**2).sum() + summed.sum()


def test_gradient_of_torch_passes_through() -> None:
    weight, states = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    inside = Parameter(to_mindspore(weight), name="weight")

    def loss() -> mindspore.Tensor:
        products = mint.matmul(to_mindspore(states), mint.permute(inside, (1, 0)))
        return loss_of_torch(squares_and_sums, [products, mint.exp(products)])

    (actual,) = mindspore.grad(loss, None, [inside])()
    products = states @ weight.T
    squares_and_sums([products, products.exp()]).backward()
    torch.testing.assert_close(to_torch(actual), weight.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        value = float(to_torch(loss()))
    assert value == pytest.approx(squares_and_sums([products, products.exp()]).item(), rel=1e-4)


def test_in_place_methods_change_nothing() -> None:
    """When this fails, MindSpore has cured it, and `TrainedWeight.step` may use them."""
    tensor = to_mindspore(torch.ones(3))
    tensor.add_(mint.ones(3))
    tensor.mul_(5.0)
    assert to_torch(tensor).tolist() == [1.0, 1.0, 1.0]


def test_split_has_a_wrong_gradient() -> None:
    """When this fails, MindSpore has cured it, and cells of this engine may split."""
    factors = torch.arange(6.0).reshape(2, 3)
    turned = to_mindspore(factors.T)

    def loss(split: bool, x: mindspore.Tensor) -> mindspore.Tensor:
        (part,) = mint.split(x, [2], 0) if split else (x[:2],)
        return (mint.permute(part, (1, 0)) * turned).sum()

    x = to_mindspore(torch.ones(2, 3))
    right, wrong = (to_torch(mindspore.grad(lambda x, s=s: loss(s, x))(x)) for s in (False, True))
    assert torch.equal(right, factors)
    assert not torch.equal(wrong, factors)


SOFTMAX = """
from mindspore import from_dlpack, grad, mint
import torch
def gradient(size):
    x, factors = (from_dlpack(torch.arange(float(size**2)).reshape(size, size).__dlpack__()) for _ in range(2))
    return grad(lambda x: (mint.nn.functional.softmax(x, dim=-1) * factors).sum(), 0)(x).asnumpy()
sizes = [{sizes}]
print(max(abs(gradient(size).sum(-1)).max() for size in sizes))
"""
"""Prints the largest sum of a softmax's gradient over a row, which is 0."""


@pytest.mark.parametrize(("sizes", "wrong"), [("3, 1, 3", False), ("1, 3", True)])
def test_softmax_of_one_element_spoils_gradients(sizes: str, wrong: bool) -> None:
    """When this fails, MindSpore has cured it, and `_Softmax` may be MindSpore's."""
    command = [sys.executable, "-c", SOFTMAX.replace("{sizes}", sizes)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (float(result.stdout.split()[-1]) > 1e-3) == wrong


def test_float32_exponential_is_approximate() -> None:
    """When this fails, MindSpore has cured it, and `TokenValues` may compute in float32."""
    x = torch.linspace(-30, 5, 1000)
    error = (to_torch(mint.exp(to_mindspore(x))).double() / x.double().exp() - 1).abs().max()
    assert 1e-6 < float(error) < 1e-4
