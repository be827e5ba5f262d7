"""Points: tests that run in a process each, with a time limit, on a GPU or at tiny sizes on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from core_rl.machine import describe_machine
from core_rl.pages import page_environment

Figures = Mapping[str, float | str]
"""Values by name; the name ends with the unit."""
T = TypeVar("T")
Status = Literal["passed", "failed", "not run"]
PRELOAD = ["core_rl.launch.fork_server", "gpu_points"]
TAIL = 40
"""Lines of a log in the message of a point that ended without a result."""
PROPERTY = "core_rl_gpu"
"""User property of a test report with the `Outcome` of a point."""


class NotRun(Exception):
    """The machine lacks a requirement of a point; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device and the sizes of a run."""

    device: Literal["cpu", "cuda"]
    """``cuda``, or ``cpu`` for a rehearsal."""
    directory: Path
    """For files that a point writes; empty at its beginning."""

    @property
    def rehearsal(self) -> bool:
        """Whether everything is tiny."""
        return self.device == "cpu"

    def size(self, real: T, tiny: T) -> T:
        """``real``, or ``tiny`` in a rehearsal."""
        return tiny if self.rehearsal else real

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of kernels."""
        return torch.bfloat16

    def milliseconds(self, work: Callable[[], Any], repeats: int = 10) -> float:
        """The median time of ``work()``, after two calls that do not count."""
        times = []
        for number in range(-2, self.size(repeats, 2)):
            self.finish()
            start = time.perf_counter()
            work()
            self.finish()
            if number >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_mib(self, work: Callable[[], Any]) -> float:
        """Memory that ``work()`` adds on the device at its peak; 0 on the CPU, which does not count it."""
        if self.device != "cuda":
            work()
            return 0.0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def free_bytes(self) -> int:
        """Memory of the device that no process has, once torch keeps none for itself; 0 on the CPU."""
        if self.device != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a point."""

    status: Status
    figures: Figures = field(default_factory=dict)
    message: str = ""


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside the context, equal work gives equal bits, or raises where torch has no deterministic kernel."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_point(
    point: Callable[[Setting], Figures], device: Literal["cpu", "cuda"], limit_s: float, directory: Path
) -> Outcome:
    """Run ``point`` in a process that starts without CUDA; its log and result go to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    result = directory / "result.json"
    result.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Not a daemon: points start ranks and servers.
    process = context.Process(target=_work, args=(point, device, directory), daemon=False)
    process.start()
    process.join(limit_s)
    if process.is_alive():
        assert process.pid is not None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet, or has just ended
            process.kill()
        process.join()
        return _failed(f"took more than its {limit_s:g} s", directory)
    if not result.exists():
        return _failed(f"its process ended with {process.exitcode}", directory)
    return Outcome(**json.loads(result.read_text()))


def _work(point: Callable[[Setting], Figures], device: Literal["cpu", "cuda"], directory: Path) -> None:
    """Write output to ``log.txt`` and the outcome to ``result.json``."""
    os.setpgid(0, 0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `deterministic`
    log = os.open(directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(log, standard)
    with tempfile.TemporaryDirectory() as files:
        try:
            outcome = Outcome(
                status="passed", figures=dict(point(Setting(device=device, directory=Path(files))))
            )
        except NotRun as error:
            outcome = Outcome(status="not run", message=str(error))
        except Exception as error:  # noqa: BLE001  # the report names every failure of a GPU
            traceback.print_exc()
            outcome = Outcome(status="failed", message=f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    (directory / "result.json").write_text(json.dumps(asdict(outcome)))


def _failed(reason: str, directory: Path) -> Outcome:
    log = directory / "log.txt"
    tail = log.read_text(errors="replace").splitlines()[-TAIL:] if log.exists() else []
    return Outcome(status="failed", message="\n".join([reason, *tail]))


def write_report(directory: Path, points: Sequence[Mapping[str, Any]], *, rehearsal: bool) -> Path:
    """Write ``gpu-report.json`` and the page next to it; returns the page's path."""
    statuses = ("passed", "failed", "not run")
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": rehearsal,
        "machine": asdict(describe_machine(["core-rl"])),
        "counts": {status: sum(point["status"] == status for point in points) for status in statuses},
        "points": points,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu-report.json").write_text(json.dumps(content, indent=1) + "\n")
    page = directory / "gpu-report.html"
    templates = page_environment(Path(__file__).parent / "templates")
    page.write_text(templates.get_template("report.html.jinja").render(content))
    return page
