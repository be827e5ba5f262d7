"""The coefficient of the KL penalty: fixed, or adapted to a target."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KLController"]

MAX_ERROR = 0.2
"""The relative error is clipped to this on both sides (arXiv:1909.08593, section 2.2)."""


class KLController:
    """Ziegler et al., arXiv:1909.08593, section 2.2: proportional control of the log of the coefficient.

    After ``n`` sequences with a mean divergence of ``kl`` the coefficient is multiplied by
    ``1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon``. Without a target it stays.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: float = 10_000.0) -> None:
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, sequences: float) -> None:
        """Take the divergence (nats for each token) of a step of as many ``sequences`` into account."""
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * sequences / self._horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict`."""
        self.coef = float(state["coef"])
