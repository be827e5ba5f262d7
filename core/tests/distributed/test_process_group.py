"""Joining a process group where a launcher has set its variables, and the device of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import engine_support
import group_support
import pytest
import torch
import torch.distributed as dist

from core_rl.distributed.devices import chosen_device, device_type, segments_expand, use_device
from core_rl.distributed.process_group import RankAddress, StoreAddress, join, local_index, open_store
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError
from core_rl.reference import SPEC
from core_rl.servers.process import bound

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
def test_launcher_without_rendezvous_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    set_all(monkeypatch, variables)
    engine = load_engine(SPEC, engine_support.config())
    with pytest.raises(ConfigError, match=rf"this is {says}, and MASTER_ADDR=.*, MASTER_PORT='' do not say"):
        engine.initialize()
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=f"an EngineGroup in {says}: .* Start the script once"):
        group_support.echo_group(group_support.SPEC, group_support.config(dp=2))
    engine.initialize(RankAddress(rank=0, world_size=1))
    engine.destroy()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_launcher_processes_form_a_world(tmp_path: Path, launcher: str) -> None:
    """Each runs the same script, whose engine has no address."""
    script = tmp_path / "script.py"
    script.write_text(
        "from core_rl.distributed.comm import Comm\n"
        "from core_rl.distributed.process_group import join, local_index\n"
        "import torch\n"
        "member = join(None, torch.device('cpu'))\n"
        "print(member.world.gather((member.world.rank, local_index(None))))\n"
        "member.leave()\n"
    )
    reserved = bound("127.0.0.1", 0)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
    processes = []
    for rank in range(2):
        own = {
            "torchrun": {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            "srun": {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)},
        }[launcher]
        command = [sys.executable, str(script)]
        processes.append(
            subprocess.Popen(command, env=os.environ | meeting | own, stdout=subprocess.PIPE, text=True)
        )
    with reserved:
        answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert answers == ["[(0, 0), (1, 1)]"] * 2


@pytest.mark.parametrize(
    "variables", [TORCHRUN | {"WORLD_SIZE": "1"}, BATCH_SCRIPT], ids=["one process", "batch script"]
)
def test_single_launcher_process_trains_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_all(monkeypatch, variables)
    engine = engine_support.engine()
    assert engine.world.size == 1
    engine.destroy()


def test_engine_joins_existing_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_all(monkeypatch, TORCHRUN)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine = engine_support.engine()
        assert engine.world.group is dist.group.WORLD
        engine.destroy()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_store_listens_on_host_for_several_worlds() -> None:
    store = open_store("127.0.0.1")
    listening = Path("/proc/net/tcp").read_text().split("\n")[1:]
    places = [line.split()[1] for line in listening if line and line.split()[3] == "0A"]
    assert f"0100007F:{store.port:04X}" in places and f"00000000:{store.port:04X}" not in places
    for name in ("first", "second"):
        store_address = StoreAddress(host="127.0.0.1", port=store.port, name=name)
        membership = join(RankAddress(rank=0, world_size=1, store=store_address), torch.device("cpu"))
        assert membership.world.gather(name) == [name]
        membership.leave()
        assert not dist.is_initialized()


def test_several_ranks_need_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="rank 1 of 2 has an address without a store"):
        join(RankAddress(rank=1, world_size=2), torch.device("cpu"))


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> list[torch.device]:
    """Let torch see CUDA devices; the list gets those that are made the current one."""
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    return used


@pytest.mark.parametrize(
    ("choice", "count", "index", "expected"),
    [
        ("auto", 0, 3, "cpu"),
        ("cpu", 4, 3, "cpu"),
        ("auto", 4, 3, "cuda:3"),
        ("cuda", 4, None, "cuda:2"),
        ("cuda", 1, 0, "cuda:0"),
    ],
)
def test_asking_for_a_device_sets_none(
    monkeypatch: pytest.MonkeyPatch, choice: str, count: int, index: int | None, expected: str
) -> None:
    used = with_devices(monkeypatch, count, current=2)
    assert str(chosen_device(choice, index)) == expected
    assert device_type(choice) == torch.device(expected).type
    assert used == []
    use_device(torch.device(expected))
    assert used == [torch.device(expected)] * expected.startswith("cuda")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("", ["expandable_segments:True", "cuda:1"]), ("max_split_size_mb:64", ["cuda:1"])],
)
def test_cuda_memory_uses_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, chosen: str, expected: list[str]
) -> None:
    did: list[str] = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", chosen)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", did.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: did.append(str(device)))
    use_device(torch.device("cpu"))
    assert did == []
    use_device(torch.device("cuda:1"))
    assert did == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", True), ("expandable_segments:True", True), ("expandable_segments:False", False)],
)
def test_older_torch_expands_segments_as_set(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: bool
) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    assert segments_expand() == expected


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, 2)
    with pytest.raises(ConfigError, match="the CUDA device 2, and this machine has 2, numbered from 0"):
        chosen_device("cuda", 2)
    with_devices(monkeypatch, 0)
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        device_type("cuda")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, None), (TORCHRUN, 1), (SRUN, 3), (SRUN | {"SLURM_LOCALID": "1"}, 1)],
    ids=["alone", "torchrun", "srun without a local number", "srun"],
)
def test_a_rank_finds_its_device_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    set_all(monkeypatch, variables)
    assert local_index(None) == expected
    assert local_index(RankAddress(rank=5, world_size=8, local_rank=2)) == 2
