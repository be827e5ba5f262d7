"""Adapters as they are written for SGLang, and servers that lose or refuse them. Servers are stubs here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from server_stub import drop, first
from sglang_support import Stub, backend_of, build, connected, stubs, tiny_model

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.engine import LoraConfig, ModelConfig
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import ConfigError, WeightsError
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.procedures.streaming import sent
from core_rl_sglang.process import SglangAdapterForm, served_model

LORA: dict[str, Any] = {"rank": 2, "alpha": 6, "rslora": True, "target_modules": ["k_proj", "down_proj"]}
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    with stubs(tmp_path) as made:
        yield made[0]


def form_of(path: str, **changes: Any) -> SglangAdapterForm:
    form = served_model(ModelConfig(path=path, lora=LoraConfig(**{**LORA, **changes})), cpu_ranks=1).adapter
    assert isinstance(form, SglangAdapterForm)
    return form


def give(engine: InferenceEngine, version: int, tmp_path: Path) -> None:
    form = backend_of(engine).model.adapter
    assert form is not None
    factors = {name: torch.full(shape, float(version)) for name, shape in form.shapes.items()}
    meta = WeightUpdateMeta(method="lora", version=version, path=str(tmp_path / "meet"))
    sent(engine, meta, factors, AdapterMetadata(rank=2, alpha=6, rslora=True))


async def ask(engine: InferenceEngine) -> LLMResponse:
    return await engine.agenerate(LLMRequest(input_ids=(1, 2, 3), sampling=SHORT))


def bodies(stub: Stub, path: str, field: str) -> list[Any]:
    """The values of ``field`` in the calls of ``path``."""
    return [body.get(field) for called, body in stub.bodies if called == path]


def test_adapter_is_written_with_fused_layers(tmp_path: Path) -> None:
    form = form_of(tiny_model(tmp_path))
    assert form.modules == ["down_proj", "k_proj", "q_proj", "v_proj"]
    assert form.arguments("cpu")[:4] == ["--enable-lora", "--max-lora-rank", "2", "--lora-target-modules"]
    assert "torch_native" in form.arguments("cpu")
    assert "torch_native" not in form.arguments("cuda")
    factors = {name: torch.ones(shape) for name, shape in form.shapes.items()}
    form.write(factors, tmp_path)
    actual = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == pytest.approx(6 / 2**0.5), "SGLang knows no rsLoRA"
    layer = "base_model.model.model.layers.0."
    assert not actual[f"{layer}self_attn.q_proj.lora_B.weight"].any()
    assert not actual[f"{layer}self_attn.v_proj.lora_A.weight"].any()
    assert actual[f"{layer}self_attn.k_proj.lora_A.weight"].all()
    padded, complete = (actual[f"{layer}mlp.down_proj.lora_A.weight"], f"{layer}mlp.down_proj.lora_A.weight")
    inner = form.shapes[complete][1]
    assert padded.shape[1] % 32 == 0 < inner % 32
    assert padded[:, :inner].all()
    assert not padded[:, inner:].any()


def test_unsupported_adapter_layers_are_named(tmp_path: Path) -> None:
    gpt2 = str(ModelStore(tmp_path).directory(TinyModel(family="gpt2")))
    engine = build(gpt2, lora={"rank": 2})
    with pytest.raises(
        ConfigError, match="the adapter is on c_attn, c_fc, c_proj, and SGLang supports only "
    ):
        engine.launch_server()


def test_adapter_stays_while_requests_use_it(stub: Stub, tmp_path: Path) -> None:
    requested, proceed = threading.Event(), threading.Event()

    async def held(_request: web.Request, _body: dict[str, Any]) -> None:
        requested.set()
        await asyncio.to_thread(proceed.wait, 20)

    with connected([stub], LORA) as engine:
        give(engine, 1, tmp_path)
        stub.faults["/generate"] = held
        actual: list[LLMResponse] = []
        asking = threading.Thread(target=lambda: actual.append(asyncio.run(ask(engine))))
        asking.start()
        assert requested.wait(20)
        give(engine, 2, tmp_path)
        assert not stub.calls["/unload_lora_adapter"]
        proceed.set()
        asking.join(20)
        assert actual[0].versions == (1,) * 4, "the server says 2, and its adapter was that of version 1"
        assert asyncio.run(ask(engine)).versions == (2,) * 4
        give(engine, 3, tmp_path)
    names = bodies(stub, "/load_lora_adapter", "lora_name")
    assert len(set(names)) == 3
    assert bodies(stub, "/generate", "lora_path") == names[:2]
    assert bodies(stub, "/unload_lora_adapter", "lora_name") == names
    assert not list(tmp_path.glob(".meet*")), "no files are left"


def test_lost_adapter_is_loaded_again(stub: Stub, tmp_path: Path) -> None:
    def never_heard_of(_request: web.Request, body: dict[str, Any]) -> web.Response:
        message = f"Got LoRA adapter that has never been loaded: {body['lora_path']}"
        return web.json_response({"error": {"message": message}}, status=400)

    with connected([stub], LORA) as engine:
        give(engine, 1, tmp_path)
        stub.faults["/generate"] = first(1, never_heard_of)
        assert asyncio.run(ask(engine)).versions == (1,) * 4
    assert stub.calls["/load_lora_adapter"] == 2


def test_reconnected_server_keeps_adapter(stub: Stub, tmp_path: Path) -> None:
    def there(_request: web.Request, body: dict[str, Any]) -> web.Response:
        message = f"Failed to load LoRA adapter {body['lora_name']} because it is already loaded"
        return web.json_response({"success": False, "error_message": message}, status=400)

    with connected([stub], LORA) as engine:
        give(engine, 1, tmp_path)
        stub.faults |= {"/generate": first(1, drop), "/load_lora_adapter": there}
        assert asyncio.run(ask(engine)).versions == (1,) * 4


def test_recovered_server_gets_current_adapter(tmp_path: Path) -> None:
    with stubs(tmp_path, 2) as made, connected(made, LORA) as engine:
        made[1].faults["/load_lora_adapter"] = first(1, drop)
        give(engine, 1, tmp_path)
        assert [stub.calls["/load_lora_adapter"] for stub in made] == [1, 2]
        assert [stub.version for stub in made] == ["1", "1"]
        names = [bodies(stub, "/load_lora_adapter", "lora_name")[-1] for stub in made]
        assert names[0] == names[1]


def test_failed_adapter_switch_is_repaired(stub: Stub, tmp_path: Path) -> None:
    with connected([stub], LORA) as engine:
        stub.faults["/update_weight_version"] = first(1, lambda r, b: web.Response(status=500))
        give(engine, 1, tmp_path)
        assert asyncio.run(ask(engine)).versions == (1,) * 4
    assert bodies(stub, "/generate", "lora_path") == bodies(stub, "/load_lora_adapter", "lora_name")[:1]


def test_refused_adapter_keeps_previous_adapter(stub: Stub, tmp_path: Path) -> None:
    def refuse(_request: web.Request, _body: dict[str, Any]) -> web.Response:
        return web.json_response({"success": False, "error_message": "rank 2 is too much"}, status=400)

    with connected([stub], LORA) as engine:
        give(engine, 1, tmp_path)
        stub.faults["/load_lora_adapter"] = refuse
        with pytest.raises(WeightsError, match="adapter of version 2 was refused.*rank 2 is too much"):
            give(engine, 2, tmp_path)
        assert engine.get_version() == 1
        assert asyncio.run(ask(engine)).versions == (1,) * 4
    names = bodies(stub, "/load_lora_adapter", "lora_name")
    assert bodies(stub, "/generate", "lora_path") == names[:1]


def test_the_base_answers_before_an_adapter_comes(stub: Stub) -> None:
    with connected([stub], LORA) as engine:
        assert asyncio.run(ask(engine)).versions == (0,) * 4
    assert bodies(stub, "/generate", "lora_path") == [None]
