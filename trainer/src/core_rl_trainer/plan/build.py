"""The plan of a run behind `core_rl_trainer.plan.resolve.resolve`, as far as it needs torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.backend.tensors import check_source
from core_rl.checkpoint.adapter_config import adapter_problems
from core_rl.checkpoint.formats import TENSOR_FILE
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.base import Config
from core_rl.config.engine import InferenceEngineConfig, ModelConfig, TrainEngineConfig
from core_rl.engine.loading import load_backend
from core_rl.engine.schedule import schedule_length
from core_rl.errors import CheckpointError, ConfigError, WeightsError, raise_all
from core_rl.registry.spec import EngineSpec
from core_rl.servers.config import ServerEngineConfig, ServerOptions
from core_rl.servers.process import machine_problems
from core_rl.toolkit.lora import checkpoint_name, exported_name, has_kind
from core_rl.toolkit.meta_build import Unloaded, build_on_meta
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.algorithms.interface import interface_class, make_interface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.data.plain import shortened
from core_rl_trainer.data.tokenizers import (
    check_same_tokens,
    context_length,
    load_tokenizer,
    require_end_tokens,
    vocabulary_size,
)
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction
from core_rl_trainer.logs.boards import load_wandb
from core_rl_trainer.outputs.push import require_hub
from core_rl_trainer.plan.data import earlier_runs, plan_data, require_budget, with_template_time
from core_rl_trainer.plan.engine_config import ConfiguredEngine, EngineSections
from core_rl_trainer.plan.engines import (
    Trainer,
    other_trainers,
    plan_online_engines,
    plan_supervised_engine,
    require_trainer_capabilities,
    trained_engine,
)
from core_rl_trainer.plan.online_checks import (
    check_algorithm,
    check_filter,
    check_sampling,
    check_token_ids,
)
from core_rl_trainer.plan.remarks import plan_remarks
from core_rl_trainer.plan.run_plan import EnginePlan, RunFiles, RunPlan, Schedule
from core_rl_trainer.recipe.cluster import ClusterSection
from core_rl_trainer.recipe.placement import PlacementSection
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.workflows.user_code import LoadedCode, load_user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REMARK = 500
"""Characters of a remark that are shown."""
FOR_ROLLOUTS = ("rollout", "reward", "rewards", "eval_samples", "colocated", "placement")
"""Fields that are read only where completions are generated."""


class PlanBuilder:
    """A recipe on its way to a plan: the one place that reads its sections together."""

    def __init__(self, recipe: Recipe, engines: EngineSections) -> None:
        """``engines`` are the engines' sections of ``recipe``. Raises `ConfigError` for the algorithm."""
        self._recipe = recipe
        self._engines = engines
        self._algorithm = with_temperature(recipe.algorithm, recipe.rollout.temperature)
        self._interface = make_interface(self._algorithm)
        self._online = not isinstance(self._interface, SupervisedInterface)

    def build(self, trained: ConfiguredEngine, remarks: Sequence[str]) -> RunPlan:
        """The plan; ``trained`` is the engine of the model before the head of its algorithm is known."""
        recipe, online = self._recipe, self._online
        if recipe.epochs is None:  # before the data is read
            schedule_length(recipe.optimizer, recipe.steps)
        if recipe.wandb is not None:
            load_wandb()
        if recipe.push_to_hub is not None:
            require_hub()
        self._check_sections()
        trainer = trained_engine(trained, self._interface)
        check_adapter(trainer[1].model)
        trainers, rollout = self._roles(self._engines, trainer, recipe.cluster, recipe.placement)
        code = self._user_code() if online else None
        tokenizer = load_tokenizer(recipe.model.path)
        if online:
            self._check_tokens(tokenizer)
        stops = (recipe.rollout.stop_token_ids, recipe.rollout.stop) if online else ()
        end_tokens = require_end_tokens(tokenizer, *stops)
        earlier = earlier_runs(recipe.directory, recipe.fresh, recipe.resume_from)
        section = with_template_time(recipe.data, tokenizer, earlier)
        data, workload, data_summary = plan_data(
            section,
            self._interface,
            tokenizer,
            recipe.rollout,
            context=context_length(recipe.model.path),
            models=recipe.model_directories.values(),
            seed=recipe.seed,
            vision_model=recipe.model.path if recipe.model.vision else None,
            rewards=code.rewards.values() if code else (),
        )
        batch_size = recipe.rollout.prompts_per_step if online else recipe.data.batch_size
        recipe = recipe.with_steps(len(data.train), batch_size)
        schedule_length(recipe.optimizer, recipe.steps)
        require_budget(workload.largest_unit, recipe.micro_batch_tokens)
        for planned in trainers.values():  # compares shapes in the files with the config's
            model = planned.config.model
            check_adapter_tensors(model, build_on_meta(model, seed=0, attn_implementation="eager"))
        plan = RunPlan(
            recipe=recipe.model_copy(update={"data": section}),
            algorithm=self._algorithm,
            trainers=trainers,
            rollout=rollout,
            cluster=recipe.cluster,
            workload=workload,
            data=data,
            data_summary=data_summary,
            tokenizer=tokenizer,
            end_tokens=end_tokens,
            code=code,
            batch_size=batch_size,
            schedule=Schedule(
                steps=recipe.steps,
                eval_every=recipe.eval_every,
                save_every=recipe.save_every,
                save_portable_every=recipe.save_portable_every,
                save_in_background=recipe.save_in_background,
                optimizer=recipe.optimizer,
            ),
            files=RunFiles(
                directory=recipe.directory,
                fresh=recipe.fresh,
                keep=recipe.keep,
                checkpoint_url=recipe.checkpoint_url,
                resume_from=recipe.resume_from,
            ),
        )
        _require_servers(plan)
        remarks = (*remarks, *plan_remarks(plan))
        return replace(plan, remarks=tuple(shortened(text, REMARK) for text in remarks))

    def _check_sections(self) -> None:
        """Raise `ConfigError` for sections that do not go with the algorithm; warn of unread sections."""
        recipe, interface = self._recipe, self._interface
        name = recipe.algorithm.type
        if isinstance(interface, SupervisedInterface):
            _warn_of(name, "data", [repr(field) for field in FOR_ROLLOUTS if _is_set(recipe, field)])
            refused = [field for field in ("critic", "reward_model") if getattr(recipe, field) is not None]
            if refused:
                raise ConfigError(
                    f"the interface {name!r} trains on data and has no use for {refused[0]!r}; remove it"
                )
            return
        if _is_set(recipe.data, "batch_size"):
            _warn_of(name, "rollouts", ["'data.batch_size'; there is 'rollout.prompts_per_step'"])
        check_algorithm(
            name,
            interface,
            has_critic=recipe.critic is not None,
            has_reward_model=recipe.reward_model is not None,
            group_size=recipe.rollout.group_size,
        )
        check_sampling(recipe.rollout)
        if recipe.critic is not None:
            make_interface(recipe.critic.interface)

    def _roles(
        self,
        engines: EngineSections,
        trainer: Trainer,
        cluster: ClusterSection,
        placement: PlacementSection,
    ) -> tuple[dict[str, EnginePlan[TrainEngineConfig]], EnginePlan[InferenceEngineConfig] | None]:
        """Train engines by role, and the rollout engine, on the machines of ``cluster``."""
        recipe, interface = self._recipe, self._interface
        require_trainer_capabilities(
            trainer[0], portable=recipe.save_portable_every > 0, colocated=recipe.colocated
        )
        if isinstance(interface, SupervisedInterface):
            return plan_supervised_engine(trainer, cluster), None
        peers = other_trainers(
            recipe.engine,
            engines,
            recipe.model,
            recipe.critic,
            recipe.reward_model,
            with_reference=REFERENCE in interface.wanted_fields,
        )
        return plan_online_engines(
            recipe.rollout,
            recipe.model,
            engines,
            {"actor": trainer, **peers},
            cluster,
            placement,
            colocated=recipe.colocated,
        )

    def _user_code(self) -> LoadedCode:
        recipe, rollout = self._recipe, self._recipe.rollout
        code = load_user_code(recipe.reward_fields, rollout.environment, rollout.should_accept)
        earned = bool(recipe.reward_fields) or rollout.environment is not None
        check_filter(rollout.should_accept, code.should_accept, has_rewards=earned)
        return code

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise `ConfigError` for models with other tokens, and for token ids that the model lacks."""
        recipe = self._recipe
        models = {"critic.path": recipe.critic, "reward_model.path": recipe.reward_model}
        paths = {field: section.path for field, section in models.items() if section is not None}
        check_same_tokens(tokenizer, paths)
        check_token_ids(recipe.rollout, vocabulary_size(recipe.model.path))


def check_adapter(model: ModelConfig) -> None:
    """Raise one `ConfigError` with the fields of the adapter to start from that do not fit."""
    if model.lora is None or model.lora.path is None:
        return
    subject = f"model.lora.path = {model.lora.path!r}"
    try:
        problems = [*adapter_problems(model.lora, model.head, Path(model.lora.path))]
    except CheckpointError as error:
        raise ConfigError(f"{subject}: {error}") from error
    raise_all(ConfigError, subject, problems)


def check_adapter_tensors(model: ModelConfig, unloaded: Unloaded | None) -> None:
    """Raise `ConfigError` where the adapter to start from has other names or shapes, or values that are not finite.

    A model of which only transformers knows the names, None, is checked by its engine.
    """
    if unloaded is None or model.lora is None or model.lora.path is None:
        return
    subject = f"model.lora.path = {model.lora.path!r}"
    files = TensorFiles(Path(model.lora.path), TENSOR_FILE)
    shapes = {checkpoint_name(name): tuple(p.shape) for name, p in unloaded.model.named_parameters()}
    expected = {
        exported_name("adapter", name): shape
        for name, shape in shapes.items()
        if has_kind(name, "adapter", trained=True)
    }
    try:
        check_source(files, expected, "the adapter does not fit the model")
    except WeightsError as error:
        raise ConfigError(f"{subject}: {error}") from error
    damaged = [name for name in files.names() if not files.read(name).isfinite().all()]
    if damaged:
        raise ConfigError(
            f"{subject}: {damaged[0]!r} has values that are not finite; take another checkpoint of it"
        )


def with_temperature(algorithm: ModelInterfaceAbstraction, temperature: float) -> ModelInterfaceAbstraction:
    """``algorithm`` with the temperature of the rollouts, where it has such a setting."""
    fields = interface_class(algorithm.type).config_class.model_fields
    shared = {"temperature": temperature} if "temperature" in fields else {}
    return ModelInterfaceAbstraction(algorithm.type, shared | algorithm.args)


def _is_set(section: Config, name: str) -> bool:
    """Whether the field ``name`` has another value than by default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _warn_of(name: str, trains_on: str, ignored: Sequence[str]) -> None:
    if ignored:
        logger.warning("%r trains on %s and does not read %s", name, trains_on, ", ".join(ignored))


def _require_servers(plan: RunPlan) -> None:
    """Raise `ConfigError` where this machine cannot launch the servers of the rollout engine, or change them."""
    rollout = plan.rollout
    if rollout is None or plan.serves_on_machines:
        return
    if isinstance(rollout.config, ServerEngineConfig):
        problems = [*machine_problems(rollout.config), *_untouchable(rollout.config.options)]
        raise_all(ConfigError, f"engines.{rollout.spec.name}", problems)
        if rollout.config.options.addresses:
            _require_running(rollout.spec, rollout.config)


def _require_running(spec: EngineSpec, config: ServerEngineConfig) -> None:
    """Raise `ConfigError` for servers at ``options.addresses`` that cannot be reached, or cannot serve the model."""
    from core_rl.servers.backend import ServerBackend  # aiohttp, which only engines over servers need

    backend = load_backend(spec)()
    if not isinstance(backend, ServerBackend):
        return
    try:
        backend.check_addresses(config)
    except ConfigError as error:
        raise ConfigError(f"engines.{spec.name}: {error}") from error
    finally:
        backend.teardown()


def _untouchable(options: ServerOptions) -> Iterator[str]:
    """The servers that training would change, and may not."""
    if options.addresses and not options.take_over:
        others = ", ".join(options.addresses)
        yield (
            f"options.take_over = false: training pauses the servers at {others} and loads weights into them; set it "
            "to true where nobody else uses them"
        )
