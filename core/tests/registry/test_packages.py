"""Versions of packages: tried, known to fail, missing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from core_rl.engine.loading import load_backend
from core_rl.errors import EngineBroken, MissingPackage, UnsupportedPackage
from core_rl.reference import SPEC
from core_rl.registry.packages import FailingVersions, PackageVersions, refuse_packages, warn_of_untried
from core_rl.registry.spec import check_spec

NUMPY = PackageVersions(name="numpy", tried=">=1.26")


@pytest.mark.parametrize(
    ("versions", "refused"), [(">=1", True), ("<1", False), ("==1.26.*", False), (">=1,!=1.26.0", True)]
)
def test_failing_version_is_refused_with_check(versions: str, refused: bool) -> None:
    package = replace(NUMPY, failing=(FailingVersions(versions=versions, check="I7.logprobs"),))
    spec = replace(SPEC, packages=(package,))
    if not refused:
        load_backend(spec)
        return
    with pytest.raises(UnsupportedPackage, match=r"fails I7\.logprobs: pip install 'numpy>=1\.26'"):
        load_backend(spec)


def test_every_missing_package_is_named() -> None:
    absent = tuple(PackageVersions(name=f"core-rl-absent-{n}", tried=">=1,<2") for n in range(2))
    with pytest.raises(MissingPackage, match="2 problems") as error:
        refuse_packages("mine", absent)
    assert "pip install 'core-rl-absent-1>=1,<2'" in str(error.value)


@pytest.mark.parametrize(("tried", "warns"), [(">=1", 0), ("<1", 1), ("==99.*", 1)])
def test_untried_version_warns_once(
    tried: str, warns: int, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    packages = (replace(NUMPY, tried=tried),)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warn_of_untried(request.node.name, packages)
    assert len(caplog.records) == warns


def test_build_with_any_name_is_untried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib_metadata.version", lambda name: "my-checkout")
    refuse_packages("mine", (replace(NUMPY, failing=(FailingVersions(versions=">=1", check="I1"),)),))
    warn_of_untried("checkout", (NUMPY,))
    assert "numpy my-checkout was not tried with the engine 'checkout'" in caplog.text


@pytest.mark.parametrize(
    "packages",
    [
        ["numpy"],
        (NUMPY, "numpy"),
        (replace(NUMPY, tried="recent"),),
        (replace(NUMPY, failing=(FailingVersions(versions="1.2", check="I1"),)),),
    ],
)
def test_malformed_packages_break_the_spec(packages: tuple[PackageVersions, ...]) -> None:
    with pytest.raises(EngineBroken, match="packages"):
        check_spec(replace(SPEC, packages=packages), "here")
