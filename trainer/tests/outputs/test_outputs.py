"""Outputs of a run: exports of its checkpoints, its adapter, and a repository on the Hub."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import training_support as support
import yaml
from huggingface_hub import HfApi
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_rl.checkpoint.portable import DcpFiles
from core_rl.cli import main
from core_rl.errors import CheckpointError, ConfigError
from core_rl_trainer import load_recipe
from core_rl_trainer.export import export_checkpoint
from core_rl_trainer.outputs.push import HubSection, model_card, push_model, require_hub
from core_rl_trainer.recipe.recipe import Recipe

LORA = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PUSH = {"repo_id": "acme/sums"}
RESULT = {"before": {"eval_loss": 2.5}, "after": {"eval_loss": 1.25}}


@pytest.fixture(scope="module")
def start(start: Path) -> Path:
    (start / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return start


def write_recipe(start: Path, directory: Path, **changes: Any) -> Path:
    values = support.supervised_values(start, directory / "out", "sft", **changes)
    return support.write_recipe(directory / "r.yaml", values)


# ---------------------------------------------------------------------- export


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_run_writes_adapter_and_exports_checkpoints(
    start: Path, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = support.recipe_values if algorithm == "grpo" else support.supervised_values
    arguments = (start, tmp_path / "out") if algorithm == "grpo" else (start, tmp_path / "out", "sft")
    model = {"path": str(start / "model"), "lora": LORA}
    recipe = support.write_recipe(tmp_path / "r.yaml", values(*arguments, model=model))
    result = support.run(recipe)
    out = tmp_path / "out"
    assert result["adapter"] == str(out / "adapter")
    for step, kind in ((4, "hf"), (4, "adapter"), (2, "hf")):
        target = tmp_path / f"{kind}-{step}"
        with pytest.raises(SystemExit) as caught:
            main(["export", str(out), "--format", kind, "--step", str(step), "--output", str(target)])
        assert not caught.value.code
        assert capsys.readouterr().out.strip() == f"{kind} of step {step}: {target}"
        assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
    models = [
        load_file(path / "model.safetensors")
        for path in (out / "model", tmp_path / "hf-4", tmp_path / "hf-2")
    ]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    assert not all(models[0][name].equal(models[2][name]) for name in models[0])
    names = [path / "adapter_model.safetensors" for path in (out / "adapter", tmp_path / "adapter-4")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert AutoTokenizer.from_pretrained(out / "adapter").chat_template == TEMPLATE

    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(start / "model")
    merged = PeftModel.from_pretrained(base, str(out / "adapter")).merge_and_unload().state_dict()
    for name, value in models[0].items():
        assert merged[name].sub(value).abs().max() < 1e-5


@pytest.mark.nightly
def test_sharded_checkpoint_exports_from_changed_layout(start: Path, tmp_path: Path) -> None:
    recipe = write_recipe(start, tmp_path, engine="fsdp", engines={"fsdp": {"layout": {"dp": 2}}})
    support.run(recipe)
    out = tmp_path / "out"
    one = ["engines.fsdp.layout.dp=1"]
    assert export_checkpoint(out, "hf", tmp_path / "exported", overrides=one) == 4
    assert export_checkpoint(out, "portable", tmp_path / "portable", overrides=one) == 4
    files = DcpFiles(tmp_path / "portable")
    assert files.read("optimizer.state.model.norm.weight.step").item() == 4
    assert files.read("optimizer.state.model.norm.weight.exp_avg").any()
    original, exported = (
        load_file(path / "model.safetensors") for path in (out / "model", tmp_path / "exported")
    )
    assert all(original[name].equal(exported[name]) for name in original)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere holds no run: there is no recipe.yaml; name the output_dir of a run"),
        (["out"], r"out has no complete checkpoint; the run writes one every save_every steps"),
        (["out", "--step", "7"], r"no checkpoint of step 7; available steps: none"),
        (
            ["out", "--format", "adapter"],
            r"trains no adapter \(model.lora is not set\); export it with --format hf",
        ),
        (["out", "--output", "out"], r"out is not empty; name another directory with --output"),
        (["out", "lr=1"], r"unknown field 'lr'"),
    ],
)
def test_impossible_exports_are_named(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core_rl.launch.process.start_fork_server", lambda *_: None)
    with support.open_directory(load_recipe(write_recipe(start, tmp_path))):
        pass
    error = io.StringIO()
    monkeypatch.setattr("sys.stderr", error)
    with pytest.raises(SystemExit) as caught:
        main(["export", *arguments])
    assert caught.value.code in (1, 2)
    assert re.search(message, error.getvalue()) and "Traceback" not in error.getvalue()


# ------------------------------------------------------------------ push_to_hub


class FakeHub(BaseHTTPRequestHandler):
    """The calls of an upload without large files."""

    protocol_version = "HTTP/1.1"
    calls: list[tuple[str, Any]]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        values = [json.loads(line) for line in body.splitlines()]
        self.calls.append((self.path, values))
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in values[0]["files"]
            ]
            return self._reply({"files": files})
        address = f"http://{self.headers['Host']}/acme/sums"
        return self._reply(
            {"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1", "pullRequestUrl": None}
        )

    def _reply(self, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing is logged."""


@pytest.fixture
def hub() -> Iterator[tuple[HfApi, type[FakeHub]]]:
    handler = type("Handler", (FakeHub,), {"calls": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield HfApi(endpoint=f"http://127.0.0.1:{server.server_address[1]}", token="hf_test"), handler
        server.shutdown()


def complete_run(start: Path, directory: Path, **changes: Any) -> Recipe:
    """The recipe of a run, with the files that it leaves."""
    recipe = load_recipe(write_recipe(start, directory, **changes))
    with support.open_directory(recipe) as out:
        rows = [{"step": step, "loss": 2.5 / (step + 1)} for step in range(4)]
        support.write_jsonl(out.path / "metrics.jsonl", rows)
        shutil.copytree(start / "model", out.model)
    return recipe


def push(recipe: Recipe, model: Path, api: HfApi) -> str:
    section = HubSection(**PUSH)
    return push_model(
        section, model, model_card(recipe.model_dump(mode="json"), section.repo_id, RESULT), api
    )


def test_complete_run_uploads_model_with_card(
    start: Path, tmp_path: Path, hub: tuple[HfApi, type[FakeHub]]
) -> None:
    api, handler = hub
    recipe = complete_run(start, tmp_path, push_to_hub=PUSH)
    with support.open_directory(recipe) as directory:
        assert push(recipe, directory.model, api).endswith("/acme/sums")
    calls = [call for call in handler.calls if call[0] != "/api/validate-yaml"]  # of the card's head
    paths = [path for path, _ in calls]
    assert paths == [
        "/api/repos/create",
        "/api/models/acme/sums/preupload/main",
        "/api/models/acme/sums/commit/main",
    ]
    assert calls[0][1][0] == {"name": "sums", "organization": "acme", "visibility": "private"}
    lines = [line["value"] for line in calls[2][1] if line["key"] == "file"]
    files = {line["path"]: base64.b64decode(line["content"]) for line in lines}
    weights = (start / "model" / "model.safetensors").read_bytes()
    assert files["model.safetensors"] == weights and files["chat_template.jinja"].decode() == TEMPLATE
    card = files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {"library_name": "transformers", "tags": ["core-rl", "sft"]}
    result, written = (yaml.safe_load(part.split("```")[0]) for part in card.split("```yaml\n")[1:])
    assert result == RESULT and written["data"]["batch_size"] == 6


def test_cards_name_no_path_of_this_machine(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--acme--tiny/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    recipe = {
        "model": {"path": str(snapshot), "lora": {"path": str(tmp_path / "adapter")}},
        "data": {"train": [str(tmp_path / "train.jsonl"), {"path": "org/data", "weight": 1.0}]},
        "rollout": {"stop": ["/end", "</s>", "/ no"]},
        "algorithm": {"type": "grpo", "args": {}},
        "reward": f"{tmp_path}/rewards.py:score",
        "output_dir": str(tmp_path / "out"),
        "engine": "fsdp",
        "steps": 1,
    }
    card = model_card(recipe, "acme/sums", {"output_dir": str(tmp_path)})
    assert str(tmp_path) not in card and "base_model: acme/tiny" in card
    written = yaml.safe_load(card.split("```yaml\n")[2].split("```")[0])
    assert written["model"] == {"path": "a" * 40, "lora": {"path": "adapter"}}
    assert written["data"]["train"] == ["train.jsonl", {"path": "org/data", "weight": 1.0}]
    assert written["reward"] == "rewards.py:score" and written["rollout"] == recipe["rollout"]


def test_a_failed_upload_is_named_and_tried_again(
    start: Path, tmp_path: Path, hub: tuple[HfApi, type[FakeHub]]
) -> None:
    api, handler = hub
    recipe = complete_run(start, tmp_path, push_to_hub=PUSH)
    with support.open_directory(recipe) as directory:
        handler.status = 403
        with pytest.raises(
            CheckpointError, match=r"upload to 'acme/sums' failed: .*403.*the same command uploads it"
        ):
            push(recipe, directory.model, api)
        handler.status = 200
        assert push(recipe, directory.model, api)


@pytest.mark.parametrize(
    ("offline", "message"),
    [(False, "there is no token; log in with `hf auth login`"), (True, "HF_HUB_OFFLINE forbids the upload")],
)
def test_impossible_upload_is_refused_early(
    monkeypatch: pytest.MonkeyPatch, offline: bool, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: offline)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=message):
        require_hub()
