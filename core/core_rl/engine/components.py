"""Parts that a `TrainEngine` is made of, and building them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from core_rl.backend.train_backend import AnyTrainBackend, BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.process_group import Membership
from core_rl.engine import guards
from core_rl.engine.modes import Modes
from core_rl.engine.passes import Passes
from core_rl.engine.persistence import Persistence
from core_rl.engine.runtime import Runtime, Status
from core_rl.engine.updates import Updates
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
    passes: Passes
    updates: Updates
    persistence: Persistence


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """Classes of the parts. Only the suite's own tests give others: faulty ones, which checks must reject."""

    tensors: type[TensorStore] = TensorStore
    passes: type[Passes] = Passes
    updates: type[Updates] = Updates
    persistence: type[Persistence] = Persistence

    def build(
        self,
        spec: EngineSpec,
        config: TrainEngineConfig,
        backend: AnyTrainBackend,
        status: Status,
        membership: Membership,
        device: torch.device,
        schedule_steps: int | None,
    ) -> Parts:
        """Build ``backend`` and the parts over it; collective. Raises what `TrainEngine.initialize` raises."""
        world, timeout_s = membership.world, membership.address.timeout_s
        groups = backend.groups(world, config)
        # Ranks that see the same sequences draw the same numbers: replicas stay equal.
        rng = RngState(derive_seed(config.seed, groups.data_parallel.rank), device)
        context = BuildContext(
            config=config,
            world=world,
            groups=groups,
            device=device,
            timeout_s=timeout_s,
            check_model=partial(guards.check_experts, spec, config.model),
        )
        with rng.own():
            backend.build(context)
        writes = groups.is_output_rank and groups.data_parallel.rank == 0
        tensors = self.tensors(
            backend,
            world,
            world.gather(writes).index(True),
            half=config.dtype == "bfloat16",
            lora=config.model.lora is not None,
        )
        guards.check_experts(spec, config.model, backend.hf_config())
        tensors.check()
        backend.set_training(False)
        runtime = Runtime(
            spec=spec,
            config=config,
            backend=backend,
            status=status,
            world=world,
            groups=groups,
            device=device,
            timeout_s=timeout_s,
            rng=rng,
            schedule_steps=schedule_steps,
            tensors=tensors,
        )
        modes = Modes(runtime)
        updates = self.updates(runtime, modes)
        return Parts(
            runtime=runtime,
            modes=modes,
            passes=self.passes(runtime, modes),
            updates=updates,
            persistence=self.persistence(runtime, modes, updates),
        )
