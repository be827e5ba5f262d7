"""`Persistence`: checkpoints and weight uploads of a train engine."""

from __future__ import annotations

from dataclasses import replace

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, TensorKind, WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors, TensorSource, check_source
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents
from core_rl.checkpoint.formats import load_contents, save_contents
from core_rl.config.capability import Capability
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.engine.step import TrainStep
from core_rl.errors import EngineStateError
from core_rl.weight_sync.disk import DiskUpdate
from core_rl.weight_sync.lora import AdapterMetadata
from core_rl.weight_sync.update import weight_update

__all__ = ["Persistence"]

FORMAT_CAPABILITY: dict[CheckpointFormat, Capability] = {
    "sharded": Capability.SHARDED_CHECKPOINT,
    "portable": Capability.PORTABLE_CHECKPOINT,
    "adapter": Capability.LORA,
}


class Persistence:
    """Named tensors, checkpoints and uploads of one engine."""

    def __init__(self, runtime: Runtime, modes: Modes, step: TrainStep) -> None:
        self.runtime = runtime
        self.modes = modes
        self.step = step
        self.saving: BackgroundSave | None = None
        """The save in the background, if any."""

    # ---------------------------------------------------------- named tensors

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Stream full tensors; see `TrainEngine.named_tensors`."""
        run = self.runtime
        guards.require_kind(run.config, kind, run.tensors.optimizer_kinds)
        if kind == "params":
            guards.require_adapter_on(self.modes.adapter_off, "named_tensors('params')")
        guards.require_present(self.modes.offloaded, kind, guards.part_of(kind))
        if kind == "grads":
            if not self.step.gradients.passes:
                raise EngineStateError("there are no gradients to export; call forward_backward() first")
            self.step.reduce()
        return run.tensors.stream(kind)

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set tensors; see `TrainEngine.load_named_tensors`."""
        run = self.runtime
        guards.require_kind(run.config, kind, run.tensors.optimizer_kinds)
        guards.require_loadable(run.config, kind)
        check_source(source, run.tensors.shapes(kind), f"loading {kind!r}")
        with self.modes.onloaded(guards.part_of(kind)):
            run.tensors.load(kind, source)

    # ------------------------------------------------------------ checkpoints

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint; see `TrainEngine.save`."""
        self._require_format("save", meta.format)
        if meta.format == "hf":
            guards.require_adapter_on(self.modes.adapter_off, "save(format='hf')")
        self.wait_for_saves()
        with self.modes.onloaded("model", "optimizer"), self.runtime.rng.own():
            self.saving = save_contents(self.contents(), meta)

    def wait_for_saves(self) -> None:
        """Return when no save is in progress in the background, or raise its error."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait(self.runtime.world)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint; see `TrainEngine.load`."""
        run = self.runtime
        self._require_format("load", meta.format)
        if meta.format == "hf":
            guards.require_loadable(run.config, "params")
        self.wait_for_saves()
        with self.modes.onloaded("model", "optimizer"), run.rng.own():
            progress = load_contents(self.contents(), meta)
            self.step.zero_grad()  # those of the weights before, which a refused checkpoint keeps
        if progress is not None:
            self.step.progress = replace(progress)

    def _require_format(self, method: str, name: CheckpointFormat) -> None:
        if name in FORMAT_CAPABILITY:
            what = f"a checkpoint with format={name!r}"
            guards.require_capability(self.runtime.spec, FORMAT_CAPABILITY[name], what)
        if name == "adapter":
            guards.require_adapter(self.runtime.config, f"{method}(format='adapter')")

    def contents(self) -> Contents:
        """Everything that a checkpoint is made of."""
        run = self.runtime
        return Contents(
            engine=run.spec.name,
            resharding=run.spec.supports(Capability.RESHARDING),
            config=run.config,
            backend=run.backend,
            tensors=run.tensors,
            world=run.world,
            is_writer=run.groups.is_writer,
            progress=self.step.progress,
            rng=run.rng,
        )

    # ------------------------------------------------------------ weight sync

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines; see `TrainEngine.upload_weights`."""
        run = self.runtime
        guards.require_sync(run.spec, meta.method)
        if meta.method == "disk":
            DiskUpdate(meta).send(self.save)
            return
        kinds, adapter = run.tensors.export_kinds("params"), None
        with self.modes.onloaded("model"):
            if meta.method == "lora":
                guards.require_sendable_adapter(run.config)
                assert run.config.model.lora is not None  # required just now
                base = run.tensors.base_digest() if meta.verify else None
                kinds, adapter = ("adapter",), AdapterMetadata.of(run.config.model.lora, base)
            stream = (item for kind in kinds for item in self.named_tensors(kind))
            update = weight_update(meta, adapter)
            update.send(stream, run.world, is_writer=run.groups.is_writer, device=run.device)
