"""Correct backends of other makes than the reference: bases of mutants.

Some implement a default of the core in the same way, so that a mutant can bend it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from core_rl.backend.inference_backend import InferenceBackend
from core_rl.backend.meta import StatePart
from core_rl.backend.protocols import SupportsOwnCheckpoint, SupportsOwnExport, SupportsOwnGradNorm
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.tensors import LocalSlice, MappedSource, NamedTensors, TensorSource
from core_rl.backend.train_backend import BuildContext, TrainBackend
from core_rl.checkpoint.shards import ShardFiles, write_copies
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.engine.components import TrainComponents
from core_rl.engine.modes import MEMORY
from core_rl.reference.train import ReferenceBackend
from core_rl.state.memory import HostCopies
from core_rl.state.slices import Shard, copy_shards
from core_rl.state.store import TensorStore, global_grad_norm
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_state import fill
from core_rl.toolkit.packed import PackedModel

TrainContext = BuildContext[TrainEngineConfig]
BackendT = TypeVar("BackendT", bound=TrainBackend[Any] | InferenceBackend[Any])
MOMENTS = ("exp_avg", "exp_avg_sq")


def inside(base: type[BackendT], place: str) -> Callable[[type], type[BackendT]]:
    """Put the decorated class into an engine like ``base``, which has its name and text.

    ``place`` is an attribute of ``base``, or one of the core's components that a train engine has.
    """

    def engine_of(part: type) -> type[BackendT]:
        is_component = place in TrainComponents.__dataclass_fields__
        attribute = {"components": TrainComponents(**{place: part})} if is_component else {place: part}
        return type(
            part.__name__, (base,), {"__module__": part.__module__, "__doc__": part.__doc__, **attribute}
        )

    return engine_of


class Replicated(ReferenceBackend):
    """Every rank has the whole model; gradients are added up over ranks."""


class Packed(Replicated):
    """The same on packed sequences."""

    def build(self, context: TrainContext) -> None:
        register_packed_attention()
        model_config = context.config.model
        model = build_model(model_config, seed=context.seed, attn_implementation=PACKED_ATTENTION)
        self.packed = PackedModel(model, model_config.head)
        self.adopt(model, context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        return ModelOutput(**self.packed(micro_batch, step.outputs, step.temperature, step.trained_only))


class OwnExport(Replicated, SupportsOwnExport):
    """Named tensors are streamed and loaded by the backend itself."""

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from self._store().stream(kind)

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        self._store().load(kind, source)

    def _store(self) -> TensorStore:
        """The core's store over the same model, without the changes of a subclass."""
        plain, config = ReferenceBackend(), self.context.config
        vars(plain).update(vars(self))
        half, lora = config.dtype == "bfloat16", config.model.lora is not None
        return TensorStore(plain, self.context.world, 0, half=half, lora=lora)


class OwnNorm(Replicated, SupportsOwnGradNorm):
    """The gradient norm is the backend's own, over `counted`."""

    def grad_norm(self) -> float:
        return global_grad_norm(self.counted(), self.context.world)

    def counted(self) -> Iterable[LocalSlice]:
        """The slices of gradients that enter the norm; slices with replica 0 count."""
        return self.state().local("grads")


class OwnCheckpoint(Replicated, SupportsOwnCheckpoint):
    """Sharded checkpoints are in a format of the backend's own."""

    def save_sharded(self, directory: Path, with_optimizer: bool) -> None:
        world = self.context.world
        subdirectory = directory / "own"
        subdirectory.mkdir(exist_ok=True)
        write_copies(
            subdirectory, world.rank, copy_shards(world.rank, self.shards(with_optimizer)), world.size
        )

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        files = ShardFiles(directory / "own")
        for kind in self.kinds(with_optimizer):
            names = {name: f"{kind}/{name}" for name in self.state().shapes(kind)}
            fill(self.state(), kind, MappedSource(files, names))

    def kinds(self, with_optimizer: bool) -> tuple[str, ...]:
        """The kinds of tensors in a checkpoint."""
        return ("master", "buffers", *(self.state().optimizer_kinds if with_optimizer else ()))

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        """Tensors that this rank writes."""
        for kind in self.kinds(with_optimizer):
            shapes = self.state().shapes(kind)
            for part in self.state().local(kind):
                if part.replica == 0:
                    yield Shard(f"{kind}/{part.name}", part.tensor, shapes[part.name], part.offsets)


class OwnOffload(Replicated):
    """State is moved to the host by the backend itself."""

    def offload(self, part: StatePart) -> None:
        self.copies = {**getattr(self, "copies", {}), part: HostCopies()}
        for memory in MEMORY[part]:
            self.copies[part].take(self.memory(memory))

    def onload(self, part: StatePart) -> None:
        self.copies.pop(part).give_back()


class CountsItself(Replicated):
    """Updates are counted by the backend itself; after a load, from `restored`."""

    counted: int | None = 0

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        self.counted = None

    def step(self, scale: float, lr: float, count: int) -> None:
        before = self.restored(count - 1) if self.counted is None else self.counted
        self.counted = before + 1
        super().step(scale, lr, self.counted)

    def restored(self, count: int) -> int:
        """The number of updates after a load with ``count``."""
        return count
