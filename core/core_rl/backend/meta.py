"""Small records that travel between the driver and its engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from core_rl.errors import ConfigError

TensorKind = str
"""``params`` (compute dtype), ``master`` (float32), ``grads`` (float32, normalised, before clipping), ``buffers``,
``carried`` (tensors of the checkpoint that the module does not hold, as they are), ``adapter`` (float32 factors under
the names of ``peft``), or a kind of the optimizer, such as ``exp_avg``."""
StatePart = Literal["model", "optimizer"]
"""Parts that are offloaded separately: weights with their gradients, and moments."""
CheckpointFormat = Literal["hf", "sharded", "portable", "adapter"]
SyncMethod = Literal["disk", "tensor", "distributed", "lora"]
BETWEEN_MACHINES: tuple[SyncMethod, ...] = ("distributed", "lora")
"""Methods that take `WeightUpdateMeta.host`."""


def _require_one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{field} = {value!r}; choose from {', '.join(map(repr, known))}")


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """Length of the training run, for engines and schedules that need it."""

    total_train_epochs: int = 1
    dataset_size: int = 1
    train_batch_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data; the last incomplete batch is dropped."""
        return max(1, self.dataset_size // self.train_batch_size)

    @property
    def total_train_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.total_train_epochs * self.steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class SaveLoadMeta:
    """Contents and path of a checkpoint to save or load."""

    path: str
    """A local directory, on a file system of all ranks."""
    format: CheckpointFormat = "sharded"
    with_optimizer: bool = True
    """Moments, step counts and random state as well; ``hf`` and ``adapter`` never hold them."""
    tokenizer_path: str | None = None
    """For ``hf`` and ``adapter``: a directory whose tokenizer files are copied into the export."""
    asynchronous: bool = False
    """``save`` returns when the saved state can no longer change, and the rest is done in the background; see
    `TrainEngine.save`. ``load`` ignores it. Until it is complete, ``hf`` takes twice the disk space: each rank writes
    its slices, which rank 0 then joins."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("SaveLoadMeta.path is empty; name a directory")
        _require_one_of("SaveLoadMeta.format", self.format, get_args(CheckpointFormat))


@dataclass(frozen=True, kw_only=True)
class WeightUpdateMeta:
    """Method and version of a weight update from a train engine to an inference engine."""

    method: SyncMethod = "disk"
    version: int
    """The version that the receiver has afterwards: raised by the driver, never by an engine."""
    path: str | None = None
    """For ``disk``: the directory between the two. For all others: the file through which they find each other; the
    receiver makes it and removes it."""
    host: str | None = None
    """For ``distributed`` and ``lora``: the address of the receiver's machine towards a sender on another one, to which
    the buckets then go over TCP. Null: both are on one machine."""
    verify: bool = False
    """Compare digests of received and sent tensors; for ``lora`` also of the weights below the adapter. Without
    it, ``disk`` compares the sizes of files."""
    delta: bool = False
    """Send only the values that changed since the previous update with ``delta``, bit for bit, with a digest of all
    weights afterwards; for all methods but ``lora``. The first update is full. The receiver refuses changes since other
    weights than its own (`DeltaRefused`), and `sync_weights` then sends all of them. Both sides keep a copy of the
    weights in host memory."""
    rebase: bool = False
    """With ``delta``: send all weights, whatever was sent before."""
    bucket_bytes: int = 256 * 2**20
    """For all but ``disk``: the largest piece in flight, in bytes, or one tensor if that is larger."""

    def __post_init__(self) -> None:
        _require_one_of("WeightUpdateMeta.method", self.method, get_args(SyncMethod))
        if self.method == "disk" and not self.path:
            raise ConfigError("WeightUpdateMeta(method='disk') needs a path; set the directory to write to")
        if self.host is not None and self.method not in BETWEEN_MACHINES:
            raise ConfigError(
                f"WeightUpdateMeta(method={self.method!r}, host={self.host!r}): host is for "
                f"{' and '.join(map(repr, BETWEEN_MACHINES))}; leave it out, or choose 'distributed' between machines"
            )
        if self.delta and self.method == "lora":
            raise ConfigError(
                "WeightUpdateMeta(method='lora', delta=True): an adapter is sent whole; set delta to False"
            )
        if self.bucket_bytes < 1:
            raise ConfigError(f"WeightUpdateMeta.bucket_bytes = {self.bucket_bytes}; it must be positive")

    @property
    def directory(self) -> Path:
        """The path of the ``disk`` method, where it is local."""
        return Path(self.path or "")


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Resources of one rank of an engine, or of one server; a launcher adds them up for each machine."""

    cpu: int = 1
    """CPU cores."""
    gpu: int = 0
    """Accelerators."""
    memory_mib: int = 0
    """Host memory in MiB; 0 where it is not known, which leaves it to the scheduler's default."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables, as names and values."""


@dataclass(frozen=True, kw_only=True)
class EngineProgress:
    """Counters of one engine; part of every checkpoint."""

    lr_steps: int = 0
    """Calls of ``lr_scheduler_step()``: the learning rate is a pure function of it."""
    updates: int = 0
    """Successful optimizer steps: Adam's own count."""
    version: int = 0
    """The version that the driver gave to the weights."""
