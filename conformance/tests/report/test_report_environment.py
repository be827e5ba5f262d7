"""The environment that a report records."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from distributions import write_distribution

from core_rl import __version__
from core_rl.machine import describe_machine


def test_environment_is_described() -> None:
    factors = describe_machine(extra="conformance")
    assert factors.packages["torch"] == torch.__version__ and "transformers" in factors.packages
    assert factors.packages["core-rl"] == __version__ and "pytest" in factors.packages
    assert "ruff" not in factors.packages and "nox" not in factors.packages
    assert factors.python == f"{platform.python_implementation()} {platform.python_version()}"
    assert factors.cores >= 1 and factors.threads == torch.get_num_threads() and factors.processor


def test_an_engines_distribution_brings_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in (
        ("core_rl_alpha", "Requires-Dist: Alpha_Backend>=2; extra == 'gpu'\nRequires-Dist: absent-backend\n"),
        ("alpha_backend", ""),
    ):
        write_distribution(tmp_path, name, "4.5", metadata=lines)
    monkeypatch.syspath_prepend(tmp_path)
    packages = describe_machine(["core-rl-alpha", "(this process)"], extra="conformance").packages
    assert packages["core-rl-alpha"] == packages["alpha-backend"] == "4.5"
    assert "absent-backend" not in packages and list(packages) == sorted(packages)
