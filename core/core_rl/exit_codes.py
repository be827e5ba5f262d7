"""Exit codes of the command line: one table for all commands."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["SIGNAL_BASE", "ExitCode"]

SIGNAL_BASE = 128
"""A command that a signal ends at once exits with this plus the signal's number, as shells count."""


class ExitCode(IntEnum):
    """The exit code of a command, and what it means."""

    DONE = 0
    """The command did what it was asked for; a run is complete."""
    FAILED = 1
    """An engine, a checkpoint, a rollout, a callback, a batch of a step or a check failed."""
    USAGE = 2
    """An argument, a field of a recipe, its data or an engine's name is wrong. Nothing was started."""
    NOTHING_LEARNED = 3
    """The field ``stop_on`` of the recipe ended the run. The last good checkpoint is kept."""
    STOPPED = 75
    """SIGTERM or SIGUSR1 stopped the run. Nothing is lost: the same command goes on."""
    INTERRUPTED = 130
    """Ctrl-C. The same command goes on from the last checkpoint."""
