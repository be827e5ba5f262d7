"""A user's model directory in place of the suite's tiny models: ``--engine`` with ``--model-dir``."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.base import parse_config
from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CheckpointError, ConfigError
from core_rl_conformance.case import Target
from core_rl_conformance.catalogue import Check
from core_rl_conformance.profile import Profile

LAYOUT = re.compile(r"((dp|tp|pp|cp|ep)[1-9]\d*)+(sp)?")
DEGREE = re.compile(r"([dtpce]p)(\d+)")
BYTES_EACH = 35
"""Memory for each parameter: the oracle while it is loaded, gradients of the engine. Measured with SmolLM2."""
DISK_BYTES_EACH = 80
"""The same in files: the oracle, the plain models, and gradients of both."""
RANK_BYTES_EACH = 25
"""The same in a data-parallel rank, of an engine's weights, moments and exports."""
MINUTES_EACH = 1e-8
"""For each parameter and check, on one core."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GivenModel:
    """A Hugging Face directory with a causal language model."""

    path: Path
    model_type: str
    parameters: int

    @property
    def memory_gib(self) -> float:
        """Memory that the session's own process takes at most; pages of files, which the system drops, are more."""
        return self.parameters * BYTES_EACH / GIB

    @property
    def disk_gib(self) -> float:
        """Temporary files of the session."""
        return self.parameters * DISK_BYTES_EACH / GIB

    def judged_by(self, target: Target, layouts: Sequence[str] | None, dtype: DType | None) -> Target:
        """``target`` with this model alone, at ``layouts``; by default at the first layout and dtype of its profile.

        Raises `ConfigError` for a target that loads no model, and for a layout that is none.
        """
        name, profile = target.spec.name, target.profile
        if target.kind == "trainer":
            raise ConfigError(f"--model-dir with {name!r}: trainers choose their models; it is for engines")
        given = Profile(
            layouts=tuple(map(_layout, layouts)) if layouts else profile.layouts[:1],
            families=(self.model_type,),
            dtypes=(dtype or profile.dtypes[0],),
            options=profile.options,
            waivers=() if target.kind == "train" else profile.waivers,
            shared_servers=profile.shared_servers,
        )
        if problem := next(given.undeclared_layouts(target.spec), ""):
            raise ConfigError(f"{name!r}: {problem}")
        return replace(target, profile=given, model_dir=str(self.path))

    def header(self, checks: Iterable[Check], layouts: int) -> str:
        """The line of a session of ``checks`` that says what it takes."""
        train = [check for check in checks if check.kind == "train" and check.partner is None]
        count = sum(check.any_model for check in train)
        minutes = math.ceil(self.parameters * MINUTES_EACH * count * layouts)
        each_rank = self.parameters * RANK_BYTES_EACH / GIB
        return (
            f"model: {self.path} ({self.model_type}, {self.parameters:,} parameters); about {self.memory_gib:.1f} GiB "
            f"of memory, {each_rank:.1f} more for each rank, {self.disk_gib:.1f} of disk, and {minutes} min; {count} "
            f"of {len(train)} checks, since the others invent a config, a head or an input of its size"
        )


def read_given(path: Path, option: str = "--model-dir") -> GivenModel:
    """The model in ``path``; raises `ConfigError` where the oracle cannot compute it, or memory is too small."""
    option = f"{option}={path}"
    if not (path / "config.json").is_file():
        raise ConfigError(f"{option}: no config.json there; give the directory of a Hugging Face model")
    try:
        model_type = str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{option}: config.json has no model_type; transformers reads it by that"
        ) from error
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{option}: the oracle does not know the model type {model_type!r}; give a causal language model of "
            "transformers"
        )
    try:
        files = TensorFiles(path, "model")
        parameters = sum(math.prod(files.shape(name)) for name in files.names())
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from error
    model = GivenModel(path=path.resolve(), model_type=model_type, parameters=parameters)
    temporary = gettempdir()
    resources = (
        ("memory", model.memory_gib, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        (f"free disk in {temporary}", model.disk_gib, shutil.disk_usage(temporary).free / GIB),
    )
    lacking = [
        f"{need:.1f} GiB of {name} (there are {size:.1f})" for name, need, size in resources if need > size
    ]
    if lacking:
        raise ConfigError(
            f"{option}: to judge {model.parameters:,} parameters takes {' and '.join(lacking)}; give a model with "
            "fewer layers, or set TMPDIR to a larger disk"
        )
    return model


def _layout(text: str) -> ParallelLayout:
    if not LAYOUT.fullmatch(text):
        raise ConfigError(f"--layout={text}: no layout; write degrees as in dp2, tp3 or dp2tp2")
    degrees = {name: int(number) for name, number in DEGREE.findall(text)}
    values = {**degrees, "sequence_parallel": text.endswith("sp")}
    return parse_config(ParallelLayout, values, f"--layout={text}")
