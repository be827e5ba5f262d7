"""Servers that others started: checked before anything is changed, and steered by one run. Servers are stubs here."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import training_support
from aiohttp import web
from rich.console import Console
from scripted_server import scripted_server
from server_stub import complete, drop, first, request
from sglang_support import Stub, build, connected, stubs, tiny_model
from test_sglang_machines import RESPONSES

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import ConfigError, RolloutError
from core_rl.servers import facts
from core_rl.servers.api import Refused
from core_rl.servers.facts import label_of
from core_rl_sglang.backend import SGLangServer
from core_rl_trainer import dry_run, train

ELSEWHERE = "core-rl:elsewhere:17:3"
CONSTRAINT = Path(__file__).parents[3] / "constraints" / "sglang-server-unresolved.txt"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    """A server of a model with a tokenizer, which somebody has paused."""
    with stubs(tmp_path) as made:
        training_support.make_tokenizer().save_pretrained(made[0].model)
        made[0].paused = True
        yield made[0]


def copied(stub: Stub, **config: Any) -> Path:
    """Have ``stub`` serve a copy of its model, with ``config``."""
    copy = Path(stub.model).with_name("copy")
    shutil.copytree(stub.model, copy)
    text = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**text, **config}))
    stub.model_path = str(copy)
    return copy


def of_another_family(stub: Stub) -> None:
    stub.model_path = "/elsewhere/model"
    stub.info = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def with_another_template(stub: Stub) -> None:
    tokenizer = training_support.make_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(copied(stub))


def with_other_tokens(stub: Stub) -> None:
    tokenizer = training_support.make_tokenizer()
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(copied(stub))


MISFITS: dict[str, tuple[Callable[[Stub], object], str]] = {
    "model": (of_another_family, r"it serves model_type = 'qwen3' \(model.path: 'llama'\)"),
    "vocabulary": (
        lambda stub: copied(stub, vocab_size=17),
        r"its config has vocab_size = 17 \(model.path: ",
    ),
    "rotation": (lambda stub: copied(stub, rms_norm_eps=0.5), r"its config has rms_norm_eps = 0.5 \("),
    "tokens": (with_other_tokens, "its tokenizer in .*copy' has other tokens"),
    "template": (with_another_template, "its tokenizer in .*copy' has another chat template"),
    "context": (lambda stub: stub.info.update(context_length=4), "its context is 4 tokens, and the model's"),
    "precision": (
        lambda stub: copied(stub, quantization_config={"quant_method": "awq", "bits": 4, "zero_point": True}),
        r"it serves layers in another precision than the trainer has: int4: model.layers.\*.self_attn.q_proj",
    ),
    "dtype": (
        lambda stub: stub.info.update(dtype="half"),
        "it computes in float16, and dtype is float32; set dtype to its own, or start it with --dtype float32",
    ),
    "defaults": (
        lambda stub: stub.info.update(preferred_sampling_params={"top_k": 1}),
        "it runs with --preferred-sampling-params {'top_k': 1}; start it with None",
    ),
}


@pytest.mark.parametrize("take_over", [False, True])
@pytest.mark.parametrize("case", MISFITS)
def test_server_of_another_model_stays_untouched(stub: Stub, case: str, take_over: bool) -> None:
    change, message = MISFITS[case]
    change(stub)
    with (
        pytest.raises(ConfigError, match=rf"(?s)nothing was changed.*{stub.address}: {message}"),
        connected([stub], take_over=take_over),
    ):
        pass
    assert stub.changes == set()


def test_all_misfits_are_one_error(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made:
        of_another_family(made[1])
        made[1].info["context_length"] = 4
        with pytest.raises(ConfigError, match="3 problems") as caught, connected(made):
            pass
        assert str(caught.value).count(made[1].address) == 3
        assert made[0].changes == made[1].changes == set()


@pytest.mark.parametrize(
    ("label", "model", "message"),
    [
        (
            "default",
            1,
            "it serves '.*'; to load the weights of model.path into it, set options.take_over to true",
        ),
        (ELSEWHERE, 0, "the run elsewhere:17 steers it; .*take it over by options.take_over = true"),
        ("17", 0, "a user that labels its weights '17' steers it"),
    ],
)
def test_foreign_weights_need_take_over(
    stub: Stub, tmp_path: Path, label: str, model: int, message: str
) -> None:
    stub.label, stub.model_path = label, tiny_model(tmp_path, seed=model)
    with pytest.raises(ConfigError, match=message), connected([stub], take_over=False):
        pass
    assert stub.changes == set()
    with connected([stub]) as engine:
        assert complete(engine, request())[0].versions == (0,) * 4
    assert (stub.label, stub.model_path, stub.paused) == (label_of(0), stub.model, False)


CHANGES: dict[str, Callable[[Any, str], object]] = {
    "an update": lambda engine, new: engine.update_weights(WeightUpdateMeta(version=1, path=new)).result(20),
    "pause": lambda engine, _: engine.pause(),
    "set_version": lambda engine, _: engine.set_version(4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_server_of_others_only_draws(stub: Stub, tmp_path: Path, name: str) -> None:
    stub.paused = False
    with connected([stub], take_over=False) as engine:
        with pytest.raises(ConfigError, match=rf"options.take_over = false: {name}.*{stub.address}"):
            CHANGES[name](engine, tiny_model(tmp_path, seed=1))
        assert complete(engine, request())[0].versions == (0,) * 4
    assert stub.changes == {"/generate"}


def recipe_with(tmp_path: Path, *addresses: str, **options: Any) -> Path:
    """A recipe that trains with servers at ``addresses``."""
    values = training_support.recipe_values(
        training_support.make_start(tmp_path / "start"),
        tmp_path / "out",
        engine="reference",
        engines={"sglang": {"options": {"addresses": list(addresses), **options}}},
        rollout={"engine": "sglang", "sync": "disk", "max_new_tokens": 4},
    )
    return training_support.write_recipe(tmp_path / "r.yaml", values)


def test_training_needs_take_over(stub: Stub, tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, stub.address)
    with pytest.raises(ConfigError, match=rf"options.take_over = false: training pauses .*{stub.address}"):
        train(recipe, [], console=Console(file=io.StringIO()))
    assert not stub.calls


def denied(_request: web.Request, _body: Any) -> web.Response:
    return web.json_response({"error": "no such key"}, status=401)


RUNNING: dict[str, tuple[Callable[..., Any], str]] = {
    "key": (denied, "status 401: no such key; set options.api_key to the key that the server requires"),
    "page": (
        lambda *_: web.Response(text="<html>"),
        "returned no JSON: '<html>'; name the address of a SGLang server",
    ),
    "product": (lambda *_: web.json_response({"name": "other"}), "is no SGLang server: it sent something"),
    "route": (lambda *_: web.Response(status=404), "status 404.*; name the address of a SGLang server"),
    "connection": (drop, "ServerDisconnectedError.*; name the address of a SGLang server over HTTP"),
}


@pytest.mark.parametrize("case", RUNNING)
def test_dry_run_names_all_absent_servers(stub: Stub, tmp_path: Path, case: str) -> None:
    fault, message = RUNNING[case]
    stub.faults["/model_info"] = fault
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens on it
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        recipe = recipe_with(tmp_path, closed, stub.address, f"[::1]:{closed[10:]}", take_over=True)
        for start in (dry_run, train):
            with pytest.raises(ConfigError) as caught:
                start(recipe)
            lines = str(caught.value).splitlines()
            assert lines[0] == "engines.sglang: options.addresses: 3 problems:"
            assert f"nothing answers at {closed} (" in lines[1]
            assert re.search(f"{stub.address}.*{message}", lines[2])
    assert not stub.changes and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "address",
    [
        "https://10.0.0.5:30000",
        "10.0.0.5",
        "10.0.0.5:30000/v1",
        "::1:80",
        ":80",
        "http://host:70000",
        "host:0",
    ],
)
def test_address_is_host_and_port(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=f"'{address}' is not host:port; leave path and user out"):
        dry_run(recipe_with(tmp_path, address, take_over=True))


def test_addresses_may_begin_with_http(stub: Stub) -> None:
    engine = build(stub.model, addresses=[f"http://{stub.address}"])
    assert engine.config.options.addresses == (stub.address,)  # type: ignore[attr-defined]
    engine.initialize(f"http://{stub.address}/")
    assert complete(engine, request(1, 2, 3))[0].output_ids == (7,) * 4
    engine.destroy()
    with pytest.raises(ConfigError, match="'/v1' is not host:port"):
        build(stub.model).initialize("/v1")


@pytest.mark.parametrize("take_over", [False, True])
def test_lost_steering_is_final(stub: Stub, take_over: bool) -> None:
    stub.paused = False
    with connected([stub], take_over=take_over) as engine:
        before, stub.label = stub.changes, ELSEWHERE
        with pytest.raises(RolloutError, match="the run elsewhere:17"):
            complete(engine, request())
        assert stub.changes - before <= {"/generate", "/abort_request"}
    assert stub.label == ELSEWHERE


def test_restarted_server_is_checked_again(stub: Stub) -> None:
    with connected([stub]) as engine:
        stub.stop()
        of_another_family(stub)
        stub.methods.clear()
        stub.start()
        with pytest.raises(RolloutError, match="it serves model_type = 'qwen3'"):
            complete(engine, request())
        assert stub.changes <= {"/generate", "/abort_request"}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"text": "<html>Welcome</html>", "content_type": "text/html"}, "returned no JSON: '<html>Welcome"),
        ({"status": 404}, "GET /model_info returned status 404"),
        ({"status": 401}, "GET /model_info returned status 401"),
    ],
)
def test_another_service_is_refused_at_once(stub: Stub, response: dict[str, Any], message: str) -> None:
    stub.faults["/model_info"] = lambda _request, _body: web.Response(**response)
    with pytest.raises(Refused, match=f"{stub.address}.*{message}"), connected([stub]):
        pass
    assert stub.calls == {"/model_info": 1}


def test_server_lost_between_calls_is_named(stub: Stub) -> None:
    stub.faults["/update_weight_version"] = first(1, drop)
    with pytest.raises(RolloutError, match=f"{stub.address}: POST /update_weight_version"), connected([stub]):
        pass


def test_launched_server_death_between_calls_reports_log(tmp_path: Path) -> None:
    python = scripted_server(tmp_path, RESPONSES, "--model-path")
    dies = "if 'new_version' in body: print('no shared memory is left', flush=True); os._exit(3)"
    code = tmp_path / "server.py"
    code.write_text(code.read_text().replace("        label[0] =", f"        {dies}\n        label[0] ="))
    engine = build(tiny_model(tmp_path), api_key="${env:CORE_RL_TEST_SGLANG_KEY}", python=python)
    with pytest.raises(RolloutError, match=r"ended with exit code 3[\s\S]*no shared memory is left"):
        engine.initialize()


def test_untested_release_warns_once(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    facts.warn_if_untested.cache_clear()
    stub.info["version"] = "9.9"
    for _ in range(2):
        with connected([stub]):
            pass
    (warning,) = [record.message for record in caplog.records if "tested" in record.message]
    assert "SGLang 9.9 has not been tested" in warning


def test_tested_release_is_that_of_constraints() -> None:
    lines = CONSTRAINT.read_text().splitlines()
    assert {line.partition("==")[2] for line in lines if line.startswith("sglang==")} == SGLangServer.tested
