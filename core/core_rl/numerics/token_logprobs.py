"""Log-probs and entropy of given tokens, in float32 and in chunks.

``[T, vocabulary]`` does not exist in float32 as a whole: each chunk of rows makes its logits, reduces
them, and drops them; the backward pass makes them again. Only as many chunks as fit in `KEEP_BYTES`
are kept for it, so that small vocabularies pay nothing for a saving that they do not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_rl.numerics.vocabulary import VocabularyShard

__all__ = ["HeadMap", "token_logits", "token_logprobs"]

CHUNK = 512
"""Rows whose logits are made at once."""

KEEP_BYTES = 128 * 2**20
"""The most that is kept of the float32 logits between the forward and the backward pass, in bytes."""


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """What a language-model head does after its matrix product."""

    scale: float = 1.0
    """Multiplies the logits (Cohere's ``logit_scale``, 1 / Granite's ``logits_scaling``)."""
    softcap: float | None = None
    """``c * tanh(logits / c)`` (Gemma 2's ``final_logit_softcapping``)."""
    temperature: float = 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Float32 logits ``[N, V]`` divided by the temperature, from the raw product in any dtype."""
        logits = raw.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def backward(self, grad: Tensor, log_p: Tensor, normaliser: Tensor) -> Tensor:
        """The gradient of the raw product; ``grad`` is that of this map's result ``log_p + normaliser``."""
        factor = self.scale / self.temperature
        if self.softcap is not None:
            grad = grad * (1.0 - ((log_p + normaliser) * (self.temperature / self.softcap)) ** 2)
        return grad if factor == 1.0 else grad * factor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    head: HeadMap | None = None,
    with_entropy: bool = False,
    vocabulary: VocabularyShard | None = None,
    chunk: int = CHUNK,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """``log_softmax(head(hidden @ weight.T))[targets]`` and the entropy of that softmax.

    Args:
        hidden: the states that predict, ``[N, H]``.
        weight: the head, ``[V, H]``; ``bias`` is ``[V]``.
        targets: the predicted ids, int64 ``[N]``.
        head: scale, soft cap and temperature of the logits.
        with_entropy: also return the entropy in nats.
        vocabulary: where ``weight`` and ``bias`` hold only some rows of the head. Results are those over
            the whole vocabulary; the gradient of ``hidden`` is this rank's part of it, and the
            caller adds the parts up.
        chunk: rows whose logits are made at once.
        keep_bytes: the most that is kept of them for the backward pass.

    Returns:
        Log-probs and, if asked, entropy, float32 ``[N]``, both differentiable.
    """
    if bias is not None:
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    keep_rows = keep_bytes // (4 * len(weight)) if torch.is_grad_enabled() else 0
    apply: Any = _TokenLogprobs.apply
    plan = _Plan(head or HeadMap(), with_entropy, vocabulary, chunk, keep_rows)
    logprobs, entropy = apply(hidden, weight, targets, plan)
    return logprobs, entropy if with_entropy else None


def token_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, head: HeadMap | None = None
) -> Tensor:
    """All logits, float32 ``[N, V]``, through scale, soft cap and temperature."""
    return (head or HeadMap())(torch.nn.functional.linear(hidden, weight, bias))


@dataclass(frozen=True)
class _Plan:
    """How the rows are gone through."""

    head: HeadMap
    with_entropy: bool
    vocabulary: VocabularyShard | None
    chunk: int
    keep_rows: int

    def chunks(self, count: int) -> Iterator[slice]:
        return (slice(start, min(start + self.chunk, count)) for start in range(0, count, self.chunk))

    def normaliser(self, logits: Tensor) -> Tensor:
        own = torch.logsumexp(logits, dim=-1)
        return own if self.vocabulary is None else self.vocabulary.normaliser(own)

    def locate(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        if self.vocabulary is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        return self.vocabulary.locate(targets, rows)


class _TokenLogprobs(torch.autograd.Function):
    """With z the logits, p = softmax(z) and H the entropy: d log p_y / dz = 1_y - p, and
    dH / dz = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros(count if plan.with_entropy else 0, dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(logprobs)
        index, here = plan.locate(targets, len(weight))
        kept: list[Tensor] = []
        for rows in plan.chunks(count):
            log_p = plan.head(hidden[rows] @ weight.T)
            normaliser[rows] = plan.normaliser(log_p)
            log_p.sub_(normaliser[rows, None])
            logprobs[rows] = log_p.gather(1, index[rows, None]).squeeze(1)
            if plan.with_entropy:
                entropy[rows] = -torch.linalg.vecdot(log_p.exp(), _finite(log_p))
            if rows.stop <= plan.keep_rows:
                kept.append(log_p)
        if plan.vocabulary is not None:
            logprobs, entropy = plan.vocabulary.add_up(torch.where(here, logprobs, 0.0), entropy)
        ctx.save_for_backward(hidden, weight, index, here, normaliser, entropy, *kept)
        ctx.plan = plan
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, index, here, normaliser, entropy, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # float32, because the sum over chunks of a bfloat16 gradient would be rounded each time.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for number, rows in enumerate(plan.chunks(len(hidden))):
            again = number >= len(kept)
            log_p = plan.head(hidden[rows] @ weight.T).sub_(normaliser[rows, None]) if again else kept[number]
            grad = log_p.exp()
            if plan.with_entropy:
                slope = (_finite(log_p) + entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad.mul_(slope.add_(grad_logprobs[rows, None]).neg_())
            else:
                grad.mul_(-grad_logprobs[rows, None])
            chosen = torch.where(here[rows], grad_logprobs[rows], 0.0)
            grad.scatter_add_(1, index[rows, None], chosen[:, None])
            grad = plan.head.backward(grad, log_p, normaliser[rows, None]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """``total [V, H] += grad [N, V].T @ hidden [N, H]``, with a float32 ``total``."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden


def _finite(log_p: Tensor) -> Tensor:
    """``p * log p`` is 0 where p is 0, also where log p is -inf."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)
