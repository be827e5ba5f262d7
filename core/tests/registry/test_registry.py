"""Finding engines. Plugins here are real distributions on disk: metadata, entry points and a module."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core_rl import errors
from core_rl.config.capability import Capability
from core_rl.engine.loading import load_backend
from core_rl.launch.hosts import LocalHosts, load_hosts
from core_rl.registry import engines as registry
from core_rl.registry.engines import (
    declared_engines,
    get_spec,
    installable_engines,
    list_engines,
    load_config,
    register_engine,
)
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec

GOOD = """
from core_rl.config.capability import Capability; from core_rl.registry.spec import EngineSpec
SPEC = EngineSpec(
    name="alpha", kind="train", protocol=(0, 3), factory="alpha_engine:Engine", config="alpha_config:Config",
    capabilities=frozenset({Capability.MOE}),
)
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution into a directory of its own on ``sys.path``; its modules go afterwards."""
    before = set(sys.modules)

    def _install(
        distribution: str,
        entry_points: str,
        *,
        version: str = "1.0",
        metadata: str | None = None,
        **modules: str,
    ) -> Path:
        site = tmp_path / f"{distribution}-{version}"
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        if metadata != "":
            (info / "METADATA").write_text(metadata or text, encoding="utf-8")
        (info / "entry_points.txt").write_bytes(f"[rl_engines]\n{entry_points}\n".encode("latin-1"))
        for name, source in modules.items():
            (site / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.syspath_prepend(site)
        return site

    yield _install
    for name in set(sys.modules) - before:
        if name.startswith(("alpha", "beta", "gamma")):
            del sys.modules[name]


def _spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {
        "name": "alpha",
        "kind": "train",
        "protocol": PROTOCOL_VERSION,
        "factory": "alpha_engine:Engine",
        "config": "alpha_config:Config",
    }
    return EngineSpec(**(fields | changes))  # type: ignore[arg-type]


def test_an_installed_engine_is_found_and_listed(install: Install) -> None:
    site = install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    spec = get_spec("alpha")
    assert (spec.name, spec.supports(Capability.MOE), spec.supports(Capability.LORA)) == (
        "alpha",
        True,
        False,
    )
    entry = next(entry for entry in list_engines() if entry.name == "alpha")
    found = (entry.distribution, entry.version, entry.value, entry.path, entry.spec, entry.error)
    assert found == ("alpha-plugin", "1.0", "alpha:SPEC", str(site), spec, None)


def test_get_spec_imports_a_single_plugin(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    install("beta-plugin", "beta = beta:SPEC", beta="raise SystemExit('imported')")
    get_spec("alpha")
    assert "beta" not in sys.modules


def test_unknown_name_gives_known_names_and_the_closest(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    with pytest.raises(errors.EngineNotFound) as caught:
        get_spec("alhpa")
    text = str(caught.value)
    assert "'alhpa'" in text
    assert "reference" in text
    assert "Did you mean 'alpha'?" in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("megatron", 'pip install "core-rl[megatron]"'),
        ("megatorn", "Did you mean 'megatron'? Install it: pip install \"core-rl[megatron]\""),
        ("quux", "Install the distribution that declares it under the entry point 'rl_engines'"),
        ("train", 'core-rl\'s own: "core-rl[fsdp]", '),  # an extra, but no engine's
    ],
)
def test_unknown_name_shows_install_line(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [entry for entry in declared_engines() if entry.distribution == "core-rl"]
    monkeypatch.setattr(registry, "declared_engines", lambda: iter(own))  # none of the plugins that are here
    with pytest.raises(errors.EngineNotFound) as caught:
        get_spec(name)
    assert line in str(caught.value)


def test_installable_engines_are_the_extras_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    lines = [f'{line}; extra == "{extra}"' for extra, lines in extras for line in lines]
    monkeypatch.setattr("core_rl.registry.engines.metadata.requires", lambda _: lines)
    assert installable_engines() == ["fsdp", "megatron", "mindspore", "sglang", "torchtitan", "vllm"]


def test_hosts_are_loaded_by_name(install: Install) -> None:
    hosts = "[rl_hosts]\nalpha-hosts = alpha:LocalHosts\nbeta-hosts = beta_gone:X"
    install("alpha-hosts", hosts, alpha="from core_rl.launch.hosts import LocalHosts")
    assert load_hosts("alpha-hosts") is LocalHosts
    with pytest.raises(
        errors.ConfigError, match="hosts 'beta-hosts' of alpha-hosts 1.0 .* no module 'beta_gone'"
    ):
        load_hosts("beta-hosts")
    with pytest.raises(
        errors.MissingPackage, match=r"'gamma' \(installed: alpha-hosts, .*core-rl\[cluster\]"
    ):
        load_hosts("gamma")


def test_name_conflict_names_both_distributions(install: Install) -> None:
    first = install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    second = install("alpha-fork", "alpha = alpha_fork:SPEC", version="2.5", alpha_fork=GOOD)
    with pytest.raises(errors.EngineAmbiguous) as caught:
        get_spec("alpha")
    text = str(caught.value)
    assert all(part in text for part in ("alpha-plugin 1.0", str(first), "alpha-fork 2.5", str(second)))
    claims = [entry for entry in list_engines() if entry.name == "alpha"]
    assert [entry.distribution for entry in claims] == ["alpha-fork", "alpha-plugin"]
    assert all(isinstance(entry.error, errors.EngineAmbiguous) for entry in claims)


def test_two_copies_of_distribution_count_once(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", version="1.0", alpha=GOOD)
    install("Alpha_Plugin", "alpha = alpha:SPEC", version="1.1", alpha=GOOD)
    assert [entry.version for entry in list_engines() if entry.name == "alpha"] == ["1.1"]
    assert get_spec("alpha").name == "alpha"


BROKEN = [
    pytest.param("raise RuntimeError('boom')", "RuntimeError: boom", RuntimeError, id="raises"),
    pytest.param("import sys; sys.exit('bye')", "SystemExit: bye", SystemExit, id="exits"),
    pytest.param("def broken(:", "SyntaxError", SyntaxError, id="syntax"),
    pytest.param(
        "import gamma_backend.ops", "needs the module 'gamma_backend'", ModuleNotFoundError, id="dependency"
    ),
    pytest.param("import beta.missing", "is incomplete", ModuleNotFoundError, id="own module"),
    pytest.param("from os import no_such", "ImportError", ImportError, id="import name"),
    pytest.param("OTHER = 1", "module 'beta' has no attribute 'SPEC'", type(None), id="no attribute"),
    pytest.param(
        "SPEC = {'name': 'beta'}", "expected an EngineSpec, found {'name': 'beta'}", type(None), id="type"
    ),
    pytest.param(GOOD, "the spec calls itself 'alpha'", type(None), id="another name"),
]


@pytest.mark.parametrize(("source", "message", "cause"), BROKEN)
def test_broken_plugin_is_reported_alone(
    install: Install, source: str, message: str, cause: type[BaseException]
) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    install("beta-plugin", "beta = beta:SPEC", version="3.2", beta=source)
    with pytest.raises(errors.EngineBroken) as caught:
        get_spec("beta")
    assert all(part in str(caught.value) for part in ("beta-plugin 3.2", "beta:SPEC", message))
    assert isinstance(caught.value.__cause__, cause)
    listed = {entry.name: entry for entry in list_engines()}
    assert isinstance(listed["beta"].error, errors.EngineBroken)
    assert message in str(listed["beta"].error)
    assert listed["alpha"].spec == get_spec("alpha")


@pytest.mark.parametrize("value", ["beta", "not a module:SPEC", "beta:SPEC.inner", ":SPEC", ""])
def test_a_malformed_entry_point_value_is_broken(install: Install, value: str) -> None:
    install("beta-plugin", f"beta = {value}", beta=GOOD)
    with pytest.raises(errors.EngineBroken, match="module:attribute"):
        get_spec("beta")


@pytest.mark.parametrize("line", ["a line without an equals sign", "bet\xe4 = beta:SPEC"])
def test_unreadable_entry_points_are_reported_under_the_distribution(install: Install, line: str) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    install("beta-plugin", line)
    listed = {entry.name: entry for entry in list_engines()}
    assert listed["alpha"].error is None
    assert "entry_points.txt cannot be parsed" in str(listed["beta-plugin"].error)
    with pytest.raises(errors.EngineNotFound, match="Unreadable: beta-plugin"):
        get_spec("beta")


def test_damaged_metadata_does_not_hide_the_engine(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", metadata="", alpha=GOOD)
    assert get_spec("alpha").name == "alpha"


MALFORMED = [
    ({"name": "Alpha"}, "lower-case"),
    ({"name": "a--b"}, "lower-case"),
    ({"name": 3}, "lower-case"),
    ({"kind": "training"}, "'train' or 'inference'"),
    ({"protocol": "0.1"}, "two integers"),
    ({"protocol": (0, 1, 2)}, "two integers"),
    ({"factory": "alpha_engine.Engine"}, "factory 'alpha_engine.Engine'"),
    ({"factory": None}, "factory None"),
    ({"config": "alpha config:Config"}, "config 'alpha config:Config'"),
    ({"conformance": "profile"}, "conformance 'profile'"),
    ({"capabilities": {Capability.MOE}}, "frozenset"),
    ({"preload": "alpha_engine"}, "names of modules"),
    ({"capabilities": frozenset({"moe"})}, "members of Capability"),
]


@pytest.mark.parametrize(("changes", "message"), MALFORMED)
def test_a_malformed_spec_is_broken(changes: dict[str, object], message: str) -> None:
    with pytest.raises(errors.EngineBroken, match=message):
        register_engine(_spec(**changes))


def test_all_violations_of_a_spec_come_at_once() -> None:
    with pytest.raises(errors.EngineBroken) as caught:
        register_engine(_spec(name="A", kind="x", factory="y"))
    assert all(part in str(caught.value) for part in ("3 problems", "name 'A'", "kind 'x'", "factory 'y'"))


MAJOR, MINOR = PROTOCOL_VERSION


@pytest.mark.parametrize(
    ("protocol", "fix"),
    [
        ((MAJOR, MINOR + 1), "upgrade core-rl"),
        ((MAJOR + 1, 0), "upgrade core-rl"),
        ((MAJOR - 1, 9), "upgrade the plugin"),
        ((MAJOR, MINOR - 1), r"upgrade the plugin \(docs/engine-reference.md\)"),
        ((0, 2), rf"declare `dropout`, .*; then set protocol=\({MAJOR}, {MINOR}\)"),
    ],
)
def test_incompatible_protocol_is_refused_before_import(
    install: Install, protocol: tuple[int, int], fix: str
) -> None:
    source = GOOD.replace(repr(PROTOCOL_VERSION), repr(protocol))
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=source, alpha_engine="raise RuntimeError")
    with pytest.raises(errors.EngineIncompatible, match=fix):
        get_spec("alpha")
    with pytest.raises(errors.EngineIncompatible, match=fix):
        load_backend(_spec(protocol=protocol))
    with pytest.raises(errors.EngineIncompatible, match=fix):
        load_config(_spec(protocol=protocol))
    assert "alpha_engine" not in sys.modules


ENGINE = "from core_rl.backend.train_backend import TrainBackend\nclass Engine(TrainBackend): ...\nclass Other: ..."
CONFIG = """
from core_rl.config.engine import InferenceEngineConfig, TrainEngineConfig
class Config(TrainEngineConfig): ...
class Other(InferenceEngineConfig): ...
"""


def test_engine_and_config_classes_are_loaded(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD, alpha_engine=ENGINE, alpha_config=CONFIG)
    spec = get_spec("alpha")
    assert load_backend(spec).__name__ == "Engine"
    assert load_config(spec) is load_config("alpha")
    assert load_config(spec).__name__ == "Config"
    with pytest.raises(errors.EngineNotFound, match="no installed engine is called 'alfa'"):
        load_config("alfa")


@pytest.mark.parametrize("load", [load_backend, load_config])
def test_a_class_of_the_wrong_kind_is_broken(install: Install, load: Callable[[EngineSpec], type]) -> None:
    source = GOOD.replace(":Engine", ":Other").replace(":Config", ":Other")
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=source, alpha_engine=ENGINE, alpha_config=CONFIG)
    with pytest.raises(errors.EngineBroken, match="alpha-plugin 1.0.*must be a subclass of core_rl"):
        load(get_spec("alpha"))


def test_missing_backend_is_reported_on_load(install: Install) -> None:
    engine = "import gamma_backend"
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD, alpha_engine=engine, alpha_config=CONFIG)
    spec = get_spec("alpha")
    assert load_config(spec).__name__ == "Config"
    with pytest.raises(errors.EngineBroken, match="alpha-plugin 1.0.*needs the module 'gamma_backend'"):
        load_backend(spec)


def test_registered_engine_lives_within_its_block() -> None:
    spec = _spec()
    with register_engine(spec):
        assert get_spec("alpha") is spec
        assert [entry.spec for entry in list_engines() if entry.name == "alpha"] == [spec]
    with pytest.raises(errors.EngineNotFound):
        get_spec("alpha")


def test_registering_a_taken_name_needs_replace(install: Install) -> None:
    install("alpha-plugin", "alpha = alpha:SPEC", alpha=GOOD)
    spec = _spec(description="mine")
    with pytest.raises(errors.EngineAmbiguous, match="alpha-plugin 1.0"):
        register_engine(spec)
    with register_engine(spec, replace=True):
        assert get_spec("alpha") is spec
        assert len([entry for entry in list_engines() if entry.name == "alpha"]) == 1
    assert get_spec("alpha").supports(Capability.MOE)


def test_registrations_may_end_in_any_order() -> None:
    first, second = _spec(description="first"), _spec(description="second")
    one = register_engine(first)
    two = register_engine(second, replace=True)
    one.close()
    assert get_spec("alpha") is second
    two.close()
    two.close()
    with pytest.raises(errors.EngineNotFound):
        get_spec("alpha")


def test_listing_engines_imports_no_torch() -> None:
    code = (
        "import sys; from core_rl import list_engines; list_engines(); "
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
