"""`TrainerSpec`: the declaration of a trainer under check, light to import."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from core_rl.errors import ConfigError, raise_all
from core_rl.registry.objects import declared_in, is_reference, load_entry_point, load_object
from core_rl_conformance.profile import Profile
from core_rl_oracle.loss_names import PAIRWISE, AdvantageRule, Aggregation, KLEstimator, Objective

GROUP = "rl_trainers"
"""The entry-point group that a distribution declares its trainers in."""
ScheduleType = Literal["constant", "linear", "cosine"]


class Feature(StrEnum):
    """A part of the interface, or a convention, that a trainer may lack."""

    GRADIENTS = "gradients"
    """`Trainer.gradients`; without it, a step of plain SGD shows the gradients."""
    SGD = "sgd"
    """Plain SGD, for gradients that the trainer does not give."""
    TOKEN_BUDGET = "token-budget"  # noqa: S105  (no password)
    """Micro-batches of at most so many tokens."""
    SEQUENCE_COUNT = "sequence-count"
    """Micro-batches of so many sequences."""
    TOKEN_ADVANTAGES = "token-advantages"  # noqa: S105
    """Advantages of each token; without it, all tokens of a sequence have the same."""
    MASK_HOLES = "mask-holes"
    """Untrained tokens between trained ones, such as a tool's answer."""
    ENTROPY = "entropy"
    """The entropy bonus."""
    TEMPERATURE = "temperature"
    """Log-probs at a temperature other than 1."""
    CLIPPING = "clipping"
    """Gradients are clipped by their norm."""
    RESUME = "resume"
    """`Trainer.save` and `Trainer.load`."""
    LORA = "lora"
    """Training of a low-rank adapter: ``TrainerSetup.adapter_dir``."""
    EPOCHS = "epochs"
    """`Trainer.epoch`."""
    RECIPES = "recipes"
    """`Trainer.build_recipe`."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """One trainer: the object that an entry point of the group ``rl_trainers`` names.

    All that it does not name is *not supported*, and none of its checks runs.
    """

    name: str
    """Equal to the entry point's."""
    factory: str
    """The `Trainer` class, as ``"module:Class"``; called without arguments."""
    description: str = ""
    objectives: frozenset[Objective]
    aggregations: frozenset[Aggregation] = frozenset()
    """Aggregations of tokens; a trainer on pairs alone has none."""
    advantages: frozenset[AdvantageRule] = frozenset()
    """Rules by which it takes advantages from rewards."""
    kl_estimators: frozenset[KLEstimator] = frozenset()
    """Estimator of the KL term in the loss."""
    log_ratio_clamp: float = math.inf
    """Size to which it clamps log-ratios before ``exp``, in ratios and in k3, as it documents."""
    kl_clamp: float = math.inf
    """Largest k3 term of a token, as it documents."""
    schedules: frozenset[ScheduleType] = frozenset({"constant"})
    warmup_from_zero: bool = False
    """Whether the first step of a warm-up has the rate 0, as transformers' schedules do."""
    features: frozenset[Feature] = frozenset()
    cut_metrics: frozenset[str] = frozenset()
    """Metrics that count micro-batches, and may change with the cut."""
    processes: Literal["one", "each rank"] = "one"
    """``one``: a single object in the driver, which starts its own ranks and takes the whole batch. ``each rank``: an
    object in each of the processes that the suite starts as torchrun does; each takes its own part of the batch."""
    profile: Profile = field(default_factory=Profile)
    """Ranks as layouts ``dp``, models, dtypes and waivers. Its ``options`` reach the trainer by `TrainerSetup`."""
    package: str = ""
    """The package whose version the report names, such as ``trl``; empty for the distribution's own."""

    def problems(self) -> Iterator[str]:
        """Malformed fields, for any trainer."""
        if not is_reference(self.factory):
            yield f"factory {self.factory!r} must be of the form 'module:Class'"
        for name, known in (
            ("objectives", Objective),
            ("aggregations", Aggregation),
            ("advantages", AdvantageRule),
        ):
            if unknown := sorted(getattr(self, name) - set(get_args(known))):
                yield f"{name} has {unknown}; known are {', '.join(get_args(known))}"
        empty = "is empty; name at least one"
        problems = (
            (not self.objectives, f"objectives {empty}"),
            (self.objectives - PAIRWISE and not self.aggregations, f"aggregations {empty}"),
            (
                not self.features & {Feature.GRADIENTS, Feature.SGD},
                "features has neither 'gradients' nor 'sgd', so that no gradient can be judged; add one of them",
            ),
            (
                not self.log_ratio_clamp > 0,
                f"log_ratio_clamp is {self.log_ratio_clamp}; give a number above 0",
            ),
            (not self.kl_clamp > 0, f"kl_clamp is {self.kl_clamp}; give a number above 0"),
        )
        yield from (sentence for wrong, sentence in problems if wrong)
        for layout in self.profile.layouts:
            if layout.world_size != layout.dp:
                yield f"layout {layout} of its profile has more than data-parallel ranks; use 'dp' alone"


def find_trainer(name: str) -> tuple[TrainerSpec, str, str]:
    """The spec of the trainer ``name``, with the name and version of its distribution.

    ``name`` is that of an entry point, or ``"module:SPEC"``. Raises `ConfigError` for an unknown, ambiguous or
    malformed one.
    """
    declared = list(declared_in(GROUP))
    claims = [point for point in declared if point.name == name]
    if claims:
        spec, origin = load_entry_point("trainer", claims, ConfigError), claims[0].described("trainer")
        distribution, version = claims[0].distribution, claims[0].version
    elif ":" in name:
        spec, origin = load_object(name, f"trainer {name!r}", ConfigError), f"trainer {name!r}"
        distribution, version = "(this process)", "-"
    else:
        listed = ", ".join(sorted({point.name for point in declared})) or "none"
        raise ConfigError(
            f"--trainer={name}: no installed trainer is called so; installed: {listed}; or give 'module:SPEC'"
        )
    if not isinstance(spec, TrainerSpec):
        raise ConfigError(f"{origin}: expected a TrainerSpec, found {spec!r} of type {type(spec).__name__}")
    raise_all(ConfigError, origin, spec.problems())
    return spec, distribution, version
