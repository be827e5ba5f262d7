"""``examples/spmd_train.py`` under two agents of ``torchrun``: it trains as an `EngineGroup` does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_support as support
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta
from core_rl.distributed.process_group import open_store
from core_rl.launch.group import EngineGroup

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 3


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and texts."""
    directory = support.make_start(tmp_path_factory.mktemp("start"))
    config = AutoConfig.from_pretrained(
        directory / "model", num_key_value_heads=2
    )  # for two tensor-parallel ranks
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    support.write_jsonl(directory / "texts.jsonl", [{"text": f"{n}+{n + 1}={2 * n + 1}"} for n in range(20)])
    return directory


@pytest.mark.nightly
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("per_rank", "layout"), [(1, {"dp": 2}), (2, {"dp": 2, "tp": 2})], ids=["2 x 1", "2 x 2"]
)
def test_torchrun_agents_train_like_a_group(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_rank: int, layout: dict[str, int]
) -> None:
    output = tmp_path / "spmd"
    rows = _torchrun(per_rank, _arguments(start, layout, output))
    expected = _in_a_group(start, layout, tmp_path / "group", monkeypatch)
    assert [row.pop("step") for row in rows] == list(range(STEPS))
    for local, second in zip(rows, expected, strict=True):
        assert local == pytest.approx(second, rel=1e-6)
    actual, required = (load_file(path / "model.safetensors") for path in (output, tmp_path / "group"))
    torch.testing.assert_close(actual, required)
    assert AutoTokenizer.from_pretrained(output).eos_token_id == support.EOS


def _arguments(start: Path, layout: dict[str, int], output: Path) -> list[str]:
    data = ["--data", str(start / "texts.jsonl"), "--layout", json.dumps(layout)]
    return ["--model", str(start / "model"), *data, "--steps", str(STEPS), "--output", str(output)]


def _torchrun(per_rank: int, arguments: list[str]) -> list[dict[str, float]]:
    """What rank 0 printed; the two agents stand for two machines with ``each`` ranks."""
    # Here it outlives both agents; in an agent it would end with it, while the other one still asks.
    store = open_store("127.0.0.1")
    endpoint = [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=false"]
    rendezvous = ["--rdzv-backend=c10d", *endpoint, "--rdzv-id=1"]
    counts = ["--nnodes=2", f"--nproc-per-node={per_rank}", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *counts, *rendezvous]
    agents = [
        subprocess.Popen(
            [*command, str(EXAMPLES / "spmd_train.py"), *arguments],
            env=os.environ
            | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=300) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(errors for _, errors in outputs)
    lines = [line for text, _ in outputs for line in text.splitlines()]
    return [json.loads(line) for line in lines]


def _in_a_group(
    start: Path, layout: dict[str, int], output: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float]]:
    """The metrics of the same steps of an `EngineGroup`, which saves its model into ``output``."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("spmd_train")
    tokenizer = AutoTokenizer.from_pretrained(start / "model")
    texts = example.read_texts(start / "texts.jsonl", tokenizer)
    rows = []
    model = {"path": str(start / "model")}
    with EngineGroup(
        "fsdp", model=model, layout=layout, optimizer={"lr": 1e-3}, ft_spec=FinetuneSpec(dataset_size=STEPS)
    ) as group:
        for step in range(STEPS):
            rows.append(group.train_batch(example.make_batch(texts, step, 8), example.LOSS, example.BUDGET))
            group.lr_scheduler_step()
        meta = SaveLoadMeta(path=str(output), format="hf", tokenizer_path=model["path"])
        group.save(meta)
    return rows
