"""The trainers that a session keeps from check to check, one object for each."""

from __future__ import annotations

from core_rl.errors import EngineBroken
from core_rl.registry.objects import load_object
from core_rl_conformance.trainers.interface import Trainer, TrainerSetup
from core_rl_conformance.trainers.ranks import RankTrainers
from core_rl_conformance.trainers.spec import TrainerSpec

CALLS = ("build", "train_batch", "weights", "close")
"""Methods that every trainer needs."""


class TrainerPool:
    """Trainers by the name of their spec; each is built anew for each check."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._trainers: dict[str, Trainer] = {}

    def build(self, spec: TrainerSpec, setup: TrainerSetup) -> Trainer:
        """The trainer of ``spec``, built with ``setup``. Raises `EngineBroken` for a factory that makes none."""
        if spec.name not in self._trainers:
            self._trainers[spec.name] = make_trainer(spec, self._timeout_s)
        trainer = self._trainers[spec.name]
        trainer.build(setup)
        return trainer

    def discard(self, name: str) -> None:
        """Close the trainer ``name``, which may be in an unknown state."""
        trainer = self._trainers.pop(name, None)
        if trainer is not None:
            trainer.close()

    def close(self) -> None:
        """Close all trainers."""
        for name in list(self._trainers):
            self.discard(name)


def make_trainer(spec: TrainerSpec, timeout_s: float) -> Trainer:
    """The trainer of ``spec``, not built. Raises `EngineBroken` for a factory that makes none."""
    origin = f"trainer {spec.name!r}"
    factory = load_object(spec.factory, origin)
    if not isinstance(factory, type):
        raise EngineBroken(f"{origin}: factory {spec.factory!r} is {factory!r}; name a class")
    if absent := [name for name in CALLS if not callable(getattr(factory, name, None))]:
        raise EngineBroken(
            f"{origin}: {spec.factory!r} has no method {', '.join(absent)}; see the Trainer protocol"
        )
    if spec.processes == "each rank":
        return RankTrainers(spec.factory, timeout_s)
    trainer: Trainer = factory()
    return trainer
