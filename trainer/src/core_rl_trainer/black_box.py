"""`BlackBoxTrainer`: the trainer's algorithms over an engine, behind the calls of the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta
from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.loading import load_yaml
from core_rl.data.batch import LOSS_MASK, SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.schedule import learning_rate, schedule_length
from core_rl.errors import ConfigError
from core_rl.launch.group import EngineGroup
from core_rl.registry.engines import get_spec, load_config
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.trainers.interface import RECIPE_STEPS, MicroBatches, TrainerSetup, TrainSequence
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.oracle import AdamW
from core_rl_oracle.policy_losses import PolicyLoss
from core_rl_trainer.algorithms.fields import (
    ADVANTAGES,
    BEHAVIOUR,
    CHOSEN,
    GROUP,
    PROXIMAL,
    REFERENCE,
    REWARDS,
)
from core_rl_trainer.algorithms.interface import ModelInterface, make_interface
from core_rl_trainer.data.datasets import ShuffledOrder
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction
from core_rl_trainer.plan.build import with_temperature
from core_rl_trainer.recipe.recipe import Recipe

RECIPES = ("ppo_actor", "sft")
"""Interfaces whose recipes are compared with others."""
CLIPPED = ("clipped", "dual_clipped", "gspo", "cispo")


class BlackBoxTrainer:
    """One engine group, and for each loss the interface that a recipe would name."""

    def __init__(self) -> None:
        self._group: EngineGroup | None = None
        self._interface: ModelInterface[Any] | None = None
        self._by_rule = False
        self._steps: int | None = None
        self._seed = 0

    @property
    def group(self) -> EngineGroup:
        """The engine; raises `ConfigError` before `build`."""
        if self._group is None:
            raise ConfigError("the trainer has no engine; call build() first")
        return self._group

    def build(self, setup: TrainerSetup) -> None:
        """The interface that a recipe with this loss has."""
        if unknown := sorted(setup.options.keys() - {"engine"}):
            raise ConfigError(
                f"the trainer takes the option 'engine' alone, and was given {unknown}; remove these"
            )
        spec = get_spec(str(setup.options["engine"]))
        interface = _interface(setup.loss, setup.advantages)
        rule = setup.advantages is not None
        self._build(spec, _config(spec, setup), interface, rule=rule, steps=None)
        self._seed = setup.seed
        if setup.adapter_dir is not None:
            self.group.load(SaveLoadMeta(path=setup.adapter_dir, format="adapter"))

    def build_recipe(self, recipe: str, model_dir: str) -> None:
        """The engine, the algorithm, the optimizer and its schedule of a recipe, without its data and its model.

        All of a batch is one update, whatever ``minibatches`` and ``epochs`` are.
        """
        parsed = parse_config(Recipe, load_yaml(recipe), recipe)
        algorithm = with_temperature(parsed.algorithm, parsed.rollout.temperature)
        if algorithm.type not in RECIPES:
            raise ConfigError(
                f"{recipe}: field 'algorithm.type' = {algorithm.type!r}: expected {' or '.join(RECIPES)}"
            )
        once = dict.fromkeys(algorithm.args.keys() & {"minibatches", "epochs"}, 1)
        spec = get_spec(parsed.engine)
        values = {"model": {"path": model_dir}, "optimizer": parsed.optimizer.model_dump()}
        config = parse_config(load_config(spec), values, recipe)
        assert isinstance(config, TrainEngineConfig)
        interface = make_interface(replace(algorithm, args=algorithm.args | once))
        self._build(spec, config, interface, rule=True, steps=parsed.steps or RECIPE_STEPS)
        self._seed = parsed.seed

    def _build(
        self,
        spec: EngineSpec,
        config: TrainEngineConfig,
        interface: ModelInterface[Any],
        *,
        rule: bool,
        steps: int | None,
    ) -> None:
        """A fresh engine, in the same processes where their number stays."""
        if self._group is None or self._group.config.layout != config.layout:
            self.close()
            self._group = EngineGroup(spec, config, threads_per_rank=1)
        self.group.initialize(None if steps is None else FinetuneSpec(dataset_size=steps), config)
        self._interface, self._by_rule, self._steps = interface, rule, steps

    def train_batch(
        self, sequences: Sequence[TrainSequence], cut: MicroBatches, apply: bool = True
    ) -> Mapping[str, float]:
        """One step of the interface."""
        group, interface = self.group, self._interface
        assert interface is not None
        engine = group if apply else _GradientsOnly(group)
        paired = interface.trains_on == "preferences"
        batch = _batch(sequences, interface.wanted_fields, by_rule=self._by_rule, paired=paired)
        metrics = interface.train_step(engine, batch, _cut(cut, len(sequences)))
        if apply:
            group.lr_scheduler_step()
        return {name: value for name, value in metrics.items() if name not in ("lr", "updates")}

    def gradients(self) -> Mapping[str, Tensor]:
        """Gradients that a step would take."""
        return self.group.named_tensors("grads")

    def weights(self) -> Mapping[str, Tensor]:
        """Master weights."""
        return self.group.named_tensors("master")

    def learning_rate(self) -> float:
        optimizer = self.group.config.optimizer
        assert optimizer is not None
        return learning_rate(optimizer, self.group.progress.lr_steps, schedule_length(optimizer, self._steps))

    def save(self, path: str) -> None:
        """A sharded checkpoint, as a run writes."""
        self.group.save(SaveLoadMeta(path=path))

    def load(self, path: str) -> None:
        """Continue from it."""
        self.group.load(SaveLoadMeta(path=path))

    def epoch(self, count: int, batch_size: int) -> Sequence[Sequence[int]]:
        """The first pass of the order that a run draws from."""
        order = list(islice(ShuffledOrder(count, self._seed), count))
        return [order[start : start + batch_size] for start in range(0, count, batch_size)]

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _GradientsOnly:
    """An engine whose step leaves the gradients in place of applying them."""

    def __init__(self, group: EngineGroup) -> None:
        self._group = group
        self.forward, self.save = group.forward, group.save

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        self._group.optimizer_zero_grad()
        return self._group.forward_backward(batch, loss, mb_spec)


def _config(spec: EngineSpec, setup: TrainerSetup) -> TrainEngineConfig:
    optimizer = setup.optimizer
    assert isinstance(optimizer, AdamW), "the spec names no SGD"
    head = "reward" if setup.loss.objective == "bradley_terry" else "lm"
    lora = None
    if setup.adapter_dir is not None:
        saved = json.loads((Path(setup.adapter_dir) / "adapter_config.json").read_text())
        lora = {"rank": saved["r"], "alpha": saved["lora_alpha"], "target_modules": saved["target_modules"]}
    values = {
        "model": {"path": setup.model_dir, "head": head, "lora": lora},
        "layout": {"dp": setup.ranks},
        "dtype": setup.dtype,
        "optimizer": {**asdict(optimizer), "schedule": asdict(setup.schedule)},
    }
    config = parse_config(load_config(spec), values, "the setup of the trainer")
    assert isinstance(config, TrainEngineConfig)
    return config


def _cut(cut: MicroBatches, count: int) -> MicroBatchSpec:
    """The cut as engines take it: a number of micro-batches, or a budget."""
    if cut.sequences is not None:
        return MicroBatchSpec(count=-(-count // cut.sequences))
    return MicroBatchSpec(count=1) if cut.max_tokens is None else MicroBatchSpec(max_tokens=cut.max_tokens)


def _batch(
    sequences: Sequence[TrainSequence], wanted_fields: frozenset[str], *, by_rule: bool, paired: bool
) -> SequenceBatch:
    tokens = {
        LOSS_MASK: [sequence.loss_mask for sequence in sequences],
        BEHAVIOUR: [sequence.old_logprobs for sequence in sequences],
    }
    if not by_rule:  # a batch that has advantages is taken as prepared
        tokens[ADVANTAGES] = [sequence.advantages for sequence in sequences]
    if REFERENCE in wanted_fields:
        tokens[REFERENCE] = [sequence.ref_logprobs for sequence in sequences]
    if PROXIMAL in wanted_fields:
        tokens[PROXIMAL] = tokens[BEHAVIOUR]
    groups = torch.tensor([sequence.group for sequence in sequences])
    return SequenceBatch.from_sequences(
        [sequence.input_ids.tolist() for sequence in sequences],
        tokens=tokens,
        sequences={
            REWARDS: torch.tensor([sequence.reward for sequence in sequences]),
            GROUP: groups,
            CHOSEN: torch.arange(len(sequences)) % 2 == 0,
        },
        unit=groups if paired else None,
    )


def _interface(loss: PolicyLoss, advantages: AdvantageRule | None) -> ModelInterface[Any]:
    """The interface with the settings of ``loss``, as a recipe's ``algorithm`` section makes it."""
    aggregation: Any = loss.aggregation
    if aggregation == "fixed_length":
        aggregation = {"fixed_length": loss.fixed_length}
    if loss.objective == "cross_entropy":
        return make_interface(ModelInterfaceAbstraction("sft", {"aggregation": aggregation}))
    if loss.objective == "dpo":
        return make_interface(ModelInterfaceAbstraction("dpo", {"beta": loss.beta}))
    if loss.objective == "bradley_terry":
        return make_interface(ModelInterfaceAbstraction("reward_model", {}))
    objective: dict[str, Any] = {"type": loss.objective, "aggregation": aggregation}
    if loss.objective in CLIPPED:
        objective |= {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.objective == "dual_clipped":
        objective["limit"] = loss.dual_limit
    settings = {
        "loss": objective,
        "kl_coef": loss.kl_coef,
        "kl_estimator": loss.kl_estimator,
        "entropy_coef": loss.entropy_coef,
        "temperature": loss.temperature,
        "recompute_logprobs": False,
        **({"advantage": {"type": advantages}} if advantages else {}),
    }
    return make_interface(ModelInterfaceAbstraction("ppo_actor", settings))
