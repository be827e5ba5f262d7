"""Mixtures of experts: kernels, the balance of routers, routing in batches, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import engine_support as support
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.loading import load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, ConfigError, CoreRLError, LossError, UnsupportedCapability
from core_rl.reference import SPEC, ReferenceConfig
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import ExpertsKernel, build_model
from core_rl.toolkit.experts import ExpertDispatch
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.routers import Routing, balance_loss

ONE = MicroBatchSpec(count=1)
LOSS = LossSpec(fn=support.weighted_nll)
EXPERTS = 6
MOE: dict[str, Any] = {
    **support.TINY,
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


def engine(spec: Any = SPEC, config: dict[str, Any] = MOE, **model: Any) -> TrainEngine:
    made = load_engine(spec, ReferenceConfig(model=ModelConfig(config=config, **model)))
    made.initialize()
    return made


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Engines join a group, and a refused engine never leaves it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------ kernels


def _gradients(kernel: ExpertsKernel, width: int, batch: SequenceBatch) -> tuple[str, dict[str, Tensor]]:
    register_packed_attention()
    config = {**MOE, "moe_intermediate_size": width}
    model = build_model(
        ModelConfig(config=config), seed=0, attn_implementation=PACKED_ATTENTION, experts=kernel
    )
    with torch.no_grad():  # an expert without tokens
        model.get_parameter("model.layers.1.mlp.gate.weight")[1] = 0.0
        model.get_parameter("model.layers.1.mlp.gate.weight").mul_(100.0)
    PackedModel(model, "lm")(batch, ("logprobs",))["logprobs"].sum().backward()
    grads = {name: value.grad for name, value in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return str(model.config._experts_implementation), {n: g for n, g in grads.items() if g is not None}


def test_grouped_products_give_the_gradients_of_the_loop() -> None:
    batch = SequenceBatch.from_sequences([[5, 9, 3], [7]])
    used, grouped = _gradients("grouped", 8, batch)
    assert used == "grouped_mm"
    _, eager = _gradients("eager", 8, batch)
    torch.testing.assert_close(grouped, eager, rtol=1e-4, atol=1e-6)
    down = grouped["model.layers.1.mlp.experts.down_proj"]
    idle = [expert for expert in range(EXPERTS) if not down[expert].any()]
    assert 0 < len(idle) < EXPERTS


def test_unaligned_experts_are_computed_one_by_one() -> None:
    assert _gradients("grouped", 7, SequenceBatch.from_sequences([[5, 9, 3]]))[0] == "eager"


# ------------------------------------------------------------------ dispatch


def test_single_padding_row_is_computed_and_dropped() -> None:
    """Three tokens where another rank has five; the result is no view, which could lose FSDP's hook."""
    seen: list[Tensor] = []

    def compute(tokens: Tensor, selected: Tensor, gates: Tensor) -> Tensor:
        seen.extend([tokens, selected, gates])
        return tokens + 1

    dispatch = ExpertDispatch(Comm())
    dispatch.begin(5)
    hidden, selected = torch.ones(3, 2), torch.tensor([[3, 0], [1, 2], [2, 3]])
    result = dispatch(hidden, selected, torch.ones(3, 2), 4, compute)
    tokens, numbers, gates = seen
    assert numbers.tolist() == [*selected.tolist(), [4, 4], [4, 4], [0, 4]]
    assert not tokens[3:].any() and not gates[3:].any()
    assert torch.equal(result, hidden + 1) and not result._is_view()


# ------------------------------------------------------------------ balance


def _routing(length: int, seed: int, experts: int = 5, k: int = 2) -> Routing:
    logits = torch.randn(length, experts, generator=torch.Generator().manual_seed(seed))
    return Routing(logits, logits.topk(k).indices)


def test_balance_loss_of_even_and_collapsed_routing() -> None:
    bounds = torch.tensor([0, 4])
    even = Routing(torch.zeros(4, 4), torch.arange(4)[:, None])
    assert balance_loss([even], bounds) == 4.0
    collapsed = Routing(
        torch.tensor([[100.0, 0.0, 0.0, 0.0]]).repeat(4, 1), torch.zeros(4, 1, dtype=torch.long)
    )
    assert balance_loss([collapsed, even], bounds) == pytest.approx((4 * 4 + 4) / 2)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_balance_of_sequences_adds_up(lengths: list[int]) -> None:
    rows = [_routing(length, seed) for seed, length in enumerate(lengths)]
    complete = Routing(torch.cat([row.logits for row in rows]), torch.cat([row.experts for row in rows]))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    alone = [balance_loss([row], torch.tensor([0, len(row.logits)])) for row in rows]
    torch.testing.assert_close(balance_loss([complete], bounds), torch.stack(alone).sum())


# ------------------------------------------------------------------ refusals


def _with_routing(*shape: int, dtype: torch.dtype = torch.int64, fill: int = 0) -> SequenceBatch:
    data = support.batch()
    routing = torch.full((data.num_tokens, *shape), fill, dtype=dtype)
    routing[..., 1::2] = fill + 1 if fill >= 0 else fill
    return data.with_tokens(routing=routing)


WRONG_ROUTING = {
    r"must be int16 .* \[T, layers, 2\]; got torch.float32": _with_routing(1, 2, dtype=torch.float32),
    r"must be int16 .* \[T, layers, 2\]; got torch.int64 \[17, 1, 4\]": _with_routing(1, 4),
    "holds 5 to 6; experts are 0 to 5": _with_routing(1, 2, fill=5),
    "is for 3 layers; .* has 1 routers": _with_routing(3, 2),
    "names an expert twice": support.batch().with_tokens(routing=torch.zeros(17, 1, 2, dtype=torch.long)),
}


@pytest.mark.parametrize("message", WRONG_ROUTING)
def test_wrong_routing_is_refused(message: str) -> None:
    made = engine()
    with pytest.raises(BatchError, match=message):
        made.forward(WRONG_ROUTING[message], ONE)
    made.destroy()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int32, torch.int64])
def test_routing_is_int16_and_replays_any_integers(dtype: torch.dtype) -> None:
    made, data = engine(), support.batch()
    before = made.forward(data, ONE, ("logprobs", "routing"))
    assert before["routing"].dtype == torch.int16
    second = (before["routing"] + 1) % EXPERTS
    moved = made.forward(data.with_tokens(routing=second.to(dtype)), ONE, ("logprobs", "routing"))
    assert torch.equal(moved["routing"], second)
    assert not torch.equal(moved["logprobs"], before["logprobs"])
    made.destroy()


def _undeclared(capability: Capability) -> Any:
    return replace(SPEC, capabilities=SPEC.capabilities - {capability})


def _balanced_in_parts() -> None:
    made = engine(router_aux_coef=0.1)
    with made.train_mode():
        made.forward_backward(support.batch(), LOSS, ONE, total_weight=30.0)


REFUSALS: dict[str, tuple[type[CoreRLError], Callable[[], object]]] = {
    "a mixture of experts: the engine 'reference' does not declare 'moe'": (
        UnsupportedCapability,
        lambda: engine(_undeclared(Capability.MOE)),
    ),
    "the token field 'routing': .* does not declare 'routing_replay'": (
        UnsupportedCapability,
        lambda: engine(_undeclared(Capability.ROUTING_REPLAY)).forward(_with_routing(1, 2), ONE),
    ),
    "output 'routing': .* does not declare 'routing_replay'": (
        UnsupportedCapability,
        lambda: engine(_undeclared(Capability.ROUTING_REPLAY)).forward(support.batch(), ONE, ("routing",)),
    ),
    "a config with aux_loss: the engine 'reference' does not declare 'aux_loss'": (
        UnsupportedCapability,
        lambda: engine(_undeclared(Capability.AUX_LOSS), router_aux_coef=0.1),
    ),
    "router_aux_coef = 0.1, and 'qwen3' routes nothing": (
        ConfigError,
        lambda: engine(config=support.TINY, router_aux_coef=0.1),
    ),
    "has a token field 'routing', and 'qwen3' routes nothing": (
        BatchError,
        lambda: engine(config=support.TINY).forward(_with_routing(1, 2), ONE),
    ),
    "pass total_tokens with total_weight": (LossError, _balanced_in_parts),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_unsupported_expert_layouts_are_refused(message: str) -> None:
    kind, action = REFUSALS[message]
    with pytest.raises(kind, match=message):
        action()


# ------------------------------------------------------------------ reports


def test_the_balance_is_reported_beside_the_loss() -> None:
    plain, balanced = engine(), engine(router_aux_coef=0.1)
    alone = plain.eval_batch(support.batch(), LOSS, ONE)
    beside = balanced.eval_batch(support.batch(), LOSS, MicroBatchSpec(count=3))
    assert "aux_loss" not in alone
    assert beside["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert 0.5 < beside["aux_loss"] < EXPERTS
