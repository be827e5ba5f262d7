"""Named sockets with short names, whatever ``TMPDIR`` is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from core_rl.distributed import sockets
from core_rl.errors import ConfigError

SHARING = """
import os, tempfile
from multiprocessing import util
import torch
from core_rl.launch.process import end_fork_server, start_fork_server
from core_rl.weight_sync.messages import shared_by_name
start_fork_server()
end_fork_server()
assert len(util.get_temp_dir()) < 75
with shared_by_name():
    torch.zeros(2).share_memory_()
assert tempfile.gettempdir() == os.environ["TMPDIR"]
"""


@pytest.mark.parametrize("length", [40, 78, 100, 200])
def test_sockets_work_below_long_directories(tmp_path: Path, length: int) -> None:
    directory = Path(str(tmp_path / "x").ljust(length, "x"))
    directory.mkdir()
    environment = os.environ | {"TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", SHARING], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_environment_is_as_before_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = str(tmp_path / ("x" * 100))
    Path(long).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", long)
    monkeypatch.setenv("TMPDIR", long)
    with sockets.short_socket_names(), sockets.short_socket_names():
        assert len(os.environ["TMPDIR"]) <= sockets.LONGEST
    assert (os.environ["TMPDIR"], tempfile.tempdir) == (long, long)


def test_a_machine_without_short_directories_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 100)
    monkeypatch.setattr(sockets, "SHORT", ("/absent",))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter directory"):
        sockets.socket_directory()
