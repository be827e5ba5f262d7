"""Log-probs and entropy of given tokens, in float32 and in chunks.

``[T, vocabulary]`` does not exist in float32 as a whole: each chunk of rows makes its logits, reduces
them, and drops them; the backward pass makes them again. Only where all fit in `KEEP_BYTES` are they kept
for it, so that small vocabularies pay nothing for a saving that they do not need. All chunks work in
the same two buffers: fresh ones would cost the CPU a page fault for every 4 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_rl.toolkit import cuda
from core_rl.toolkit.cuda import add_product, product
from core_rl.toolkit.parallel_context import VocabularyShard

__all__ = ["HeadMap", "chunk_rows", "token_logits", "token_logprobs"]

CHUNK_ROWS = 512
"""Most rows whose logits the CPU makes at once. More gain nothing in the products and leave the cache."""

CUDA_CHUNK_ROWS = 2048
"""The same for CUDA, whose products are not busy with fewer; at a vocabulary of 151,936, 1.2 GB in float32."""

GROUP_ROWS = 512
"""Rows whose gradients in half precision go into one product, where chunks are smaller: each product writes as many
numbers as the head has, and where it adds to others, reads and writes as many in float32."""

CPU_CHUNK_BYTES = 96 * 2**20
"""Most float32 logits that the CPU makes at once, in bytes; there are two buffers of this size."""

KEEP_BYTES = 128 * 2**20
"""The largest float32 logits, in bytes, that are kept between the forward and the backward pass: all or none."""

LOWEST = -128.0
"""exp is 0 here and below in float32, so that p * log p is 0 and not NaN where a logit is -inf."""

LOWEST_FLOAT = torch.finfo(torch.float32).min


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """Operations of a language-model head after its matrix product."""

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

    def apply_(self, logits: Tensor) -> Tensor:
        """The same in place, on the raw product in float32, without a graph."""
        factor = self.scale / self.temperature
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_()
            factor = self.softcap / self.temperature
        return logits if factor == 1.0 else logits.mul_(factor)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Derivative of this map's result ``logits`` by the raw product."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0).mul_(factor)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    head: HeadMap | None = None,
    with_entropy: bool = False,
    vocabulary: VocabularyShard | None = None,
    chunk: int | None = None,
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
        chunk: rows whose logits are made at once; by default `chunk_rows`.
        keep_bytes: the logits are kept for the backward pass where all of them take at most this.

    Returns:
        Log-probs and, if asked, entropy, float32 ``[N]``, both differentiable.
    """
    if bias is not None:
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        weight = torch.cat([weight, bias[:, None]], dim=1)
    row_bytes = 4 * max(1, len(weight))
    if chunk is None:
        chunk = chunk_rows(row_bytes, hidden.device.type == "cpu")
    keep = torch.is_grad_enabled() and len(hidden) * row_bytes <= keep_bytes
    apply: Any = _TokenLogprobs.apply
    plan = _Plan(head or HeadMap(), with_entropy, vocabulary, chunk, keep)
    logprobs, entropy = apply(hidden, weight, targets, plan)
    return logprobs, entropy if with_entropy else None


def chunk_rows(row_bytes: float, on_cpu: bool) -> int:
    """Number of rows of logits, of ``row_bytes`` float32 each, that are computed at once."""
    return min(CHUNK_ROWS, max(1, int(CPU_CHUNK_BYTES // row_bytes))) if on_cpu else CUDA_CHUNK_ROWS


def token_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, head: HeadMap | None = None
) -> Tensor:
    """All logits, float32 ``[N, V]``, through scale, soft cap and temperature."""
    return (head or HeadMap())(torch.nn.functional.linear(hidden, weight, bias))


@dataclass(frozen=True)
class _Plan:
    """Settings for the chunked computation over rows."""

    head: HeadMap
    with_entropy: bool
    vocabulary: VocabularyShard | None
    chunk: int
    keep: bool
    """Whether the logits, or their exponentials, wait for the backward pass."""

    @property
    def exponentials(self) -> bool:
        """Whether exp(logits) is all that the backward pass needs."""
        return not self.with_entropy and self.head.softcap is None

    def chunks(self, rows: slice) -> Iterator[slice]:
        """Parts of ``rows`` whose float32 logits are made at once."""
        return _parts(rows, self.chunk)

    def groups(self, hidden: Tensor) -> Iterator[slice]:
        """Parts of all rows whose gradients go into one product; in float32 these are chunks."""
        half = hidden.dtype != torch.float32
        return _parts(slice(0, len(hidden)), max(self.chunk, GROUP_ROWS) if half else self.chunk)

    def buffer(self, rows: int, weight: Tensor) -> Tensor:
        return torch.empty(rows, len(weight), dtype=torch.float32, device=weight.device)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        product(hidden, weight.T, out)
        return self.head.apply_(out)

    def above(self, highest: Tensor, total: Tensor) -> Tensor:
        """The log-sum-exp over the whole vocabulary minus the ``highest`` logit here; ``total`` is
        the sum of exp(logit - highest) here.
        """
        local = total.log()
        return local if self.vocabulary is None else self.vocabulary.normaliser(highest + local) - highest

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
        index, is_local = plan.locate(targets, len(weight))
        highest, total, target, mean = torch.zeros(4, count, dtype=torch.float32, device=hidden.device)
        stored = plan.buffer(count if plan.keep else min(plan.chunk, count), weight)
        exponential = plan.buffer(0 if plan.exponentials else min(plan.chunk, count), weight)
        for rows in plan.chunks(slice(0, count)):
            out = stored[rows] if plan.keep else stored[: rows.stop - rows.start]
            logits = plan.logits(hidden[rows], weight, out)
            # Finite, so that a row of -inf stays one.
            highest[rows] = logits.amax(dim=1).clamp(min=LOWEST_FLOAT)
            logits.sub_(highest[rows, None])
            target[rows] = logits.gather(1, index[rows, None]).squeeze(1)
            p = torch.exp(logits, out=logits if plan.exponentials else exponential[: len(logits)])
            total[rows] = p.sum(dim=1)
            if plan.with_entropy:
                # The backward pass clamps as well, and makes p again; the slope of a soft cap needs lower values.
                capped = plan.keep and plan.head.softcap is not None
                finite = torch.clamp(logits, min=LOWEST, out=None if capped else logits)
                mean[rows] = p.mul_(finite).sum(dim=1)
        above = plan.above(highest, total)
        logprobs = target - above
        entropy = (-above).exp() * (above * total - mean) if plan.with_entropy else mean[:0]
        if plan.vocabulary is not None:
            logprobs, entropy = plan.vocabulary.add_up(torch.where(is_local, logprobs, 0.0), entropy)
        ctx.save_for_backward(
            hidden, weight, index, is_local, highest, above, entropy, *([stored] if plan.keep else [])
        )
        ctx.plan = plan
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        groups = [*plan.groups(hidden)]
        # float32, because the sum over groups of a bfloat16 gradient would be rounded each time. CUDA may round within
        # one product as well.
        sums = needs_weight and (len(groups) != 1 or cuda.on_cuda(weight))
        total = torch.zeros_like(weight, dtype=torch.float32) if sums else None
        only: Tensor | None = None
        by_logits = _LogitGradients(plan, ctx.saved_tensors, grads)
        for group in groups:
            grad = by_logits.of(group)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[group])
            if total is not None:
                add_product(total, grad.T, hidden[group])
            elif needs_weight:
                only = grad.T @ hidden
        return grad_hidden, only if total is None else total.to(weight.dtype), None, None


class _LogitGradients:
    """Gradients of the raw product of the head, of which a group of rows exists at one time."""

    def __init__(self, plan: _Plan, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        self._plan = plan
        (
            self._hidden,
            self._weight,
            self._index,
            self._here,
            highest,
            self._above,
            self._entropy,
            *self._kept,
        ) = saved
        self._by_logprobs, self._by_entropy = grads
        self._normaliser = highest + self._above
        rows = min(plan.chunk, len(self._hidden))
        self._scratch = [plan.buffer(rows, self._weight) for _ in range(1 + plan.with_entropy)]
        self._rounded: Tensor | None = None

    def of(self, group: slice) -> Tensor:
        """Gradients of the rows ``group``, in the dtype of the products; valid until the next group."""
        if self._weight.dtype == torch.float32:
            return self._chunk(group)
        size = group.stop - group.start
        if self._rounded is None:  # the first group is the largest
            self._rounded = self._weight.new_empty(size, len(self._weight))
        for rows in self._plan.chunks(group):
            self._rounded[rows.start - group.start : rows.stop - group.start] = self._chunk(rows)
        return self._rounded[:size]

    def _chunk(self, rows: slice) -> Tensor:
        """Float32, in a buffer that the next chunk takes."""
        plan, stored = self._plan, self._kept
        buffer, *scratch = (buffer[: rows.stop - rows.start] for buffer in self._scratch)
        by_raw: Tensor | float = plan.head.scale / plan.head.temperature
        by_logprobs, above = self._by_logprobs[rows], self._above[rows]
        if stored and plan.exponentials:
            factor = -by_logprobs * (-above).exp()
            grad = torch.mul(stored[0][rows], factor[:, None], out=buffer)
        else:
            normaliser = self._normaliser[rows, None]
            if stored:
                log_p = torch.sub(stored[0][rows], above[:, None], out=buffer)
            else:
                log_p = plan.logits(self._hidden[rows], self._weight, buffer).sub_(normaliser)
            if plan.head.softcap is not None:
                by_raw = plan.head.derivative(log_p + normaliser)
            grad = _through_softmax(log_p, by_logprobs, self._by_entropy, self._entropy, rows, scratch)
        by_target = torch.where(self._here[rows], by_logprobs, 0.0)
        grad.scatter_add_(1, self._index[rows, None], by_target[:, None])
        return grad if isinstance(by_raw, float) and by_raw == 1.0 else grad.mul_(by_raw)


def _parts(rows: slice, most: int) -> Iterator[slice]:
    """Parts of ``rows`` of nearly equal sizes, of at most ``most``."""
    size = -(-(rows.stop - rows.start) // max(1, -(-(rows.stop - rows.start) // most)))
    return (slice(at, min(at + size, rows.stop)) for at in range(rows.start, rows.stop, max(1, size)))


def _through_softmax(
    log_p: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    entropy: Tensor,
    rows: slice,
    scratch: list[Tensor],
) -> Tensor:
    """The gradient of the logits but for the chosen tokens' own, in the memory of ``log_p``."""
    if not scratch:
        return log_p.exp_().mul_(-grad_logprobs[:, None])
    slope = -grad_entropy[rows]
    constant = slope * entropy[rows] - grad_logprobs
    log_p.clamp_(min=LOWEST)
    factor = torch.addcmul(constant[:, None], log_p, slope[:, None], out=scratch[0])
    return log_p.exp_().mul_(factor)
