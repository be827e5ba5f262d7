"""The identity of a run: its recipe, the horizon of its schedule, and the content of data, tokenizer and adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from core_rl.checkpoint.model_files import tokenizer_files
from core_rl.config.base import parse_config
from core_rl.config.secret import hidden
from core_rl.errors import ConfigError
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.sources import data_files
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.recipe.sections import ModelSection

CHANGEABLE = (
    "steps",
    "save_every",
    "save_portable_every",
    "save_in_background",
    "eval_every",
    "eval_first",
    "keep",
    "checkpoint_url",
    "stop_on*",
    "doctor*",
    "wandb*",
    "push_to_hub*",
    "callbacks",
    "placement*",
    "cluster*",
    "timeouts*",
    "*timeout_s",
    "*optimizer.schedule_steps",
    "*optimizer.schedule.total_steps",
    "output_dir",
    "fresh",
    "resume_from",
)
"""Fields that may differ when a run is resumed, as patterns."""

REASONS = (
    ("engine*", "the state of an engine is exact under the same engine and layout only"),
    ("dtype", "the values before and after would be of two precisions"),
    ("device", "the values before and after would be of two devices"),
    ("data.*template*", "the tokens of the data follow from it"),
    ("data*", "the order of the data follows from it"),
    ("seed", "the order of the data follows from it"),
    ("rollout*", "the completions follow from it"),
    ("model*", "the checkpoint is of this model"),
    ("critic*", "the checkpoint is of this critic"),
    ("optimizer*", "the moments in the checkpoint were made with it"),
    ("algorithm*", "one run learns by one rule"),
    ("reward*", "one run learns by one reward"),
    ("eval_samples", "evaluations before and after could not be compared"),
    ("keep_best*", "evaluations before and after could not be compared"),
    ("*", "the values of the run follow from it"),
)
"""Why a field may not change, by the first pattern that matches."""

SHARED = ("seed", "data*", "model*", "critic", "critic.path", "algorithm.type", "rollout.prompts_per_step")
"""Fields, as patterns, that a run shares with the one from whose checkpoint it starts."""

FILES = ("train", "eval")
"""Fields of the section ``data`` that name sources."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of image processors."""
CONFIGS = ("config.json", "generation_config.json")
"""Files next to the tokenizer's that name end tokens."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Kept in the directory of a run, and in each of its checkpoints."""

    recipe: Mapping[str, Any]
    """The recipe with all defaults, as plain values."""
    schedule_steps: int
    """The last step of a decaying schedule, where the optimizer does not set its own: the steps that the run had
    when it began. More steps do not change it, so that the learning rate never jumps."""
    data: Mapping[str, str]
    """The digests of local data files or rows of the Hub, by field and number of the source; of image files and
    processors."""
    files: Mapping[str, str]
    """The digests of tokenizer, chat templates, configs and adapter, by field and name of the file."""

    @staticmethod
    def of(recipe: Recipe, digests: Mapping[str, str] = MappingProxyType({})) -> RunIdentity:
        """The identity of a run that begins now; reads its data files. ``digests`` come from `TrainingData`."""
        files = {
            f"data.{field}.{number}": _digest(Path(source.path), paths)
            for field in FILES
            for number, source in enumerate(getattr(recipe.data, field) or ())
            if (paths := list(data_files((source,))))  # local files or directories
        }
        processors = [Path(recipe.model.path) / name for name in PROCESSORS if recipe.model.vision]
        files |= {f"model.path/{file.name}": _sha256(file) for file in processors if file.is_file()}
        return RunIdentity(
            recipe=recipe.model_dump(mode="json", exclude={"fresh"}),
            schedule_steps=recipe.steps,
            data={**files, **digests},
            files=dict(_model_digests(recipe.model)),
        )

    def without_recipe(self) -> dict[str, Any]:
        """JSON for a file next to the recipe."""
        return {name: value for name, value in asdict(self).items() if name != "recipe"}

    def refused_changes(self, now: RunIdentity) -> list[str]:
        """Forbidden differences of ``now``, which resumes this run: field, both values, and the reason."""
        return self._changes(now, lambda name: not _matches(name, CHANGEABLE))

    def refused_start(self, now: RunIdentity) -> list[str]:
        """Forbidden differences of ``now``, which starts from a checkpoint of this run."""
        return self._changes(now, lambda name: _matches(name, SHARED))

    def _changes(self, now: RunIdentity, counts: Callable[[str], bool]) -> list[str]:
        """Differences of the fields that count, and of files. A data file counts by its content, not by its name."""
        known = self.data.keys() & now.data.keys()
        before = _sources_numbered(_with_defaults(self.recipe), known)
        fields = differing_fields(before, _sources_numbered(now.recipe, known))
        changed = [f"{text} ({_reason(name)})" for name, text in fields.items() if counts(name)]
        changed += _changed_files(self.data, now.data, known, "the run would see other examples")
        names = self.files.keys() | now.files.keys()
        consequence = "the run would see other tokens, or another policy"
        return [*changed, *_changed_files(self.files, now.files, names, consequence)]


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The dotted fields in which two recipes, as plain values, differ, each with a text that has both values."""
    return {
        field: f"{field}: {_shown(field, left)} then, {_shown(field, right)} now"
        for field, (left, right) in differing_values(old, new).items()
        if not _moved(left, right)
    }


def differing_values(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two recipes, as plain values, differ, each with both values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*old, *new}):
        left, right, field = old.get(name), new.get(name), f"{prefix}{name}"
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            differing |= differing_values(left, right, f"{field}.")
        elif left != right:
            differing[field] = left, right
    return differing


def _moved(left: Any, right: Any) -> bool:
    """Whether the path ``left`` is of a file that is gone, and ``right`` of one with its name: a project may move."""
    if not (isinstance(left, str) and isinstance(right, str) and Path(left).is_absolute()):
        return False
    file = left.rpartition(":")[0] if ".py:" in left else left
    return Path(left).name == Path(right).name and not Path(file).exists()


def _changed_files(
    then: Mapping[str, str], now: Mapping[str, str], names: Collection[str], consequence: str
) -> Iterator[str]:
    """A message for each of the files ``names`` whose digest is another one."""
    for name in sorted(names):
        before, after = then.get(name), now.get(name)
        if before != after:
            yield (
                f"{name}: the content has changed since the run began ({_short(before)} then, "
                f"{_short(after)} now); restore it, since {consequence}"
            )


def _short(digest: str | None) -> str:
    return "missing" if digest is None else f"sha256 {digest[:12]}…"


def _shown(field: str, value: Any) -> str:
    return repr(hidden(field.rpartition(".")[2], value))


def _matches(field: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(field, pattern) for pattern in patterns)


def _reason(field: str) -> str:
    return next(reason for pattern, reason in REASONS if fnmatch(field, pattern))


def _with_defaults(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """``recipe`` with the defaults of fields that it lacks."""
    try:
        return parse_config(Recipe, recipe).model_dump(mode="json", exclude={"fresh"})
    except ConfigError:  # it has fields that there are no more: those differ
        return recipe


def _model_digests(model: ModelSection) -> Iterator[tuple[str, str]]:
    """Name and digest of each file that the tokens of a run, or its initial adapter, are read from."""
    directory = Path(model.path)
    for file in [*tokenizer_files(directory), *(directory / name for name in CONFIGS)]:
        if file.is_file():
            yield f"model.path/{file.relative_to(directory)}", _sha256(file)
    if model.lora is not None and model.lora.path is not None:
        for file in sorted(Path(model.lora.path).glob("adapter_*")):
            yield f"model.lora.path/{file.name}", _sha256(file)


def _sources_numbered(recipe: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """``recipe`` with its data sources by number, and without paths of sources ``known`` by content."""
    data = parse_config(DataSection, {field: recipe["data"].get(field) for field in FILES})
    numbered = {
        field: {
            str(number): source.model_dump(exclude={"path"} if f"data.{field}.{number}" in known else None)
            for number, source in enumerate(getattr(data, field) or ())
        }
        for field in FILES
    }
    return {**recipe, "data": {**recipe["data"], **numbered}}


def _digest(path: Path, files: Sequence[Path]) -> str:
    """The sha256 of a file, or of the names and contents of all ``files`` in the directory ``path``."""
    if path.is_file():
        return _sha256(path)
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(path)} {_sha256(file)}\n".encode())
    return total.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
