"""Mutants, and runs of a check on an engine outside pytest's plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext
from core_rl.backend.train_backend import TrainBackend
from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.train import TrainEngine
from core_rl.reference import ROLLOUT_SPEC, ReferenceRolloutConfig
from core_rl.registry.engines import load_class
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.profile import MOE, Profile, Setting

C = Capability
CAPABILITIES = frozenset(
    {
        C.VALUE_HEAD,
        C.REWARD_HEAD,
        C.LOGITS,
        C.DROPOUT,
        C.FROZEN_PARAMETERS,
        C.OPTIMIZER_RULES,
        C.MUON,
        C.LORA,
        C.OFFLOAD,
        C.TAPS,
        C.DATA_PARALLEL,
        C.SHARDED_CHECKPOINT,
        C.RESHARDING,
        C.PORTABLE_CHECKPOINT,
        C.SYNC_DISK,
        C.SYNC_TENSOR,
        C.SYNC_DISTRIBUTED,
        C.SYNC_LORA,
    }
)
Context = InferenceContext[ReferenceRolloutConfig]
EngineT = TypeVar("EngineT", bound=type[TrainBackend[Any] | InferenceBackend[Any]])
DP1 = ParallelLayout()
DP2 = ParallelLayout(dp=2)
DP3 = ParallelLayout(dp=3)
TP2 = ParallelLayout(tp=2)
TP2SP = ParallelLayout(tp=2, sequence_parallel=True)
CP2 = ParallelLayout(cp=2)
CP4 = ParallelLayout(cp=4)
PP2 = ParallelLayout(pp=2)
DP2EP2 = ParallelLayout(dp=2, ep=2)


RECORD = "mutant"
"""Attribute of an engine with a planted bug."""


@dataclass(frozen=True)
class Mutant:
    """An engine with one planted bug: the class that this decorates."""

    killed_by: str
    """The check that is meant for this bug."""
    issue: str
    """Source of a shipped bug of this kind, or the reason for the mutant."""
    says: str
    """A regular expression that the failure must match: the message points at the cause."""
    _: KW_ONLY
    layout: ParallelLayout = DP1
    family: str = "llama"
    dtype: DType = "float32"
    undeclared: frozenset[Capability] = frozenset()
    declared: frozenset[Capability] = frozenset()
    """Capabilities beyond the zoo's other engines."""
    partner: EngineSpec | None = None
    """The correct partner, for a check of a pair."""
    timeout_s: float = 120.0
    """Seconds that a call may take; short for a mutant that hangs."""
    engine: type[TrainBackend[Any] | InferenceBackend[Any]] = TrainBackend

    def __call__(self, engine: EngineT) -> EngineT:
        """Record the bug on ``engine``, for `mutants_of`."""
        setattr(engine, RECORD, replace(self, engine=engine))
        return engine

    @property
    def name(self) -> str:
        """The class's name with hyphens."""
        return name_of(self.engine)

    @property
    def spec(self) -> EngineSpec:
        """The engine's spec; it declares what its layout and model need."""
        special = {Capability.BFLOAT16} if self.dtype == "bfloat16" else set()
        special |= (
            {Capability.MOE, Capability.AUX_LOSS, Capability.ROUTING_REPLAY} if self.family == MOE else set()
        )
        # Of the toy engines, which have such layouts, only the tensor-parallel engine takes adapters. None has taps.
        missing = {Capability.LORA, Capability.SYNC_LORA, Capability.TAPS}
        toy = missing if self.layout.needed_capabilities() - {Capability.DATA_PARALLEL} else set()
        return spec_of(
            self.engine,
            self.undeclared | (toy - self.declared),
            self.layout.needed_capabilities() | special | self.declared,
        )


def mutants_of(module: ModuleType) -> Iterator[Mutant]:
    """The mutants that ``module`` defines, in order."""
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and RECORD in vars(value):
            yield vars(value)[RECORD]


def name_of(engine: type) -> str:
    """The class's name with hyphens."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", engine.__name__).lower()


def spec_of(
    engine: type[TrainBackend[Any] | InferenceBackend[Any]],
    undeclared: frozenset[Capability] = frozenset(),
    declared: frozenset[Capability] = frozenset(),
) -> EngineSpec:
    """A spec for ``engine``, which is importable by its module's name; an inference engine is the reference's kin.

    ``undeclared`` and ``declared`` list differences from the capabilities of the zoo's engines.
    """
    if issubclass(engine, InferenceBackend):
        return replace(
            ROLLOUT_SPEC,
            name=name_of(engine),
            factory=f"{engine.__module__}:{engine.__name__}",
            capabilities=(ROLLOUT_SPEC.capabilities | declared) - undeclared,
        )
    return EngineSpec(
        name=name_of(engine),
        kind="train",
        protocol=(0, 3),
        factory=f"{engine.__module__}:{engine.__name__}",
        config="core_rl.reference:ReferenceConfig",
        capabilities=(CAPABILITIES | declared) - undeclared,
    )


def make_engine(spec: EngineSpec, config: Any) -> Any:
    """The engine of ``spec``, over the core's components or the components that its backend class names as
    ``components``.

    Declarations and implementations are not compared: a mutant may differ, for a check to find out.
    """
    base: type[Any] = TrainBackend if spec.kind == "train" else InferenceBackend
    backend = load_class(spec, "factory", base)
    if spec.kind == "train":
        return TrainEngine(spec, config, backend(), getattr(backend, "components", None))
    return InferenceEngine(spec, config, backend(), getattr(backend, "components", None))


def run_check(
    expected_values: ExpectedValues,
    identifier: str,
    spec: EngineSpec,
    *,
    layout: ParallelLayout,
    family: str,
    directory: Path,
    seed: int = 0,
    dtype: DType = "float32",
    partner: EngineSpec | None = None,
) -> EngineUnderTest:
    """Run one check as the plugin would. Raises the check's error; returns the engine with its measurements."""
    case = case_of(identifier, spec, layout=layout, family=family, seed=seed, dtype=dtype, partner=partner)
    directory.mkdir(parents=True, exist_ok=True)
    subject = EngineUnderTest(case, expected_values, directory)
    case.check.function(subject)
    return subject


def case_of(
    identifier: str,
    spec: EngineSpec,
    *,
    layout: ParallelLayout,
    family: str,
    seed: int = 0,
    dtype: DType = "float32",
    partner: EngineSpec | None = None,
) -> Case:
    """A case as the plugin would run it."""
    profile = Profile(layouts=(ParallelLayout(), DP2), families=(family,))
    return Case(
        check=load_checks()[identifier],
        target=Target(spec=spec, profile=profile),
        setting=Setting(layout=layout, layer_multiple=layout.pp, expert_multiple=layout.ep),
        family=family,
        dtype=dtype,
        seed=seed,
        device="cpu",
        partner=Target(spec=partner, profile=Profile()) if partner else None,
        partner_setting=Setting(layout=DP1) if partner else None,
        other_setting=Setting(layout=DP1 if layout == DP2 else DP2),
    )
