"""Models and adapters of the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta
from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints
from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import ScheduleConfig, TrainEngineConfig
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.engine.guards import require_capability
from core_rl.errors import CheckpointNotFound, ConfigError
from core_rl.launch.group import EngineGroup
from core_rl.launch.hosts import Hosts
from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.outputs.run_files import RECIPE
from core_rl_trainer.plan.engine_config import EngineSections
from core_rl_trainer.plan.engines import trained_engine
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.plan.slots import place_ranks
from core_rl_trainer.recipe.recipe import Recipe, with_local_models
from core_rl_trainer.run.cluster import open_cluster, require_shared
from core_rl_trainer.run.engines import open_trainers
from core_rl_trainer.run.saving import readable_part

ExportFormat = Literal["hf", "adapter", "portable"]


def export_checkpoint(
    run: Path, kind: ExportFormat, output: Path, step: int | None = None, overrides: Sequence[str] = ()
) -> int:
    """Write the model, or its adapter, of a checkpoint of the run in ``run`` to ``output``; returns the step.

    It is the newest checkpoint unless ``step`` names another. The engine is that of the run's recipe, which
    ``overrides`` change: another layout where the engine declares ``resharding``. The tokenizer with its chat
    template is written too, but for ``portable``, which has the moments instead. The run may continue meanwhile, and
    remove the checkpoint.

    Raises `ConfigError` for a directory without a run, a run without adapter, or an ``output`` that is not empty,
    `UnsupportedCapability` for an engine without the format, and `CheckpointNotFound` for a step that there is not.
    """
    recipe = _recipe_of(run, overrides)
    if kind == "adapter" and recipe.model.lora is None:
        raise ConfigError(
            f"{run}: the run trains no adapter (model.lora is not set); export it with --format hf"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not empty; name another directory with --output")
    with RunCheckpoints(run / "checkpoints", keep=1).reading(step) as checkpoint:
        if checkpoint is None:
            raise CheckpointNotFound(
                f"{run} has no complete checkpoint; the run writes one every save_every steps and at its end"
            )
        engines = EngineSections(sections=recipe.engines, shared=recipe.engine_fields)
        trained = engines.configure_trained(recipe.engine, recipe.model, recipe.optimizer)
        interface = make_interface(recipe.algorithm)
        spec, config = trained_engine(trained, interface)
        slots = place_ranks(config.layout.world_size, None, recipe.cluster)
        optimizer = None  # the moments are neither needed nor loaded
        if kind == "portable":
            require_capability(spec, Capability.PORTABLE_CHECKPOINT, "--format portable")
            assert config.optimizer is not None  # it is trained
            # Without a schedule: no step is made.
            optimizer = config.optimizer.model_copy(update={"schedule": ScheduleConfig()})
        config = config.model_copy(update={"optimizer": optimizer})
        engine = EnginePlan(spec=spec, config=config, slots=slots)
        output.parent.mkdir(parents=True, exist_ok=True)
        with open_cluster(recipe.cluster, {"actor": engine}, recipe.device) as hosts:
            require_shared(hosts, "--output", output.parent, engine.machines)
            with _loaded_engine(engine, checkpoint, recipe.timeouts.call_s, hosts) as group:
                if kind == "portable":
                    group.save(SaveLoadMeta(path=str(output), format=kind))
                else:
                    save = interface.save if kind == "hf" else interface.save_adapter
                    save(group, str(output), tokenizer_path=recipe.model.path)
        return checkpoint.step


def _recipe_of(run: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe of the run in ``run``; its data and its reward need not be there any more."""
    path = run / RECIPE
    if not path.is_file():
        raise ConfigError(f"{run} holds no run: there is no {RECIPE}; name the output_dir of a run")
    recipe = parse_config(Recipe, apply_overrides(load_yaml(path), overrides), str(path))
    return with_local_models(recipe, str(path))


@contextmanager
def _loaded_engine(
    engine: EnginePlan[TrainEngineConfig], checkpoint: RunCheckpoint, timeout_s: float, hosts: Hosts
) -> Iterator[EngineGroup]:
    """The engine with the weights of ``checkpoint``, and its moments where it has an optimizer, on ``hosts``."""
    part = "actor" if (checkpoint.path / "actor").is_dir() else "model"
    finetune = FinetuneSpec(dataset_size=1, train_batch_size=1)
    with open_trainers({part: engine}, finetune, timeout_s, hosts) as groups:
        saved = readable_part(checkpoint, part, engine.spec, engine.config.layout)
        groups[part].load(replace(saved, with_optimizer=engine.config.optimizer is not None))
        yield groups[part]
