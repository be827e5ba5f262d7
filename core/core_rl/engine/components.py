"""Components of a `TrainEngine`: checkpoints and weight uploads (`Persistence`), and building all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import CheckpointFormat, FinetuneSpec, SaveLoadMeta, TensorKind, WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors, TensorSource, check_source
from core_rl.backend.train_backend import AnyTrainBackend, BuildContext
from core_rl.checkpoint.background import BackgroundSave
from core_rl.checkpoint.contents import Contents
from core_rl.checkpoint.formats import load_contents, save_contents
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.hub import with_local_model
from core_rl.distributed.agreement import first_on_each_machine
from core_rl.distributed.devices import chosen_device, use_device
from core_rl.distributed.process_group import RankAddress, join, local_index
from core_rl.engine import guards
from core_rl.engine.delta_files import write_changes
from core_rl.engine.modes import Modes
from core_rl.engine.runtime import Runtime
from core_rl.engine.schedule import ScheduleFunction, schedule_length
from core_rl.engine.step import TrainStep
from core_rl.errors import EngineStateError
from core_rl.registry.packages import warn_of_untried
from core_rl.registry.spec import EngineSpec
from core_rl.seeds import derive_seed
from core_rl.state.rng_state import RngState
from core_rl.state.store import TensorStore
from core_rl.weight_sync.delta import DeltaEncoder
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl.weight_sync.update import weight_update

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
        self.changes = DeltaEncoder()
        """The weights of the previous update with ``delta``."""

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
        self._save(meta)

    def _save(self, meta: SaveLoadMeta, export: Callable[[NamedTensors], NamedTensors] = iter) -> None:
        self._require_format("save", meta.format)
        if meta.format == "hf":
            guards.require_adapter_on(self.modes.adapter_off, "save(format='hf')")
        self.wait_for_saves()
        with self.modes.onloaded("model", "optimizer"), self.runtime.rng.own():
            self.saving = save_contents(replace(self.contents(), export=export), meta)

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
            self.step.zero_grad()  # gradients of the weights before, which a refused checkpoint keeps
        if progress is not None:
            self.step.progress = replace(progress)

    def _require_format(self, method: str, name: CheckpointFormat) -> None:
        if name in FORMAT_CAPABILITY:
            subject = f"a checkpoint with format={name!r}"
            guards.require_capability(self.runtime.spec, FORMAT_CAPABILITY[name], subject)
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
        if not meta.delta or meta.rebase:
            self.changes.forget()
        if meta.method == "disk":
            self._write_update(meta)
            return
        kinds, adapter = run.tensors.export_kinds("params"), None
        with self.modes.onloaded("model"):
            if meta.method == "lora":
                guards.require_sendable_adapter(run.config)
                assert run.config.model.lora is not None  # required just now
                base = run.tensors.base_digest() if meta.verify else None
                kinds, adapter = ("adapter",), AdapterMetadata.of(run.config.model.lora, base)
            update = weight_update(meta, adapter, self.changes.base)
            stream = self._export(kinds)
            if meta.delta:
                stream = self.changes.encode(stream)
            update.send(stream, run.world, is_writer=run.groups.is_writer, device=run.device)
        if meta.delta:
            self.changes.commit(meta.version)

    def _export(self, kinds: Sequence[TensorKind]) -> NamedTensors:
        return (item for kind in kinds for item in self.named_tensors(kind))

    def _write_update(self, meta: WeightUpdateMeta) -> None:
        """Write a model directory, or with ``delta`` the changes since the previous update."""
        full = SaveLoadMeta(path=meta.path or "", format="hf", with_optimizer=False)
        if not meta.delta:
            self.save(full)
        elif self.changes.base is None:
            self._save(full, self.changes.recorded)
        else:
            run = self.runtime
            with self.modes.onloaded("model"):
                self.wait_for_saves()
                stream = self.changes.encode(self._export(run.tensors.export_kinds("params")))
                write_changes(full.path, stream, run.world, is_writer=run.groups.is_writer)
        if meta.delta:
            self.changes.commit(meta.version)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of one engine that is built."""

    runtime: Runtime
    modes: Modes
    step: TrainStep
    persistence: Persistence


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """Classes of the parts. Only the suite's own tests give others: faulty ones, which checks must reject."""

    tensors: type[TensorStore] = TensorStore
    step: type[TrainStep] = TrainStep
    persistence: type[Persistence] = Persistence

    def build(
        self,
        spec: EngineSpec,
        config: TrainEngineConfig,
        backend: AnyTrainBackend,
        addr: RankAddress | None,
        ft_spec: FinetuneSpec | None,
        resources: ExitStack,
    ) -> Parts:
        """Join the process group, build ``backend`` and the parts over it; collective.

        ``resources`` leaves the group and frees the backend. Raises what `TrainEngine.initialize` raises.
        """
        device = chosen_device(config.device, local_index(addr))
        if device.type == "cuda":
            guards.require_capability(spec, Capability.CUDA, "device 'cuda'")
        if addr is not None:
            config.layout.check_world(addr.world_size)
        schedule_steps = None
        if config.optimizer is not None:
            schedule_steps = schedule_length(config.optimizer, ft_spec.total_train_steps if ft_spec else None)
        schedule_function = ScheduleFunction.of(config.optimizer, schedule_steps)
        use_device(device)  # NCCL's groups and kernels are made for it
        membership = join(addr, device)
        resources.callback(membership.leave)
        world = membership.world
        if world.rank == 0:
            warn_of_untried(spec.name, spec.packages)
        config.layout.check_world(world.size)
        if config.model.path is not None:  # a model that is named by a Hub id is downloaded
            config = first_on_each_machine(
                world, lambda first: with_local_model(config, local_files_only=not first), "the model"
            )
        resources.callback(backend.teardown)
        groups = backend.groups(world, config)
        # Ranks that see the same sequences draw the same numbers: replicas stay equal.
        rng = RngState(derive_seed(config.seed, groups.data_parallel.rank), device)
        context = BuildContext(
            config=config,
            world=world,
            groups=groups,
            device=device,
            check_model=partial(guards.check_model, spec, config),
        )
        with rng.own():
            backend.build(context)
        tensors = self.tensors(
            backend,
            world,
            world.gather(groups.is_writer).index(True),
            half=config.dtype == "bfloat16",
            lora=config.model.lora is not None,
        )
        model = backend.hf_config()
        guards.check_model(spec, config, model)
        if context.parameter_rules is not None:
            context.parameter_rules.check(tensors.shapes("grads"))
        tensors.check()
        backend.set_training(False)
        backend.verify()
        runtime = Runtime(
            spec=spec,
            config=config,
            backend=backend,
            model=model,
            limits=ModelLimits.of(model, config.model.vision),
            world=world,
            groups=groups,
            device=device,
            rng=rng,
            schedule_steps=schedule_steps,
            schedule_function=schedule_function,
            tensors=tensors,
        )
        modes = Modes(runtime)
        step = self.step(runtime, modes)
        persistence = self.persistence(runtime, modes, step)
        return Parts(runtime=runtime, modes=modes, step=step, persistence=persistence)
