"""The files that one weight sync to SGLang runs in driver and rank, as docs/architecture.md lists them."""

from __future__ import annotations

from pathlib import Path

from sglang_support import connected, stubs, tiny_model
from traced_files import listed_files, start_trace, stop_trace, traced_files

from core_rl import EngineGroup, WeightUpdateMeta, sync_weights

LAUNCH = "core/core_rl/launch/"
"""A call to ranks, which belongs to the training step of the page."""
SOCKETS = "core/core_rl/distributed/sockets.py"
"""Run where a process makes its first shared tensor, in this sync or in an earlier test."""


def test_a_sync_runs_the_listed_files(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, seed=1)
    first, second = (
        WeightUpdateMeta(method="tensor", version=version, path=str(tmp_path / "meeting"), bucket_bytes=4096)
        for version in (1, 2)
    )
    start_trace()
    try:
        with (
            stubs(tmp_path) as made,
            connected(made) as rollout,
            EngineGroup("reference", model={"path": model}, device="cpu", optimizer=None) as group,
        ):
            group.run(_start_in_rank)
            sync_weights(group, rollout, first)  # imports and connections
            traced_files()
            group.run(_files_of_rank)
            sync_weights(group, rollout, second)
            ran = {*traced_files(), *group.run(_files_of_rank)[0]}
    finally:
        stop_trace()
    listed = set(listed_files("architecture.md", "## The life of a weight sync"))
    ran = {file for file in ran if not file.startswith(LAUNCH) and file != SOCKETS}
    assert (ran - listed, listed - ran) == (set(), set()), "unlisted, and listed in vain"


def _start_in_rank(_: object) -> None:
    start_trace()


def _files_of_rank(_: object) -> frozenset[str]:
    return traced_files()
