"""Muon on something else than whole matrices of the checkpoint, and rules that are lost or shifted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from toy_tp.engine import TensorParallelBackend

from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.optimizer import MOMENTUM, Muon, adjusted_lr, orthogonalize
from mutants.bases import OwnCheckpoint, TrainContext
from mutants.zoo import TP2, Mutant


class _OfLocalParts(Muon):
    """Muon on this rank's parts, whatever other ranks have."""

    def groups(self, names: Iterable[str]) -> Iterable[list[str]]:
        """Matrices that are orthogonalized together."""
        return ([name] for name in names)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        config, parts = self._config, self._parts()
        for names in self.groups(parts):
            local_total = [parts[name][0] for name in names]
            for part in local_total:
                part.momentum.tensor.lerp_(part.grad, 1 - config.momentum)
            full = torch.cat([self._direction(part) for part in local_total])
            updates = orthogonalize(full, config.ns_steps).split([len(part.weight) for part in local_total])
            for name, part, update in zip(names, local_total, updates, strict=True):
                decay = self._rules.of(name, self._placed.shapes[name]).weight_decay
                part.weight.mul_(1 - lr * decay).add_(update, alpha=-adjusted_lr(lr, config, full.shape))


class _OfFusedParts(_OfLocalParts):
    """Queries, keys and values of a layer are one matrix."""

    def groups(self, names: Iterable[str]) -> Iterable[list[str]]:
        fused: dict[str, list[str]] = {}
        for name in names:
            fused.setdefault(re.sub(r"[qkv]_proj", "qkv", name), []).append(name)
        return fused.values()


@Mutant(
    "I20.muon",
    "torch.optim.Muon on a shard",
    r"weights after 3 steps of Muon[\s\S]*that of a shard, 1 of 2 parts",
    layout=TP2,
)
class MuonOfAShard(TensorParallelBackend):
    """`torch.optim.Muon` gets this rank's shards."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if self.muon is not None and context.parameter_rules is not None:
            self.muon = _OfLocalParts(self.state(), context.parameter_rules, context.world)


@Mutant(
    "I20.muon",
    "torch.optim.Muon on a fused parameter",
    r"weights after 3 steps of Muon[\s\S]*one matrix with q, k and v",
)
class MuonOfFusedQueries(ReferenceBackend):
    """`torch.optim.Muon` gets the fused matrix of queries, keys and values."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if self.muon is not None and context.parameter_rules is not None:
            self.muon = _OfFusedParts(self.state(), context.parameter_rules, context.world)


@Mutant("I20.rules", "groups of an optimizer", "the rules are ignored")
class RulesAreIgnored(ReferenceBackend):
    """The optimizer is built without the rules."""

    def build(self, context: TrainContext) -> None:
        optimizer = context.config.optimizer
        plain = None if optimizer is None else optimizer.model_copy(update={"rules": ()})
        super().build(replace(context, config=context.config.model_copy(update={"optimizer": plain})))


@Mutant("I20.rules", "groups by position", "the decay of the one before it")
class DecayOfTheNeighbour(ReferenceBackend):
    """Decay is given by position, and off by one."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if self.optimizer is None or context.config.optimizer is None or not context.config.optimizer.rules:
            return
        groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        parameters = list(self.owned.values())
        self.optimizer.param_groups = [
            {
                **groups[parameter],
                "params": [parameter],
                "weight_decay": groups[parameters[number - 1]]["weight_decay"],
            }
            for number, parameter in enumerate(parameters)
        ]


@Mutant("I11.resume-muon", "dropped by a save", "momentum after the load of 'sharded'")
class MomentumIsNotSaved(OwnCheckpoint):
    """A sharded checkpoint has the moments of AdamW alone."""

    def kinds(self, with_optimizer: bool) -> tuple[str, ...]:
        return tuple(kind for kind in super().kinds(with_optimizer) if kind != MOMENTUM)
