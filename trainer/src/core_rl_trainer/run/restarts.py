"""``cluster.restarts``: a run that lost ranks or machines goes on from its last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from rich.console import Console

from core_rl.config.capability import Capability
from core_rl.errors import (
    ClusterError,
    ConfigError,
    CoreRLError,
    GroupError,
    RankDied,
    RankTimeout,
    UnsupportedCapability,
    raise_all,
)
from core_rl_trainer.logs.progress import say
from core_rl_trainer.plan.engines import TrainPlan
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.parts import own_format
from core_rl_trainer.run.run_directory import RunDirectory

__all__ = ["Restarts", "check_layouts", "on_machines"]

logger = logging.getLogger(__name__)

LOSSES = (ClusterError, RankDied, RankTimeout)
"""Errors after which new ranks can do what these could not."""


class Restarts:
    """The restarts that a run has left, and a record of each in the terminal, the log and the run's directory."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, console: Console) -> None:
        self._recipe = recipe
        self._directory = directory
        self._console = console
        self._done = 0
        self._machines = recipe.cluster.machines
        """The number of machines of the last attempt."""

    def after(self, error: CoreRLError, opened: bool) -> Recipe:
        """The recipe to go on with after ``error``, which is raised again where no restart can help, or none is left.

        ``opened`` says whether the machines were there. A restart waits for all of them first, and then takes the
        largest smaller number with a layout.
        """
        loss = _loss(error)
        if loss is None or not (opened or self._done):
            raise error
        if opened:
            self._begin(error, loss)
        else:
            self._machines = self._fewer(error)
        recipe = on_machines(self._recipe, self._machines)
        self._tell(loss, recipe)
        return recipe

    def _begin(self, error: CoreRLError, loss: GroupError) -> None:
        """Count a restart on all machines; raises ``error`` where there may be none."""
        limit = self._recipe.cluster.restarts
        if self._done >= limit:
            if limit:
                error.add_note(f"cluster.restarts = {limit}, and all of them were used")
            raise error
        logger.info("ranks were lost", exc_info=loss)
        self._done += 1
        self._machines = self._recipe.cluster.machines

    def _fewer(self, error: CoreRLError) -> int:
        """The next smaller number of machines that has a layout; raises ``error`` where there is none."""
        smaller = [count for count in self._recipe.cluster.layouts if count < self._machines]
        if not smaller:
            error.add_note(
                f"not all {self._machines} machines are there, and cluster.layouts has no layout for fewer; the same "
                "command goes on from the last checkpoint when they are back"
            )
            raise error
        return max(smaller)

    def _tell(self, loss: GroupError, recipe: Recipe) -> None:
        checkpoint = self._directory.checkpoint()
        step = checkpoint.step if checkpoint is not None else 0
        start = f"the checkpoint of step {step}" if checkpoint is not None else "the beginning"
        reason = loss.message.partition("\n")[0]
        text = f"restart {self._done} of {recipe.cluster.restarts}, from {start}, on {recipe.cluster.number}: {reason}"
        logger.info("%s", text)
        say(self._console, text)
        self._directory.add_restart(
            {
                "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
                "step": step,
                "machines": recipe.cluster.machines,
                "reason": reason,
            }
        )


def on_machines(recipe: Recipe, count: int) -> Recipe:
    """``recipe`` on ``count`` of its machines, with the layout that ``cluster.layouts`` has for so many."""
    cluster = recipe.cluster
    if count == cluster.machines:
        return recipe
    section = {**recipe.engines.get(recipe.engine, {}), "layout": cluster.layouts[count].model_dump()}
    fewer = {number: layout for number, layout in cluster.layouts.items() if number < count}
    return recipe.model_copy(
        update={
            "engines": {**recipe.engines, recipe.engine: section},
            "cluster": cluster.model_copy(update={"machines": count, "layouts": fewer}),
            "placement": recipe.placement.within(count),
        }
    )


def check_layouts(recipe: Recipe, plan: Callable[[Recipe], Mapping[str, TrainPlan]]) -> None:
    """Raise one `ConfigError` for ``cluster.layouts`` with which the run could not go on.

    ``plan(recipe)`` gives the trained roles, and raises where they cannot be.
    """
    problems = []
    for count in sorted(recipe.cluster.layouts):
        fewer = on_machines(recipe, count)
        try:
            trained = plan(fewer)
        except (ConfigError, UnsupportedCapability) as error:
            problems.append(f"{count}: {error}")
        else:
            problems += [f"{count}: {name}: {text}" for name, text in _unreadable(fewer, trained)]
    raise_all(ConfigError, "cluster.layouts", problems)


def _unreadable(recipe: Recipe, trained: Mapping[str, TrainPlan]) -> Iterator[tuple[str, str]]:
    """Roles that could not read a checkpoint of another layout, with the reason."""
    portable = recipe.save_portable_every and recipe.save_every % recipe.save_portable_every == 0
    for name, (spec, _) in trained.items():
        if not (portable or spec.supports(Capability.RESHARDING) or own_format(spec) == "portable"):
            yield (
                name,
                f"the engine {spec.name!r} does not declare 'resharding' and reads no checkpoint of another layout; "
                "set save_portable_every to save_every, or a divisor of it",
            )


def _loss(error: BaseException) -> GroupError | None:
    """The loss of ranks that led to ``error``."""
    return next((found for found in _causes(error) if isinstance(found, LOSSES)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
