"""Runs points, each in a process of its own that starts without CUDA, and collects what they report."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from core_rl_gpu.points import Point

__all__ = ["Outcome", "Status", "run_points"]

Status = Literal["passed", "failed", "not run"]
PRELOAD = ["core_rl.launch.preload", "core_rl_gpu.runner"]
TAIL = 40
"""Lines of a log in the message of a point that failed without one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a point."""

    name: str
    about: str
    status: Status
    seconds: float
    figures: Mapping[str, float | str] = field(default_factory=dict)
    message: str = ""


def run_points(points: Iterable[Point], device: Literal["cpu", "cuda"], directory: Path) -> Iterator[Outcome]:
    """The outcomes of ``points`` one by one; logs and files of each are below ``directory``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    for point in points:
        own = directory / point.name
        own.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        # Not a daemon: points start ranks and servers.
        process = context.Process(target=_work, args=(point, device, own), daemon=False)
        process.start()
        process.join(point.limit_s)
        if process.is_alive():
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            found = _failed(point, f"took more than its {point.limit_s:g} s", own)
        else:
            found = _read(point, own, process.exitcode)
        yield replace(found, seconds=round(time.monotonic() - start, 1))


def _work(point: Point, device: Literal["cpu", "cuda"], directory: Path) -> None:
    """The process of a point: what it prints goes to ``log.txt``, what it returns to ``result.json``."""
    from core_rl_gpu.setting import NotRun, Setting

    os.setpgid(0, 0)
    log = os.open(directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(log, standard)
    module, _, function = point.function.partition(":")
    with tempfile.TemporaryDirectory() as files:
        setting = Setting(device=device, directory=Path(files))
        try:
            figures = getattr(importlib.import_module(module), function)(setting)
            result = {"status": "passed", "figures": dict(figures)}
        except NotRun as error:
            result = {"status": "not run", "message": str(error)}
        except Exception as error:  # noqa: BLE001  # of anything that a GPU may break: the report tells of it
            traceback.print_exc()
            result = {"status": "failed", "message": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    (directory / "result.json").write_text(json.dumps(result))


def _read(point: Point, directory: Path, code: int | None) -> Outcome:
    file = directory / "result.json"
    if not file.exists():
        return _failed(point, f"its process ended with {code}", directory)
    result = json.loads(file.read_text())
    return Outcome(name=point.name, about=point.about, seconds=0.0, **result)


def _failed(point: Point, reason: str, directory: Path) -> Outcome:
    log = directory / "log.txt"
    tail = log.read_text(errors="replace").splitlines()[-TAIL:] if log.exists() else []
    message = "\n".join([reason, *tail])
    return Outcome(name=point.name, about=point.about, status="failed", seconds=0.0, message=message)
