"""The environment that a report records."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from core_rl import __version__
from core_rl.machine import describe_machine


def test_environment_is_described() -> None:
    found = describe_machine(extra="conformance")
    assert found.packages["torch"] == torch.__version__ and "transformers" in found.packages
    assert found.packages["core-rl"] == __version__ and "pytest" in found.packages
    assert "ruff" not in found.packages and "nox" not in found.packages
    assert found.python == f"{platform.python_implementation()} {platform.python_version()}"
    assert found.cores >= 1 and found.threads == torch.get_num_threads() and found.processor


def test_an_engines_distribution_brings_its_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in (
        ("core_rl_alpha", "Requires-Dist: Alpha_Backend>=2; extra == 'gpu'\nRequires-Dist: absent-backend\n"),
        ("alpha_backend", ""),
    ):
        info = tmp_path / f"{name}-4.5.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.5\n{lines}"
        (info / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    packages = describe_machine(["core-rl-alpha", "(this process)"], extra="conformance").packages
    assert packages["core-rl-alpha"] == packages["alpha-backend"] == "4.5"
    assert "absent-backend" not in packages and list(packages) == sorted(packages)
