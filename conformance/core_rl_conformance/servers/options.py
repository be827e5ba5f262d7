"""`ServerArguments`: the server of a session, as its command line names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from core_rl.config.engine import DType
from core_rl.errors import ConfigError, raise_all
from core_rl.registry.engines import list_engines
from core_rl.servers.config import server_address

WIRES = ("openai", "sglang", "vllm")
"""Wires whose routes the suite knows; others are of installed engines."""


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """A running server, with the model that it serves, or the command that starts one."""

    url: str
    """Such as ``http://127.0.0.1:8000``; empty with a command."""
    command: str = ""
    """The command that starts a server of ``{model}`` on ``{port}``; empty for a server that runs."""
    wire: str
    model_dir: str
    take_over: bool = False
    """Whether the session may change its weights, its version and its state."""
    key_variable: str | None = None
    """The environment variable with its API key."""
    dtype: DType | None = None
    device: str = "cpu"

    def require_valid(self) -> None:
        """Raise one `ConfigError` with everything that is wrong."""
        raise_all(ConfigError, "the server under test", self._problems())

    def _problems(self) -> Iterator[str]:
        if self.wire not in (*WIRES, *(entry.name for entry in list_engines())):
            yield f"--wire={self.wire}: give --wire={'|'.join(WIRES)}, or the name of an installed engine over servers"
        if self.command:
            if self.url:
                yield "--server and --server-command are two servers; give one of them"
            if self.model_dir:
                yield f"--model-dir={self.model_dir}: the command serves the suite's models; leave it out"
            for name in ("{model}", "{port}"):
                if name not in self.command:
                    yield f"--server-command={self.command!r} has no {name}"
            return
        try:
            server_address(self.url)
        except ConfigError as error:
            key = "; name the variable of an API key with --server-key" if "@" in self.url else ""
            yield f"--server: {error}{key}"
        if not (Path(self.model_dir) / "config.json").is_file():
            yield (
                f"--model-dir={self.model_dir}: no config.json there; give the directory of the model that the server "
                "serves: expected values are computed from its weights"
            )

    @property
    def command_line(self) -> list[str]:
        """The suite's options for a running server."""
        options = [
            f"--server={self.url}",
            f"--wire={self.wire}",
            *(["--take-over"] if self.take_over else []),
        ]
        return [*options, f"--server-key={self.key_variable}"] if self.key_variable else options

    @property
    def address(self) -> str:
        """``host:port``"""
        return server_address(self.url)

    @property
    def model_type(self) -> str:
        return str(self._model_config.get("model_type", "model"))

    @property
    def vocab_size(self) -> int:
        config = self._model_config
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])

    @property
    def served_dtype(self) -> DType:
        """``dtype``, or by default the dtype in the model's config; float32 where that has another or none."""
        if not self.model_dir:
            return self.dtype or "float32"
        config = self._model_config
        named = str(config.get("dtype", config.get("torch_dtype", "")))
        return self.dtype or ("bfloat16" if named == "bfloat16" else "float32")

    @cached_property
    def _model_config(self) -> dict[str, Any]:
        text = (Path(self.model_dir) / "config.json").read_text(encoding="utf-8")
        parsed: dict[str, Any] = json.loads(text)
        return parsed
