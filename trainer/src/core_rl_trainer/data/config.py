"""The section ``data`` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from core_rl.config.base import Config
from core_rl.config.paths import HubPath


class DataSource(Config):
    """A file, a directory, or a dataset of the Hugging Face Hub."""

    path: HubPath
    """A file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``), a directory that ``datasets.save_to_disk`` wrote, or a
    Hub id ``organization/name[@revision]``."""
    config: str | None = None
    """The config of a Hub dataset, which its page calls a subset."""
    split: str | None = None
    """The split; null: the only one, or ``train`` for ``data.train``."""
    columns: dict[str, str] = Field(default_factory=dict)
    """As ``data.columns``, for this source alone."""
    weight: float | None = Field(default=None, allow_inf_nan=False)
    """The share of this source among the examples that are drawn, relative to the other weights. Null for all sources:
    each example is drawn as often as any other."""

    @field_validator("weight")
    @classmethod
    def _positive(cls, weight: float | None) -> float | None:
        if weight is not None and weight <= 0:
            raise ValueError("a weight is above 0; remove the source to leave it out")
        return weight


def _listed(value: object) -> object:
    """A single source as a list of one, and a path as a source."""
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


Sources = Annotated[tuple[DataSource, ...], BeforeValidator(_listed), Field(min_length=1)]
"""One source or several; a text is the path of one."""


class DataSection(Config):
    """The data.

    Examples for rollouts have a ``prompt`` (a text, or chat messages) and the fields that the reward function reads.
    Examples for ``sft`` have an ``answer`` as well, or ``messages`` alone, and examples for ``reward_model`` and
    ``dpo`` the completions ``chosen`` and ``rejected``. The formats of TRL and verl are recognised.
    """

    train: Sources
    """Examples to train on: a path, a source with its fields, or a list of them."""
    eval: Sources | None = None
    """Examples for evaluation; null: see ``eval_fraction``."""
    eval_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Hold out this share of each source of ``train`` for evaluation, drawn by ``seed``. Null without ``eval``: there
    is no evaluation."""
    columns: dict[str, str] = Field(default_factory=dict)
    """The columns that fields of an example come from, such as ``{prompt: question}``; dots lead into a column, as in
    ``{answer: reward_model.ground_truth}``."""
    batch_size: int = Field(default=16, ge=1)
    """Examples of one training step where nothing is rolled out."""
    unusable: Literal["error", "drop"] = "error"
    """The treatment of rows that cannot be trained: damaged ones, pairs of equal completions, and sequences longer than
    the model's context (with ``rollout.max_new_tokens`` where there are rollouts). ``error`` names them before the
    start; ``drop`` leaves them out, and counts them in a warning."""
    chat_template: str | None = None
    """The name of the chat template, where the tokenizer has several; null: ``tool_use`` for examples with tools where
    there is such a template, else ``default``."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as ``{enable_thinking: false}``. Arguments in a column
    ``chat_template_kwargs`` take precedence."""
    template_time: datetime | None = None
    """The time that a chat template formats with ``strftime_now``. Null: when the run begins, also after it resumes."""
    max_image_pixels: int = Field(default=4096 * 4096, ge=1)
    """Larger images of examples are refused; the model's image processor scales smaller ones."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        weighted = [source.weight is not None for source in self.train]
        if any(weighted) and not all(weighted):
            raise ValueError("train: give a weight to every source, or to none")
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("eval and eval_fraction: evaluation data is given twice; leave either out")
        if any(source.weight is not None for source in self.eval or ()):
            raise ValueError("eval: every example is evaluated; leave the weights out")
        return self

    @field_serializer("train", "eval")
    def _as_written(self, sources: tuple[DataSource, ...] | None) -> Any:
        """The short form of sources in a recipe."""
        if sources is None:
            return None
        listed = [_short(source) for source in sources]
        return listed[0] if len(listed) == 1 else listed

    @property
    def has_evaluation(self) -> bool:
        """Whether there are examples for evaluation."""
        return self.eval is not None or self.eval_fraction is not None


def _short(source: DataSource) -> str | Mapping[str, Any]:
    values = source.model_dump(mode="json", exclude_defaults=True)
    return source.path if set(values) == {"path"} else values
