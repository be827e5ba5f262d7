"""The data of a run: its examples, the time of their chat templates, and bounds on the tokens of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from core_rl.config.base import Config
from core_rl.errors import ConfigError
from core_rl_trainer.algorithms.interface import ModelInterface
from core_rl_trainer.algorithms.sft import SupervisedInterface
from core_rl_trainer.algorithms.updates import UpdatesConfig
from core_rl_trainer.data.chat_template import CLOCK
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS
from core_rl_trainer.data.tokenizers import vocabulary_size
from core_rl_trainer.data.training_data import DataSummary, TrainingData, load_training_data, summarize_data
from core_rl_trainer.outputs.run_files import RECIPE
from core_rl_trainer.plan.online_checks import longest_prompt, with_answer_checks
from core_rl_trainer.plan.run_plan import Workload
from core_rl_trainer.recipe.rollout import RolloutSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def plan_data(
    section: DataSection,
    interface: ModelInterface[Any],
    tokenizer: PreTrainedTokenizerBase,
    rollout: RolloutSection,
    *,
    context: int | None,
    models: Collection[str],
    seed: int,
    vision_model: str | None,
    rewards: Collection[Callable[..., Any]] = (),
) -> tuple[TrainingData, Workload, DataSummary]:
    """The examples of ``section``, with bounds and a summary of them.

    ``models`` are directories, of which the trained one has this ``context``. ``vision_model`` is the directory of a
    trained vision-language model, and ``rewards`` are the functions that compare with answers. Raises
    `ConfigError` where a sequence does not fit.
    """
    supervised = isinstance(interface, SupervisedInterface)
    kinds = {"demonstrations": DEMONSTRATIONS, "preferences": PREFERENCES}
    data = load_training_data(
        section,
        with_answer_checks(kinds.get(interface.trains_on, PROMPTS), rewards),
        tokenizer,
        seed,
        limit=context if supervised else longest_prompt(context, rollout),
        vocabulary=min(map(vocabulary_size, models)),
        vision_model=vision_model,
    )
    workload = Workload(
        examples=len(data.train),
        held_out=len(data.held_out or ()),
        examples_per_step=section.batch_size,
        sequences_per_example=2 if data.kind.paired else data.train.most_sequences,
        longest=data.train.longest,
        largest_unit=max(dataset.largest_unit for dataset in (data.train, data.held_out or data.train)),
    )
    if not supervised:
        workload = _with_completions(workload, rollout, context, interface.config)
    return data, workload, summarize_data(data, tokenizer, seed)


def _with_completions(
    workload: Workload, rollout: RolloutSection, context: int | None, config: Config
) -> Workload:
    completion = rollout.max_new_tokens * (rollout.max_turns if rollout.environment else 1)
    longest = min(workload.longest + completion, context or sys.maxsize)
    return replace(
        workload,
        examples_per_step=rollout.prompts_per_step,
        sequences_per_example=rollout.group_size,
        longest=longest,
        largest_unit=longest,
        updates_per_step=config.minibatches * config.epochs if isinstance(config, UpdatesConfig) else 1,
    )


def require_budget(largest: int, budget: int) -> None:
    """Raise `ConfigError` where ``largest`` tokens that stay in one micro-batch exceed its ``budget``."""
    if largest > budget:
        raise ConfigError(
            f"micro_batch_tokens = {budget:,}, and a sequence or pair that stays in one micro-batch may have "
            f"{largest:,} tokens, the completion included: raise micro_batch_tokens to {largest:,}, or lower "
            "rollout.max_new_tokens, or take shorter examples"
        )


def with_template_time(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, earlier: Sequence[Path]
) -> DataSection:
    """``section`` with ``template_time``, where a chat template of ``tokenizer`` reads the time.

    A run that resumes, or starts from another run, has the time of that run, whose directory is among ``earlier``.
    Raises `ConfigError` for a time that no template reads.
    """
    templates = tokenizer.chat_template or ""
    texts = [templates] if isinstance(templates, str) else templates.values()
    time_setting, reads = section.template_time, any(CLOCK in text for text in texts)
    if time_setting is not None and not reads:
        raise ConfigError(
            f"data.template_time = {time_setting}: the chat template does not read the time ({CLOCK}); remove it"
        )
    if time_setting is not None or not reads:
        return section
    recorded = _recorded_data(earlier)
    if recorded is None:
        time = datetime.now(UTC).astimezone().replace(microsecond=0)
    elif (text := recorded.get("template_time")) is not None:
        time = datetime.fromisoformat(text)
    else:  # begun by a version that did not keep the time
        return section
    return section.model_copy(update={"template_time": time})


def earlier_runs(directory: Path, fresh: bool, resume_from: str | None) -> list[Path]:
    """Directories of the resumed run in ``directory``, and of the run that it starts from."""
    directories = [] if fresh else [directory]
    if resume_from is not None:
        source = Path(resume_from).resolve()
        directories += [source, *source.parents[1:2]]  # a run, or a checkpoint of it
    return directories


def _recorded_data(earlier: Sequence[Path]) -> Mapping[str, Any] | None:
    """The section ``data`` of the first run in ``earlier``; None for a run that begins."""
    for directory in earlier:
        if (directory / RECIPE).is_file():
            data: dict[str, Any] = yaml.safe_load((directory / RECIPE).read_text(encoding="utf-8"))["data"]
            return data
    return None
