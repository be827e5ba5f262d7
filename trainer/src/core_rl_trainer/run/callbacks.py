"""The callbacks of one run: loading them by name, and calling them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.algorithms.named import find_object
from core_rl_trainer.callbacks import (
    Callback,
    CheckpointSaved,
    EvaluationEnd,
    Event,
    RunEnd,
    RunFailed,
    StepEnd,
    StopRun,
)
from core_rl_trainer.errors import CallbackError
from core_rl_trainer.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

GROUP = "core_rl_callbacks"
"""The entry-point group in which a distribution declares callbacks."""


class Callbacks:
    """The callbacks that the recipe names, then those given to `train`, each called with every event of the run.

    As a context manager it reports an error that ends the run to all of them.
    """

    def __init__(self, recipe: Recipe, added: Sequence[Callback] = ()) -> None:
        """Load the callbacks of ``recipe``, which events carry. Raises one `ConfigError` for all that are none."""
        self.recipe = recipe
        self.step = 0
        """The training steps that are done."""
        self.stopped: str | None = None
        """Why a callback has asked for the end of the run, or None."""
        problems: list[str] = []
        self._callbacks: dict[str, Callback] = {}
        for name in recipe.callbacks:
            try:
                self._add(name, _loaded(name))
            except ConfigError as error:
                problems.append(str(error))
        raise_all(ConfigError, "field 'callbacks'", problems)
        for callback in added:
            self._add(getattr(callback, "__qualname__", type(callback).__qualname__), _checked(callback))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        event = RunFailed(recipe=self.recipe, step=self.step, error=error)
        for name, callback in self._callbacks.items():
            try:
                _call(name, callback, event)
            except CallbackError as second:  # it must not hide the error that is on its way
                logger.warning("%s", second)

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._send(StepEnd(recipe=self.recipe, step=step, metrics=MappingProxyType(metrics)))

    def evaluation_end(self, step: int, metrics: dict[str, float]) -> None:
        """Send `EvaluationEnd`, unless there is no evaluation data and so no metric."""
        if metrics:
            self._send(EvaluationEnd(recipe=self.recipe, step=step, metrics=MappingProxyType(metrics)))

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self._send(CheckpointSaved(recipe=self.recipe, step=step, path=path))

    def run_end(self, result: dict[str, Any]) -> None:
        self._send(RunEnd(recipe=self.recipe, step=result["steps"], result=MappingProxyType(result)))

    def _send(self, event: Event) -> None:
        self.step = event.step
        for name, callback in self._callbacks.items():
            reason = _call(name, callback, event)
            if self.stopped is None:
                self.stopped = reason

    def _add(self, name: str, callback: Callback) -> None:
        number, key = 1, name
        while key in self._callbacks:
            number += 1
            key = f"{name} ({number})"
        self._callbacks[key] = callback


def _call(name: str, callback: Callback, event: Event) -> str | None:
    """Call ``callback``; the reason where it stops the run. Raises `CallbackError` that names it."""
    try:
        callback(event)
    except StopRun as stop:
        return f"callback {name!r}: {stop}" if str(stop) else f"callback {name!r}"
    except (Exception, SystemExit) as error:  # a user's code: it may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise CallbackError(
            f"the callback {name!r} raised {type(error).__name__}: {error} ({at.filename}:{at.lineno}), at "
            f"{type(event).__name__} of step {event.step}"
        ) from error
    return None


def _loaded(name: str) -> Callback:
    """The callback that ``name`` stands for: an entry point, or ``module:name`` or ``file.py:name``."""
    candidate = find_object("callback", name, (), "module:Class", GROUP)
    if isinstance(candidate, type):
        try:
            candidate = candidate()
        except (Exception, SystemExit) as error:  # a user's code
            raise ConfigError(
                f"callback {name!r}: {candidate.__name__}() raised {type(error).__name__}: {error}; a callback that a "
                "recipe names is made without arguments"
            ) from error
    return _checked(candidate)


def _checked(candidate: object) -> Callback:
    if isinstance(candidate, type):
        raise ConfigError(
            f"the callback {candidate.__name__} is a class; pass an instance: {candidate.__name__}()"
        )
    if not callable(candidate):
        raise ConfigError(
            f"the callback {candidate!r} cannot be called; it is a function of one event, or has __call__"
        )
    return cast("Callback", candidate)
