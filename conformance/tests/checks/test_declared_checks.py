"""Checks of other distributions, by the entry-point group ``core_rl_checks``: real ones on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributions import write_distribution
from plugin_support import run

from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import declared_checks, load_checks

pytest_plugins = ["pytester"]

Install = Callable[[str, str], None]
CHECK = """
from core_rl_conformance.catalogue import check

@check("{name}", each="engine")
def it_has_a_name(subject):
    '''The engine has a name.

    Why: a check of a test.
    Look at: the spec.
    '''
    assert subject.case.target.spec.name == "reference"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install the distribution ``alpha-checks`` with one entry point and one module."""

    def _install(value: str, source: str) -> None:
        points = {"core_rl_checks": {"named": value}}
        write_distribution(tmp_path, "alpha-checks", points=points, files={"alpha_checks.py": source})
        monkeypatch.syspath_prepend(tmp_path)

    yield _install
    sys.modules.pop("alpha_checks", None)


def test_declared_check_joins_suite(install: Install, pytester: pytest.Pytester) -> None:
    install("alpha_checks:it_has_a_name", CHECK.format(name="contract.mine"))
    assert [check.identifier for check in declared_checks()] == ["contract.mine"]
    assert list(load_checks())[-1] == "contract.mine"
    result = run(
        pytester, "--engine=reference", "--check=contract.mine", "-v", "--pyargs", "core_rl_conformance"
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*checks/__init__.py::contract*mine*PASSED*"])


BROKEN = [
    ("alpha_checks:nothing", "", r"check 'named' of alpha-checks 1.0 .*has no attribute 'nothing'"),
    (
        "alpha_checks:check",
        "raise RuntimeError('boom')",
        "check 'named' of alpha-checks 1.0 .*RuntimeError: boom",
    ),
    ("alpha_checks", "", "check 'named' of alpha-checks 1.0 .*not of the form 'module:attribute'"),
    ("alpha_checks:plain", "def plain(subject): ...", "alpha-checks 1.0 .* is no check; decorate"),
    ("alpha_checks:it_has_a_name", CHECK.format(name="I7.logprobs"), "two checks are called 'I7.logprobs'"),
]


@pytest.mark.parametrize(("value", "source", "message"), BROKEN)
def test_unusable_check_is_single_error(install: Install, value: str, source: str, message: str) -> None:
    install(value, source)
    with pytest.raises(ConfigError, match=message):
        load_checks()


def test_session_ends_with_check_error(install: Install, pytester: pytest.Pytester) -> None:
    install("alpha_checks:nothing", "")
    result = run(pytester, "--engine=reference", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*check 'named' of alpha-checks 1.0*has no attribute 'nothing'*"])
