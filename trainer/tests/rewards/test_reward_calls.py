"""Reward functions that raise, exit, hang or return no number: each error has the function, its line and the limit."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from core_rl.distributed.loop_thread import LoopThread
from core_rl.errors import RolloutError
from core_rl_trainer.rewards.calls import UserThreads, call_on_loop
from core_rl_trainer.rewards.functions import compute_reward

SOURCE = Path(__file__).read_text().splitlines()
ENDED = threading.Event()
"""Ends what hangs."""


def score(prompt_ids: Any, output_ids: Any, data: Mapping[str, Any]) -> Any:
    match data["do"]:
        case "raise":
            return json.loads("no JSON")
        case "exit":
            exec("exit(3)")
        case "interrupt":
            raise KeyboardInterrupt
        case "cancel":
            raise asyncio.CancelledError
        case "hang":
            ENDED.wait()
        case "text":
            return "1.0"
        case "complex":
            return 1j
    return 0.5


async def score_later(prompt_ids: Any, output_ids: Any, data: Mapping[str, Any]) -> Any:
    if data["do"] == "hang":
        await asyncio.sleep(60)
    if data["do"] == "block":
        ENDED.wait()
    return score(prompt_ids, output_ids, data)


def line_of(beginning: str, nth: int = 0) -> int:
    return [n for n, line in enumerate(SOURCE, 1) if line.strip().startswith(beginning)][nth]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("rewards")
    yield made
    ENDED.set()
    made.close()
    ENDED.clear()


LINES = {
    "raise": "return json.loads",
    "exit": "exec(",
    "interrupt": "raise KeyboardInterrupt",
    "cancel": "raise asyncio",
    "hang": "ENDED.wait()",
}
"""The beginning of the line that does it."""
CASES = {
    "raise": r"raised JSONDecodeError: Expecting value: .* \(LINE\)\nfix: correct that line",
    "exit": r"raised SystemExit: 3 \(LINE\)\nfix: return instead; .* catch SystemExit",
    "interrupt": r"raised KeyboardInterrupt \(LINE\)",
    "cancel": r"raised CancelledError \(LINE\)",
    "text": r"returned '1.0', not a number \(test_reward_calls.py:\d+\)\nfix: return a float",
    "complex": r"returned 1j, not a number",
}


@pytest.mark.parametrize("do", CASES)
@pytest.mark.parametrize("where", ["thread", "coroutine", "loop"])
def test_errors_name_function_and_line(loop: LoopThread, where: str, do: str) -> None:
    expected = CASES[do].replace("LINE", f"test_reward_calls.py:{line_of(LINES[do])}" if do in LINES else "")
    with pytest.raises(RolloutError, match=rf"sample 7: the reward function score\w* {expected}"):
        asyncio.run(ask(loop, where, do))


@pytest.mark.parametrize(
    ("where", "do", "line", "nth"),
    [
        ("thread", "hang", "ENDED.wait()", 0),
        ("coroutine", "hang", "await asyncio.sleep(60)", 0),
        ("loop", "hang", "await asyncio.sleep(60)", 0),
        ("loop", "block", "ENDED.wait()", 1),
    ],
)
def test_hanging_call_names_line_and_limit(
    loop: LoopThread, where: str, do: str, line: str, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = (
        rf"the reward function score\w* gave no result in 0.2 s \(test_reward_calls.py:{line_of(line, nth)}\)\n"
        "fix: .*raise rollout.reward_timeout_s"
    )
    with caplog.at_level(logging.DEBUG), pytest.raises(RolloutError, match=expected):
        asyncio.run(ask(loop, where, do, timeout_s=0.2))
    ENDED.set()
    time.sleep(0.1)  # a late result has no reader and no effect
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_next_call_after_an_exit_is_fine(loop: LoopThread) -> None:
    for where in ("thread", "loop"):
        with pytest.raises(RolloutError, match="SystemExit"):
            asyncio.run(ask(loop, where, "exit"))
        assert asyncio.run(ask(loop, where, "")) == 0.5


async def ask(loop: LoopThread, where: str, do: str, timeout_s: float = 20) -> float | None:
    async def on_loop(*args: Any) -> float:
        return await call_on_loop(loop, score_later, *args)  # type: ignore[no-any-return]

    on_loop.__name__, on_loop.__wrapped__ = "score_later", score_later  # type: ignore[attr-defined]
    function = {"thread": score, "coroutine": score_later, "loop": on_loop}[where]
    return await compute_reward(function, [1], [2], {"do": do}, subject="sample 7", timeout_s=timeout_s)


def results_of(function: Any, *args: Any, count: int) -> list[Any]:
    async def work() -> list[Any]:
        threads = UserThreads()
        return await asyncio.gather(*(threads.call(function, args) for _ in range(count)))

    return asyncio.run(work())


def test_slow_calls_run_at_once() -> None:
    assert sorted(results_of(threading.Barrier(8).wait, 10.0, count=8)) == list(range(8))


def test_quick_calls_share_threads() -> None:
    assert len(set(results_of(threading.get_ident, count=2000))) < 20


def test_hanging_call_delays_no_other() -> None:
    async def work() -> int:
        threads = UserThreads()
        hanging = asyncio.ensure_future(threads.call(ENDED.wait, (10.0,)))
        await asyncio.sleep(0.05)
        result: int = await asyncio.wait_for(threads.call(abs, (-1,)), 5)
        hanging.cancel()
        return result

    assert asyncio.run(work()) == 1
