"""Every error that core-rl raises on purpose, in one tree.

CoreRLError
├── ConfigError                a configuration field or file is wrong
│   └── LayoutError            parallel degrees that do not fit the world, the model or the engine
├── EngineError
│   ├── EngineNotFound         no installed engine has this name
│   ├── EngineAmbiguous        two distributions claim one name
│   ├── EngineBroken           the plugin is installed, but it cannot be loaded
│   ├── EngineIncompatible     the plugin was built for another interface version
│   ├── EngineStateError       a method was called in a state that does not allow it
│   ├── EngineContractError    an engine's hook returned something that the contract forbids
│   ├── OutOfDeviceMemory      a pass did not fit into the memory of the accelerator
│   └── UnsupportedCapability  something optional that this engine does not declare
├── BatchError                 the data of a batch is inconsistent or does not fit
├── LossError                  a loss function broke the loss contract
├── WeightsError               named tensors that are missing, unexpected or of the wrong shape
│   └── DeltaRefused           changes of weights that the receiver does not have
├── CheckpointError            a checkpoint could not be written or read
│   ├── CheckpointNotFound     the path holds no complete checkpoint
│   ├── CheckpointDamaged      a file is missing, truncated or changed
│   └── CheckpointMismatch     the checkpoint belongs to another model, engine or layout
├── GroupError                 a group of ranks failed
│   ├── ClusterError           machines did not come, or were refused
│   ├── RankFailed             a rank raised an error
│   ├── RankDied               a rank's process ended
│   └── RankTimeout            a rank did not answer in time
├── RolloutError               generation, a workflow or a reward function failed
└── RunStopped                 a run ended before its last step, on purpose

Each message begins with the problem and the value, and ends with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar

__all__ = [
    "SIGNAL_BASE",
    "BatchError",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ClusterError",
    "ConfigError",
    "CoreRLError",
    "DeltaRefused",
    "EngineAmbiguous",
    "EngineBroken",
    "EngineContractError",
    "EngineError",
    "EngineIncompatible",
    "EngineNotFound",
    "EngineStateError",
    "ExitCode",
    "GroupError",
    "LayoutError",
    "LossError",
    "MissingPackage",
    "OutOfDeviceMemory",
    "RankDied",
    "RankFailed",
    "RankTimeout",
    "RolloutError",
    "RunStopped",
    "UnsupportedCapability",
    "UnsupportedPackage",
    "WeightsError",
    "raise_all",
]

SIGNAL_BASE = 128
"""A command that a signal ends at once exits with this plus the signal's number, as shells count."""


class ExitCode(IntEnum):
    """Exit code of a command."""

    DONE = 0
    """The command succeeded; a run is complete."""
    FAILED = 1
    """An engine, a checkpoint, a rollout, a callback, a batch of a step or a check failed."""
    USAGE = 2
    """An argument, a field of a recipe, its data or an engine's name is wrong. Nothing was started."""
    NOTHING_LEARNED = 3
    """The field ``stop_on`` of the recipe ended the run. The last good checkpoint is kept."""
    STOPPED = 75
    """SIGTERM or SIGUSR1 stopped the run. Nothing is lost: the same command continues."""
    INTERRUPTED = 130
    """Ctrl-C. The same command continues from the last checkpoint."""


class CoreRLError(Exception):
    """The root: ``except CoreRLError`` catches everything that core-rl raises on purpose."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    """Exit code of a command that ends with this error."""


class ConfigError(CoreRLError):
    """A configuration field or file is wrong."""

    exit_code = ExitCode.USAGE


class MissingPackage(ConfigError):
    """A field of a config needs a package that is not installed."""


class UnsupportedPackage(ConfigError):
    """An installed version of a package with which the engine fails a check of the conformance suite."""


class LayoutError(ConfigError):
    """Parallel degrees that do not fit the world size, the model or the engine."""


class EngineError(CoreRLError):
    """Something about an engine, as opposed to its input."""


class EngineNotFound(EngineError):
    """No installed engine has this name."""

    exit_code = ExitCode.USAGE


class EngineAmbiguous(EngineError):
    """Two installed distributions claim the same engine name."""

    exit_code = ExitCode.USAGE


class EngineBroken(EngineError):
    """The plugin is installed, but it cannot be loaded."""

    exit_code = ExitCode.USAGE


class EngineIncompatible(EngineError):
    """The plugin was built for a version of the interface that this core does not speak."""

    exit_code = ExitCode.USAGE


class EngineStateError(EngineError):
    """A method was called in a state that does not allow it."""


class EngineContractError(EngineError):
    """A hook of an engine returned something that the contract forbids."""


class OutOfDeviceMemory(EngineError):
    """A model or a pass does not fit into the memory of the accelerator; the message has the remedy."""


class UnsupportedCapability(EngineError):
    """An optional feature that the engine does not declare was requested."""

    exit_code = ExitCode.USAGE


class BatchError(CoreRLError):
    """The data of a batch is inconsistent, or does not fit the model or the budget."""

    exit_code = ExitCode.USAGE


class LossError(CoreRLError):
    """A loss function broke the loss contract."""


class WeightsError(CoreRLError):
    """Named tensors that are missing, unexpected, or of the wrong shape."""


class DeltaRefused(WeightsError):
    """Changes of weights that the receiver does not have; a full update follows."""


class CheckpointError(CoreRLError):
    """A checkpoint could not be written or read."""


class CheckpointNotFound(CheckpointError):
    """The path holds no complete checkpoint."""


class CheckpointDamaged(CheckpointError):
    """A file of the checkpoint is missing, truncated or changed."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model, engine or layout."""


class GroupError(CoreRLError):
    """A group of ranks failed; ``rank`` is the first one at fault."""

    def __init__(self, message: str, rank: int = -1, traceback: str = "") -> None:
        super().__init__(message, rank, traceback)
        self.message = message
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.message}\n{self.traceback}" if self.traceback else self.message


class ClusterError(GroupError):
    """Machines did not come, are not like the driver's, or were refused."""


class RankFailed(GroupError):
    """A rank raised an error; ``traceback`` is the rank's own."""


class RankDied(GroupError):
    """A rank's process ended while it was needed."""


class RankTimeout(GroupError):
    """A rank did not answer within the time that the call was given."""


class RolloutError(CoreRLError):
    """Generation, a workflow or a reward function failed."""


class RunStopped(CoreRLError):
    """A run ended before its last step, on purpose. It can be resumed."""


def raise_all(
    kind: type[CoreRLError], subject: object, violations: Iterable[str], *, most: int | None = None
) -> None:
    """Raise one ``kind`` that counts every violation and lists all, or ``most``; return when there is none."""
    problems = list(violations)
    if len(problems) == 1:
        raise kind(f"{subject}: {problems[0]}")
    if problems:
        more = [] if most is None or len(problems) <= most else [f"and {len(problems) - most} more"]
        listed = "\n".join(f"  - {line}" for line in [*problems[:most], *more])
        raise kind(f"{subject}: {len(problems)} problems:\n{listed}")
