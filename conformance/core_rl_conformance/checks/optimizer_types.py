"""Muon for matrices, rules for some parameters, and AdamW with moments of 8 bits: steps and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from core_rl.backend.meta import TensorKind
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import ConfigError, MissingPackage
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.mixed import default_settings, verify_mixed_steps
from core_rl_conformance.procedures.outputs import PROBE, verify_outputs
from core_rl_conformance.procedures.training import MOMENTS, optimizer_config
from core_rl_conformance.profile import DENSE
from core_rl_oracle.muon import MixedOptimizer, mixed_tolerances
from core_rl_oracle.oracle import AdamW, OptimizerState
from core_rl_oracle.plain_adamw import share_of_values, with_rounding_to_codes
from core_rl_oracle.tolerance import EXACT

LOSS = TokenMeanLoss(temperature=0.8)
STEPS = 3
CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
"""Clipped, with an epsilon that makes the update depend on the scale."""
KINDS: tuple[TensorKind, ...] = ("master", "momentum", "exp_avg", "exp_avg_sq")
VOCABULARY = 1024
"""Token ids: the embedding has 4,096 weights or more on each of some ranks, and blocks of 256 divide them."""
SMALLEST = 4096
"""Weights of one parameter on one rank, from which on moments are in 8 bits."""
MOST_VALUES = 0.9
"""The largest share of different values that moments of 8 bits have."""


@check("I20.muon", requires={Capability.MUON})
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


@check("I20.rules", requires={Capability.OPTIMIZER_RULES}, each="layout")
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


@check("I11.resume-muon", requires={Capability.MUON, Capability.SHARDED_CHECKPOINT}, each="layout")
def resume_with_muon_is_bitwise(subject: EngineUnderTest) -> None:
    """Training with Muon continues bit for bit from a checkpoint at the same layout, also after an offload.

    From ``sharded``, and from ``portable`` where it is declared: the momentum of matrices is a kind of its own, and
    the other parameters have both moments of AdamW.

    Why: a momentum that starts again from zero changes the direction of every matrix, and no loss shows it.
    Look at: ``ShardedState.optimizer_kinds``, and the names in ``momentum``.
    """
    start = partial(_start_muon, subject)
    moving.verify_resume(subject, start, subject.model(), moving.formats(subject), kinds=KINDS)


def _start_muon(subject: EngineUnderTest, model: TinyModel) -> EngineGroup:
    return subject.start(model, optimizer={**optimizer_config(CONFIG), "type": "muon"})


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


@check("I20.8bit", requires={Capability.ADAMW_8BIT}, each="layout", families=DENSE)
def steps_with_8_bit_moments_are_those_of_adamw(subject: EngineUnderTest) -> None:
    """With ``optimizer.type = "adamw_8bit"``, a step is AdamW's from the moments before it; only their codes round.

    After the step, a moment differs from the exact one by at most half of the distance of two codes, in relation to the
    largest of its tensor. The embedding's moments have the values of 8 bits. The exported moments are in use.

    Why: a scale that is lost, codes with a sign for unsigned values, or moments that are rounded before they are used
    look like a smaller or noisier learning rate. An engine that keeps float32 saves nothing.
    Look at: when moments are rounded: after the update; blocks that end at the borders of this rank's parts; the codes
    of the second moment, which have no sign.
    """
    model = _wide(subject)
    group = _start(subject, model)
    settings = default_settings(group.named_tensors("master"), CONFIG.weight_decay)
    config = MixedOptimizer(adamw=CONFIG, settings=settings)
    for number in range(STEPS):
        _verify_step(subject, group, config, number)
    for kind in MOMENTS:
        # Tensors that have moments of 8 bits, whatever the layout cuts them into.
        size = SMALLEST * subject.layout.world_size
        large = {n: v for n, v in group.named_tensors(kind).items() if v.numel() >= size}
        plain = [name for name, value in large.items() if share_of_values(value) > MOST_VALUES]
        subject.require(not plain, f"{kind} of {', '.join(plain)} has more values than 8 bits do")


def _verify_step(subject: EngineUnderTest, group: EngineGroup, config: MixedOptimizer, number: int) -> None:
    before = moving.state(group)
    group.optimizer_zero_grad()
    group.forward_backward(subject.data(PROBE, number).batch(), LOSS.spec(), MicroBatchSpec(count=2))
    grads = group.named_tensors("grads")
    group.optimizer_step()
    moments = {kind: before[kind] for kind in MOMENTS}
    start = OptimizerState(params=before["master"], **moments, count=number)
    right = start.copy(config.dtype)
    config.step(right, grads, CONFIG.lr)
    allowed = mixed_tolerances(start, right, config, [grads], [CONFIG.lr])
    label = f"after step {number}"
    exported = group.named_tensors("master")
    subject.verify_named(f"weights {label}", exported, right.params, allowed["params"], before["master"])
    for kind in MOMENTS:
        exact = getattr(right, kind)
        limits = with_rounding_to_codes(kind, exact, allowed[kind])
        subject.verify_named(f"{kind} {label}", group.named_tensors(kind), exact, limits)


@check("I11.resume-8bit", requires={Capability.ADAMW_8BIT}, each="layout", families=DENSE)
def resume_with_8_bit_moments_is_bitwise(subject: EngineUnderTest) -> None:
    """Training with moments of 8 bits continues bit for bit from ``sharded`` at the same layout, and after an offload.

    From ``portable``, which has them as float32, they are rounded to codes again: weights are equal, and moments differ
    by no more than that.

    Why: codes that are saved without their scales, or rounded again on the way, are near enough for no loss to show it.
    Look at: ``SupportsOpaqueState``: codes and scales of each part; the copies of an offload.
    """
    model = _wide(subject)
    group = _start(subject, model)
    moving.train(group, subject, [0, 1])
    # Declared by the engine, and not asked for above: without torchao, they are certified by other checks.
    names = moving.formats(subject)
    for format_ in names:
        group.save(moving.meta(subject.directory(format_), format_))
    saved = moving.state(group)
    moving.offload_and_onload(subject, group, saved)
    reports = moving.train(group, subject, [2, 3])
    expected = moving.state(group)
    group = _start(subject, moving.elsewhere(model))
    moving.train(group, subject, [5])
    if "portable" in names:
        group.load(moving.meta(subject.directory("portable"), "portable"))
        _verify_near(subject, group, saved)
    if "sharded" in names:
        group.load(moving.meta(subject.directory("sharded"), "sharded"))
        moving.verify_state(subject, "after the load of 'sharded'", group, saved)
        moving.verify_steps(subject, 2, moving.train(group, subject, [2, 3]), reports)
        moving.verify_state(subject, "after resuming from 'sharded'", group, expected)


def _verify_near(subject: EngineUnderTest, group: EngineGroup, saved: moving.State) -> None:
    label = "after the load of 'portable'"
    moving.verify_state(subject, label, group, {"master": saved["master"]})
    for kind in MOMENTS:
        limits = with_rounding_to_codes(kind, saved[kind], dict.fromkeys(saved[kind], EXACT))
        subject.verify_named(f"{kind} {label}", group.named_tensors(kind), saved[kind], limits)


def _wide(subject: EngineUnderTest) -> TinyModel:
    return replace(subject.model(), vocabulary=VOCABULARY)


def _start(subject: EngineUnderTest, model: TinyModel) -> EngineGroup:
    """Raises `NotRun` where the package that rounds to codes is missing."""
    try:
        return subject.start(model, optimizer={**optimizer_config(CONFIG), "type": "adamw_8bit"})
    except MissingPackage as error:
        raise NotRun(str(error)) from error
