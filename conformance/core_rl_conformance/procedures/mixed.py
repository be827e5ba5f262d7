"""Steps of an engine with Muon or rules for parameters, compared with float64 ones on the engine's own gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_named
from core_rl_conformance.hints.muon import MixedSteps, likely_mistake
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_oracle.muon import KINDS, MixedOptimizer, Settings, hidden_matrix, mixed_tolerances

__all__ = ["default_settings", "verify_mixed_steps"]

NAMES = {
    "params": "weights",
    "momentum": "the momentum",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
}
TWO = MicroBatchSpec(count=2)


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
    params, grads = group.named_tensors("master"), []
    for number in range(steps):
        group.optimizer_zero_grad()
        group.forward_backward(subject.data(PROBE, number).batch(), loss.spec(), TWO)
        grads.append(group.named_tensors("grads"))
        reported = group.optimizer_step()
        subject.require(reported["update_successful"] == 1.0, f"the update of step {number} was not made")
    rates = [config.adamw.lr] * steps
    verify_state(
        subject, group, MixedSteps(config=config, params=params, grads=grads, rates=rates), defaults, label
    )


def verify_state(
    subject: EngineUnderTest,
    group: EngineGroup,
    steps: MixedSteps,
    defaults: Mapping[str, Settings],
    label: str,
) -> None:
    """Compare weights and moments of ``group`` with those after ``steps``; name the known mistake behind others."""
    right = steps.state()
    allowed = mixed_tolerances(steps.start(), right, steps.config, steps.grads, steps.rates)
    weights = group.named_tensors("master")

    def explain() -> str | None:
        ranks = subject.layout.world_size
        return likely_mistake(steps, weights, allowed["params"], defaults, ranks)

    kinds = [kind for kind in KINDS if getattr(right, kind)]
    for kind in kinds:
        tensors = weights if kind == "params" else group.named_tensors(kind)
        since = steps.params if kind == "params" else None
        finding = compare_named(
            f"{NAMES[kind]} {label}", tensors, getattr(right, kind), allowed[kind], since, explain=explain
        )
        subject.verify(finding)
