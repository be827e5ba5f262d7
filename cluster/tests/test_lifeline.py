"""A command under `lifeline` ends with the process that holds its standard input."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from group_support import survivors

from core_rl_cluster import lifeline

RUN = [sys.executable, "-I", "-S", lifeline.__file__]
STUBBORN = "trap '' TERM; echo $$; while :; do sleep 0.1; done"


@pytest.mark.parametrize("script", ["echo $$; exec sleep 300", STUBBORN])
def test_a_command_ends_when_standard_input_closes(script: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*RUN, "sh", "-c", script], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        assert process.poll() is None
        process.stdin.close()
        assert not survivors([pid], within_s=3)
        assert process.wait(3) != 0


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_exit_code_is_that_of_the_command(script: str, code: int) -> None:
    with subprocess.Popen([*RUN, "sh", "-c", script], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == code
