"""Whole runs over agents on this machine, which stand for machines of a cluster."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_support as support
from cluster_support import Agents
from rich.console import Console

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.engine.sync import sync_weights
from core_rl_trainer import train
from core_rl_trainer.callbacks import Event, StepEnd
from core_rl_trainer.export import export_checkpoint
from core_rl_trainer.run import online

pytestmark = pytest.mark.nightly


def run(values: dict[str, Any], *callbacks: Callable[[Event], None]) -> str:
    """Train; returns the printed text."""
    console = Console(file=io.StringIO(), width=200)
    train(values, callbacks=callbacks, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


FSDP = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}}


@pytest.mark.parametrize("come_back", [True, False], ids=["comes back", "gone"])
def test_a_lost_machine(start: Path, tmp_path: Path, come_back: bool) -> None:
    """One of two machines is powered off: the run continues when it is back, or with the layout for one machine."""
    pytest.importorskip("core_rl_fsdp")
    unbroken, lost = tmp_path / "unbroken", tmp_path / "lost"
    run(support.supervised_values(start, unbroken, "sft", **FSDP))
    with Agents(tmp_path, 2) as agents:

        def power_off(event: Event) -> None:
            if isinstance(event, StepEnd) and event.step == 3 and not (lost / "restarts.jsonl").exists():
                agents.kill(1, for_good=not come_back)

        layouts = {} if come_back else {1: {"dp": 1}}
        section = agents.section(restarts=1, layouts=layouts, wait_s=120.0 if come_back else 45.0)
        printed = run(support.supervised_values(start, lost, "sft", **FSDP, cluster=section), power_off)
    assert "restart 1 of 1, from the checkpoint of step 2, on 2 machines: rank 1" in printed
    if come_back:
        assert support.curve(lost) == support.curve(unbroken)
    else:
        assert "restart 1 of 1, from the checkpoint of step 2, on 1 machine: 1 of 2 machines came" in printed
        losses = [[row["loss"] for row in support.curve(output)[1:]] for output in (lost, unbroken)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("sync", ["distributed", "disk"])
def test_rollouts_on_two_machines_leave_curve_equal(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    hosts: list[str | None] = []

    def recorded(sender: Any, receiver: Any, meta: WeightUpdateMeta, *more: Any) -> None:
        hosts.append(meta.host)
        sync_weights(sender, receiver, meta, *more)

    monkeypatch.setattr(online, "sync_weights", recorded)
    pytest.importorskip("core_rl_fsdp")
    rollout = {"prompts_per_step": 6, "group_size": 3, "max_new_tokens": 4, "sync": sync}
    one, two = tmp_path / "one", tmp_path / "two"
    changes = FSDP | {"rollout": rollout, "steps": 2}
    run(support.recipe_values(start, one, **changes))
    with Agents(tmp_path, 2) as agents:
        run(support.recipe_values(start, two, **changes, cluster=agents.section()))
        assert support.curve(two) == support.curve(one)
        assert hosts == [None] * 3 + ["127.0.0.1"] * 3
        export_checkpoint(two, "hf", tmp_path / "exported")
    exported, model = (path / "model.safetensors" for path in (tmp_path / "exported", one / "model"))
    assert exported.read_bytes() == model.read_bytes()
