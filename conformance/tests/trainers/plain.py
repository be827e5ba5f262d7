"""A trainer in plain torch, whose steps are methods that mutants override. Its ranks are parts of the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from core_rl_conformance.trainers.interface import SGD, MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.policy_losses import PolicyLoss
from trainers.pairs import PairLosses

NO_CLIPPING = 1e9


class PlainTrainer(PairLosses):
    """All sequences in one process, one model pass for each; written apart from the oracle and from core-rl."""

    def build(self, setup: TrainerSetup) -> None:
        self.setup = setup
        scores = setup.loss.objective == "bradley_terry"
        kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        self.model = kind.from_pretrained(
            setup.model_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        if setup.adapter_dir is not None:
            self.model = self.adapted(self.model, setup.adapter_dir).eval()
        given = setup.optimizer
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=given.lr)
            if isinstance(given, SGD)
            else torch.optim.AdamW(
                self.model.parameters(), lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=0.0
            )
        )
        self.max_norm = getattr(given, "max_grad_norm", None) or NO_CLIPPING
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def adapted(self, model: Any, path: str) -> Any:
        return PeftModel.from_pretrained(model, path, is_trainable=True)

    def factor(self, step: int) -> float:
        schedule = self.setup.schedule
        if step < schedule.warmup_steps:
            return (step + 1) / (schedule.warmup_steps + 1)
        if schedule.type == "constant":
            return 1.0
        assert schedule.total_steps is not None
        done = min(1.0, (step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps))
        return 1.0 - done if schedule.type == "linear" else (1.0 + math.cos(math.pi * done)) / 2

    # ------------------------------------------------------------------- batch

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        given, rule, loss = list(sequences), self.setup.advantages, self.setup.loss
        if loss.pairwise:
            self.check_pairs(given)
        values = [row.advantages for row in given] if rule is None else self.advantages_of(given, rule)
        self.optimizer.zero_grad()
        rows = list(zip(given, values, strict=True))
        ranks = [self.part(rows, rank, 2 if loss.pairwise else 1) for rank in range(self.setup.ranks)]
        total = 0.0
        clipped: list[Tensor] = []
        for part in ranks:
            batches = self.cut(part, cut)
            for batch in batches:
                value = self.loss_of(batch, loss, rows, part, clipped) * self.share(batches, ranks)
                value.backward()
                total += float(value.detach())
                self.after_backward()
        total = self.reduce(total)
        norm = self.clip() if apply else self.norm()
        if apply:
            self.optimizer.step()
            self.scheduler.step()
        return {"loss": total, "grad_norm": norm, "clipped": self.clipped_fraction(clipped, cut)}

    def part(
        self, rows: Sequence[tuple[TrainSequence, Tensor]], rank: int, size: int
    ) -> list[tuple[TrainSequence, Tensor]]:
        """Units of ``size`` sequences go to the ranks in turn."""
        return [row for number, row in enumerate(rows) if number // size % self.setup.ranks == rank]

    def reduce(self, total: float) -> float:
        """The loss of all processes; their gradients are added up."""
        return total

    def share(self, batches: Sequence[object], ranks: Sequence[object]) -> float:
        """The factor of a micro-batch, of one rank."""
        return 1.0

    def after_backward(self) -> None:
        """Called after each micro-batch."""

    def clipped_fraction(self, clipped: Sequence[Tensor], cut: MicroBatches) -> float:
        return float(torch.cat(list(clipped)).float().mean())

    def cut(
        self, rows: list[tuple[TrainSequence, Tensor]], cut: MicroBatches
    ) -> list[list[tuple[TrainSequence, Tensor]]]:
        size = cut.sequences or (2 if cut.max_tokens else len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def advantages_of(self, rows: Sequence[TrainSequence], rule: AdvantageRule) -> list[Tensor]:
        rewards = torch.tensor([row.reward for row in rows])
        groups = torch.tensor([row.group for row in rows])
        values = torch.zeros_like(rewards)
        for group in groups.unique():
            mine = groups == group
            values[mine] = self.of_group(rewards[mine], rule)
        return [value.expand(len(row.input_ids)) for row, value in zip(rows, values, strict=True)]

    def of_group(self, rewards: Tensor, rule: AdvantageRule) -> Tensor:
        centred = rewards - rewards.mean()
        if rule == "rloo":
            return centred * len(rewards) / (len(rewards) - 1)
        return centred / (rewards.std() + 1e-6) if rule == "grpo" else centred

    # -------------------------------------------------------------------- loss

    def loss_of(
        self,
        batch: Sequence[tuple[TrainSequence, Tensor]],
        loss: PolicyLoss,
        rows: Sequence[tuple[TrainSequence, Tensor]],
        part: Sequence[tuple[TrainSequence, Tensor]],
        clipped: list[Tensor],
    ) -> Tensor:
        """The part of the loss that ``batch`` has in the whole of ``rows``."""
        if loss.pairwise:
            terms = self.pair_terms([row for row, _ in batch], loss, clipped)
        else:
            terms = [self.terms(row, advantages, loss, clipped) for row, advantages in batch]
        return self.aggregated(terms, batch, loss) / self.divisor(rows, part, batch, loss)

    def aggregated(
        self, terms: Sequence[Tensor], batch: Sequence[tuple[TrainSequence, Tensor]], loss: PolicyLoss
    ) -> Tensor:
        sums = [
            term.sum() / max(1, len(term)) if loss.aggregation == "sequence_mean" else term.sum()
            for term in terms
        ]
        return torch.stack(sums).sum()

    def divisor(
        self,
        rows: Sequence[tuple[TrainSequence, Tensor]],
        part: Sequence[tuple[TrainSequence, Tensor]],
        batch: Sequence[tuple[TrainSequence, Tensor]],
        loss: PolicyLoss,
    ) -> float:
        return self.weight(rows, loss)

    def weight(self, rows: Sequence[tuple[TrainSequence, Tensor]], loss: PolicyLoss) -> float:
        if loss.pairwise:
            return len(rows) / 2
        counts = [int(self.trained(row).sum()) for row, _ in rows]
        if loss.aggregation == "token_mean":
            return float(sum(counts))
        sequences = sum(count > 0 for count in counts)
        return float(sequences * (loss.fixed_length if loss.aggregation == "fixed_length" else 1))

    def trained(self, row: TrainSequence) -> Tensor:
        """The mask of the tokens after the first."""
        return row.loss_mask[1:]

    def terms(
        self, row: TrainSequence, advantages: Tensor, loss: PolicyLoss, clipped: list[Tensor]
    ) -> Tensor:
        """The loss of each trained token."""
        logits = self.model(input_ids=row.input_ids[None], use_cache=False).logits[0, :-1]
        log_p = torch.log_softmax(self.at_temperature(logits, loss.temperature), dim=-1)
        mask = self.trained(row)
        logprobs = log_p.gather(1, row.input_ids[1:, None])[:, 0]
        ratios = self.ratios(logprobs, row.old_logprobs[1:], mask, loss)
        inside = (ratios > 1 - loss.clip_low) & (ratios < 1 + loss.clip_high)
        clipped.append(~inside[mask].detach())
        values = -self.objective(logprobs, ratios, self.aligned(advantages), loss)
        if loss.kl_coef:
            values = values + loss.kl_coef * self.divergence(logprobs, row.ref_logprobs[1:], loss)
        if loss.entropy_coef:
            values = values - loss.entropy_coef * self.entropy(log_p)
        return values[mask]

    def at_temperature(self, logits: Tensor, temperature: float) -> Tensor:
        return logits.float() / temperature

    def aligned(self, advantages: Tensor) -> Tensor:
        return advantages[1:]

    def ratios(self, logprobs: Tensor, old: Tensor, mask: Tensor, loss: PolicyLoss) -> Tensor:
        difference = logprobs - old
        if loss.objective == "gspo":
            difference = self.sequence_mean(difference, mask).expand_as(logprobs)
        return difference.exp()

    def sequence_mean(self, values: Tensor, mask: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum().clamp(min=1)

    def objective(self, logprobs: Tensor, ratios: Tensor, advantages: Tensor, loss: PolicyLoss) -> Tensor:
        match loss.objective:
            case "cross_entropy":
                return logprobs
            case "reinforce":
                return advantages * logprobs
            case "cispo":
                return self.weights_of(ratios, loss) * advantages * logprobs
        gains = torch.minimum(ratios * advantages, self.bounded(ratios, loss) * advantages)
        if loss.objective == "dual_clipped":
            return torch.where(
                self.bounded_below(advantages), gains.maximum(loss.dual_limit * advantages), gains
            )
        return gains

    def bounded(self, ratios: Tensor, loss: PolicyLoss) -> Tensor:
        return ratios.clamp(1 - loss.clip_low, 1 + loss.clip_high)

    def weights_of(self, ratios: Tensor, loss: PolicyLoss) -> Tensor:
        return self.bounded(ratios, loss).detach()

    def bounded_below(self, advantages: Tensor) -> Tensor:
        return advantages < 0

    def divergence(self, logprobs: Tensor, reference: Tensor, loss: PolicyLoss) -> Tensor:
        difference = reference - logprobs
        if loss.kl_estimator == "k1":
            return -difference
        return difference**2 / 2 if loss.kl_estimator == "k2" else difference.exp() - difference - 1

    def entropy(self, log_p: Tensor) -> Tensor:
        return -(log_p.exp() * log_p).sum(-1)

    # ------------------------------------------------------------------- state

    def norm(self) -> float:
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return float(torch.stack([grad.norm() for grad in grads]).norm())

    def clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))

    def gradients(self) -> Mapping[str, Tensor]:
        parameters = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {
            name.replace(".default", ""): torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in parameters
        }

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def save(self, path: str) -> None:
        Path(path).mkdir()
        torch.save(self.state(), Path(path) / "state.pt")

    def state(self) -> dict[str, object]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, path: str) -> None:
        for name, value in torch.load(Path(path) / "state.pt").items():
            getattr(self, name).load_state_dict(value)

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.setup.seed)).tolist()
        return [order[start : start + batch_size] for start in range(0, count, batch_size)]

    def close(self) -> None:
        """Nothing runs."""
