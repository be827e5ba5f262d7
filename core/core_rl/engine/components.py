"""Parts that a `TrainEngine` is made of, and building them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.train_backend import AnyTrainBackend, BuildContext
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.config.hub import with_local_model
from core_rl.distributed.agreement import first_on_each_machine
from core_rl.distributed.devices import chosen_device, use_device
from core_rl.distributed.process_group import RankAddress, join, local_index
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.persistence import Persistence
from core_rl.engine.runtime import Runtime
from core_rl.engine.schedule import ScheduleFunction, schedule_length
from core_rl.engine.step import TrainStep
from core_rl.registry.spec import EngineSpec
from core_rl.seeds import derive_seed
from core_rl.state.rng_state import RngState
from core_rl.state.store import TensorStore

__all__ = ["Parts", "TrainComponents"]


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
            check_model=partial(guards.check_experts, spec, config.model),
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
        guards.check_experts(spec, config.model, model)
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
            limits=ModelLimits.of(model),
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
