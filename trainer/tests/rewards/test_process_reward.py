"""Rewards in processes of their own: they may raise, hang, crash or leave children; nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import rollout_support
from rollout_support import eventually

from core_rl.errors import ConfigError, EngineStateError, RolloutError
from core_rl_trainer.rewards.functions import compute_reward
from core_rl_trainer.rewards.process import ProcessReward


def score(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    """Follow ``data["do"]``, and write the process id to ``data["pids"]`` first."""
    with Path(data["pids"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    match data["do"]:
        case "raise":
            raise FileNotFoundError("no such answer")
        case "word":
            return "much"  # type: ignore[return-value]
        case "hang":
            while True:
                pass
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with Path(data["pids"]).open("a") as file:
                file.write(f"{child.pid}\n")
            time.sleep(600)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
    return float(len(prompt_ids) * 10 + len(output_ids))


async def score_later(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    await asyncio.sleep(0)
    return score(prompt_ids, output_ids, data)


class Unreadable:
    """Arrives broken in the other process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(int, "x"), ()

    def __call__(self, *args: Any) -> float | None:
        return 0.0


@pytest.fixture
def pool() -> Iterator[ProcessReward]:
    with ProcessReward(score, processes=2, timeout_s=20) as made:
        yield made


def ask(reward: ProcessReward, do: str, tmp_path: Path) -> float | None:
    data = {"do": do, "pids": str(tmp_path / "pids")}
    return asyncio.run(compute_reward(reward, [1, 2], [3], data, subject="sample 7, completion 1"))


def pids(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "pids").read_text().splitlines()]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_reward_processes_are_reused(pool: ProcessReward, tmp_path: Path) -> None:
    assert [ask(pool, "", tmp_path) for _ in range(4)] == [21.0] * 4
    assert os.getpid() not in pids(tmp_path)
    assert len(set(pids(tmp_path))) <= 2


def test_a_coroutine_function_runs_there_too(tmp_path: Path) -> None:
    with ProcessReward(score_later, timeout_s=20) as reward:
        assert ask(reward, "", tmp_path) == 21.0
        assert pids(tmp_path) != [os.getpid()]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", r"raised FileNotFoundError: no such answer \(test_process_reward.py:31\)"),
        ("word", r"it returned 'much', not a number \(test_process_reward.py:25\)"),
        (
            "crash",
            r"its process was killed by SIGKILL \(out of memory is a common reason\) \(test_process_reward.py:25\)",
        ),
        ("exit", r"raised SystemExit: 3 \(test_process_reward.py:45\)\nfix: return instead"),
    ],
)
def test_process_reward_recovers_after_failure(
    pool: ProcessReward, tmp_path: Path, do: str, message: str
) -> None:
    with pytest.raises(RolloutError, match=f"sample 7, completion 1: the reward function score: {message}"):
        ask(pool, do, tmp_path)
    assert ask(pool, "", tmp_path) == 21.0


@pytest.mark.parametrize("do", ["hang", "child"])
def test_hanging_reward_is_killed_with_children(tmp_path: Path, do: str) -> None:
    with ProcessReward(score, timeout_s=1.5) as reward:
        ask(reward, "", tmp_path)
        line = {"hang": "3[56]", "child": "41"}[do]
        message = (
            "sample 7, completion 1: the reward function score: gave no result in 1.5 s "
            rf"\(test_process_reward.py:{line}\); its process was killed\nfix: .*raise rollout.reward_timeout_s"
        )
        with pytest.raises(RolloutError, match=message):
            ask(reward, do, tmp_path)
        eventually(lambda: all(gone(pid) for pid in pids(tmp_path)))
        assert ask(reward, "", tmp_path) == 21.0


def lengths(completions: list[str], sample: Mapping[str, Any]) -> list[float]:
    return [float(len(completion)) for completion in completions][sample["skip"] :]


def test_batched_rewards_run_in_a_process() -> None:
    with ProcessReward(lengths, timeout_s=20, batched=True) as reward:
        assert asyncio.run(reward(["ab", "c"], {"skip": 0})) == [2.0, 1.0]
        with pytest.raises(
            RolloutError, match=r"it returned a list of length 1 for 2 completions \(test_process"
        ):
            asyncio.run(reward(["ab", "c"], {"skip": 1}))


def test_waiting_for_a_free_process_does_not_count(tmp_path: Path) -> None:
    async def all_at_once(reward: ProcessReward) -> list[Any]:
        data = {"do": "", "pids": str(tmp_path / "pids")}
        return await asyncio.gather(*(reward([], [1] * n, data) for n in range(200)))

    with ProcessReward(score, processes=2, timeout_s=5) as reward:
        assert asyncio.run(all_at_once(reward)) == [float(n) for n in range(200)]


def test_close_kills_working_processes(tmp_path: Path) -> None:
    reward = ProcessReward(score, timeout_s=600)

    async def close_while_it_hangs() -> None:
        data = {"do": "hang", "pids": str(tmp_path / "pids")}
        hanging = asyncio.ensure_future(reward([], [], data))
        while not (tmp_path / "pids").is_file() or not pids(tmp_path):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(reward.close)
        with pytest.raises(RolloutError, match="closed meanwhile"):
            await hanging

    asyncio.run(close_while_it_hangs())
    eventually(lambda: all(gone(pid) for pid in pids(tmp_path)))
    reward.close()
    with pytest.raises(EngineStateError, match="are closed"):
        asyncio.run(reward([], [], {}))


@pytest.mark.nightly
def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; sys.path += sys.argv[2:]; import test_process_reward as t\n"
        "from core_rl_trainer.rewards.process import ProcessReward\n"
        "if __name__ == '__main__':\n"
        "    data = {'do': 'child', 'pids': sys.argv[1]}\n"
        "    asyncio.run(ProcessReward(t.score, timeout_s=600)([], [], data))\n"
    )
    paths = [str(tmp_path / "pids"), str(Path(__file__).parent), str(Path(rollout_support.__file__).parent)]
    driver = subprocess.Popen([sys.executable, "-c", code, *paths])
    eventually(lambda: (tmp_path / "pids").is_file() and len(pids(tmp_path)) == 2)
    driver.kill()
    driver.wait()
    eventually(lambda: all(gone(pid) for pid in pids(tmp_path)))


def test_unpicklable_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        ProcessReward(lambda *args: 0.0, timeout_s=1)
    with pytest.raises(ConfigError, match="both must be positive"):
        ProcessReward(score, processes=0, timeout_s=1)
    with ProcessReward(Unreadable(), timeout_s=1) as reward:
        for _ in range(2):
            with pytest.raises(RolloutError, match="the reward function Unreadable: raised ValueError"):
                ask(reward, "", tmp_path)
