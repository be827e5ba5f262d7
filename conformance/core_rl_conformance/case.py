"""A case: one check on one engine, layout and tiny model, and with one partner for a check of a pair."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.catalogue import Check, TargetKind
from core_rl_conformance.profile import MIXTURES, VISION, Profile, Setting
from core_rl_conformance.trainers.spec import TrainerSpec


def takes(check: Check, family: str) -> bool:
    """Whether ``check`` can use the tiny models of ``family``; vision-language models are for checks with images."""
    if check.families is None:
        return check.images or family not in VISION
    return family in check.families


@dataclass(frozen=True, kw_only=True)
class Target:
    """An engine under check, with its profile."""

    spec: EngineSpec
    profile: Profile
    model_dir: str = ""
    """The user's model: served by a running server, or loaded by a train engine; empty for the suite's models."""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Token ids of the user's sequences for that model; empty for drawn ones."""
    longest: int | None = None
    """The tokens that tiny models take; None is their own number."""
    version: str = ""
    """Product and version of a running server, or the version of a trainer's package."""
    distribution: str = ""
    """The distribution of a trainer."""
    trainer: TrainerSpec | None = None
    """A trainer as a black box, in place of an engine; ``spec`` has its name and capabilities then."""
    missing_routes: Mapping[str, str] = field(default_factory=dict)
    """Capabilities and checks that a server has no routes for, each with the reason: *not supported*."""
    withheld: Mapping[str, str] = field(default_factory=dict)
    """Capabilities and checks that its user has not allowed, each with the reason: *not run*."""
    raw_logprobs: str = ""
    """Advice for a server whose log-probs lack the temperature."""

    @property
    def kind(self) -> TargetKind:
        """The kind of checks that it takes."""
        return self.spec.kind if self.trainer is None else "trainer"

    @property
    def given(self) -> bool:
        """Whether a train engine loads the user's model."""
        return bool(self.model_dir) and self.kind == "train"

    @property
    def noun(self) -> str:
        """The word for it in messages."""
        return "engine" if self.trainer is None else "trainer"

    @property
    def three_ranks(self) -> Setting | None:
        """Three data-parallel ranks, for a train engine whose profile has several of them but not three.

        Checks with ``on_three_ranks`` run there, unless the engine refuses it.
        """
        three, layouts = Setting(layout=ParallelLayout(dp=3)), self.profile.layouts
        several = any(layout.dp > 1 and layout == ParallelLayout(dp=layout.dp) for layout in layouts)
        trains = self.kind != "inference"
        added = trains and several and not self.given and three not in self.profile.places
        return three if added else None

    @property
    def places(self) -> tuple[Setting, ...]:
        """The layouts and settings of the profile, and the added one."""
        added = self.three_ranks
        return self.profile.places if added is None else (*self.profile.places, added)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One check on one engine, layout and tiny model."""

    check: Check
    target: Target
    setting: Setting
    """The layout, with the options that the engine is run with on it."""
    family: str
    dtype: DType
    seed: int
    device: str
    partner: Target | None = None
    """The second engine, for a check of a pair."""
    partner_setting: Setting | None = None
    other_setting: Setting | None = None
    """Another layout or setting of the session, or else of the profile, for what moves between two."""
    not_supported: str = ""
    """Why the engine cannot be asked."""
    not_run: str = ""
    """Why it can be asked, but not here."""

    @property
    def layout(self) -> ParallelLayout:
        """The parallel degrees of `setting`."""
        return self.setting.layout

    @property
    def multiples(self) -> tuple[int, int]:
        """Divisors of the model's layers and experts: all layouts that it is run on must take it."""
        other_setting = self.other_setting if self.check.min_layouts > 1 else None
        places = [place for place in (self.setting, self.partner_setting, other_setting) if place is not None]
        return math.lcm(*(p.layer_multiple for p in places)), math.lcm(*(p.expert_multiple for p in places))

    @property
    def head_size(self) -> int | None:
        """The numbers in the model's attention heads, where an engine needs a size."""
        targets = [self.target] if self.partner is None else [self.target, self.partner]
        return max(
            (size for target in targets if (size := target.profile.head_size) is not None), default=None
        )

    @property
    def name(self) -> str:
        """The part of the test's name in brackets."""
        parts = [self.target.spec.name, str(self.setting), self.family, self.dtype]
        suffix = [] if self.partner is None else ["with", self.partner.spec.name, str(self.partner_setting)]
        return "-".join([*parts, *suffix])

    def failure_message(self, problem: str) -> str:
        """``problem`` below a line with the place, and above the requirement and the places to look at."""
        check = self.check
        partner = f", with {self.partner.spec.name!r} at {self.partner_setting}" if self.partner else ""
        place = f"layout {self.setting}" + (f" {dict(self.setting.options)}" if self.setting.options else "")
        lines = [
            f"{check.identifier}: {self.target.noun} {self.target.spec.name!r}, {place}, model {self.family} "
            f"(seed {self.seed}), {self.dtype} on {self.device}{partner}",
            textwrap.indent(problem, "  "),
            f"  required: {check.title}",
        ]
        lines += [f"  look at: {check.where_to_look}"] if check.where_to_look else []
        lines.append(f"  see: core-rl checks {check.identifier} (docs/checks.md#{check.anchor})")
        return "\n".join(lines)

    def of_partner(self) -> Case:
        """The same case from the side of the partner."""
        assert self.partner is not None and self.partner_setting is not None
        return replace(
            self,
            target=self.partner,
            setting=self.partner_setting,
            partner=self.target,
            partner_setting=self.setting,
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The declared capabilities that this case shows."""
        special = {Capability.BFLOAT16} if self.dtype == "bfloat16" else set()
        special |= {Capability.CUDA} if self.device == "cuda" else set()
        special |= {Capability.MOE} if self.family in MIXTURES else set()
        special |= {Capability.VISION} if self.family in VISION else set()
        return frozenset(special) | self.check.requires | self.layout.needed_capabilities()
