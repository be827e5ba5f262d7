"""Policy, preference and reward losses, and their gradients, against TRL's own on the same numbers.

TRL is no dependency of core-rl: ``nox -s trl`` installs it and runs this file. Its losses are methods of trainers;
they are called here on trainers with the attributes that the loss reads. The model of these trainers is a table
of log-probs, so that nothing but the loss is compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl_trainer.algorithms import DPOConfig, RewardModelConfig
from core_rl_trainer.algorithms.aggregation import FixedLength
from core_rl_trainer.algorithms.objectives import CISPO, GSPO, Clipped, PolicyLoss, SequenceClipped

PROMPT = 2
LENGTHS = [5, 1, 9, 3, 4, 7]
"""Of the completions."""


def make_batch(seed: int) -> SequenceBatch:
    """A prompt of two tokens before each completion; an advantage for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [PROMPT + length for length in LENGTHS]
    total = sum(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs()
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return SequenceBatch(
        input_ids=torch.zeros(total, dtype=torch.long),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        tokens={
            "loss_mask": torch.cat([torch.arange(length) >= PROMPT for length in lengths]),
            "logprobs": old,
            "prox_logprobs": old,
            "ref_logprobs": old + noise(0.3),
            "advantages": torch.repeat_interleave(advantages, torch.tensor(lengths)),
            "importance_weights": noise(0.2).exp(),
            "new": old + noise(0.3),
            "entropy": noise(1.0).abs(),
        },
        sequences={"advantage": advantages},
    )


def padded(batch: SequenceBatch, name: str) -> Tensor:
    """Completions of a token field, right-padded ``[B, max(LENGTHS)]``."""
    rows = [row[PROMPT:] for row in batch[name].split(batch.lengths)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def bare(trainer: type[Any], **attributes: Any) -> Any:
    """A trainer without the machinery of its constructor."""
    made = object.__new__(trainer)
    model = torch.nn.Identity().train()
    shared = {"accelerator": Accelerator(cpu=True), "model": model, "aux_loss_enabled": False}
    for name, value in {**shared, "_metrics": defaultdict(lambda: defaultdict(list)), **attributes}.items():
        setattr(made, name, value)
    return made


def given_logprobs(trainer: Any, logprobs: Tensor, entropy: Tensor) -> Any:
    """``trainer`` with these log-probs in place of its model's."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
    return trainer


def trl_inputs(batch: SequenceBatch) -> dict[str, Tensor]:
    rows, width = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    prompts = torch.ones(rows, PROMPT, dtype=torch.long)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.zeros(rows, width, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": batch["advantage"],
        "old_per_token_logps": padded(batch, "prox_logprobs"),
        "ref_per_token_logps": padded(batch, "ref_logprobs"),
        "importance_sampling_ratio": padded(batch, "importance_weights"),
        "num_items_in_batch": mask.sum(),
    }


def compare(ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, Tensor]) -> None:
    """Equal losses, and equal gradients with respect to the packed and the padded leaf."""
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-10)
    (own,) = torch.autograd.grad(ours, leaves[0])
    (other,) = torch.autograd.grad(theirs, leaves[1])
    assert bool((own != 0).any())
    rows = [row[PROMPT:] for row in own.split([PROMPT + length for length in LENGTHS])]
    torch.testing.assert_close(
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), other, rtol=1e-9, atol=1e-12
    )


GRPO_CASES: dict[str, tuple[PolicyLoss, dict[str, Any]]] = {
    "grpo": (PolicyLoss(objective=Clipped(aggregation="sequence_mean")), {"loss_type": "grpo"}),
    "grpo-kl": (
        PolicyLoss(objective=Clipped(aggregation="sequence_mean"), kl_coef=0.04),
        {"loss_type": "grpo", "beta": 0.04},
    ),
    "dapo": (PolicyLoss(objective=Clipped(clip_high=0.28)), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (
        PolicyLoss(objective=Clipped(aggregation=FixedLength(fixed_length=16))),
        {"loss_type": "dr_grpo", "max_completion_length": 16},
    ),
    "gspo": (
        PolicyLoss(objective=GSPO(clip_low=0.05, clip_high=0.08)),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 0.08,
        },
    ),
    "cispo": (PolicyLoss(objective=CISPO(clip_high=0.3)), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "weights": (
        PolicyLoss(objective=Clipped(aggregation="sequence_mean")),
        {"loss_type": "grpo", "use_vllm": True},
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", GRPO_CASES)
def test_policy_losses(case: str, seed: int) -> None:
    loss, settings = GRPO_CASES[case]
    batch = make_batch(seed)
    new = batch["new"].clone().requires_grad_(True)
    theirs_new = padded(batch, "new").requires_grad_(True)
    defaults = {
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "max_completion_length": 16, "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
    }  # fmt: skip
    trainer = bare(GRPOTrainer, **(defaults | settings))
    given_logprobs(trainer, theirs_new, padded(batch, "entropy"))
    theirs = trainer._compute_loss(None, trl_inputs(batch))
    chosen = batch if settings.get("use_vllm") else without(batch, "importance_weights")
    total, _ = loss(ModelOutput(logprobs=new, entropy=batch["entropy"]), chosen)
    compare(total / loss.spec(1.0).weight(chosen), theirs, (new, theirs_new))


@pytest.mark.parametrize("seed", range(5))
def test_rloo_loss(seed: int) -> None:
    batch = make_batch(seed)
    new = batch["new"].clone().requires_grad_(True)
    theirs_new = padded(batch, "new").requires_grad_(True)
    trainer = given_logprobs(
        bare(RLOOTrainer, epsilon_low=0.2, epsilon_high=0.3), theirs_new, padded(batch, "entropy")
    )
    inputs = trl_inputs(batch) | {"old_logps": padded(batch, "prox_logprobs").sum(1)}
    loss = PolicyLoss(objective=SequenceClipped(clip_high=0.3))
    chosen = without(batch, "importance_weights")
    total, _ = loss(ModelOutput(logprobs=new, entropy=batch["entropy"]), chosen)
    compare(total / loss.spec(1.0).weight(chosen), trainer._compute_loss(None, inputs), (new, theirs_new))


def without(batch: SequenceBatch, name: str) -> SequenceBatch:
    return replace(batch, tokens={key: value for key, value in batch.tokens.items() if key != name})


# ------------------------------------------------------------------ preferences


def pairs(batch: SequenceBatch) -> SequenceBatch:
    """The first half is chosen, as TRL lays a batch out."""
    half = len(LENGTHS) // 2
    chosen = torch.arange(len(LENGTHS)) < half
    return replace(batch, unit=torch.arange(half).repeat(2), sequences={**batch.sequences, "chosen": chosen})


class LogProbTable(torch.nn.Module):
    """A model that answers with log-probs of the completion, 0 in its padding, and with empty statistics."""

    def __init__(self, logprobs: Tensor) -> None:
        super().__init__()
        self.logprobs = logprobs

    def forward(self, **_: Any) -> SimpleNamespace:
        prompt = self.logprobs.new_zeros(len(self.logprobs), PROMPT - 1)
        log_probs = torch.cat([prompt, self.logprobs], dim=1)
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


DPO_CASES: dict[str, tuple[DPOConfig, dict[str, Any]]] = {
    "sigmoid": (DPOConfig(beta=0.3), {"loss_types": ["sigmoid"]}),
    "ipo": (DPOConfig(variant="ipo", beta=0.3), {"loss_types": ["ipo"]}),
    "hinge": (DPOConfig(variant="hinge", beta=0.3), {"loss_types": ["hinge"]}),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo_losses(case: str, seed: int) -> None:
    loss, settings = DPO_CASES[case]
    batch = pairs(make_batch(seed))
    new = batch["new"].clone().requires_grad_(True)
    theirs_new = padded(batch, "new").requires_grad_(True)
    trainer = bare(
        DPOTrainer, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=0.3,
        label_smoothing=0.0, loss_weights=[1.0], use_weighting=False, _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip
    mask = trl_inputs(batch)["completion_mask"]
    whole = torch.cat([torch.zeros(len(LENGTHS), PROMPT, dtype=torch.long), mask], dim=1)
    reference = padded(batch, "ref_logprobs").sum(1).chunk(2)
    inputs = {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}
    inputs |= {"ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
    theirs = trainer._compute_loss(LogProbTable(theirs_new * mask), inputs, return_outputs=False)
    total, _ = loss(ModelOutput(logprobs=new), batch)
    compare(total / loss.spec().weight(batch), theirs, (new, theirs_new))


@pytest.mark.parametrize("center", [None, 0.01])
@pytest.mark.parametrize("margins", [False, True])
def test_reward_loss(center: float | None, margins: bool) -> None:
    batch = pairs(make_batch(0))
    scores = torch.randn(len(LENGTHS), dtype=torch.float64)
    margin = torch.rand(len(LENGTHS) // 2, dtype=torch.float64)
    arguments = SimpleNamespace(center_rewards_coefficient=center)
    trainer = bare(RewardTrainer, args=arguments, _total_train_tokens=0, _tp_size=1)
    inputs = {"attention_mask": torch.ones(1)} | ({"margin": margin} if margins else {})
    theirs = trainer.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    if margins:
        batch = batch.with_sequences(margin=margin.repeat(2))
    loss = RewardModelConfig(center_coef=center or 0.0)
    total, _ = loss(ModelOutput(scores=scores), batch)
    assert float(total) / loss.spec().weight(batch) == pytest.approx(float(theirs), rel=1e-12)
