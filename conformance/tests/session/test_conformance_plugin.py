"""The pytest plugin in foreign directories: collection, exit status and leftovers of a session."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from distributions import write_distribution
from mutants.outputs import EntropyOverPadding
from mutants.zoo import spec_of
from plugin_support import engine, run, run_checks

from core_rl.config.layout import ParallelLayout
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.engines import register_engine
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.catalogue import CHECKS_DIRECTORY, load_checks
from core_rl_conformance.plugin import OPTIONS
from core_rl_conformance.profile import Profile, Setting, Waiver

__all__ = ["engine"]

pytest_plugins = ["pytester"]

FOREIGN_CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--unrelated", default="x")

@pytest.fixture(autouse=True)
def everything_fails_here():
    raise RuntimeError("a foreign fixture ran")

@pytest.fixture
def subject():
    raise RuntimeError("a foreign fixture was used")

def pytest_collection_modifyitems(items):
    for item in items:
        item.name
"""
FOREIGN_INI = """
[pytest]
python_files = nothing_*.py
python_functions = it_*
python_classes = Describe*
addopts = --strict-markers --strict-config
"""
GREEDY_INI = """
[pytest]
python_files = *.py
python_functions = *
addopts = --doctest-modules
"""
# --------------------------------------------------------- without an engine


def test_a_session_without_an_engine_is_left_alone(pytester: pytest.Pytester) -> None:
    """Neither options nor imports: the plugin is loaded in every session with core-rl installed."""
    pytester.makeconftest(
        """
        def pytest_addoption(parser):
            for name in ("--engine", "--layout", "--model", "--dtype", "--device", "--seed", "--quick", "--report"):
                parser.addoption(name, default="mine")
        """
    )
    pytester.makepyfile(
        """
        import sys

        def test_nothing_heavy_is_imported(pytestconfig):
            assert "core_rl_conformance.plugin" in sys.modules
            heavy = {"torch", "transformers", "pydantic", "core_rl", "core_rl_conformance.session.session"}
            assert not heavy & set(sys.modules)
            assert pytestconfig.getoption("--model") == "mine"
        """
    )
    result = pytester.runpytest_subprocess("--seed=3")
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("ini", [FOREIGN_INI, GREEDY_INI], ids=["foreign", "greedy"])
def test_checks_are_no_tests_without_an_engine(pytester: pytest.Pytester, ini: str) -> None:
    pytester.makeini(ini)
    result = run(pytester, "--collect-only", "-q", str(CHECKS_DIRECTORY))
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_help_names_all_options(pytester: pytest.Pytester) -> None:
    """Without an engine as text: plain names may belong to the project's own options."""
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--seed', help='of mine')")
    result = run(pytester, "--help")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*--engine=NAME*"])
    text = " ".join(result.stdout.str().split())
    for name, fields in OPTIONS.items():
        assert f"{name}" in text and " ".join(fields["help"].split()) in text
    assert "--seed=SEED of mine" in text
    result = run(pytester, "--engine=reference", "--help", "--noconftest")
    result.stdout.fnmatch_lines(["*--layout=LAYOUT*", "*--quick*"])


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine=referense"], "*no installed engine is called 'referense'*Did you mean 'reference'*"),
        (
            ["--engine=reference:dp1"],
            "*--engine=reference:dp1: a layout is for --model-dir; write --engine=reference --layout*",
        ),
        (["--engine=reference", "--check=I99.*"], "*--check=I99.*: no check is called so*"),
        (["--engine=reference", "--layout=dp9"], "*--layout=dp9: the profiles have dp1*"),
        (["--engine=reference", "--model=gpt5"], "*--model=gpt5*qwen3*"),
        (["--engine=reference", "--dtype=bfloat16"], "*--dtype=bfloat16: the profiles have float32*"),
    ],
)
def test_bad_options_end_with_our_message(
    pytester: pytest.Pytester, arguments: list[str], message: str
) -> None:
    result = run(pytester, *arguments, "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    _assert_line(result, message)


def _assert_line(result: pytest.RunResult, pattern: str) -> None:
    """``pattern`` in the error output as one line."""
    assert fnmatch.fnmatch(" ".join(result.stderr.lines), pattern), result.stderr.str()


def test_wrong_profile_names_engine(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    waiver = Waiver(check="I7.nothing", reason="", owner="me", raises=AssertionError)
    engine(ReferenceBackend, Profile(waivers=(waiver,)))
    result = run(pytester, "--engine=reference-backend", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    _assert_line(result, "*engine 'reference-backend': 2 problems*names no check*has no reason*")


def test_unknown_options_are_named_with_setting(
    pytester: pytest.Pytester, engine: Callable[..., EngineSpec]
) -> None:
    wrong = Setting(name="hsdp", layout=ParallelLayout(), options={"replica": 2})
    engine(ReferenceBackend, Profile(settings=(wrong,)))
    result = run(pytester, "--engine=reference-backend", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    _assert_line(result, "*engine 'reference-backend', layout dp1-hsdp*unknown field 'replica' = 2*")


def test_a_setting_is_run_by_its_name(
    pytester: pytest.Pytester, engine: Callable[..., EngineSpec], tmp_path: Path
) -> None:
    """The waiver of another place does not cover it, and the report holds its full name."""
    seeded = Setting(name="seeded", layout=ParallelLayout(), options={"seed": 7})
    waiver = Waiver(
        check="I7.logprobs", reason="known", owner="me", raises=AssertionError, layouts=("dp1-seeded",)
    )
    engine(ReferenceBackend, Profile(families=("llama",), settings=(seeded,), waivers=(waiver,)))
    options = ["--layout=dp1-seeded", f"--report={tmp_path / 'report.json'}", "-v"]
    result = run_checks(pytester, "reference-backend", "I7.logprobs or I8.temperature", *options)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*temperature*reference-backend-dp1-seeded-llama-float32*PASSED*"])
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert {case["layout"] for case in results} == {"dp1-seeded"}


def test_raising_profile_names_engine(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    spec = replace(spec_of(EntropyOverPadding), conformance="mutants.no_such_module:PROFILE")
    with register_engine(spec):
        result = run(pytester, "--engine=entropy-over-padding", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    _assert_line(result, "*'entropy-over-padding'*no_such_module*")


# ---------------------------------------------------------------- collection


def _collected(result: pytest.RunResult) -> list[str]:
    return [line.rpartition("::")[2] for line in result.outlines if "::" in line]


@pytest.mark.parametrize("ini", [FOREIGN_INI, GREEDY_INI], ids=["foreign", "greedy"])
def test_any_directory_collects_every_check_and_nothing_else(pytester: pytest.Pytester, ini: str) -> None:
    pytester.makeini(ini)
    pytester.makeconftest(FOREIGN_CONFTEST)
    pytester.makepyfile("def test_mine(): assert False")
    arguments = ["--engine=reference", "--collect-only", "-q"]
    packaged = _collected(run(pytester, *arguments, "--pyargs", "core_rl_conformance"))
    checks = {c.identifier for c in load_checks().values() if c.kind == "train" and c.partner is None}
    assert {name.partition("[")[0] for name in packaged} == checks
    # No path at all means the suite as well.
    assert _collected(run(pytester, *arguments)) == packaged
    # A path that holds other tests adds none of them.
    assert _collected(run(pytester, *arguments, ".", str(CHECKS_DIRECTORY.parent))) == packaged


def test_paths_in_second_copy_are_redirected(pytester: pytest.Pytester) -> None:
    """A checkout in addition to an installation: its tests are not collected, and its checks are those installed."""
    copy = pytester.mkdir("conformance")
    shutil.copytree(CHECKS_DIRECTORY.parent, copy / "core_rl_conformance")
    (copy / "tests").mkdir()
    (copy / "tests" / "test_suite.py").write_text("def test_suite(): assert False")
    arguments = ["--engine=reference", "--collect-only", "-q"]
    everything = _collected(run(pytester, *arguments))
    assert _collected(run(pytester, *arguments, "conformance/")) == everything
    one = _collected(run(pytester, *arguments, "conformance/core_rl_conformance/checks/gradients.py"))
    assert one and set(one) < set(everything)


def test_node_id_selects_check(pytester: pytest.Pytester) -> None:
    module = CHECKS_DIRECTORY / "gradients.py"
    result = run(
        pytester,
        "--engine=reference",
        "--collect-only",
        "-q",
        f"{module}::I4.grad-norm[reference-dp1-qwen3-float32]",
    )
    assert _collected(result) == ["I4.grad-norm[reference-dp1-qwen3-float32]"]


def test_two_engines_run_in_sequence(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    engine(ReferenceBackend)
    result = run(pytester, "--engine=reference-backend", "--engine=reference", "--collect-only", "-q")
    names = [name.partition("[")[2].partition("-dp1")[0] for name in _collected(result)]
    assert list(dict.fromkeys(names)) == ["reference-backend", "reference"]
    assert names == sorted(names, key=["reference-backend", "reference"].index)


# ------------------------------------------------------------------- running


def test_checks_run_beside_a_foreign_conftest(pytester: pytest.Pytester) -> None:
    pytester.makeini(FOREIGN_INI)
    pytester.makeconftest(FOREIGN_CONFTEST)
    result = run_checks(
        pytester, "reference", "I7.entropy and llama", "--junitxml=junit.xml", "--model=llama"
    )
    result.assert_outcomes(passed=1, deselected=_deselected(result))
    result.stdout.fnmatch_lines(
        [
            "*core-rl conformance: reference; checks in *",
            "engine reference: 1 passed, 0 failed*",
            "  models: llama",
            "  I7.entropy *ok *",
        ]
    )
    junit = (pytester.path / "junit.xml").read_text()
    assert (
        'property name="core_rl_conformance"' in junit and "&quot;outcome&quot;:&quot;passed&quot;" in junit
    )


def _deselected(result: pytest.RunResult) -> int:
    return int(result.parseoutcomes().get("deselected", 0))


def test_wrong_engine_message_helps(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    engine(EntropyOverPadding)
    result = run_checks(pytester, "entropy-over-padding", "I7.entropy and llama")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "I7.entropy: engine 'entropy-over-padding', layout dp1, model llama (seed 0), float32 on cpu",
            "  entropy at temperature 1 differs by *",
            "  first at sequence 0, token 1 of 17: expected *, got *",
            "  required: *",
            "*- reproduction without core-rl -*",
            "# I7.entropy: entropy at temperature 1 differs by *",
            "import torch",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_nothing_executed_is_no_success(pytester: pytest.Pytester) -> None:
    result = run_checks(pytester, "reference", "I2.data-parallel")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["NOT A SUCCESS: engine 'reference': no check was executed*"])


# ------------------------------------------------------------------- waivers

KNOWN = Waiver(check="I7.entropy", reason="padded rows, issue 12", owner="somebody", raises=AssertionError)


def test_a_waived_failure_is_no_failure(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    spec = engine(EntropyOverPadding, Profile(families=("llama",), waivers=(KNOWN,)))
    result = run_checks(pytester, spec.name, "I7.entropy")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["engine entropy-over-padding: 0 passed, 0 failed, 0 not supported, 1 waived*"]
    )


def test_obsolete_waiver_fails(pytester: pytest.Pytester, engine: Callable[..., EngineSpec]) -> None:
    spec = engine(ReferenceBackend, Profile(families=("llama",), waivers=(KNOWN,)))
    result = run_checks(pytester, spec.name, "I7.entropy")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*XPASS(strict)*padded rows, issue 12*", "engine reference-backend: 0 passed, 1 failed*"]
    )


def test_waiver_needs_matching_exception(
    pytester: pytest.Pytester, engine: Callable[..., EngineSpec]
) -> None:
    waiver = replace(KNOWN, raises=MemoryError)
    spec = engine(EntropyOverPadding, Profile(families=("llama",), waivers=(waiver,)))
    result = run_checks(pytester, spec.name, "I7.entropy")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["engine entropy-over-padding: 0 passed, 1 failed, 0 not supported, 0 waived*"]
    )


# ------------------------------------------------------- subprocess sessions


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution with one engine, as a user would install it; its name."""
    site = pytester.mkdir("site")
    source = (
        "from dataclasses import replace\n"
        "from core_rl.reference import SPEC as REFERENCE\n"
        "SPEC = replace(REFERENCE, name='strange', factory='mutants.outputs:EntropyOverPadding')\n"
    )
    points = {"rl_engines": {"strange": "strange:SPEC"}}
    write_distribution(site, "strange", points=points, files={"strange.py": source})
    paths = [str(site), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "strange"


@pytest.mark.nightly
def test_last_failed_and_workers(pytester: pytest.Pytester, installed: str) -> None:
    """``-n 2`` spreads the checks, ``--lf`` runs what failed, and no process is left."""
    pytester.makeini(FOREIGN_INI)
    pytester.makeconftest(FOREIGN_CONFTEST)
    command = [
        f"--engine={installed}",
        "--pyargs",
        "core_rl_conformance",
        "--model=llama",
        "-k",
        "I7.entropy or I7.logprobs or I7.values",
    ]
    first = pytester.runpytest_subprocess(*command, "-n", "2")
    first.assert_outcomes(passed=2, failed=1)
    first.stdout.fnmatch_lines(["engine strange: 2 passed, 1 failed*", "slowest of 3 cases*"])
    again = pytester.runpytest_subprocess(*command, "--lf")
    again.assert_outcomes(failed=1, deselected=_deselected(again))
    again.stdout.fnmatch_lines(["engine strange: 0 passed, 1 failed*"])
    end = time.monotonic() + 20
    while (left := [line for line in _processes() if str(pytester.path) in line]) and time.monotonic() < end:
        time.sleep(0.1)  # a fork server ends when it sees that its starter has
    assert not left


def _processes() -> list[str]:
    """The command lines of all living processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


WITHOUT_AIOHTTP = "import sys, pytest; sys.modules['aiohttp'] = None; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--engine=reference", "--check=I7.logprobs"], pytest.ExitCode.OK, "1 test collected"),
        (
            ["--server=http://127.0.0.1:9", "--wire=openai"],
            pytest.ExitCode.USAGE_ERROR,
            "need aiohttp: pip install 'core-rl[conformance,servers]'",
        ),
    ],
)
def test_only_servers_need_aiohttp(options: list[str], status: int, text: str, tmp_path: Path) -> None:
    suite = ["--pyargs", "core_rl_conformance", "--collect-only", "--quick", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", WITHOUT_AIOHTTP, *options, *suite]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == status and text in result.stdout + result.stderr
