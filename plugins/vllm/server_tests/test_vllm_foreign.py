"""A real server of another user: an engine of another model leaves it alone, and an engine of its model draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_stub import complete, logged_calls, request
from vllm_support import build, tiny_model

from core_rl.errors import ConfigError
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel


def test_foreign_server_stays_untouched(root: Path, tmp_path: Path) -> None:
    llama = str(ModelStore(root).directory(TinyModel(family="llama", head_size=32)))
    owner = build(llama, log_path=str(tmp_path / "logs"))
    try:
        (address,) = owner.launch_server()
        (log,) = (tmp_path / "logs").iterdir()
        start = log.stat().st_size

        def calls() -> set[tuple[str, str]]:
            return logged_calls(log.read_text()[start:])

        for take_over in (False, True):
            qwen = build(tiny_model(root), addresses=(address,), take_over=take_over)
            with pytest.raises(
                ConfigError, match=r"its config has model_type = 'llama' \(model.path: 'qwen3'\)"
            ):
                qwen.initialize()
        assert {method for method, _ in calls()} == {"GET"}

        guest = build(llama, addresses=(address,))
        guest.initialize()
        try:
            (response,) = complete(guest, request(5, 8, 2))
            assert response.versions == (0,) * 4
            with pytest.raises(ConfigError, match=r"options.take_over = false: pause\(\)"):
                guest.pause()
        finally:
            guest.destroy()
        assert {path for method, path in calls() if method != "GET"} == {"/inference/v1/generate"}
    finally:
        owner.destroy()
