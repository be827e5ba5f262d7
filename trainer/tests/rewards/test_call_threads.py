"""Threads of users' functions."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from core_rl_trainer.rewards import calls as threads
from core_rl_trainer.rewards.calls import CallThreads

NAME: ContextVar[str] = ContextVar("NAME", default="unset")


def finished(calls: CallThreads) -> threading.Thread:
    """The thread of a call that has ended."""
    done = threading.Event()
    thread = calls.run(done.set)
    assert done.wait(60)
    return thread


def test_idle_thread_takes_the_next_call() -> None:
    calls = CallThreads("test")
    used = {finished(calls) for _ in range(100)}
    assert len(used) < 10  # a call may come before its predecessor's thread is idle


def test_hanging_call_delays_no_other() -> None:
    calls, free = CallThreads("test"), threading.Event()

    def hang() -> None:
        free.wait(60)

    hanging = calls.run(hang)
    assert all(finished(calls) is not hanging for _ in range(3))
    assert hanging.is_alive() and hanging.daemon
    free.set()


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    calls = CallThreads("test")
    first = finished(calls)
    first.join(60)
    assert not first.is_alive()
    assert finished(calls) is not first


def test_calls_have_contexts_of_their_own() -> None:
    calls, seen = CallThreads("test"), list[str]()

    def work() -> None:
        seen.append(NAME.get())
        NAME.set("set")
        done.set()

    for _ in range(3):
        done = threading.Event()
        calls.run(work)
        assert done.wait(60)
    assert seen == ["unset"] * 3
