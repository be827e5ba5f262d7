"""Muon for matrices, and rules for some parameters: rates, decay and the choice of optimizer."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from core_rl.backend.meta import TensorKind
from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.mixed import default_settings, verify_mixed_steps
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.training import optimizer_config
from core_rl_oracle.muon import MixedOptimizer
from core_rl_oracle.oracle import AdamW

LOSS = TokenMeanLoss(temperature=0.8)
STEPS = 3
CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
"""Clipped, with an epsilon that makes the update depend on the scale."""
KINDS: tuple[TensorKind, ...] = ("master", "momentum", "exp_avg", "exp_avg_sq")


@check("I20.muon", requires=[Capability.MUON])
def matrices_take_the_steps_of_muon(subject: EngineUnderTest) -> None:
    """With ``optimizer.type = "muon"``, matrices of layers take the steps of a float64 Muon, each as a whole.

    A matrix is a matrix of the checkpoint: q, k and v and each expert alone, gathered from all ranks. All other
    parameters take the steps of AdamW. Newton-Schulz iterations are computed in float32.

    Why: ``torch.optim.Muon`` on a shard, or on a parameter that fuses several matrices, runs and learns something, and
    depends on the layout. The factor of the learning rate comes from the shape, and is wrong with it.
    Look at: the momentum that enters the Newton-Schulz iterations: its shape is that in the checkpoint. Then the
    factor of the learning rate, Nesterov's step, the decay, and which parameters are left to AdamW.
    """
    model = subject.model()
    group = _start_muon(subject, model)
    params = group.named_tensors("master")
    settings = default_settings(params, CONFIG.weight_decay, muon=True)
    label = f"after {STEPS} steps of Muon"
    config = MixedOptimizer(adamw=CONFIG, settings=settings)
    verify_mixed_steps(subject, group, config, settings, LOSS, STEPS, label)
    verify_outputs(subject, group, model, label)


@check("I20.rules", requires=[Capability.OPTIMIZER_RULES], each="layout")
def rules_hold_for_what_they_match(subject: EngineUnderTest) -> None:
    """Rates and decay that ``optimizer.rules`` give to a pattern hold for all parameters that match, and no others.

    Where several rules match, the last to set a field counts. A pattern that matches nothing is a `ConfigError`.
    So is a pattern for a part of a fused parameter, unless the engine honours it.

    Why: groups of an optimizer are made by position, by the names of the module, or by a flag that a wrapper drops: a
    rule is lost without an error, or another parameter gets it.
    Look at: ``BuildContext.parameter_rules``, by names and shapes of the checkpoint; the groups of the optimizer, and
    what ``TrainBackend.step`` sets in them.
    """
    names = list(subject.expected.oracle(subject.model()).parameters())
    rules = (
        {"pattern": subject.first_layer, "lr_factor": 0.5, "weight_decay": 0.7},
        {"pattern": names[0], "lr_factor": 0.1, "weight_decay": 0.0},
        {"pattern": subject.first_layer, "lr_factor": 3.0},
    )
    _verify_rules(subject, rules, "after steps with rules")
    queries = next((name for name in names if name.endswith("q_proj.weight")), names[-1])
    try:
        _verify_rules(subject, ({"pattern": queries, "lr_factor": 0.1},), f"with a rule for {queries}")
    except ConfigError as error:
        subject.require(queries in str(error), f"a rule for {queries} is refused without its name: {error}")
    subject.require_error(
        ConfigError,
        lambda: _start_with_rules(subject, ({"pattern": "no.such.parameter", "lr_factor": 0.1},)),
        "a rule whose pattern matches nothing did not raise ConfigError",
    )


@check(
    "I11.resume-muon",
    requires=[Capability.MUON, Capability.SHARDED_CHECKPOINT],
    each="layout",
)
def resume_with_muon_is_bitwise(subject: EngineUnderTest) -> None:
    """Training with Muon continues bit for bit from a checkpoint at the same layout, also after an offload.

    From ``sharded``, and from ``portable`` where it is declared: the momentum of matrices is a kind of its own, and
    the other parameters have both moments of AdamW.

    Why: a momentum that starts again from zero changes the direction of every matrix, and no loss shows it.
    Look at: ``ShardedState.optimizer_kinds``, and the names in ``momentum``.
    """
    model = subject.model()
    for format_ in moving.formats(subject):
        group = _start_muon(subject, model)
        moving.train(group, subject, [0, 1])
        group.save(moving.meta(subject.directory(format_), format_))
        saved = _state(group)
        moving.offload_and_onload(subject, group, saved)
        reports = moving.train(group, subject, [2, 3])
        expected = _state(group)
        group = _start_muon(subject, moving.elsewhere(model))
        moving.train(group, subject, [5])
        group.load(moving.meta(subject.directory(format_), format_))
        moving.verify_state(subject, f"after the load of {format_!r}", group, saved)
        moving.verify_steps(subject, 2, moving.train(group, subject, [2, 3]), reports)
        moving.verify_state(subject, f"after resuming from {format_!r}", group, expected)


def _start_muon(subject: EngineUnderTest, model: TinyModel) -> EngineGroup:
    return subject.start(model, optimizer={**optimizer_config(CONFIG), "type": "muon"})


def _state(group: EngineGroup) -> moving.State:
    return {kind: group.named_tensors(kind) for kind in KINDS}


def _start_with_rules(subject: EngineUnderTest, rules: tuple[dict[str, Any], ...]) -> EngineGroup:
    return subject.start(optimizer={**optimizer_config(CONFIG), "rules": list(rules)})


def _verify_rules(subject: EngineUnderTest, rules: tuple[dict[str, Any], ...], label: str) -> None:
    group = _start_with_rules(subject, rules)
    defaults = default_settings(group.named_tensors("master"), CONFIG.weight_decay)
    settings = dict(defaults)
    for rule in rules:
        fields = {name: value for name, value in rule.items() if name != "pattern"}
        for name, setting in settings.items():
            if fnmatchcase(name, rule["pattern"]):
                settings[name] = replace(setting, **fields)
    config = MixedOptimizer(adamw=CONFIG, settings=settings)
    verify_mixed_steps(subject, group, config, defaults, LOSS, STEPS, label)
