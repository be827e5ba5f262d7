"""The time that chat templates read: when a run began, also after it resumes on another day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from core_rl.errors import ConfigError
from core_rl_trainer.data.chat_template import CLOCK
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.outputs.run_files import RECIPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["earlier_runs", "with_template_time"]


def with_template_time(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, earlier: Sequence[Path]
) -> DataSection:
    """``section`` with ``template_time``, where a chat template of ``tokenizer`` reads the time.

    A run that resumes, or starts from another run, has the time of that run, whose directory is among ``earlier``.
    Raises `ConfigError` for a time that no template reads.
    """
    time_setting, reads = section.template_time, _reads_clock(tokenizer)
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


def _reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    templates = tokenizer.chat_template or ""
    texts = [templates] if isinstance(templates, str) else templates.values()
    return any(CLOCK in text for text in texts)


def _recorded_data(earlier: Sequence[Path]) -> Mapping[str, Any] | None:
    """The section ``data`` of the first run in ``earlier``; None for a run that begins."""
    for directory in earlier:
        if (directory / RECIPE).is_file():
            recorded: dict[str, Any] = yaml.safe_load((directory / RECIPE).read_text(encoding="utf-8"))
            data: dict[str, Any] = recorded["data"]
            return data
    return None
