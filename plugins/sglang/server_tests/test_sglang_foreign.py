"""A real server of another user: an engine of another model leaves it alone, and an engine of its model draws."""

from __future__ import annotations

from pathlib import Path

from server_stub import check_foreign_server
from sglang_support import build, tiny_model

from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel


def test_foreign_server_stays_untouched(root: Path, tmp_path: Path) -> None:
    other = str(ModelStore(root).directory(TinyModel(family="qwen3")))
    check_foreign_server(build, tiny_model(root), other, "/generate", tmp_path / "logs")
