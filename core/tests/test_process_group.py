"""Joining a process group where a launcher has set its variables."""

from __future__ import annotations

from pathlib import Path

import engine_support
import group_support
import pytest
import torch.distributed as dist

from core_rl.distributed.process_group import RankAddress
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError
from core_rl.reference import SPEC

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
"""The script of ``sbatch --ntasks=4``, which runs once."""


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (TORCHRUN, r"one of 2 processes that torchrun started \(RANK=1, WORLD_SIZE=2\)"),
        (SRUN, r"one of 4 processes that srun started \(SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4\)"),
    ],
    ids=["torchrun", "srun"],
)
def test_a_lone_model_in_each_process_of_a_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    set_all(monkeypatch, variables)
    engine = load_engine(SPEC, engine_support.config())
    with pytest.raises(
        ConfigError, match=rf"initialize\(\) without an address in {says}: .*\.init_process_group\(\)"
    ):
        engine.initialize()
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=f"an EngineGroup in {says}: .* Start the script once"):
        group_support.echo_group(group_support.SPEC, group_support.config(dp=2))
    engine.initialize(RankAddress(rank=0, world_size=1, store_path=str(tmp_path / "store")))
    engine.destroy()


@pytest.mark.parametrize(
    "variables", [TORCHRUN | {"WORLD_SIZE": "1"}, BATCH_SCRIPT], ids=["one process", "batch script"]
)
def test_one_process_of_a_launcher_trains_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_all(monkeypatch, variables)
    engine = engine_support.engine()
    assert engine.world.size == 1
    engine.destroy()


def test_an_engine_joins_the_world_that_the_script_has_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(monkeypatch, TORCHRUN)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine = engine_support.engine()
        assert engine.world.group is dist.group.WORLD
        engine.destroy()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
