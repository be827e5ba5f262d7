"""Sessions that judge a running server: outcomes by its routes, messages, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web
from distributions import install_project
from mutants.rollouts import ReportsAfterTheCut, ReportsWithoutTemperature
from plugin_support import run
from reference_server import CONTROL, GENERATE, ReferenceServer
from server_stub import running

from core_rl import load_config, load_engine
from core_rl.config.capability import Capability
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import ConfigError
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.servers.api import Refused
from core_rl.servers.backend import ServerBackend
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.servers import routes
from core_rl_conformance.servers.options import ServerArguments
from core_rl_conformance.servers.routes import read_routes
from core_rl_conformance.servers.target import load_server

pytest_plugins = ["pytester"]
EXAMPLE = Path(__file__).parents[3] / "examples" / "core-rl-plain"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ModelStore(tmp_path_factory.mktemp("models")).directory(TinyModel(family="llama")))


@pytest.fixture(scope="module")
def server(model_dir: str) -> Iterator[ReferenceServer]:
    with running([ReferenceServer(model_dir)]) as (made,):
        yield made


def judge(
    pytester: pytest.Pytester, server: ReferenceServer, checks: list[str], *arguments: str
) -> tuple[pytest.RunResult, dict[str, tuple[str, str]]]:
    """A session with these checks, and outcome and reason of each."""
    report = pytester.path / "report.json"
    result = run(
        pytester,
        f"--server=http://{server.address}",
        f"--model-dir={server.model}",
        f"--report={report}",
        *(f"--check={check}" for check in checks),
        "--pyargs",
        "core_rl_conformance",
        *arguments,
    )
    cases = json.loads(report.read_text())["results"]
    return result, {case["check"]: (case["outcome"], case["reason"]) for case in cases}


def arguments_for(server: ReferenceServer, wire: str, *, take_over: bool = False) -> ServerArguments:
    """The command line of a session that judges ``server``."""
    return ServerArguments(
        url=f"http://{server.address}",
        command="",
        wire=wire,
        model_dir=str(server.model),
        take_over=take_over,
        key_variable=None,
        dtype=None,
        device="cpu",
    )


VERSIONS, PREFIX = "contract.rollout-versions", "I12.updates"


def test_completions_are_judged_without_control_routes(
    pytester: pytest.Pytester, server: ReferenceServer
) -> None:
    checks = ["I7.rollout-logprobs", "I7.score", "I19.stop", PREFIX, VERSIONS]
    result, outcomes = judge(pytester, server, checks, "--wire=openai")
    assert result.ret == pytest.ExitCode.OK
    reason = "the wire openai has no route that changes a server"
    assert outcomes == {
        **dict.fromkeys(checks[:3], ("passed", "")),
        **dict.fromkeys((PREFIX, VERSIONS), ("not supported", reason)),
    }
    assert not {path for path, body in server.bodies if body} - {"/v1/completions"}


def test_missing_routes_are_named(pytester: pytest.Pytester, model_dir: str) -> None:
    for absent in ("/pause", "/collective_rpc"):
        with running([ReferenceServer(model_dir, routes=[r for r in CONTROL if r != absent])]) as (made,):
            _, outcomes = judge(pytester, made, [PREFIX, VERSIONS], "--wire=vllm", "--take-over")
            assert outcomes[PREFIX] == ("not supported", f"no route {absent}")
            assert (outcomes[VERSIONS] == ("passed", "")) == (absent == "/collective_rpc")


@pytest.mark.nightly
def test_server_changes_only_with_take_over(pytester: pytest.Pytester, server: ReferenceServer) -> None:
    before = server.label
    result, outcomes = judge(pytester, server, ["I19.bos", PREFIX, VERSIONS], "--wire=vllm")
    assert result.ret == pytest.ExitCode.OK
    withheld = ("not run", "it would change the server; give --take-over to allow it")
    assert outcomes == {"I19.bos": ("passed", ""), PREFIX: withheld, VERSIONS: withheld}
    assert server.label == before
    result, outcomes = judge(pytester, server, [PREFIX, VERSIONS], "--wire=vllm", "--take-over")
    assert outcomes == dict.fromkeys((PREFIX, VERSIONS), ("passed", ""))
    server.load(server.model)
    server.label = before


@pytest.fixture
def owner(model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InferenceEngine]:
    """The example's engine, installed."""
    for path in install_project(EXAMPLE, tmp_path):
        monkeypatch.syspath_prepend(path)
        monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)
    engine = load_engine("plain", load_config("plain")(model={"path": model_dir}, device="cpu"))
    assert isinstance(engine, InferenceEngine)
    yield engine
    engine.destroy()


def test_a_wrong_health_path_ends_the_start(owner: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = owner._backend
    assert isinstance(backend, ServerBackend)
    monkeypatch.setattr(backend.server_class, "health_path", "/healthy")
    with pytest.raises(Refused, match="plain server .*: GET /healthy returned status 404"):
        owner.launch_server()


def test_an_engines_own_wire_judges(
    pytester: pytest.Pytester, model_dir: str, owner: InferenceEngine
) -> None:
    checks = ["I7.rollout-logprobs", "I7.score", "I12.receive-tensor"]
    (address,) = owner.launch_server()
    labelled = json.dumps({"version": "core-rl:elsewhere:17:3"}).encode()
    urlopen(Request(f"http://{address}/version", labelled), timeout=60).close()
    arguments = [f"--server=http://{address}/", f"--model-dir={model_dir}", "--wire=plain"]
    arguments += [f"--check={check}" for check in checks] + ["--pyargs", "core_rl_conformance"]
    run(pytester, *arguments).assert_outcomes(passed=2, skipped=1)
    run(pytester, *arguments, "--take-over").assert_outcomes(passed=3)


DELTAS = ["I12.updates", "I12.delta-base"]


@pytest.mark.nightly
def test_deltas_are_judged_with_take_over(pytester: pytest.Pytester, model_dir: str) -> None:
    with running([ReferenceServer(model_dir)]) as (made,):
        _, outcomes = judge(pytester, made, DELTAS, "--wire=vllm", "--take-over")
        assert outcomes == dict.fromkeys(DELTAS, ("passed", ""))
        assert made.calls["/collective_rpc"] > len(DELTAS)


@pytest.mark.parametrize(
    ("wire", "absent", "outcome", "reason"),
    [
        ("vllm", "", "not run", "it would change the server; give --take-over to allow it"),
        ("vllm", "/collective_rpc", "not supported", "no route /collective_rpc"),
        ("openai", "", "not supported", "the wire openai has no route that changes a server"),
    ],
)
def test_deltas_need_a_route_of_whole_weights(
    pytester: pytest.Pytester, model_dir: str, wire: str, absent: str, outcome: str, reason: str
) -> None:
    with running([ReferenceServer(model_dir, routes=[r for r in CONTROL if r != absent])]) as (made,):
        _, outcomes = judge(pytester, made, DELTAS, f"--wire={wire}")
    assert outcomes == dict.fromkeys(DELTAS, (outcome, reason))
    assert not made.calls["/collective_rpc"]


def test_raw_logprobs_are_named(pytester: pytest.Pytester, model_dir: str) -> None:
    with running([ReferenceServer(model_dir, ReportsWithoutTemperature)]) as (made,):
        result, outcomes = judge(pytester, made, ["I8.rollout-temperature"], "--wire=openai")
    assert outcomes["I8.rollout-temperature"][0] == "failed"
    result.stdout.fnmatch_lines(["*reports raw log-probs; start it with --logprobs-mode processed_logprobs*"])


class KnownVersion(ReferenceServer):
    """A server of the version whose failures are known."""

    def _descriptions(self) -> dict[str, Any]:
        return {**super()._descriptions(), "/version": {"version": "0.32.0"}}


@pytest.mark.parametrize(
    ("kind", "outcome"), [(ReportsAfterTheCut, "waived"), (ReferenceRolloutBackend, "failed")]
)
def test_known_failures_of_a_version_are_strict(
    pytester: pytest.Pytester, model_dir: str, kind: type[ReferenceRolloutBackend], outcome: str
) -> None:
    with running([KnownVersion(model_dir, kind)]) as (made,):
        _, outcomes = judge(pytester, made, ["I8.sampling-pairs"], "--wire=openai")
    assert outcomes["I8.sampling-pairs"][0] == outcome


def test_report_has_product_and_no_key(
    pytester: pytest.Pytester, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_SERVER", "do-not-write")
    judge(pytester, server, ["I19.bos"], "--wire=openai", "--server-key=KEY_OF_SERVER")
    text = (pytester.path / "report.json").read_text()
    (engine,) = json.loads(text)["engines"]
    assert (engine["name"], engine["version"]) == ("vllm-server", "vLLM 9.9")
    assert engine["description"] == f"vLLM 9.9 at http://{server.address} (wire openai)"
    assert "do-not-write" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server=https://host:1"], "*--server: 'https://host:1' is not host:port*"),
        (
            ["--server=host:1", "--wire=nobody"],
            "*--wire=nobody: give --wire=openai|sglang|vllm, or the name*",
        ),
        (["--server=host"], "*--server: 'host' is not host:port*"),
        (
            ["--server=host:1"],
            "*--wire=: give --wire=openai|sglang|vllm, or the name of an installed engine*",
        ),
        (
            ["--server=host:1", "--server-command=serve", "--wire=vllm"],
            "*--server and --server-command are two servers; give one of them",
        ),
        (["--server=host:1", "--wire=vllm"], "*--model-dir=: no config.json there*"),
    ],
)
def test_wrong_options_name_the_fix(pytester: pytest.Pytester, arguments: list[str], message: str) -> None:
    result = run(pytester, *arguments, "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


class WithoutTokenizer(ReferenceServer):
    """SGLang's description of a server for token ids alone."""

    def _descriptions(self) -> dict[str, Any]:
        return {**super()._descriptions(), "/server_info": {"version": "0.5.23", "skip_tokenizer_init": True}}


def test_sglang_completions_need_a_tokenizer(model_dir: str) -> None:
    with (
        running([WithoutTokenizer(model_dir)]) as (server,),
        pytest.raises(ConfigError, match="the SGLang at .* runs with --skip-tokenizer-init.*--wire=sglang"),
    ):
        read_routes(server.address, None, "openai")


def test_images_are_left_to_engines(model_dir: str) -> None:
    with running([WithoutTokenizer(model_dir, routes=["/generate"])]) as (server,):
        # A session that declares them and runs no check of them is no success.
        arguments = arguments_for(server, "sglang", take_over=True)
        assert Capability.VISION not in load_server(arguments).spec.capabilities


class SlowAboutItself(ReferenceServer):
    """A server that collects its description for seconds, as vLLM does at the first request."""

    async def usual(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/server_info":
            await asyncio.sleep(2.5)
        return await super().usual(request, body)


def test_slow_descriptions_are_awaited(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "TIMEOUT_S", 2.0)
    with running([SlowAboutItself(model_dir)]) as (server,):
        assert read_routes(server.address, None, "vllm").product == "vLLM"


def test_unsuited_servers_name_the_fix(pytester: pytest.Pytester, model_dir: str, tmp_path: Path) -> None:
    with running([ReferenceServer(model_dir, routes=[r for r in CONTROL if r != GENERATE])]) as (made,):
        arguments = (f"--model-dir={model_dir}", "--wire=vllm", "--pyargs", "core_rl_conformance")
        result = run(pytester, f"--server={made.address}", *arguments)
        result.stderr.fnmatch_lines(
            [
                f"*--wire=vllm: the vLLM at {made.address} has no route {GENERATE}; start it with --enable-scale-out*"
            ]
        )
    result = run(pytester, f"--server={made.address}", *arguments)
    result.stderr.fnmatch_lines(["*--server: *; start the server first, and give its address*"])


def test_wrong_model_ends_the_session_at_once(
    pytester: pytest.Pytester, server: ReferenceServer, tmp_path: Path
) -> None:
    other = ModelStore(tmp_path).directory(TinyModel(family="qwen3"))
    before = len(server.bodies)
    arguments = (f"--model-dir={other}", "--wire=vllm", "--take-over", "--pyargs", "core_rl_conformance")
    result = run(pytester, f"--server={server.address}", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--model-dir={other}: its config has model_type = 'llama'*"])
    # The probe of scores alone has a body.
    assert {path for path, body in server.bodies[before:] if body} == {GENERATE}


def test_server_option_of_other_projects_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--server')")
    pytester.makepyfile("def test_value(pytestconfig): assert pytestconfig.getoption('--server') == 'mine'")
    run(pytester, "--server=mine").assert_outcomes(passed=1)


def test_log_of_failed_command_is_shown(pytester: pytest.Pytester) -> None:
    program = "import sys; sys.exit('no such flag: ' + sys.argv[1])"
    command = shlex.join([sys.executable, "-c", program, "--weights={model}", "{port}"])
    result = run(pytester, f"--server-command={command}", "--wire=openai", "--pyargs", "core_rl_conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--server-command: *ended with exit code 1*", "no such flag: --weights=/*"])


@pytest.mark.parametrize(
    ("quantization", "layers"),
    [
        ({"quant_method": "fp8"}, "fp8: model.layers.*.mlp"),
        ({"quant_method": "gptq", "bits": 4}, "int4: model.layers.*.mlp"),
        (None, ""),
    ],
)
def test_report_lists_quantized_layers(
    quantization: dict[str, Any] | None, layers: str, model_dir: str, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "served")
    file = tmp_path / "served" / "config.json"
    config = json.loads(file.read_text()) | ({"quantization_config": quantization} if quantization else {})
    file.write_text(json.dumps(config))
    with running([ReferenceServer(model_dir)]) as (made,):
        made.model_path = str(tmp_path / "served")
        description = load_server(arguments_for(made, "openai")).spec.description
    assert layers in description and ("another precision" in description) == bool(quantization)
