"""Weights of a model that are not finite: found in its files, and blamed on them instead of on an engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.errors import CheckpointError, ConfigError, CoreRLError, RunStopped, WeightsError, raise_all

SIGNS = re.compile(r"\b(nan|inf|infinite|finite|probability)\b", re.IGNORECASE)
"""Words of an error that weights which are not finite may have caused."""
SHOWN = 3
"""Tensors that an error names."""


@contextmanager
def weights_are_blamed(models: Mapping[str, str]) -> Iterator[None]:
    """Errors inside that speak of NaN become a `WeightsError`, where files of ``models`` have some.

    ``models`` are directories by their fields.

    Reading all weights takes a while: it is done only then.
    """
    try:
        yield
    except (ConfigError, RunStopped):
        raise
    except (CoreRLError, RuntimeError) as error:
        if SIGNS.search(str(error)):
            _raise_if_bad(models, error)
        raise


def require_finite_weights(models: Mapping[str, str], metrics: Mapping[str, float]) -> None:
    """Raise `WeightsError` for NaN in first ``metrics`` that comes from the model's files."""
    if not all(math.isfinite(value) for value in metrics.values()):
        _raise_if_bad(models, None)


def _raise_if_bad(models: Mapping[str, str], cause: Exception | None) -> None:
    problems = [text for field, path in models.items() for text in _bad(field, Path(path))]
    try:
        raise_all(WeightsError, "the weights that the run starts from are not finite", problems)
    except WeightsError as error:
        raise error from cause


def _bad(field: str, directory: Path) -> Iterator[str]:
    """A line for each file with such weights."""
    by_file: dict[str, list[str]] = {}
    try:
        files = TensorFiles(directory, "model")
        for name in files.names():
            tensor = files.read(name)
            wrong = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if wrong:
                by_file.setdefault(files.file_of(name), []).append(
                    f"{name} ({wrong:,} of {tensor.numel():,} values)"
                )
    except CheckpointError:
        return  # files that cannot be read are an error of their own
    for file, tensors in by_file.items():
        more = f" and {len(tensors) - SHOWN} more" if len(tensors) > SHOWN else ""
        shown = ", ".join(tensors[:SHOWN])
        yield (
            f"{field}: {directory / file} has NaN or infinity in {shown}{more}; replace the file, for example by "
            "a new download or an earlier checkpoint"
        )
