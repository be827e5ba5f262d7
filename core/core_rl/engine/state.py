"""`EngineState`: tensors, checkpoints, weight sync and progress of a train engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core_rl.backend.meta import SaveLoadMeta, Scheduling, TensorKind, WeightUpdateMeta
from core_rl.backend.named_tensors import NamedTensors, TensorSource, check_source
from core_rl.backend.progress import EngineProgress
from core_rl.engine import guards
from core_rl.engine.passes import EnginePasses
from core_rl.errors import EngineStateError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["EngineState"]


class EngineState(EnginePasses):
    """What a train engine holds, by name and on disk."""

    def hf_config(self) -> PretrainedConfig:
        """The transformers config of the model with its head. No collective."""
        return self._hf_config()

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Stream parameter-shaped quantities in the Hugging Face layout; see `NamedTensors`.

        ``grads`` are there between ``forward_backward`` and ``optimizer_step``: reduced, normalised,
        not clipped. With an adapter (``model.lora``), ``params`` are the weights with the adapter merged
        into them, ``adapter`` is the adapter (and a value or reward head) under the names of ``peft``
        in float32, and ``master`` holds the base weights and the adapter beside each other.
        """
        guards.require_state(self._state, "ready", "named_tensors()")
        guards.require_kind(self.config, kind)
        if kind == "params":
            guards.require_adapter_on(self._adapter_off, "named_tensors('params')")
        guards.require_present(self._offloaded, kind)
        if kind == "grads":
            if not self._pending.passes:
                raise EngineStateError("there are no gradients to export; call forward_backward() first")
            self._ensure_reduced()
        return self._named_tensors(kind)

    def tensor_shapes(self, kind: TensorKind) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of what `named_tensors` streams. No collective."""
        return self._tensor_shapes(kind)

    def load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        """Set parameters, moments or buffers; `WeightsError` lists every name or shape that is off."""
        guards.require_state(self._state, "ready", "load_named_tensors()")
        guards.require_kind(self.config, kind)
        guards.require_loadable(self.config, kind)
        check_source(source, self._tensor_shapes(kind), f"loading {kind!r}")
        with self._onloaded(guards.part_of(kind)):
            self._load_named_tensors(kind, source)

    def save(self, meta: SaveLoadMeta) -> None:
        """Write a checkpoint, atomically; `CheckpointError` leaves what was there untouched.

        With ``meta.asynchronous`` it returns when what is saved can no longer change: each rank has copied
        the parts that it holds to host memory (an engine that cannot has written its files by then).
        Files, digests, flushing and the renaming into place come while training goes on.
        `wait_for_saves` waits for that, and so do the next ``save``, ``load`` and ``destroy``; whichever
        comes first raises what went wrong.
        """
        from core_rl.checkpoint.formats import save_engine

        guards.require_state(self._state, "ready", "save()")
        if meta.format == "hf":
            guards.require_adapter_on(self._adapter_off, "save(format='hf')")
        self._finish_saving()
        with self._onloaded("model", "optimizer"), self._draws.own():
            self._background = save_engine(self, meta)

    def wait_for_saves(self) -> None:
        """Return when no save is going on in the background.

        Raises one `CheckpointError` on all ranks if one failed on any of them; what was at its place
        before is untouched.
        """
        guards.require_state(self._state, "ready", "wait_for_saves()")
        self._finish_saving()

    def _finish_saving(self) -> None:
        saving, self._background = self._background, None
        if saving is not None:
            saving.wait(self.world)

    def load(self, meta: SaveLoadMeta) -> None:
        """Read a checkpoint; a damaged or foreign one is refused before anything changes."""
        from core_rl.checkpoint.formats import load_engine_state

        guards.require_state(self._state, "ready", "load()")
        self._finish_saving()
        self.optimizer_zero_grad()
        with self._onloaded("model", "optimizer"), self._draws.own():
            load_engine_state(self, meta)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights to inference engines, which take them by ``update_weights(meta)``.

        ``lora`` sends the adapter alone (``model.lora``), and all others the weights with the adapter merged into
        them. By ``disk`` this comes first. By any other method the two run at one time: call ``update_weights``
        first, which returns at once, and this returns when the weights are installed. `sync_weights` does both.
        """
        guards.require_state(self._state, "ready", "upload_weights()")
        guards.require_sync(self.spec, meta.method)
        if meta.method == "disk":
            self.save(SaveLoadMeta(path=str(meta.directory), format="hf", with_optimizer=False))
            return
        if meta.method == "lora":
            guards.require_sendable_adapter(self.config)
        with self._onloaded("model"):
            self._send_weights(meta)

    def _send_weights(self, meta: WeightUpdateMeta) -> None:
        from core_rl.weight_sync.messages import AdapterMetadata
        from core_rl.weight_sync.sender import send_weights

        adapter = None
        if meta.method == "lora":
            assert self.config.model.lora is not None  # required when the upload began
            adapter = AdapterMetadata.of(self.config.model.lora, self._base_digest() if meta.verify else None)
        kinds: tuple[TensorKind, ...] = ("params",) if adapter is None else ("adapter",)
        if adapter is None and self.tensor_shapes("buffers"):
            kinds = ("params", "buffers")
        stream = (item for kind in kinds for item in self.named_tensors(kind))
        send_weights(stream, meta, self.world, is_writer=self.is_writer, device=self.device, adapter=adapter)

    @property
    def progress(self) -> EngineProgress:
        """Scheduler steps, updates and version."""
        return self._progress

    def restore_progress(self, progress: EngineProgress) -> None:
        """Go on from ``progress``, as a checkpoint does. No collective."""
        self._progress = replace(progress)
        if self.config.optimizer is not None:
            with self._onloaded("optimizer"):
                self._set_update_count(progress.updates)

    def set_version(self, version: int) -> None:
        """Record the version that the driver gave to the weights. No collective."""
        self._progress = replace(self._progress, version=version)

    def get_version(self) -> int:
        """The version that the driver gave to the weights. No collective."""
        return self._progress.version

    def get_scheduling_config(self) -> Scheduling:
        """Resources that one rank needs. No collective."""
        return self._scheduling()
