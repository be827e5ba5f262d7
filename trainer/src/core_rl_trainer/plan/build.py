"""The plan of a run behind `core_rl_trainer.plan.resolve.resolve`, as far as it needs torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.backend.tensors import check_source
from core_rl.checkpoint.adapter_config import adapter_problems
from core_rl.checkpoint.formats import TENSOR_FILE
from core_rl.checkpoint.model_config import generation_config
from core_rl.checkpoint.model_files import some
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.base import Config
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, ModelConfig, TrainEngineConfig
from core_rl.distributed.comm import Comm
from core_rl.distributed.devices import device_type
from core_rl.engine.guards import require_capability
from core_rl.engine.loading import load_backend
from core_rl.engine.schedule import schedule_length
from core_rl.errors import CheckpointError, ConfigError, WeightsError, raise_all
from core_rl.registry.spec import EngineSpec
from core_rl.servers.config import ServerEngineConfig
from core_rl.servers.process import machine_problems
from core_rl.toolkit.hf_state import HFShardedState
from core_rl.toolkit.meta_build import build_on_meta, model_on_meta
from core_rl.toolkit.model_files import unused_tensors
from core_rl_trainer.algorithms.fields import REFERENCE
from core_rl_trainer.algorithms.interface import interface_class, make_interface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.data.plain import shortened
from core_rl_trainer.data.tokenizers import (
    check_same_tokens,
    context_length,
    load_tokenizer,
    require_end_tokens,
    vocabulary_size,
)
from core_rl_trainer.interface_abstraction import ModelInterfaceAbstraction
from core_rl_trainer.logs.metrics_log import load_wandb
from core_rl_trainer.outputs.push import require_hub
from core_rl_trainer.plan.data import earlier_runs, plan_data, require_budget, with_template_time
from core_rl_trainer.plan.engine_config import ConfiguredEngine, EngineSections
from core_rl_trainer.plan.engines import (
    Trainer,
    other_trainers,
    plan_online_engines,
    plan_supervised_engine,
    trained_engine,
)
from core_rl_trainer.plan.online_checks import check_algorithm, check_filter, check_sampling, check_token_ids
from core_rl_trainer.plan.run_plan import EnginePlan, RunFiles, RunPlan, Schedule, Workload
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.recipe.sections import ModelSection
from core_rl_trainer.workflows.user_code import LoadedCode, check_environment, load_user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REMARK = 500
"""Characters of a remark that are shown."""
FOR_ROLLOUTS = ("rollout", "reward", "rewards", "eval_samples", "colocated", "placement")
"""Fields that are read only where completions are generated."""
RANKS_PER_CORE = 4
"""More ranks for each CPU core are worth a remark."""
NO_SAMPLING = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "output_attentions", "return_dict_in_generate"),
)
"""Fields of a generation config that are read, or change no completion."""
HIGH_LR = 0.1
MANY_PASSES = 100
LONG_EVALUATION = 3
"""Steps that compute as much as the longest evaluation before the first step."""
"""More passes over the data are worth a remark."""


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
        trainers, rollout = self._roles(trainer)
        code = self._user_code() if online else None
        tokenizer = load_tokenizer(recipe.model.path)
        if online:
            self._check_tokens(tokenizer)
        if code is not None and code.environment is not None:
            check_environment(code.environment, tokenizer, recipe.rollout.step_limit_s)
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
        models = {role.config.model.model_dump_json(): role.config.model for role in trainers.values()}
        for model in models.values():  # compares names and shapes in the files with the config's
            unloaded = build_on_meta(model, seed=0, attn_implementation="eager")
            if unloaded is not None and (unused := unused_tensors(unloaded.model, model)):
                text = (
                    f"its model does not compute {some(unused)} of the weights; exports have them as they are"
                )
                remarks = [*remarks, f"{model.path}: {text}"]
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
                evaluates_first=_evaluates_first(
                    recipe.eval_first, recipe.eval_samples if online else None, workload
                ),
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
            refused = [
                field for field in ("critic", "reward_model", "doctor") if getattr(recipe, field) is not None
            ]
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
        self, trainer: Trainer
    ) -> tuple[dict[str, EnginePlan[TrainEngineConfig]], EnginePlan[InferenceEngineConfig] | None]:
        """Train engines by role, and the rollout engine; ``trainer`` is that of the trained model."""
        recipe, interface = self._recipe, self._interface
        if recipe.save_portable_every:
            require_capability(trainer[0], Capability.PORTABLE_CHECKPOINT, "save_portable_every")
        if recipe.colocated:
            require_capability(trainer[0], Capability.OFFLOAD, "colocated = true")
        if isinstance(interface, SupervisedInterface):
            return plan_supervised_engine(trainer, recipe.cluster), None
        peers = other_trainers(
            recipe.engine,
            self._engines,
            recipe.model,
            recipe.critic,
            recipe.reward_model,
            with_reference=REFERENCE in interface.wanted_fields,
        )
        return plan_online_engines(
            recipe.rollout,
            recipe.model,
            self._engines,
            {"actor": trainer, **peers},
            recipe.cluster,
            recipe.placement,
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
    """Raise one `ConfigError` with the fields, or the tensors, of the adapter to start from that do not fit."""
    if model.lora is None or model.lora.path is None:
        return
    subject, directory = f"model.lora.path = {model.lora.path!r}", Path(model.lora.path)
    try:
        raise_all(ConfigError, subject, [*adapter_problems(model.lora, model.head, directory)])
        shapes = HFShardedState(model_on_meta(model), None, {}, Comm()).shapes("adapter")
        files = TensorFiles(directory, TENSOR_FILE)
        modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in files.names()})
        required = (
            f"its tensors are for {modules}, and model.lora.target_modules is {model.lora.target_modules!r} in all "
            "layers, without the exclude_modules of peft; set the first, or merge it (peft's merge_and_unload) into "
            "model.path"
        )
        check_source(files, shapes, required)
        damaged = [name for name in files.names() if not files.read(name).isfinite().all()]
    except (CheckpointError, WeightsError) as error:
        raise ConfigError(f"{subject}: {error}") from error
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
        options, problems = rollout.config.options, [*machine_problems(rollout.config)]
        if options.addresses and not options.take_over:
            problems.append(
                f"options.take_over = false: training pauses the servers at {', '.join(options.addresses)} and loads "
                "weights into them; set it to true where nobody else uses them"
            )
        raise_all(ConfigError, f"engines.{rollout.spec.name}", problems)
        if options.addresses:
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


def plan_remarks(plan: RunPlan) -> tuple[str, ...]:
    """Remarks on a plan that can run, and is probably not meant."""
    schedule, workload, data = plan.schedule, plan.workload, plan.recipe.data
    return (
        *_ranks(plan.trainers, workload, plan.cluster.is_local),
        *_data(data, workload, schedule.steps),
        *_training(schedule, plan.recipe.model, data.has_evaluation, plan.recipe.eval_first),
        *(_generation(Path(plan.recipe.model.path), plan.recipe.rollout) if plan.rollout is not None else ()),
    )


def _ranks(
    trainers: Mapping[str, EnginePlan[TrainEngineConfig]], workload: Workload, is_local: bool
) -> Iterator[str]:
    alone = [plan.config for plan in trainers.values() if plan.colocated_with is None]
    ranks, cores = sum(config.layout.world_size for config in alone), os.cpu_count() or 1
    on_cpu = device_type(alone[0].device) == "cpu"
    if is_local and on_cpu and ranks > RANKS_PER_CORE * cores:
        yield f"{ranks} ranks on the {cores} cores of this machine: lower the degrees of engines.NAME.layout"
    sequences = workload.examples_per_step * workload.sequences_per_example
    for name, plan in trainers.items():
        dp = plan.config.layout.dp
        if dp > sequences:
            yield (
                f"layout.dp = {dp} of the {name} for {sequences} sequences of a step: the other ranks have none; lower "
                "dp, or raise the sequences of a step"
            )


def _data(data: DataSection, workload: Workload, steps: int) -> Iterator[str]:
    train = {_identity(source) for source in data.train}
    shared = sorted({source.path for source in data.eval or () if _identity(source) in train})
    if shared:
        yield f"data.eval = {', '.join(shared)}: also in data.train, so that evaluations measure what was trained on"
    if workload.examples < workload.examples_per_step:
        yield (
            f"{workload.examples_per_step} examples in a step, and {workload.examples} to train on: each step has some "
            "of them twice"
        )
    passes = steps * workload.examples_per_step / workload.examples
    if passes > MANY_PASSES:
        yield (
            f"steps = {steps:,} with {workload.examples_per_step} examples each are {passes:,.0f} passes over the "
            f"{workload.examples:,} examples: lower steps, or set epochs"
        )


def _identity(source: DataSource) -> tuple[Path, str | None, str | None]:
    return Path(source.path).resolve(), source.config, source.split


def _evaluates_first(eval_first: bool | None, samples: int | None, workload: Workload) -> bool:
    """Whether an evaluation before the first step is asked for, or short; ``samples`` is None without rollouts."""
    if eval_first is not None:
        return eval_first
    # A forward pass is a third of a training pass.
    sequences = workload.sequences_per_example / 3 if samples is None else 1 + samples
    of_step = workload.examples_per_step * workload.sequences_per_example
    return workload.held_out * sequences <= LONG_EVALUATION * of_step


def _training(
    schedule: Schedule, model: ModelSection, has_evaluation: bool, eval_first: bool | None
) -> Iterator[str]:
    if has_evaluation and schedule.eval_every > schedule.steps:
        yield (
            f"eval_every = {schedule.eval_every} and steps = {schedule.steps}: there is no evaluation between the "
            "first and the last step"
        )
    if not schedule.evaluates_first and eval_first is None:
        yield (
            f"no evaluation before the first step, since it would take longer than {LONG_EVALUATION} steps; "
            "eval_first=true asks for one"
        )
    lr = schedule.optimizer.lr
    if lr == 0:
        yield "optimizer.lr = 0: the weights stay as they are"
    elif lr >= HIGH_LR:
        yield f"optimizer.lr = {lr:g} is very high; 1e-6 to 1e-3 are usual"
    if model.frozen and model.lora is not None:
        yield (
            f"model.frozen = {list(model.frozen)} beside model.lora changes nothing: the adapter alone is trained, in "
            "the layers of model.lora.target_modules"
        )


def _generation(path: Path, rollout: RolloutSection) -> Iterator[str]:
    """Fields of the model's generation config that rollouts have otherwise."""
    fields = generation_config(path).to_diff_dict()
    unread = [
        f"{name} = {value}"
        for name, value in fields.items()
        if name not in NO_SAMPLING and getattr(rollout, name, name == "do_sample") != value
    ]
    if unread:
        yield f"{path}: its fields of generation are not used: {', '.join(unread)}; 'rollout' has those of completions"
