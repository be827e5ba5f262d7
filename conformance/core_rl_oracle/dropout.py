"""Dropout of attention weights with given masks: then nothing in a training pass is random.

In a sequence of two tokens the second one is predicted from the first, which attends to itself alone. So each head of
a layer adds its value divided by ``1 - p``, or nothing: with ``n`` heads in all, ``2 ** n`` results are possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from core_rl_oracle.experts import all_written, gradients_of
from core_rl_oracle.float64 import float64_only
from core_rl_oracle.plain import VARIANTS, PlainModel


@dataclass(frozen=True, kw_only=True)
class MaskedPairs:
    """``N`` sequences of two tokens, and the heads that dropout keeps in each of them."""

    firsts: Tensor
    """Ids ``[N]``."""
    seconds: Tensor
    """Ids ``[N]``, which are predicted."""
    factors: Tensor
    """Factor of each attention weight, ``[N, layers, heads]``: ``1 / (1 - p)`` where it is kept, else 0."""

    def shuffled(self, seed: int) -> MaskedPairs:
        """The same in another order."""
        order = torch.randperm(len(self.firsts), generator=torch.Generator().manual_seed(seed))
        return MaskedPairs(
            firsts=self.firsts[order], seconds=self.seconds[order], factors=self.factors[order]
        )

    def outputs(self, model: PreTrainedModel, *, exact: bool, by_lse: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the second tokens, each ``[N]``.

        ``exact`` computes in float64, otherwise in the model's dtype. ``by_lse`` takes the entropy from the
        log-sum-exp.
        """
        factors = self.factors.double().unbind(1)
        with _precise(exact), _training(model), _Given(factors):
            logits = model(input_ids=self.firsts[:, None], use_cache=False).logits[:, 0].float()
            lse = torch.logsumexp(logits, dim=-1)
            log_p = logits - lse[:, None]
            entropy = lse - (log_p.exp() * logits).sum(-1) if by_lse else -(log_p.exp() * log_p).sum(-1)
            return log_p.gather(1, self.seconds[:, None])[:, 0], entropy

    def gradients(
        self, model: PreTrainedModel, entropy_coef: float, *, exact: bool
    ) -> tuple[float, dict[str, Tensor]]:
        """The mean of ``-log p - entropy_coef * entropy``, and its gradients by written names."""
        model.zero_grad(set_to_none=True)
        logprobs, entropy = self.outputs(model, exact=exact)
        with _precise(exact):
            loss = -(logprobs + entropy_coef * entropy).mean()
            loss.backward()
        grads = {name: grad.clone() for name, grad in all_written(gradients_of(model)).items()}
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), grads


def all_masks(layers: int, heads: int) -> Tensor:
    """Every choice of heads to keep, bool ``[2 ** (layers * heads), layers, heads]``."""
    return torch.tensor(list(product((False, True), repeat=layers * heads))).reshape(-1, layers, heads)


def plain_outputs(plain: PlainModel, pairs: MaskedPairs) -> list[tuple[Tensor, Tensor]]:
    """The outputs of the plain model in several equivalent ways."""
    with torch.no_grad():
        return [
            pairs.outputs(
                plain.model(replace(variant, attention="eager")),
                exact=False,
                by_lse=variant.softmax == "logsumexp",
            )
            for variant in VARIANTS
        ]


def plain_gradients(
    plain: PlainModel, pairs: MaskedPairs, entropy_coef: float
) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of the plain model in several equivalent ways."""
    return [
        pairs.shuffled(seed).gradients(
            plain.model(replace(variant, attention="eager")), entropy_coef, exact=False
        )
        for seed, variant in enumerate(VARIANTS)
    ]


class _Given(TorchFunctionMode):
    """Reads the calls of ``dropout``, one for each layer, as products with given factors."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        super().__init__()
        self._factors = iter(factors)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is not torch.nn.functional.dropout:
            return func(*args, **keywords)
        weights, rate = args[0], float(keywords["p"] if "p" in keywords else args[1])
        if rate == 0.0:
            return weights
        return weights * next(self._factors)[:, :, None, None].to(weights.dtype)


def _precise(exact: bool) -> Any:
    return float64_only() if exact else nullcontext()


@contextmanager
def _training(model: PreTrainedModel) -> Iterator[None]:
    """Training mode, in which dropout is called, inside the context."""
    model.train()
    try:
        yield
    finally:
        model.eval()
