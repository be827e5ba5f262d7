"""Errors that only the trainer raises, in the tree of `core_rl.errors`.

CoreRLError
├── BatchError
│   └── StepError              the data of a step, in a run that had passed all checks of its data
├── CallbackError              a callback of a run failed
└── RunStopped
    ├── StoppedBySignal        SIGTERM or SIGUSR1
    └── NothingLearned         a rule of the recipe: NaN, no signal, skipped updates
"""

from __future__ import annotations

from core_rl.errors import BatchError, CoreRLError, ExitCode, RunStopped


class StepError(BatchError):
    """The data of a step is inconsistent, in a run that had passed all checks of its data."""

    exit_code = ExitCode.FAILED


class CallbackError(CoreRLError):
    """A callback of a run raised an error."""


class StoppedBySignal(RunStopped):
    """SIGTERM or SIGUSR1 stopped the run; its state is saved."""

    exit_code = ExitCode.STOPPED


class NothingLearned(RunStopped):
    """A rule of the recipe (``stop_on``) ended a run that learned nothing."""

    exit_code = ExitCode.NOTHING_LEARNED
