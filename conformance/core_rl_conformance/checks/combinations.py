"""Capabilities in pairs: trainings that combine them, with a load in the middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor

from core_rl.backend.meta import TensorKind, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.case import takes
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.hints.mistakes import Steps
from core_rl_conformance.inputs.covering import Combination, covering_array, share
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.adapters import load, verify_trained
from core_rl_conformance.procedures.mixed import default_settings, verify_state
from core_rl_conformance.procedures.outputs import PROBE, verify_outputs
from core_rl_conformance.procedures.training import optimizer_config
from core_rl_oracle.muon import MixedOptimizer, Settings
from core_rl_oracle.oracle import AdamW, OptimizerState

OPTIONS: Mapping[str, Mapping[str, Capability | None]] = {
    "adapter": {"none": None, "on all layers": Capability.LORA, "rank-stabilised": Capability.LORA},
    "head": {"lm": None, "value": Capability.VALUE_HEAD, "reward": Capability.REWARD_HEAD},
    "frozen": {"none": None, "first layer": Capability.FROZEN_PARAMETERS},
    "rules": {"none": None, "second layer": Capability.OPTIMIZER_RULES},
    "optimizer": {"adamw": None, "muon": Capability.MUON},
    "calls": {"one": None, "three": None},
    "between": {
        "nothing": None,
        "offload": Capability.OFFLOAD,
        "upload": Capability.SYNC_DISK,
        "evaluation": None,
    },
    "load": dict.fromkeys(("none", "weights"))
    | {"sharded": Capability.SHARDED_CHECKPOINT, "portable": Capability.PORTABLE_CHECKPOINT},
}
"""Values of each option, and the capability that each needs."""
CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
"""Clipped, with an epsilon that makes the update depend on the scale."""
FACTOR, DECAY = 0.5, 0.7
"""The rule of the second layer."""
CUT = MicroBatchSpec(max_tokens=48)


def rows_of(
    subject: EngineUnderTest, options: Mapping[str, Mapping[str, Capability | None]], least: int = 1
) -> Sequence[Combination]:
    """The combinations of ``options`` that this case runs, as far as the engine declares their values; see `share`."""
    declared = {
        name: [value for value, needed in values.items() if needed is None or subject.spec.supports(needed)]
        for name, values in options.items()
    }
    case = subject.case
    families = [family for family in case.target.profile.families if takes(case.check, family)]
    turn = case.seed + case.layout.world_size
    return share(covering_array(declared), families.index(case.family), len(families), turn, least)


@check("I20.combinations")
def capabilities_hold_together(subject: EngineUnderTest) -> None:
    """In trainings that combine capabilities, gradients are the oracle's, and steps before and after a load AdamW's.

    Each pair of an adapter, a head, frozen parameters, rules, Muon, accumulation, offloads or uploads between the
    steps, and the ways to load, occurs in a training. All models together have each; the first has a single training,
    which the seed picks.

    Why: an engine may be right with each capability, and wrong with two at once: rules that go by the names of a
    module which an adapter renames; a load that skips what is frozen.
    Look at: the combination that the message names; then the check of each part alone, which passes.
    """
    for number, options in enumerate(rows_of(subject, OPTIONS)):
        _Training.begin(subject, options, f"training-{number}").verify()


@dataclass(kw_only=True)
class _Training:
    """One training of the engine, with some capabilities."""

    subject: EngineUnderTest
    options: Mapping[str, str]
    name: str
    model: TinyModel
    adapter: TinyAdapter | None
    group: EngineGroup = field(init=False)

    @staticmethod
    def begin(subject: EngineUnderTest, options: Mapping[str, str], name: str) -> _Training:
        """Start the engine."""
        model = subject.model(head=cast("Head", options["head"]))
        stable = options["adapter"] == "rank-stabilised"
        adapter = (
            None if options["adapter"] == "none" else TinyAdapter(model=model, rslora=stable, some=stable)
        )
        training = _Training(subject=subject, options=options, name=name, model=model, adapter=adapter)
        training.start(model)
        if adapter is not None:
            load(subject, training.group, adapter, f"{name}-adapter")
        return training

    def start(self, model: TinyModel) -> None:
        """A fresh engine with the weights of ``model``."""
        frozen = [self.subject.first_layer] if self.options["frozen"] != "none" else []
        optimizer: dict[str, Any] = {**optimizer_config(CONFIG), "type": self.options["optimizer"]}
        if self.options["rules"] != "none":
            optimizer["rules"] = [{"pattern": self.second_layer, "lr_factor": FACTOR, "weight_decay": DECAY}]
        changes = {} if self.adapter is None else {"model": {"lora": self.adapter.section()}}
        self.group = self.subject.start(model, frozen=frozen, optimizer=optimizer, changes=changes)

    @property
    def judged(self) -> TinyModel | TinyAdapter:
        return self.adapter or self.model

    @property
    def second_layer(self) -> str:
        """A pattern for parameters of the model and of the adapter: no expert has it."""
        return "*" + self.subject.first_layer.replace(".0.", ".1.")

    @property
    def loss(self) -> CheckLoss:
        return moving.LOSSES[self.model.head]

    @property
    def label(self) -> str:
        return "with " + ", ".join(f"{name}: {value}" for name, value in self.options.items())

    def trains(self, name: str) -> bool:
        """Whether the parameter ``name`` has a gradient."""
        if self.adapter is not None:
            return name.startswith((PREFIX, "score."))
        return self.options["frozen"] == "none" or not fnmatchcase(name, self.subject.first_layer)

    def verify(self) -> None:
        """Gradients by the oracle, steps, something between them, a load, and steps again."""
        self._gradients(self.subject.data(PROBE))
        self._steps((0, 1), "before the load")
        self._between()
        self._load()
        self._steps((2,), "after the load")
        verify_outputs(self.subject, self.group, self.judged, f"{self.name}, {self.label}")

    def _backward(self, data: Ragged) -> dict[str, Tensor]:
        self.group.optimizer_zero_grad()
        count = 1 if self.options["calls"] == "one" else 3
        weight = self.loss.weight(data.batch())
        for part in range(count):
            rows = data.select(range(part, len(data.rows), count))
            self.group.forward_backward(rows.batch(), self.loss.spec(), CUT, total_weight=weight)
        return self.group.named_tensors("grads")

    def _gradients(self, data: Ragged) -> None:
        expected = self.subject.gradients(self.judged, data, self.loss)
        verify_trained(self.subject, self.label, self._backward(data), expected, self.trains)

    def _steps(self, numbers: Sequence[int], when: str) -> None:
        state, settings = self._state(), self._settings()
        steps, updates = [], self.group.progress.updates
        for number in numbers:
            steps.append(self._backward(self.subject.data(PROBE, number)))
            reported = self.group.optimizer_step()
            self.subject.require(
                reported["update_successful"] == 1.0, f"no update was made {self.label}: {reported}"
            )
        start = OptimizerState(
            params={name: value.double() for name, value in state["master"].items()},
            count=updates,
            **{
                kind: {name: value.double() for name, value in tensors.items()}
                for kind, tensors in state.items()
                if kind != "master"
            },
        )
        taken = Steps(
            config=MixedOptimizer(adamw=CONFIG, settings=settings[1]),
            start=start,
            grads=steps,
            rates=[CONFIG.lr] * len(steps),
        )
        verify_state(self.subject, self.group, taken, settings[0], f"{when}, {self.label}")

    def _settings(self) -> tuple[dict[str, Settings], dict[str, Settings]]:
        """Settings of the trained parameters without and with the rule."""
        trained = {n: v for n, v in self.group.named_tensors("master").items() if self.trains(n)}
        plain = default_settings(trained, CONFIG.weight_decay, muon=self.options["optimizer"] == "muon")
        if self.options["rules"] == "none":
            return plain, plain
        ruled = {
            name: replace(setting, lr_factor=FACTOR, weight_decay=DECAY)
            for name, setting in plain.items()
            if fnmatchcase(name, self.second_layer)
        }
        return plain, {**plain, **ruled}

    def _state(self) -> dict[TensorKind, dict[str, Tensor]]:
        """Weights, and the moments that the optimizer has."""
        muon = [name for name, setting in self._settings()[0].items() if setting.muon]
        others = [name for name, setting in self._settings()[0].items() if not setting.muon]
        kinds: list[TensorKind] = ["master"]
        kinds += ["momentum"] if muon else []
        kinds += ["exp_avg", "exp_avg_sq"] if others else []
        return {kind: self.group.named_tensors(kind) for kind in kinds}

    def _between(self) -> None:
        match self.options["between"]:
            case "offload":
                before = self._state()
                self.group.offload()
                self.group.onload()
                moving.verify_state(self.subject, f"after an offload {self.label}", self.group, before)
            case "upload":
                path = str(self.subject.directory(f"{self.name}-upload"))
                self.group.upload_weights(WeightUpdateMeta(version=1, path=path))
            case "evaluation":
                self.group.eval_batch(self.subject.data().batch(), self.loss.spec(), ONE_PASS)

    def _load(self) -> None:
        form = self.options["load"]
        if form == "weights":
            if self.adapter is not None:
                self.adapter = replace(self.adapter, seed=1)
                load(self.subject, self.group, self.adapter, f"{self.name}-second-adapter")
            else:
                self.model = moving.elsewhere(self.model)
                moving.load_weights(self.subject, self.group, self.model)
            self._gradients(self.subject.data(PROBE))
        elif form != "none":
            path = self.subject.directory(f"{self.name}-{form}")
            meta = moving.meta(path, "sharded" if form == "sharded" else "portable")
            self.group.save(meta)
            before, progress = self._state(), self.group.progress
            self.start(moving.elsewhere(self.model))
            self.group.load(meta)
            label = f"after the load of {form!r} {self.label}"
            moving.verify_state(self.subject, label, self.group, before, progress)
