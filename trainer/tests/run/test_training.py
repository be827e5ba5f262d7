"""Recipes, and whole runs on the reference engines: their files, and that an interruption changes nothing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import training_support as support
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_rl.errors import ConfigError, CoreRLError
from core_rl_trainer import load_recipe, train
from core_rl_trainer.logs.metrics_log import read_steps
from core_rl_trainer.plan.identity import differing_fields
from core_rl_trainer.run.online import OnlineLearner


@pytest.fixture(scope="module")
def unbroken(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("unbroken")
    recipe = support.write_recipe(directory / "r.yaml", support.recipe_values(start, directory / "out"))
    run(recipe)
    return directory / "out"


def run(recipe: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """The result and the printed text."""
    console = Console(file=io.StringIO(), width=200)
    result = train(recipe, list(overrides), console=console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


# ---------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimiser.lr=1"], "unknown field 'optimiser'.*did you mean 'optimizer'"),
        (["learning_rate=1"], "'learning_rate' = 1; its place here is optimizer.lr$"),
        (["model.lora.r=4"], "'model.lora.r' = 4; its place here is model.lora.rank$"),
        (["model.lora={lora_alpha: 8}"], "'model.lora.lora_alpha' = 8; its place here is model.lora.alpha$"),
        (["optimizer.schedule.warmup_ratio=0.1"], "its place here is optimizer.schedule.warmup_steps$"),
        (["rollout.groupsize=2"], "unknown field 'rollout.groupsize'.*did you mean 'group_size'"),
        (["steps=0"], "'steps' = 0"),
        (["rollout.temperature=0"], "'rollout.temperature' = 0"),
        (["algorithm.args.temperature=0.5"], "leave the former out"),
        (["keep_best.metric=reward", "keep_best.mode=max"], "'keep_best.metric' = 'reward'"),
        (["keep_best.metric=eval_reward"], "'keep_best.mode' is required"),
        (["keep_best.metric=eval_reward", "keep_best.mode=max", "eval_every=0"], "set eval_every above 0"),
        (["output_dir=runs/{step}"], "only {engine} and {seed}"),
        (["model.path=nowhere"], "model.path = '.*/nowhere': no such directory"),
        (["data.train=a.jsonl", "data.eval=b.jsonl"], r"(?s)2 problems.*'data.train'.*'data.eval'"),
        (
            ["data.eval=null"],
            "eval_every = 3, and there is no evaluation data; set data.eval, or data.eval_fr",
        ),
        (
            ["data.eval=null", "eval_every=0", "keep_best={metric: eval_loss, mode: min}"],
            "there is no evaluation data",
        ),
        (["checkpoint_url=runs/a"], "'checkpoint_url' = 'runs/a'"),
        (["push_to_hub.repo_id=sums"], "'push_to_hub.repo_id' = 'sums'"),
        (["steps=true"], "field 'steps' = True: it is a number, neither true nor false"),
        (["optimizer.schedule.warmup_steps=false"], "field 'optimizer.schedule.warmup_steps' = False: "),
        (["optimizer.lr=.nan"], "field 'optimizer.lr' = nan: must be finite"),
        (["rollout.reward_processes=2"], "reward_processes needs reward_timeout_s"),
    ],
)
def test_a_wrong_recipe_names_field_value_and_fix(
    start: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=referense"], "Did you mean 'reference'"),
        (["engine=reference-rollout"], "engine = 'reference-rollout': this engine is for inference"),
        (["rollout.engine=reference"], "rollout.engine = 'reference': this engine is for train"),
        (["engines.reference.layuot.dp=2"], "engine 'reference': unknown field 'layuot'"),
        (["algorithm.type=grop"], "no interface 'grop'; did you mean 'grpo'"),
        (["algorithm.args.clip=0.1"], "unknown field 'clip'"),
        (["reward=core_rl_trainer.rewards.text:nothing"], "no attribute 'nothing'"),
    ],
)
def test_names_in_recipe_are_checked_early(
    start: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    with pytest.raises(CoreRLError, match=message):
        run(recipe, *overrides)
    assert not (tmp_path / "out").exists()


def test_damaged_prompt_file_is_named_early(start: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt"\n')
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    with pytest.raises(CoreRLError, match=r"bad.jsonl: line 2 is not JSON"):
        run(recipe, f"data.train={tmp_path}/bad.jsonl")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parent", ["{here}", "$RUNS", "${RUNS}"])
def test_output_directory_has_engine_and_seed(
    start: Path, tmp_path: Path, parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    values = support.recipe_values(start, Path(parent, "{engine}-{seed}"))
    loaded = load_recipe(support.write_recipe(tmp_path / "r.yaml", values), ["seed=7"])
    assert loaded.directory == tmp_path / "reference-7"


def test_differing_fields_are_dotted_and_show_both_values() -> None:
    old = {"a": 1, "b": {"c": [1], "d": 2}, "gone": 0}
    new = {"a": 1, "b": {"c": [2], "d": 2}, "new": 0}
    assert list(differing_fields(old, new).values()) == [
        "b.c: [1] then, [2] now",
        "gone: 0 then, None now",
        "new: None then, 0 now",
    ]


# ------------------------------------------------------------------- whole runs


def test_run_writes_metrics_picture_and_model(unbroken: Path, start: Path) -> None:
    rows = support.curve(unbroken)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 3, 4]
    names = {"reward", "kl_k1", "kl_k2", "kl_k3", "lr", "version"}
    names |= {"entropy_estimate", "clip_fraction", "grad_norm"}
    assert all(names <= row.keys() for row in rows[1:])
    assert all(row["update_successful"] == 1 and row["updates"] == 2 for row in rows[1:])
    assert [row["version"] for row in rows[1:]] == [1, 2, 3, 4]
    assert (unbroken / "curve.svg").read_text().startswith("<svg")
    assert any((unbroken / "tensorboard").iterdir())
    assert not list(unbroken.glob("*weights*"))
    page = (unbroken / "index.html").read_text()
    assert ">complete<" in page and "Mismatch" in page and "&lt;s&gt;3+1=" in page
    samples = read_steps(unbroken / "samples.jsonl")
    assert [row["step"] for row in samples] == [0] * 4 + [3] * 4 + [4] * 4
    assert [row["versions"] for row in samples] == [[step, step] for step in (0, 3, 4) for _ in range(4)]
    model = AutoModelForCausalLM.from_pretrained(unbroken / "model")
    before = AutoModelForCausalLM.from_pretrained(start / "model")
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert all(changed)
    assert AutoTokenizer.from_pretrained(unbroken / "model")("1+2=")["input_ids"][0] == support.BOS


def test_trainer_and_rollout_logprobs_agree_after_sync(unbroken: Path) -> None:
    for row in support.curve(unbroken)[1:]:
        assert row["mismatch_max"] < 1e-5
        assert abs(row["mismatch_k1"]) < 1e-5
        assert 0 <= row["mismatch_k3"] < 1e-9


def test_reference_kl_grows_from_zero(unbroken: Path) -> None:
    first, *_, last = (row["kl_k3"] for row in support.curve(unbroken)[1:])
    # The second minibatch of the first step sees weights that one update has moved.
    assert first < last


def test_a_schedule_ends_with_the_run(unbroken: Path) -> None:
    rates = [row["lr"] for row in support.curve(unbroken)[1:]]
    assert rates == pytest.approx([0.01, 0.02, 0.02 * 2 / 3, 0.02 / 3])


def test_a_complete_run_is_only_reported(unbroken: Path, start: Path, tmp_path: Path) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, unbroken))
    before = support.curve(unbroken)
    result, text = run(recipe)
    assert result == json.loads((unbroken / "result.json").read_text())
    assert "is complete" in text
    assert f"{result['before']['eval_reward']:.3f} before" in text
    assert run(unbroken / "recipe.yaml")[0] == result  # as on the page of the run
    assert support.curve(unbroken) == before


@pytest.mark.parametrize(
    "stop_at", [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_interrupted_run_resumes_exactly(
    unbroken: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Step 1 has no checkpoint behind it, step 3 has step 2's, and in step 4 the weights are half way out."""
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    publish = OnlineLearner.sync

    def interrupted(loop: OnlineLearner, version: int) -> None:
        publish(loop, version)
        if version == stop_at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OnlineLearner, "sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    _, text = run(recipe)
    assert ("resuming from the checkpoint of step 2" in text) == (stop_at > 1)
    assert support.curve(tmp_path / "out") == support.curve(unbroken)
    weights = [path / "model" / "model.safetensors" for path in (tmp_path / "out", unbroken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.nightly
def test_evaluations_do_not_disturb_the_training(unbroken: Path, start: Path, tmp_path: Path) -> None:
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    run(recipe, "eval_every=1", "eval_samples=2", "save_every=3")
    trained = [
        [{n: v for n, v in row.items() if not n.startswith("eval_")} for row in support.curve(path)]
        for path in (tmp_path / "out", unbroken)
    ]
    assert trained[0] == trained[1]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [(3,), (1, 3, 4)], ids=["1", "3"])
def test_killed_run_resumes_exactly(
    unbroken: Path, start: Path, tmp_path: Path, rows: tuple[int, ...]
) -> None:
    """``kill -9`` of the driver's process at a drawn moment, or at three; each time the same command resumes."""
    recipe = support.write_recipe(tmp_path / "r.yaml", support.recipe_values(start, tmp_path / "out"))
    command = [sys.executable, "-m", "core_rl.cli", "train", str(recipe)]
    support.run_killed(command, tmp_path / "out", rows=rows)
    assert support.curve(tmp_path / "out") == support.curve(unbroken)
