"""Builds two trainers from the files of their settings, and compares them on a tiny model."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from core_rl.errors import ConfigError, raise_all
from core_rl_conformance.differences.frozen import drawn_rows, read_rows, rollouts_of
from core_rl_conformance.differences.reading import variant_of
from core_rl_conformance.differences.replay import Comparison, Measured, compare_measured, measure_trainer
from core_rl_conformance.inputs.rollouts import Rollouts
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.trainers.interface import Trainer
from core_rl_conformance.trainers.pool import make_trainer
from core_rl_conformance.trainers.spec import Feature, TrainerSpec, find_trainer

MODEL = TinyModel(family="qwen3")
TIMEOUT_S = 300.0
NEEDED = (Feature.GRADIENTS, Feature.RECIPES)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A trainer that is built from the file of its settings."""

    spec: TrainerSpec
    trainer: Trainer

    def measure(self, directory: Path, rollouts: Rollouts) -> Measured:
        return measure_trainer(self.trainer, directory, rollouts, self.spec.features)

    def measure_after(self, other: Measured, directory: Path, rollouts: Rollouts) -> Measured:
        """The same with the advantages that the ``other`` trainer takes from rewards, which this one cannot."""
        terms = other.reading.terms
        measured = self.measure(directory, variant_of(rollouts, replace(terms, mask="as given")))
        if measured.reading.terms.advantages != "as given":
            return measured
        same = replace(measured.reading.terms, advantages=terms.advantages)
        return replace(measured, reading=replace(measured.reading, terms=same))


def compare(left: str, right: str, rollouts: Path | None, seed: int) -> Comparison:
    """The differences of two trainers, each given as ``NAME:FILE``. Raises `ConfigError` for what cannot be compared.

    A trainer without rules for advantages gets the other's.
    """
    rows = drawn_rows(seed) if rollouts is None else read_rows(rollouts)
    frozen = rollouts_of(rows, MODEL.vocab_size, seed)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="core-rl-diff-")))
        directory = ModelStore(place).directory(MODEL)
        one, two = (_built(stack, argument, directory) for argument in (left, right))
        if bool(one.spec.advantages) == bool(two.spec.advantages):
            measured = one.measure(directory, frozen), two.measure(directory, frozen)
        elif one.spec.advantages:
            first = one.measure(directory, frozen)
            measured = first, two.measure_after(first, directory, frozen)
        else:
            second = two.measure(directory, frozen)
            measured = one.measure_after(second, directory, frozen), second
        return compare_measured(*measured, frozen)


def _built(stack: ExitStack, argument: str, directory: Path) -> _Side:
    name, separator, recipe = argument.rpartition(":")
    if not separator or not Path(recipe).is_file():
        raise ConfigError(
            f"{argument!r}: expected NAME:FILE, with an existing file of the trainer's settings"
        )
    spec, _, _ = find_trainer(name)
    missing = [feature for feature in NEEDED if feature not in spec.features]
    raise_all(
        ConfigError,
        f"{argument!r}",
        [f"the trainer {name} declares no '{feature}', which core-rl diff needs" for feature in missing],
    )
    trainer = make_trainer(spec, TIMEOUT_S)
    stack.callback(trainer.close)
    trainer.build_recipe(recipe, str(directory))
    return _Side(spec=spec, trainer=trainer)
