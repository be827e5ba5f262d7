"""The pytest plugin: options, and the suite itself once ``--engine`` asks for it.

pytest loads this module in every session with core-rl installed. It therefore imports
nothing heavy, and its options exist only in a session that names an engine: plain names such as
``--model`` belong to other projects too.
"""

from __future__ import annotations

import gc
import os
import shlex
from collections.abc import Iterable
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

CHECKS_DIRECTORY = Path(__file__).parent / "checks"
ENGINES = "core_rl_engines"
"""Destination of the parsed ``--engine`` options, a unique name."""
HELP = (
    "check this core-rl engine (with --model-dir also NAME:LAYOUT) with the suite; may be given several times"
)
OTHERS = ("--server", "--server-command", "--trainer")
"""Options that name a target too; other projects have servers and trainers as well."""
SUITE = "core_rl_conformance"
"""Part of a word of every command that runs the suite."""


def _positive(text: str) -> int:
    """An option that counts from 1; argparse reports the ValueError with the name of the option."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _minutes(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ValueError
    return number


OPTIONS: dict[str, dict[str, Any]] = {
    "--trainer": {
        "action": "append",
        "metavar": "NAME",
        "help": "check this trainer as a black box: an entry point of rl_trainers, or module:SPEC; may be given "
        "several times",
    },
    "--server": {
        "metavar": "URL",
        "help": "check the running server at http://HOST:PORT; with --wire and --model-dir",
    },
    "--server-command": {
        "metavar": "COMMAND",
        "help": "check servers that this starts with tiny models: 'vllm serve {model} --port {port}'; with --wire",
    },
    "--wire": {"metavar": "WIRE", "help": "the interface of its requests: openai, or an engine over servers"},
    "--model-dir": {
        "metavar": "DIR",
        "help": "the model that a server serves, or a Hugging Face directory that train engines are checked on",
    },
    "--data": {
        "metavar": "FILE.jsonl",
        "help": "with --model-dir: sequences in place of drawn ones, a line each: token ids, a text or a chat",
    },
    "--take-over": {
        "action": "store_true",
        "help": "checks may change its weights, its version and its state",
    },
    "--server-key": {"metavar": "NAME", "help": "the environment variable with its API key"},
    "--layout": {
        "action": "append",
        "metavar": "LAYOUT",
        "help": "only this layout or setting of the profile, such as dp2, dp2tp2 or dp4-hsdp; may be given several "
        "times",
    },
    "--model": {
        "action": "append",
        "metavar": "FAMILY",
        "help": "only this tiny model, such as qwen3; may be given several times",
    },
    "--check": {
        "action": "append",
        "metavar": "NAME",
        "help": "only checks whose names match, such as I1.* (see core-rl checks); may be given several times",
    },
    "--dtype": {"choices": ("float32", "bfloat16"), "help": "only this dtype"},
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "default: cpu"},
    "--seed": {"type": int, "help": "of models and data; default: 0, or drawn for a soak"},
    "--quick": {"action": "store_true", "help": "one layout, of several ranks, and few unlike models"},
    "--sample-every": {
        "type": _positive,
        "default": 1,
        "metavar": "N",
        "help": "each check on the second layout, on every Nth of the others, and with an Nth of the models; "
        "with --quick an Nth of the checks of each engine; --seed moves them; default: 1, all",
    },
    "--soak": {
        "type": _minutes,
        "metavar": "MINUTES",
        "help": "no checks: for so long, calls in any order with sizes over powers of two, drawn from the seed",
    },
    "--lr0": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "besides the checks: N steps and weight syncs at learning rate 0, in which nothing may move",
    },
    "--call-timeout": {
        "type": float,
        "default": 120.0,
        "metavar": "SECONDS",
        "help": "after this a rank that does not answer hangs; default: 120",
    },
    "--report": {"metavar": "FILE.json", "help": "write a report, and an HTML page next to it"},
}
"""The options of a session with an engine; `pytest --help` without one shows them as text."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the suite's options to a session that asks for an engine, and ``--engine`` alone to ``--help``."""
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    words = list(_words(config))
    names = {word.partition("=")[0] for word in words}
    requested = "--engine" in names or (not names.isdisjoint(OTHERS) and any(SUITE in word for word in words))
    # A worker of pytest-xdist gets parsed options instead of a command line.
    requested = requested or _names_engines(config)
    if not requested and not {"-h", "--help"} & set(words):
        return
    group = parser.getgroup("core-rl conformance", "conformance of core-rl engines")
    help_ = HELP if requested else "\n".join([f"{HELP}. With it:", *starmap(_usage, OPTIONS.items())])
    group.addoption("--engine", action="append", dest=ENGINES, default=[], metavar="NAME", help=help_)
    for name, fields in OPTIONS.items() if requested else ():
        group.addoption(name, dest=destination(name), **fields)


def _names_engines(config: pytest.Config) -> bool:
    """Whether parsed options name an engine, a server or a trainer."""
    return any(getattr(config.option, name, None) for name in (ENGINES, *map(destination, OTHERS)))


def destination(name: str) -> str:
    """The attribute of pytest's options that holds the option ``name``, a unique one."""
    return f"core_rl_{name.removeprefix('--').replace('-', '_')}"


def _usage(name: str, fields: dict[str, Any]) -> str:
    """A line of help about an option that is not added: its name may be another plugin's."""
    choices = fields.get("choices")
    value = (
        "{" + ",".join(choices) + "}" if choices else fields.get("metavar", "N" if "type" in fields else "")
    )
    return f"{name}{'=' if value else ''}{value}  {fields['help']}"


def _words(config: pytest.Config) -> Iterable[str]:
    """Everything that may hold options: the command line, the environment, the ini file."""
    yield from map(str, config.invocation_params.args)
    yield from shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    yield from map(str, config.getini("addopts"))


def pytest_configure(config: pytest.Config) -> None:
    """Bring in the suite, which imports torch, if an engine is named."""
    if not _names_engines(config):
        return
    # This process needs ranks, unless it only collects or pytest-xdist's workers run the checks.
    distributes = bool(config.getoption("numprocesses", default=None)) and not hasattr(config, "workerinput")
    if not config.getoption("collectonly") and not distributes:
        from core_rl.launch.process import start_fork_server

        # The ranks' transformers reads it when it is loaded; bars would hide messages of failed checks.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # CUDA's matrix products have one order of summation only with workspaces of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        start_fork_server()  # it imports torch for the ranks while this process does so for itself
    # Imported objects are no garbage: searches take half a second each, five of them at the end of pytest.
    gc.disable()
    try:
        from core_rl_conformance.session.session import ConformanceSession

        session = ConformanceSession(config)
    finally:
        gc.freeze()
        gc.enable()
    config.pluginmanager.register(session, "core_rl_conformance.session.session")
    if config.getoption("core_rl_report") and not session.is_worker:
        from core_rl_conformance.session.summary import ReportWriter

        writer = ReportWriter(Path(config.getoption("core_rl_report")), config, session.summary)
        config.pluginmanager.register(writer, "core_rl_conformance.report")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without ``--engine`` the checks are no tests."""
    if _names_engines(config):
        return None
    return True if CHECKS_DIRECTORY in (collection_path, *collection_path.parents) else None
