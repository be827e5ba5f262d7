"""Checks of a machine before servers start there."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from core_rl.servers.process import machine_problems
from core_rl_sglang.process import PYTHON_VARIABLE, SglangConfig


def config(**options: object) -> SglangConfig:
    return SglangConfig.model_validate({"model": {"path": "model"}, "options": options})


def python_with(directory: Path, module: str) -> str:
    """A Python in whose path there is ``module``, which may not be imported."""
    (directory / f"{module}.py").write_text("raise RuntimeError('imported')")
    script = directory / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{directory}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_missing_servers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    good = python_with(tmp_path, "sglang")
    assert list(machine_problems(config(python=good))) == []
    (missing,) = machine_problems(config(python=str(tmp_path / "none")))
    assert missing.startswith(f"options.python: '{tmp_path}/none' cannot be run: ")
    (without,) = machine_problems(config())
    assert (
        without.startswith(f"options.python: {sys.executable!r} has no module 'sglang'")
        and PYTHON_VARIABLE in without
    )
    monkeypatch.setenv(PYTHON_VARIABLE, good)
    assert list(machine_problems(config())) == []


def test_taken_ports_are_named(tmp_path: Path) -> None:
    good = python_with(tmp_path, "sglang")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = machine_problems(config(python=good, ports=[port]))
        assert problem.startswith(f"options.ports: port {port} of 127.0.0.1 cannot be listened on (Address")
        (problem,) = machine_problems(config(python=good, ports=[port, port + 1]))
        assert problem.endswith("for 1 servers; give one for each, or none")
    assert list(machine_problems(config(addresses=["127.0.0.1:1"], python="/none"))) == []
