"""The target of a session that judges a trainer."""

from __future__ import annotations

from collections.abc import Collection

import importlib_metadata as metadata

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError, raise_all
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec, check_spec
from core_rl_conformance.case import Target
from core_rl_conformance.profile import MOE
from core_rl_conformance.trainers.spec import TrainerSpec, find_trainer


def load_trainer(name: str, known_checks: Collection[str]) -> Target:
    """The trainer ``name`` with its profile; raises `ConfigError` with everything that is wrong with them."""
    trainer, distribution, version = find_trainer(name)
    origin = f"trainer {name!r}"
    profile = trainer.profile
    spec = EngineSpec(
        name=trainer.name,
        kind="train",
        protocol=PROTOCOL_VERSION,
        factory=trainer.factory,
        config="core_rl.config.engine:TrainEngineConfig",
        capabilities=frozenset(_capabilities(trainer)),
        description=trainer.description,
    )
    check_spec(spec, origin)
    raise_all(ConfigError, f"the profile of {origin}", profile.violations(spec, known_checks))
    if trainer.package:
        try:
            version = f"{trainer.package} {metadata.version(trainer.package)}"
        except metadata.PackageNotFoundError as error:
            raise ConfigError(f"{origin} needs {trainer.package}, which is not installed") from error
    return Target(spec=spec, profile=profile, trainer=trainer, distribution=distribution, version=version)


def _capabilities(trainer: TrainerSpec) -> set[Capability]:
    """Capabilities that the layouts, dtypes and models of its profile show."""
    profile = trainer.profile
    layouts = (layout.needed_capabilities() for layout in profile.layouts)
    special = {Capability.BFLOAT16} if "bfloat16" in profile.dtypes else set()
    return set().union(*layouts, special, {Capability.MOE} if MOE in profile.families else set())
