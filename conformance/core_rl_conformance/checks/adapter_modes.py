"""Adapters that are switched off and on again between passes and steps, with dropout, frozen parts and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.combinations import rows_of
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.inputs.covering import Combination
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.adapters import load, outputs_of, snapshot_of, start, verify_trained
from core_rl_conformance.procedures.outputs import OUTPUT, PROBE, verify_outputs
from core_rl_conformance.procedures.training import CLIPPED, Shadow, fail_without_adapter, optimizer_config

OPTIONS: Mapping[str, Mapping[str, Capability | None]] = {
    "head": {"lm": None, "value": Capability.VALUE_HEAD, "reward": Capability.REWARD_HEAD},
    "dropout": {"none": None, "of the base": Capability.DROPOUT, "of the adapter": Capability.DROPOUT},
    "frozen": {"none": None} | dict.fromkeys(("first layer", "head"), Capability.FROZEN_PARAMETERS),
    "adapter": {"on all layers": None, "rank-stabilised": None},
}
"""Values of each option, and the capability that each needs."""
RATE, STEPS, FEWEST = 0.25, 2, 2
"""Dropout of the base and of the adapter, steps, and combinations of a quick session."""


@check("I20.adapter-modes", requires={Capability.LORA})
def adapters_hold_in_every_mode(subject: EngineUnderTest) -> None:
    """Off inside ``disable_adapter()``, on after it, in passes and steps, with dropout, frozen parts and each head.

    Inside, outputs match an engine without an adapter, bit for bit, and so do those of a new adapter, whose ``B`` is
    0. After it, also by an error, outputs are as before, and gradients, steps and dropout as without it. Forward passes
    have no dropout. Any two values of the options occur together; all models together have each pair.

    Why: a reference policy with the adapter on has a KL of zero to the policy, and nothing fails; a switch that goes
    by ``requires_grad``, ``eval()`` or the memory of gradients changes later training; a new head that is
    frozen with the base stays noise.
    Look at: ``set_adapter``: every adapter layer, on every rank, off and on again; its other effects. Modules that
    were added after ``eval()``; ``requires_grad`` of the head after the adapter was added.
    """
    for number, options in enumerate(rows_of(subject, OPTIONS, FEWEST)):
        run = _Run.of(subject, options, f"adapter-{number}")
        if options["dropout"] == "none":
            run.train(switched=True)
        else:
            run.verify_draws()


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Training of an adapter with some options."""

    subject: EngineUnderTest
    options: Combination
    name: str
    adapter: TinyAdapter

    @staticmethod
    def of(subject: EngineUnderTest, options: Combination, name: str) -> _Run:
        """The run of a combination."""
        stable, rate = options["adapter"] == "rank-stabilised", RATE * (options["dropout"] == "of the base")
        model = subject.model(head=cast("Head", options["head"]), dropout=rate)
        adapter = TinyAdapter(model=model, rslora=stable, some=stable)
        return _Run(subject=subject, options=options, name=name, adapter=adapter)

    @property
    def label(self) -> str:
        return "with an adapter, " + ", ".join(f"{name}: {value}" for name, value in self.options.items())

    @property
    def loss(self) -> CheckLoss:
        return moving.LOSSES[self.adapter.model.head]

    def trains(self, name: str) -> bool:
        """Whether the parameter ``name`` has a gradient."""
        head = name.startswith("score.") and self.options["frozen"] != "head"
        return name.startswith(PREFIX) or head

    def start(self, seed: int) -> EngineGroup:
        """A fresh engine with a new adapter."""
        names = [*self.subject.expected.oracle(self.adapter.model).parameters()]
        head = [name for name in names if name.startswith(("score.", "lm_head."))] or names[:1]
        frozen = {"none": [], "first layer": [self.subject.first_layer], "head": head}
        return start(
            self.subject,
            self.adapter,
            optimizer=optimizer_config(CLIPPED),
            frozen=frozen[self.options["frozen"]],
            seed=seed,
            fields={"dropout": RATE} if self.options["dropout"] == "of the adapter" else {},
        )

    def verify_draws(self) -> None:
        """A switch changes no draw of dropout; one seed gives the same draws, and another one gives others."""
        losses = self.train(switched=True)
        subject, same, other = self.subject, self.train(switched=False), self.train(switched=False, seed=1)
        subject.require(
            losses == same,
            f"losses {self.label}, are {losses} after disable_adapter(), and {same} without it, with the same seed: "
            "it changes dropout or training",
        )
        for label, first, second in (("two seeds", losses[0], other[0]), ("two passes", *losses[:2])):
            subject.require(
                first != second, f"{label} give the same loss {self.label}, {first!r}: dropout does not act"
            )

    def train(self, *, switched: bool, seed: int = 0) -> list[float]:
        """Two passes, and steps, each after a pass that is without the adapter if ``switched``; their losses."""
        subject = self.subject
        plain = self._answers(subject.start(self.adapter.model)) if switched else {}
        group = self.start(seed)
        if switched:
            new = self._answers(group)
            subject.verify_same(f"outputs of a new adapter {self.label}", new, plain)
        load(subject, group, self.adapter, f"{self.name}-{seed}-{switched}")
        if switched:
            verify_outputs(subject, group, self.adapter, self.label)
            self._verify_switch(group, plain)
        before = self._answers(group)
        losses = [self._backward(group, switched)["loss"] for _ in range(2)]
        subject.verify_same(f"outputs after training passes {self.label}", self._answers(group), before)
        frozen = [part for part in group.named_tensors("master") if not self.trains(part)]
        shadow = Shadow.of(group, CLIPPED, frozen=frozen)
        for step in range(STEPS):
            group.optimizer_zero_grad()
            metrics = self._backward(group, switched)
            losses.append(metrics["loss"])
            if switched:
                with group.disable_adapter():
                    self._answers(group)
            if switched and self.options["dropout"] == "none" and not step:
                expected = subject.gradients(self.adapter, subject.data(PROBE, 1), self.loss)
                label = f"{self.label} and disable_adapter() before and after the backward pass"
                subject.verify_loss(f"the loss {label}", metrics["loss"], expected)
                verify_trained(subject, label, group.named_tensors("grads"), expected, self.trains)
            shadow.step(subject, group, f"of step {step} {self.label}")
        shadow.verify(subject, group, f"after steps {self.label}")
        if switched:
            verify_outputs(subject, group, self.adapter, f"after steps {self.label}")
            self._verify_base(group)
        return losses

    def _verify_base(self, group: EngineGroup) -> None:
        """Compare outputs inside disable_adapter() with the base and the trained head."""
        subject, name = self.subject, OUTPUT[self.adapter.model.head]
        data, base = subject.data(PROBE), snapshot_of(subject, self.adapter, group)._replace(adapter=None)
        outputs = subject.outputs(base, data, name)
        with group.disable_adapter():
            got = per_sequence(group.forward(data.batch(), ONE_PASS, (name,)), name, data)

        def mistakes() -> Iterator[tuple[str, Sequence[Tensor]]]:
            yield from outputs.mistakes()
            start = subject.outputs(self.adapter.model, data, name).values
            yield "the head of the start, and not the trained one", start

        label = f"{name} inside disable_adapter() after steps {self.label}"
        subject.verify_tokens(label, got, replace(outputs, mistakes=mistakes))

    def _answers(self, group: EngineGroup) -> dict[str, Tensor]:
        """The outputs of a batch, and its loss in evaluation."""
        data = self.subject.data(PROBE)
        outputs = outputs_of(group, data, (OUTPUT[self.adapter.model.head],))
        loss = group.eval_batch(data.batch(), self.loss.spec(), ONE_PASS)["loss"]
        return {**outputs, "the loss of eval_batch()": torch.tensor(loss, dtype=torch.float64)}

    def _verify_switch(self, group: EngineGroup, plain: Mapping[str, Tensor]) -> None:
        """Switch the adapter off and on, three times; outputs are those of an engine without it, or as before."""
        subject, adapted = self.subject, self._answers(group)
        for turn in ("", " the second time"):
            with group.disable_adapter():
                off = self._answers(group)
            subject.verify_same(f"outputs inside disable_adapter(){turn} {self.label}", off, plain, adapted)
            self._verify_on(group, f"after disable_adapter(){turn} {self.label}", adapted, plain)
        group.run(fail_without_adapter)
        self._verify_on(group, f"after an error inside disable_adapter() {self.label}", adapted, plain)

    def _verify_on(
        self, group: EngineGroup, label: str, adapted: Mapping[str, Tensor], plain: Mapping[str, Tensor]
    ) -> None:
        # Next to the oracle first, which names an adapter that is wrong since the switch.
        verify_outputs(self.subject, group, self.adapter, label)
        self.subject.verify_same(f"outputs {label}", self._answers(group), adapted, plain)

    def _backward(self, group: EngineGroup, switched: bool) -> dict[str, float]:
        batch = self.subject.data(PROBE, 1).batch()
        return group.run(backward_after_a_pass, batch, self.loss.spec(), switched)[0]


def backward_after_a_pass(
    engine: TrainEngine, batch: SequenceBatch, loss: LossSpec, switched: bool
) -> dict[str, float]:
    """``forward_backward`` after a ``forward``, without the adapter if ``switched``, both inside ``train_mode()``."""
    part = engine.shard_data(batch)
    with engine.train_mode():
        with engine.disable_adapter() if switched else nullcontext():
            engine.forward(part, ONE_PASS, loss.outputs)
        return engine.forward_backward(part, loss, moving.TWO)
