"""Models and adapters of the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta
from core_rl.checkpoint.run import RunCheckpoint, RunCheckpoints
from core_rl.config.base import parse_config
from core_rl.config.loading import apply_overrides, load_yaml
from core_rl.errors import CheckpointNotFound, ConfigError
from core_rl.launch.group import EngineGroup
from core_rl_trainer.algorithms.interface import make_interface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.outputs.run_files import RECIPE
from core_rl_trainer.plan.engines import plan_trained
from core_rl_trainer.recipe.placement import place_ranks
from core_rl_trainer.recipe.recipe import Recipe, with_local_models
from core_rl_trainer.run.cluster import open_cluster, require_shared
from core_rl_trainer.run.parts import readable_part
from core_rl_trainer.run.supervised import trained_head

__all__ = ["ExportFormat", "export_checkpoint"]

ExportFormat = Literal["hf", "adapter"]
TRAINED = ("actor", "model")
"""The part of a run checkpoint that holds the trained model."""


def export_checkpoint(
    run: Path, kind: ExportFormat, output: Path, step: int | None = None, overrides: Sequence[str] = ()
) -> int:
    """Write the model, or its adapter, of a checkpoint of the run in ``run`` to ``output``; returns the step.

    It is the newest checkpoint unless ``step`` names another. The engine is that of the run's recipe, which
    ``overrides`` change: another layout where the engine declares ``resharding``. The tokenizer with its chat
    template is written too. The run may go on meanwhile, and remove the checkpoint.

    Raises `ConfigError` for what is no run, has no adapter, or an ``output`` that is not empty, and
    `CheckpointNotFound` for a step that there is not.
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
        _export(recipe, checkpoint, kind, output)
        return checkpoint.step


def _recipe_of(run: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe of the run in ``run``; its data and its reward need not be there any more."""
    path = run / RECIPE
    if not path.is_file():
        raise ConfigError(f"{run} holds no run: there is no {RECIPE}; name the output_dir of a run")
    recipe = parse_config(Recipe, apply_overrides(load_yaml(path), overrides), str(path))
    return with_local_models(recipe, str(path))


def _export(recipe: Recipe, checkpoint: RunCheckpoint, kind: ExportFormat, output: Path) -> None:
    interface = make_interface(recipe.algorithm)
    head = trained_head(interface) if isinstance(interface, SupervisedInterface) else "lm"
    spec, config = plan_trained(recipe, head)
    part = next((name for name in TRAINED if (checkpoint.path / name).is_dir()), TRAINED[0])
    finetune = FinetuneSpec(dataset_size=recipe.steps, train_batch_size=1)
    # The moments are neither needed nor loaded.
    weights = config.model_copy(update={"optimizer": None})
    output.parent.mkdir(parents=True, exist_ok=True)
    with open_cluster(recipe.cluster) as hosts:
        slots = place_ranks(config.layout.world_size, None, recipe.cluster)
        require_shared(hosts, "--output", output.parent, sorted({slot.machine for slot in slots}))
        with EngineGroup(
            spec, weights, ft_spec=finetune, timeout_s=recipe.timeouts.call_s, hosts=hosts
        ) as group:
            saved = readable_part(checkpoint, part, spec, config.layout)
            group.load(SaveLoadMeta(path=saved.path, format=saved.format, with_optimizer=False))
            save = interface.save if kind == "hf" else interface.save_adapter
            save(group, str(output), tokenizer_path=recipe.model.path)
