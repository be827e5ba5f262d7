"""Routers of a mixture of experts: recorded choices, their balance, and replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ROUTING_DTYPE, OutputName, segment_sum
from core_rl.data.pinned import to_device
from core_rl.errors import BatchError, UnsupportedCapability
from core_rl.toolkit.parallel_context import TokenSlice

__all__ = ["Routers", "Routing", "balance_loss", "own_routing", "routing_outputs"]

NORMALISING = ("Qwen3VLMoeTextTopKRouter",)
"""Classes of such routers that always divide gates by their sum, and have no attribute for it."""


@dataclass(frozen=True)
class Routing:
    """Logits and choices of one layer's router for ``T`` packed tokens."""

    logits: Tensor
    """``[T, E]``, with their graph."""
    experts: Tensor
    """The chosen ones, int64 ``[T, k]``."""


def balance_loss(routings: Sequence[Routing], cu_seqlens: Tensor) -> Tensor:
    """The load-balancing loss of each sequence, weighted by its tokens: a float32 scalar **sum** over tokens.

    Of one layer and sequence it is ``E * sum_e f_e * P_e``, with the share ``f_e`` of its choices that
    fell on expert ``e`` and the mean probability ``P_e``. It is 1 where both are even; layers are averaged.
    Being a matter of one sequence, it does not depend on what else is in the micro-batch (DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20). Gradients flow through the probabilities alone.
    """
    lengths = to_device(cu_seqlens.diff().float(), routings[0].logits.device)
    total = routings[0].logits.new_zeros((), dtype=torch.float32)
    for routing in routings:
        probabilities = F.softmax(routing.logits, dim=-1, dtype=torch.float32)
        count, k = probabilities.shape[1], routing.experts.shape[1]
        choices = F.one_hot(routing.experts, count).sum(1, dtype=torch.float32) / k
        # A sum over the tokens of f_e times a mean over them of P_e: the sequence counts by its length.
        shares, sums = segment_sum(choices, cu_seqlens), segment_sum(probabilities, cu_seqlens)
        total = total + count * (shares * sums).sum(1).div(lengths).sum()
    return total / len(routings)


def routing_outputs(
    routings: Sequence[Routing], cu_seqlens: Tensor, names: Sequence[OutputName], model: str
) -> dict[str, Tensor]:
    """The fields of a `ModelOutput` that the ``routings`` of all tokens give, as far as they are ``names`` for.

    Raises `UnsupportedCapability`, which names the ``model``, for one without routers of the known kind.
    """
    requested = [name for name in ("aux_loss", "routing") if name in names]
    if requested and not routings:
        raise UnsupportedCapability(
            f"{model} has no softmax top-k router, so it gives no {requested}: other kinds are not known"
        )
    computed = {"aux_loss": balance_loss(routings, cu_seqlens)} if "aux_loss" in names else {}
    if "routing" in names:
        computed["routing"] = torch.stack([routing.experts.to(ROUTING_DTYPE) for routing in routings], dim=1)
    return computed


def own_routing(batch: SequenceBatch, tokens: TokenSlice) -> Tensor | None:
    """The experts that ``batch`` prescribes for the tokens of this rank, ``[L, layers, k]``.

    Padding gets ``k`` different ones, as dispatchers count on for each token.
    """
    routing = batch.tokens.get("routing")
    if routing is None:
        return None
    if tokens.tree is not None:
        routing = routing[to_device(tokens.tree.kept, routing.device)]
    layers, k = routing.shape[1:]
    different = torch.arange(k, dtype=routing.dtype, device=routing.device)
    padded = torch.cat([routing, different.expand(tokens.segments[-1] - len(routing), layers, k)])
    local = padded[tokens.start : tokens.start + len(tokens.input_ids)]
    return local.to(tokens.input_ids.device)


class Routers:
    """Listens to the routers of ``model``, and makes them choose as recorded.

    Only softmax routers over the ``k`` likeliest experts are known.
    Recorded choices stay in force until the next `watch`: a block that activation checkpointing computes
    again in the backward pass must choose as it did before.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        self._routers = [module for module in model.modules() if _is_router(module)]
        self._replay: Tensor | None = None
        self._listening: list[dict[int, Routing]] = []
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._after, layer))

    @contextmanager
    def watch(self, replay: Tensor | None = None) -> Iterator[list[Routing]]:
        """A list that holds, after the context, the routing of each layer with a router; none of other models.

        Args:
            replay: experts to choose, of any integer dtype, ``[T, layers, k]``; gates follow from the present
                probabilities of these.

        Raises `BatchError` where ``replay`` is for another number of layers.
        """
        if replay is not None and replay.shape[1] != len(self._routers):
            raise BatchError(
                f"token field 'routing' is for {replay.shape[1]} layers; {self._name} has "
                f"{len(self._routers)} routers that can replay it"
            )
        routings: list[Routing] = []
        heard: dict[int, Routing] = {}
        self._replay = replay
        self._listening.append(heard)
        try:
            yield routings
            routings.extend(heard[layer] for layer in range(len(self._routers)))
        finally:
            self._listening.pop()

    def outputs(
        self, routings: Sequence[Routing], cu_seqlens: Tensor, names: Sequence[OutputName]
    ) -> dict[str, Tensor]:
        """`routing_outputs` of this model."""
        return routing_outputs(routings, cu_seqlens, names, self._name)

    def _after(
        self, layer: int, router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = output
        if self._replay is not None:
            experts = self._replay[:, layer].to(logits.device, torch.int64)
            gates = F.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
            if getattr(router, "norm_topk_prob", True):
                gates = gates / gates.sum(-1, keepdim=True)
            gates = gates.to(logits.dtype)
        for heard in self._listening:
            heard[layer] = Routing(logits, experts)
        return logits, gates, experts


def _is_router(module: nn.Module) -> bool:
    """True for a router like Qwen2-MoE's, Qwen3-MoE's and OLMoE's: softmax, then top-k, perhaps normalised."""
    if type(module).__name__ in NORMALISING:
        return True
    return all(
        hasattr(module, name) for name in ("top_k", "num_experts", "norm_topk_prob", "weight")
    ) and not (hasattr(module, "experts") or hasattr(module, "e_score_correction_bias"))
