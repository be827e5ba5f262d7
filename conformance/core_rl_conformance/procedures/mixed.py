"""Steps of Muon or of rules for parameters, compared with float64 steps on the engine's own gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.mistakes import Steps
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_oracle.muon import (
    MixedOptimizer,
    Settings,
    hidden_matrix,
    mixed_tolerances,
    newton_schulz,
    rate_factor,
    scaled,
)
from core_rl_oracle.oracle import KINDS, OptimizerState
from core_rl_oracle.tolerance import Tolerance, largest_difference

Matrices = Mapping[str, Tensor]
FUSED = {
    "q, k and v": re.compile(r"(.*)\.[qkv]_proj\.weight"),
    "gate and up projection": re.compile(r"(.*)\.(?:gate|up)_proj\.weight"),
    "all experts of a layer": re.compile(r"(.*\.experts)\.\d+(\.\w+\.weight)"),
}
NAMES = {
    "params": "weights",
    "momentum": "the momentum",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
TWO = MicroBatchSpec(count=2)


def likely_mistake(
    steps: Steps[MixedOptimizer],
    weights: Mapping[str, Tensor],
    allowed: Mapping[str, Tolerance],
    defaults: Mapping[str, Settings],
    ranks: int,
) -> str | None:
    """The known mistake that leads to the ``weights`` of an engine on so many ``ranks``; None where none does.

    ``defaults`` are the settings without rules.
    """
    right = steps.state().params
    off = {
        name
        for name, value in right.items()
        if not allowed[name].allows(largest_difference(weights[name], value))
    }
    for sentence, configs in _mistakes(steps.config, defaults, ranks):
        wrong = [replace(steps, config=config).state().params for config in configs]
        if off and all(
            any(_near(weights[name], params[name], right[name]) for params in wrong) for name in off
        ):
            return sentence
    return None


def _near(got: Tensor, wrong: Tensor, right: Tensor) -> bool:
    """Whether ``wrong`` explains ``got``; a mistake may amplify rounding, so limits for right values do not fit."""
    return largest_difference(got, wrong) <= 0.05 * largest_difference(right, wrong)


def _mistakes(
    config: MixedOptimizer, defaults: Mapping[str, Settings], ranks: int
) -> Iterator[tuple[str, Sequence[MixedOptimizer]]]:
    """Sentences, and the ways to make the mistake: each tensor is wrong in some way of these."""
    if any(setting.muon for setting in config.settings.values()):
        for parts in dict.fromkeys((2, ranks)):
            shards = [
                replace(config, updates=partial(of_shards, parts=parts, dim=dim, factor=factor))
                for dim in (0, 1)
                for factor in (False, True)
            ]
            yield f"Muon's update is that of a shard, 1 of {parts} parts of a matrix", shards
        for label, pattern in FUSED.items():
            sentence = f"Muon's update is that of one matrix with {label}"
            yield sentence, [replace(config, updates=partial(of_fused, pattern=pattern))]
        yield "Muon's momentum is without Nesterov's step", [replace(config, nesterov=False)]
    setting = config.settings
    decay = {
        name: replace(setting[name], weight_decay=plain.weight_decay) for name, plain in defaults.items()
    }
    rate = {name: replace(setting[name], lr_factor=plain.lr_factor) for name, plain in defaults.items()}
    shifted = dict(zip(setting, [*setting.values()][-1:] + [*setting.values()][:-1], strict=True))
    moved = {
        name: replace(setting[name], weight_decay=shifted_setting.weight_decay)
        for name, shifted_setting in shifted.items()
    }
    unscaled = {
        name: replace(one, weight_decay=one.weight_decay / one.lr_factor) if one.lr_factor else one
        for name, one in setting.items()
    }
    yield "gradients are not clipped", [replace(config, adamw=replace(config.adamw, max_grad_norm=None))]
    for sentence, settings in {
        "the rules are ignored": defaults,
        "the rates of the rules are not for the decay": unscaled,
        "the decay of the rules is ignored": decay,
        "the rates of the rules are ignored": rate,
        "each parameter has the decay of the one before it": moved,
    }.items():
        yield sentence, [replace(config, settings=settings)]


def of_shards(
    config: MixedOptimizer, matrices: Matrices, parts: int, dim: int, factor: bool
) -> dict[str, Tensor]:
    """The updates of shards along ``dim``; with ``factor``, their learning rate is that of their shape as well."""
    updates = {}
    for name, matrix in matrices.items():
        updates[name] = torch.cat(
            [
                rate_factor(config, part if factor else matrix) * newton_schulz(part, config.ns_steps)
                for part in matrix.chunk(parts, dim)
            ],
            dim,
        )
    return updates


def of_fused(config: MixedOptimizer, matrices: Matrices, pattern: re.Pattern[str]) -> dict[str, Tensor]:
    """The updates of matrices with equal groups of ``pattern`` as one matrix."""
    groups: dict[object, list[str]] = {}
    for name in matrices:
        match = pattern.fullmatch(name)
        groups.setdefault(name if match is None else match.groups(), []).append(name)
    updates: dict[str, Tensor] = {}
    for names in groups.values():
        full = scaled(config, torch.cat([matrices[name] for name in names]))
        updates |= dict(zip(names, full.split([len(matrices[name]) for name in names]), strict=True))
    return updates


def default_settings(
    params: Mapping[str, Tensor], weight_decay: float, *, muon: bool = False
) -> dict[str, Settings]:
    """The settings without rules: matrices decay, and with ``muon`` matrices of layers use it."""
    return {
        name: Settings(
            muon=muon and hidden_matrix(name, value), weight_decay=weight_decay * (value.dim() >= 2)
        )
        for name, value in params.items()
    }


def verify_mixed_steps(
    subject: EngineUnderTest,
    group: EngineGroup,
    config: MixedOptimizer,
    defaults: Mapping[str, Settings],
    loss: CheckLoss,
    steps: int,
    label: str,
) -> None:
    """Take ``steps`` on ``group``, which is fresh; its weights and moments follow ``config``."""
    muon = [name for name, setting in config.settings.items() if setting.muon]
    start, grads = OptimizerState.start(group.named_tensors("master"), muon), []
    for number in range(steps):
        group.optimizer_zero_grad()
        group.forward_backward(subject.data(PROBE, number).batch(), loss.spec(), TWO)
        grads.append(group.named_tensors("grads"))
        reported = group.optimizer_step()
        subject.require(reported["update_successful"] == 1.0, f"the update of step {number} was not made")
    rates = [config.adamw.lr] * steps
    taken = Steps(config=config, start=start, grads=grads, rates=rates)
    verify_state(subject, group, taken, defaults, label)


def verify_state(
    subject: EngineUnderTest,
    group: EngineGroup,
    steps: Steps[MixedOptimizer],
    defaults: Mapping[str, Settings],
    label: str,
) -> None:
    """Compare weights and moments of ``group`` with those after ``steps``; name the known mistake behind others."""
    right = steps.state()
    allowed = mixed_tolerances(steps.start, right, steps.config, steps.grads, steps.rates)
    weights = group.named_tensors("master")

    def explain() -> str | None:
        ranks = subject.layout.world_size
        return likely_mistake(steps, weights, allowed["params"], defaults, ranks)

    kinds = [kind for kind in KINDS if getattr(right, kind)]
    for kind in kinds:
        tensors = weights if kind == "params" else group.named_tensors(kind)
        since = steps.start.params if kind == "params" else None
        subject.verify_named(
            f"{NAMES[kind]} {label}", tensors, getattr(right, kind), allowed[kind], since, explain=explain
        )
