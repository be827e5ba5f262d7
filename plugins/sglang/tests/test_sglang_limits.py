"""Many requests, few files; servers and other engines on the same accelerators."""

from __future__ import annotations

import asyncio
import errno
import resource
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import server_stub
from aiohttp import web
from sglang_support import Stub, build, tiny_model

from core_rl import get_spec, load_config
from core_rl.config.base import parse_config
from core_rl.data.requests import LLMRequest, SamplingParams
from core_rl.errors import ConfigError
from core_rl.servers.api import SPARE_FILES, TooManyFiles
from core_rl_sglang.process import SglangConfig, arguments_of, served_model
from core_rl_trainer.plan.engine_config import EngineSections
from core_rl_trainer.plan.engines import checked_trainer, plan_online_engines
from core_rl_trainer.recipe.recipe import load_recipe

FILES, REQUESTS = 1024, 1000
CLIENT = f"""
import asyncio, resource, sys
sys.path[:0] = sys.argv[3:]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {FILES}))
from sglang_support import build
from core_rl.data.requests import LLMRequest, SamplingParams

async def main(engine):
    sampling = SamplingParams(max_new_tokens=1)
    requests = [LLMRequest(input_ids=(1, 2, 3), sampling=sampling) for _ in range({REQUESTS})]
    return await asyncio.gather(*map(engine.agenerate, requests))

engine = build(sys.argv[1], addresses=(sys.argv[2],), retries=0)
engine.initialize()
print(len(asyncio.run(main(engine))), "responses")
engine.destroy()
"""


@pytest.mark.nightly
def test_more_requests_than_files_are_all_answered(tmp_path: Path) -> None:
    """Requests of a process that may open 1,024 files, with a lower soft limit as in many shells."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * FILES), hard))
    stub, most = Stub(tiny_model(tmp_path)), [0, 0]

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        most[0] += 1
        most[1] = max(most)
        while most[1] <= 256:  # more than the lower limit come at one time
            await asyncio.sleep(0.01)
        most[0] -= 1

    stub.faults["/generate"] = slow
    stub.start()
    try:
        arguments = [
            stub.model,
            stub.address,
            *(str(Path(file).parent) for file in (__file__, server_stub.__file__)),
        ]
        actual = subprocess.run(
            [sys.executable, "-c", CLIENT, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        stub.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert actual.stdout == f"{REQUESTS} responses\n", actual.stderr[-2000:]
    assert 256 < most[1] <= (FILES - SPARE_FILES) / 2


def test_too_many_open_files_are_no_lost_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tiny_model(tmp_path))
    stub.start()
    engine = build(stub.model, addresses=(stub.address,), retries=0)
    engine.initialize()
    request = LLMRequest(input_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=1))

    async def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(aiohttp.TCPConnector, "connect", full)
        with pytest.raises(TooManyFiles, match=r"too many open files; raise their limit \(ulimit -n\)"):
            asyncio.run(engine.agenerate(request))
    assert asyncio.run(engine.agenerate(request)).output_ids == (7,)
    engine.destroy()
    stub.close()


def config(model: str, **fields: Any) -> SglangConfig:
    actual = parse_config(
        load_config(get_spec("sglang")), {"model": {"path": model}, "device": "cpu", **fields}
    )
    assert isinstance(actual, SglangConfig)
    return actual


@pytest.mark.parametrize(
    ("fields", "number", "expected"),
    [
        ({}, 0, ["--base-gpu-id", "0"]),
        ({"layout": {"dp": 3}}, 2, ["--base-gpu-id", "2"]),
        ({"layout": {"dp": 2, "tp": 2}}, 1, ["--base-gpu-id", "2", "--gpu-id-step", "1"]),
        ({"layout": {"dp": 2}, "devices": [5, 3]}, 1, ["--base-gpu-id", "3"]),
        ({"layout": {"tp": 2}, "devices": [1, 5]}, 0, ["--base-gpu-id", "1", "--gpu-id-step", "4"]),
        ({"options": {"memory_fraction": 0.4}}, 0, ["--base-gpu-id", "0", "--mem-fraction-static", "0.4"]),
    ],
)
def test_each_server_has_accelerators_of_its_own(
    tmp_path: Path, fields: dict[str, Any], number: int, expected: list[str]
) -> None:
    path = tiny_model(tmp_path)
    actual = config(path, **fields)
    model = served_model(actual.model, 0)
    arguments = arguments_of(actual.of_server(number), model, 1234, "cuda")
    names = ("--base-gpu-id", "--gpu-id-step", "--mem-fraction-static")
    local = [pair for pair in pairwise(arguments) if pair[0] in names]
    assert [part for pair in local for part in pair] == expected
    assert "--enable-memory-saver" in arguments
    assert not set(names) & set(arguments_of(actual.of_server(number), model, 1234, "cpu"))


@pytest.mark.parametrize("devices", [[3, 1], [0, 1, 3, 6][1:], [1, 1]])
def test_unsupported_accelerators_are_refused(tmp_path: Path, devices: list[int]) -> None:
    actual = config(tiny_model(tmp_path), layout={"tp": len(devices)}, devices=devices)
    with pytest.raises(ConfigError, match="SGLang takes devices that rise in equal steps"):
        actual.of_server(0)


def test_colocated_server_needs_memory_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"device": "auto", "shares_devices": True}
    path = tiny_model(tmp_path)
    config(path, **shared)  # on the CPU nothing is reserved
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(
        ConfigError, match=r"devices \[0\], which other engines share.*set options.memory_fraction"
    ):
        config(path, **shared)
    config(path, **shared, options={"memory_fraction": 0.4})
    config(path, **shared, options={"addresses": ["127.0.0.1:1"]})


RECIPE: dict[str, tuple[dict[str, Any], str | None]] = {
    "none": ({}, r"server on the devices \[0\], which other engines share.*options.memory_fraction"),
    "fraction": ({"engines": {"sglang": {"options": {"memory_fraction": 0.4}}}}, None),
    "own device": ({"placement": {"rollout": [1]}}, None),
    "distributed": (
        {
            "engines": {"sglang": {"options": {"memory_fraction": 0.4}}},
            "rollout": {"engine": "sglang", "sync": "distributed"},
        },
        r"the actor sends from device 0, where a server runs as well.*'tensor'.*placement\.rollout",
    ),
    "distributed elsewhere": (
        {"placement": {"rollout": [1]}, "rollout": {"engine": "sglang", "sync": "distributed"}},
        None,
    ),
}


@pytest.mark.parametrize("case", RECIPE)
def test_shared_device_recipe_is_checked_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes, message = RECIPE[case]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": 2}')
    values: dict[str, Any] = {
        "engine": "fsdp",
        "model": {"path": tiny_model(tmp_path)},
        "data": {"train": str(prompts)},
        "reward": "math",
        "rollout": {"engine": "sglang"},
        "steps": 1,
        "algorithm": {"type": "ppo_actor"},
        "output_dir": str(tmp_path / "out"),
    }
    recipe = load_recipe(values | changes)
    sections = EngineSections(sections=recipe.engines, shared={})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        trained = checked_trainer(sections.configure_trained("fsdp", recipe.model, recipe.optimizer))
        plan_online_engines(
            recipe.rollout,
            recipe.model,
            sections,
            {"actor": trained},
            recipe.cluster,
            recipe.placement,
            colocated=recipe.colocated,
        )
