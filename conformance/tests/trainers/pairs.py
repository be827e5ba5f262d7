"""Losses on pairs for the plain trainer, in methods that mutants override."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core_rl_conformance.trainers.interface import TrainSequence
from core_rl_oracle.policy_losses import PolicyLoss


class PairLosses:
    """Losses of neighbours, the preferred sequence first."""

    model: Any

    def check_pairs(self, rows: Sequence[TrainSequence]) -> None:
        """Raise `ValueError` unless each two neighbours have one group."""
        groups = [row.group for row in rows]
        if groups[::2] != groups[1::2]:
            raise ValueError(f"neighbours have the groups {groups}; give pairs of one group each")

    def pair_terms(
        self, rows: Sequence[TrainSequence], loss: PolicyLoss, preferred: list[Tensor]
    ) -> list[Tensor]:
        """The loss of each pair; ``preferred`` gets whether the model agrees."""
        terms = []
        for first, second in zip(rows[::2], rows[1::2], strict=False):
            gap = self.gap(first, second, loss)
            preferred.append((gap > 0).detach().reshape(1))
            terms.append((1.0 + (-gap).exp()).log())
        return terms

    def gap(self, preferred: TrainSequence, rejected: TrainSequence, loss: PolicyLoss) -> Tensor:
        if loss.objective == "bradley_terry":
            return self.score(preferred) - self.score(rejected)
        return self.beta(loss) * (self.log_ratio(preferred) - self.log_ratio(rejected))

    def beta(self, loss: PolicyLoss) -> float:
        return loss.beta

    def log_ratio(self, row: TrainSequence) -> Tensor:
        """The log-ratio of all trained tokens together."""
        logits = self.model(input_ids=row.input_ids[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, row.input_ids[1:, None])[:, 0]
        return ((logprobs - self.reference(row)) * row.loss_mask[1:]).sum()

    def reference(self, row: TrainSequence) -> Tensor:
        return row.ref_logprobs[1:]

    def score(self, row: TrainSequence) -> Tensor:
        return self.scores(row)[-1]

    def scores(self, row: TrainSequence) -> Tensor:
        """The head at each token."""
        hidden = self.model.base_model(input_ids=row.input_ids[None], use_cache=False).last_hidden_state
        values: Tensor = self.model.score(hidden)[0, :, 0]
        return values
