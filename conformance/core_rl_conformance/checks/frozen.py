"""Parameters that are not trained: no gradient, no moments, no movement, and no effect on the others."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_named
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import TinyModel, layer_of
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_oracle.oracle import AdamW

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)
CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.02)
"""Clipped in every step, with an epsilon that makes the update depend on the scale."""


@check("I20.frozen", requires=[Capability.FROZEN_PARAMETERS], each="layout")
def frozen_parameters_stay(subject: EngineUnderTest) -> None:
    """Frozen parameters have no gradient and no moments and never move; the others' steps stay right.

    Why: a frozen parameter that decays, a wrapper that drops gradients next to frozen ones, a clip or a
    decay that goes by position and shifts where some are left out.
    Look at: which parameters reach the optimizer and the norm, and gradient reduction where some have none.
    """
    model = subject.model()
    group = _verify_frozen(subject, model, LOSS, [subject.first_layer])
    verify_outputs(subject, group, model, "after steps with frozen parameters")


@check("I20.frozen-parts", requires=[Capability.FROZEN_PARAMETERS], each="layout")
def any_part_can_be_frozen(subject: EngineUnderTest) -> None:
    """The embedding alone, the last layer, all but the last layer, or the trunk under a value head can be frozen.

    Why: tying again turns on the gradients of a frozen embedding; a wrapper expects gradients in its first or last
    group; a stage without trained parameters sends none back. Most critics begin by training the head alone.
    Look at: ``requires_grad`` after tying, wrapping and casting; hooks that wait for gradients which do
    not come; gradients that a frozen part passes to earlier layers.
    """
    model = subject.model()
    names = list(subject.expected.oracle(model).parameters())
    last = list(filter(None, map(layer_of, names)))[-1]
    _verify_frozen(subject, model, LOSS, names[:1])
    _verify_frozen(subject, model, LOSS, [name for name in names if layer_of(name) != last])
    _verify_frozen(subject, model, LOSS, [name for name in names if layer_of(name) == last])
    if subject.spec.supports(Capability.VALUE_HEAD):
        model = subject.model(head="value")
        trunk = [
            name for name in subject.expected.oracle(model).parameters() if not name.startswith("score.")
        ]
        _verify_frozen(subject, model, ValueLoss(), trunk)


def _verify_frozen(
    subject: EngineUnderTest, model: TinyModel, loss: CheckLoss, patterns: Sequence[str]
) -> EngineGroup:
    """Freeze what ``patterns`` match; compare gradients with the oracle's and some steps with AdamW's."""
    data = subject.data()
    expected = subject.gradients(model, data, loss)
    grads = expected.oracle.grads
    frozen = {name for name in grads if any(fnmatchcase(name, pattern) for pattern in patterns)}
    label = (
        f"with {len(frozen)} of {len(grads)} parameters frozen ({patterns[0]}{', ...' * (len(patterns) > 1)})"
    )
    group = subject.start(model, frozen=patterns, optimizer=optimizer_config(CONFIG))
    shadow = Shadow.of(group, CONFIG, frozen=frozen)
    group.forward_backward(data.batch(), loss.spec(), TWO)
    trained = {name: grad for name, grad in grads.items() if name not in frozen}
    found = group.named_tensors("grads")
    subject.verify(compare_named(f"gradients {label}", found, trained, expected.tolerances))
    shadow.step(subject, group, f"of the first step {label}")
    shadow.train(subject, group, [subject.data(seed=1).batch()], loss.spec(), TWO)
    shadow.verify(subject, group, label)
    return group
