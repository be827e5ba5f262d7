"""`TrainEngine`: the public methods, the same for all engines, over the hooks of a plugin."""

from __future__ import annotations

from contextlib import ExitStack

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta
from core_rl.backend.schedule import schedule_length
from core_rl.config.hub import with_local_model
from core_rl.distributed.agreement import first_on_each_machine
from core_rl.distributed.comm import RankGroups
from core_rl.distributed.process_group import Membership, RankAddress, join, pick_device
from core_rl.engine import guards
from core_rl.engine.modes import parts_of
from core_rl.engine.state import EngineState
from core_rl.seeds import derive_seed
from core_rl.state.rng_state import Draws

__all__ = ["TrainEngine"]


class TrainEngine(EngineState):
    """One rank of a sharded model that is trained.

    All methods are collective unless they say otherwise: each rank of the engine's world calls them
    in the same order, model-parallel peers with the same data, data-parallel ranks each with its
    own shard. Results are the same on every rank of a model-parallel group.

    A plugin subclasses it and fills in the hooks of `TrainHooks`; it overrides no public method.
    """

    # ------------------------------------------------------------- life cycle

    def initialize(self, addr: RankAddress | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Join the process group and build module and optimizer.

        Raises `LayoutError` when the layout does not multiply to the world size, `ConfigError` when
        the model cannot be built, `UnsupportedCapability` for a mixture of experts where the engine
        declares none, `EngineStateError` when called twice, and what `load` raises for
        ``model.lora.path``.
        """
        guards.require_state(self._state, "new", "initialize()")
        self.device = pick_device(self.config.device, addr.local_rank if addr else 0)
        guards.check_device(self.spec, self.device)
        if addr is not None:
            self.layout.check_world(addr.world_size)
        self._total_steps = self._schedule_length(ft_spec)
        self._membership: Membership = join(addr, self.device)
        with ExitStack() as undo:
            undo.callback(self._membership.leave)
            self.layout.check_world(self.world.size)
            if self.config.model.path is not None:
                self.config = first_on_each_machine(
                    self.world,
                    lambda first: with_local_model(self.config, local_files_only=not first),
                    "the model",
                )
            self._rank_groups: RankGroups = self._groups(self.world)
            # Ranks that see the same sequences draw the same numbers: what they hold in common stays common.
            self._draws = Draws(derive_seed(self.config.seed, self.data_parallel_rank), self.device)
            with self._draws.own():
                self._build(self._membership.address, ft_spec or FinetuneSpec())
                undo.callback(self._abandon)
                self._become_ready()
            undo.pop_all()

    def _become_ready(self) -> None:
        guards.check_experts(self.spec, self.config.model, self._hf_config())
        self._set_training(False)
        self._state = "ready"
        self._start_adapter()
        self._send_away(parts_of(self.config.offload_params, self.config.offload_optimizer))

    def _abandon(self) -> None:
        self._state = "new"
        self._teardown()

    def _start_adapter(self) -> None:
        """Load the adapter that the config names."""
        lora = self.config.model.lora
        if lora is not None and lora.path is not None:
            self.load(SaveLoadMeta(path=lora.path, format="adapter"))

    def destroy(self) -> None:
        """Free the model and leave the process group; the engine cannot be used again.

        Waits for a save in the background, and raises its `CheckpointError` after all is freed.
        """
        ready, self._state = self._state == "ready", "destroyed"
        if ready:
            try:
                self._finish_saving()
            finally:
                self._teardown()
                self._membership.leave()

    def _schedule_length(self, ft_spec: FinetuneSpec | None) -> int | None:
        if self.config.optimizer is None:
            return None
        return schedule_length(self.config.optimizer, ft_spec.total_train_steps if ft_spec else None)
