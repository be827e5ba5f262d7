"""Inference engines that are right after each call alone, and wrong after some orders of calls."""

from __future__ import annotations

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import CoreRLError
from core_rl.reference.rollout import ReferenceRolloutBackend
from mutants.zoo import C, Mutant


class ResumesWithThePausedWeights(ReferenceRolloutBackend):
    """A pause keeps the weights, and resuming restores them over an update."""

    def pause(self) -> None:
        self._paused_model = self._model

    def resume(self) -> None:
        self._on_worker(setattr, self, "_model", self._paused_model)


class ResumesWithThePausedVersion(ReferenceRolloutBackend):
    """The same of the version."""

    def pause(self) -> None:
        self._paused_version = self._served_version

    def resume(self) -> None:
        self._on_worker(setattr, self, "_served_version", self._paused_version)


class SkipsTheUpdateAfterAFailure(ReferenceRolloutBackend):
    """The first update after a failed one is acknowledged, and changes nothing but the version."""

    _failed = False

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if self._failed:
            self._failed = False
            self.set_version(meta.version)
            return
        try:
            super().update_weights(meta)
        except CoreRLError:
            self._failed = True
            raise


class WakesWithTheUpdateBefore(ReferenceRolloutBackend):
    """A sleep keeps the weights from before the last update, and a wake restores them."""

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        before = self._model
        super().update_weights(meta)
        self._before = before

    def resume_memory(self) -> None:
        super().resume_memory()
        self._on_worker(setattr, self, "_model", getattr(self, "_before", self._model))


ORDERS = "I13.route-orders"
MUTANTS = (
    Mutant(
        engine=SkipsTheUpdateAfterAFailure,
        killed_by=ORDERS,
        issue="an update that follows a failed one (I12)",
        says=r"(?s)of greedy tokens after these calls.*fail_update",
    ),
    Mutant(
        engine=ResumesWithThePausedWeights,
        killed_by=ORDERS,
        issue="an update while paused that a resume undoes (I13)",
        says=r"(?s)of greedy tokens after these calls.*pause",
        declared=frozenset({C.PAUSE}),
    ),
    Mutant(
        engine=ResumesWithThePausedVersion,
        killed_by=ORDERS,
        issue="AReaL #941: a version that is stuck",
        says=r"versions \[\d+\]; the weights had|tokens carry the versions",
        declared=frozenset({C.PAUSE}),
    ),
    Mutant(
        engine=WakesWithTheUpdateBefore,
        killed_by=ORDERS,
        issue="a wake that restores a copy from before the update (I15)",
        says=r"(?s)of greedy tokens after these calls.*sleep_or_wake",
    ),
)
