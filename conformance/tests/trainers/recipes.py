"""The plain trainer with its settings in a JSON file, among them terms that no `PolicyLoss` describes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile
from core_rl_conformance.trainers.interface import TrainerSetup, TrainSequence
from core_rl_conformance.trainers.spec import Feature, TrainerSpec
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.oracle import AdamW, Schedule
from core_rl_oracle.policy_losses import PolicyLoss
from trainers.plain import PlainTrainer

SPEC = TrainerSpec(
    name="plain",
    factory="trainers.recipes:RecipeTrainer",
    objectives=frozenset({"cross_entropy", "clipped", "dual_clipped", "gspo", "cispo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    advantages=frozenset({"grpo"}),
    features=frozenset({Feature.GRADIENTS, Feature.SEQUENCE_COUNT, Feature.RECIPES, Feature.EPOCHS}),
    profile=Profile(layouts=(ParallelLayout(),)),
)
WITHOUT_RECIPES = replace(SPEC, features=SPEC.features - {Feature.RECIPES, Feature.GRADIENTS} | {Feature.SGD})


class RecipeTrainer(PlainTrainer):
    """``loss``, ``advantages``, ``schedule`` and flags of unusual terms."""

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        settings = json.loads(Path(recipe).read_text(encoding="utf-8"))
        self.flags = frozenset(settings.pop("flags", ()))
        setup = TrainerSetup(
            model_dir=model_dir,
            optimizer=AdamW(lr=settings.pop("lr", 1e-3), **settings.pop("optimizer", {})),
            schedule=Schedule(**settings.pop("schedule", {})),
            loss=PolicyLoss(**settings.pop("loss", {})),
            advantages=settings.pop("advantages", "grpo"),
            dtype="float32",
            ranks=1,
            seed=settings.pop("seed", 0),
        )
        assert not settings
        self.build(setup)
        assert isinstance(setup.optimizer, AdamW)
        parameters = list(self.model.parameters())
        matrices = [value for value in parameters if value.dim() > 1]
        self.optimizer.param_groups[0]["params"] = [value for value in parameters if value.dim() < 2]
        self.optimizer.add_param_group({"params": matrices, "weight_decay": setup.optimizer.weight_decay})
        if "momentum" in self.flags:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=setup.optimizer.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        for dtype in {"bfloat16", "float16"} & self.flags:
            self.model.forward = torch.autocast("cpu", getattr(torch, dtype))(self.model.forward)

    def trained(self, row: TrainSequence) -> Tensor:
        mask = super().trained(row).clone()
        if "no EOS" in self.flags:
            mask[-1] = False
        return torch.ones_like(mask) if "prompts" in self.flags else mask

    def advantages_of(self, rows: Sequence[TrainSequence], rule: AdvantageRule) -> list[Tensor]:
        values = super().advantages_of(rows, rule)
        if "whitened" not in self.flags:
            return values
        trained = torch.cat([value[1:][self.trained(row)] for row, value in zip(rows, values, strict=True)])
        return [(value - trained.mean()) / trained.std(correction=0) for value in values]

    def share(self, batches: Sequence[object], ranks: Sequence[object]) -> float:
        return 1.0 / len(batches) if "mean of micro-batches" in self.flags else 1.0
