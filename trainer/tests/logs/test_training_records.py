"""The files of a run: metrics, the picture, the directory; and rewards, which are read from text."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import json
import logging
import os
import re
import sys
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import training_support as support
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from core_rl.config.base import parse_config
from core_rl.errors import CheckpointError, ConfigError, RolloutError
from core_rl.pages import svg_document
from core_rl_trainer.data.plain import json_text
from core_rl_trainer.environments import ToolEnvironment
from core_rl_trainer.logs.metrics_log import MetricsLog, StepLog, read_steps
from core_rl_trainer.logs.page import main_chart
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.rewards.functions import compute_reward, load_callable
from core_rl_trainer.rewards.text import TextReward, completion_text, integer_match, text_match
from core_rl_trainer.run.run_directory import RunDirectory

# ---------------------------------------------------------------------- metrics


def test_rows_have_null_for_nonfinite_values(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, -1)) as log:
        log.write(0, {"reward": 0.5, "kl": float("nan"), "ratio": float("inf")})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 0, "reward": 0.5, "kl": None, "ratio": None}


def test_resume_drops_repeated_and_incomplete_rows(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path, -1)) as log:
        for step in range(5):
            log.write(step, {"reward": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    with closing(MetricsLog(tmp_path, 2)) as log:
        assert [row["step"] for row in log.rows] == [0, 1, 2]
        log.write(3, {"reward": 30.0})
    assert [row["reward"] for row in read_steps(tmp_path / "metrics.jsonl")] == [0, 1, 2, 30]


def test_tensorboard_shows_each_step_once_after_going_on(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with closing(MetricsLog(tmp_path, -1)) as log:
        for step in range(5):
            log.write(step, {"reward": float(step)})
    with closing(MetricsLog(tmp_path, 2)) as log:
        log.write(3, {"reward": 30.0})
        log.sync()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_without_tensorboard_metrics_are_json_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.WARNING), closing(MetricsLog(tmp_path, -1)) as log:
        log.write(0, {"reward": 1.0})
    assert "pip install tensorboard" in caplog.text
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_steps(tmp_path / "metrics.jsonl")) == 1


ROWS: list[dict[str, float | None]] = [
    {"step": 0, "eval_reward": 0.2, "eval_reward_greedy": 0.3},
    *(dict[str, float | None](step=step, reward=step / 10) for step in range(1, 8)),
    {"step": 8, "reward": None, "eval_reward": 0.7, "eval_reward_greedy": 0.8},
]


@pytest.mark.parametrize(("rows", "names"), [(ROWS, 3), (ROWS[:1], 2)], ids=["run", "start"])
def test_picture_is_svg_with_title_and_legend(rows: list[dict[str, float | None]], names: int) -> None:
    chart = main_chart(rows)
    assert chart is not None
    texts = [element.text or "" for element in ET.fromstring(svg_document(chart)).iter() if element.text]
    assert "Reward" in texts
    assert len([text for text in texts if re.match(r"(eval_)?reward\w*: 0\.\d → 0\.\d", text)]) == names


def test_without_metrics_there_is_no_picture() -> None:
    assert main_chart([]) is None


# ---------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [("68", "68", 1), (" 68\n", "68", 1), ("68.", "68", 0), ("6 8", "68", 0), ("", "68", 0), ("68", 68, 1)],
)
def test_text_match(answer: str, expected: Any, reward: float) -> None:
    assert text_match(answer, {"answer": expected}) == reward


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("it is 68", "68", 1),
        ("12 + 56 = 068.", 68, 1),
        ("68 or 69", 68, 0),
        ("-68", 68, 0),
        ("-68", "-68", 1),
        ("1,068", 1068, 1),
        ("none", 68, 0),
        ("", 0, 0),
    ],
)
def test_integer_match(answer: str, expected: Any, reward: float) -> None:
    assert integer_match(answer, {"answer": expected}) == reward


@pytest.mark.parametrize("fn", [text_match, integer_match])
def test_a_sample_without_an_answer_is_named(fn: Any) -> None:
    with pytest.raises(RolloutError, match="the 'answer' of a sample is missing"):
        fn("1", {"prompt": "1+1="})


async def _async_length(answer: str, sample: Any) -> float:
    return float(len(answer))


@pytest.mark.parametrize(("fn", "expected"), [(text_match, 1.0), (_async_length, 2.0)])
def test_text_reward_gets_text_without_special_tokens(fn: Any, expected: float) -> None:
    tokenizer = support.make_tokenizer()
    reward = TextReward(fn, tokenizer)
    ids = [*tokenizer("68", add_special_tokens=False)["input_ids"], support.EOS]
    assert asyncio.run(compute_reward(reward, [1], ids, {"answer": 68}, subject="s")) == expected


@pytest.mark.parametrize(
    ("skip", "ends", "text"),
    [(True, True, "68"), (False, True, "<think>68</s>"), (False, False, "<think>68")],
)
def test_rewards_and_tools_see_special_tokens(skip: bool, ends: bool, text: str) -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    ids = tokenizer.encode("<think>68</s>" if ends else "<think>68", add_special_tokens=False)
    texts: list[str] = []

    def record(completion: str, sample: Any) -> float:
        texts.append(completion)
        return 0.0

    def tool(completion: str, sample: Any) -> None:
        texts.append(completion)

    TextReward(record, tokenizer, skip)([1], [*ids, support.EOS], {})
    asyncio.run(ToolEnvironment(tokenizer, tool, skip).step([*ids, support.EOS]))
    assert texts == [text, text]


def test_spaces_of_completions_stay() -> None:
    vocabulary = {token: n for n, token in enumerate(("<unk>", "a", " .", " ,"))}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True)
    assert completion_text(tokenizer, [1, 2, 1, 3], skip_special_tokens=True) == "a .a ,"


def test_rewards_are_found_by_module_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(support.REWARD)
    assert load_callable("reward", "core_rl_trainer.rewards.text:text_match") is text_match
    assert load_callable("reward", f"{tmp_path}/my_reward.py:even_digits")("2468", {}) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text_match", "reward = 'text_match': .* not of the form 'module:attribute'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("no_such_file.py:f", "importing 'no_such_file.py' raised FileNotFoundError"),
        ("core_rl_trainer.rewards.text:text_mach", "no attribute 'text_mach'; did you mean 'text_match'"),
        ("core_rl_trainer.rewards.text:__name__", "which cannot be called"),
    ],
)
def test_invalid_reward_name_shows_form(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable("reward", name)


@pytest.mark.parametrize("neighbour", ["rewards_here.py", "rewards_here/__init__.py"])
def test_module_beside_a_reward_is_named(tmp_path: Path, neighbour: str) -> None:
    (tmp_path / neighbour).parent.mkdir(exist_ok=True)
    (tmp_path / neighbour).write_text("")
    (tmp_path / "uses.py").write_text("import rewards_here")
    directory = re.escape(str(tmp_path))
    with pytest.raises(ConfigError, match=f"'rewards_here' beside it; add .* PYTHONPATH: {directory}$"):
        load_callable("reward", f"{tmp_path}/uses.py:f")


# -------------------------------------------------------------------- directory


def _recipe(output: Path, **changes: Any) -> Recipe:
    return parse_config(Recipe, support.recipe_values(Path("start"), output, **changes))


def test_the_same_recipe_finds_its_run_again(tmp_path: Path) -> None:
    with support.open_directory(_recipe(tmp_path / "new")) as directory:
        directory.finish({"after": 1})
    with support.open_directory(_recipe(tmp_path / "new")) as directory:
        assert directory.result() == {"after": 1}


def test_run_directory_is_locked_for_processes(tmp_path: Path) -> None:
    with (
        support.open_directory(_recipe(tmp_path)),
        pytest.raises(ConfigError, match="another process is at work"),
        support.open_directory(_recipe(tmp_path, fresh=True)),
    ):
        pass
    assert (tmp_path / "recipe.yaml").exists()


def test_full_disk_is_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(MetricsLog(tmp_path, -1)) as log:
        monkeypatch.setattr(log._file, "write", full, raising=False)
        with pytest.raises(CheckpointError, match="metrics.jsonl: No space left"):
            log.write(0, {"reward": 1.0})


def _write_all(directory: RunDirectory) -> None:
    directory.write_page("page", "picture")
    directory.write_status("running", "")
    directory.finish({})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("name", ["index.html", "curve.svg", "status.json", "result.json"])
def test_unwritable_run_file_is_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    directory, write = support.make_directory(_recipe(tmp_path)), Path.write_text

    def refuse(path: Path, text: str, encoding: str) -> int:
        if name in path.name:
            raise OSError(code, os.strerror(code))
        return write(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path / name}: {os.strerror(code)}; free"):
        _write_all(directory)


def test_changed_recipe_is_refused_with_differing_fields(tmp_path: Path) -> None:
    """For runs with a step: a run without any is replaced."""
    support.make_directory(_recipe(tmp_path))
    support.make_directory(_recipe(tmp_path, engine="fsdp"))
    support.make_directory(_recipe(tmp_path)).write_page("the page", None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(
        ConfigError, match=r"(?s)fresh=true.*engine: 'reference' then, 'fsdp' now.*optimizer.lr: 0.02"
    ):
        support.make_directory(_recipe(tmp_path, engine="fsdp", optimizer={"lr": 0.5}))


@pytest.mark.parametrize(
    ("name", "after", "change"),
    [
        ("model/tokenizer.json", "other", "model.path/tokenizer.json: .*sha256 .* then, sha256"),
        ("model/chat_template.jinja", "new", "model.path/chat_template.jinja: .*missing then, sha256"),
        ("model/generation_config.json", None, "generation_config.json: .*sha256 .* then, missing now"),
        ("adapter/adapter_model.safetensors", "other", "model.lora.path/adapter_model.safetensors: "),
        ("model/model.safetensors", "other", None),
    ],
)
def test_changed_tokenizer_or_adapter_is_refused(
    tmp_path: Path, name: str, after: str | None, change: str | None
) -> None:
    files = ("tokenizer.json", "generation_config.json", "model.safetensors")
    for path in (*(f"model/{file}" for file in files), "adapter/adapter_model.safetensors"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("before")
    model = {"path": str(tmp_path / "model"), "lora": {"rank": 2, "path": str(tmp_path / "adapter")}}
    recipe = _recipe(tmp_path / "out", model=model)
    before = RunIdentity.of(recipe)
    assert before.refused_changes(RunIdentity.of(recipe)) == []
    (tmp_path / name).unlink(missing_ok=True)
    if after is not None:
        (tmp_path / name).write_text(after)
    now = RunIdentity.of(recipe)
    for changes in (before.refused_changes(now), before.refused_start(now)):
        assert bool(changes) == (change is not None)
        assert all(re.search(str(change), text) for text in changes)


@pytest.mark.parametrize(("extra", "resumes"), [({}, True), ({"streaming": True}, False)])
def test_absent_recorded_fields_have_defaults(tmp_path: Path, extra: dict[str, Any], resumes: bool) -> None:
    identity = RunIdentity.of(_recipe(tmp_path))
    data = {name: value for name, value in identity.recipe["data"].items() if name != "unusable"}
    before = replace(identity, recipe={**identity.recipe, "data": {**data, **extra}})
    assert (before.refused_changes(identity) == []) is resumes


def test_changed_rows_or_images_are_refused(tmp_path: Path) -> None:
    recipe, digests = _recipe(tmp_path), {"data.train.0": "a" * 64, "data.train.0.images": "b" * 64}
    before = RunIdentity.of(recipe, digests)
    for name in digests:
        now = RunIdentity.of(recipe, {**digests, name: "c" * 64})
        then = digests[name][:12]
        expected = f"{name}: the content has changed .*sha256 {then}… then, sha256 cccccccccccc… now"
        for changes in (before.refused_changes(now), before.refused_start(now)):
            assert len(changes) == 1 and re.match(expected, changes[0])


@pytest.mark.parametrize("value", [np.float32(0.5), dt.time(1), "\ud800", Decimal("0.50"), b"\x89PNG"])
def test_rows_of_any_type_are_written(tmp_path: Path, value: Any) -> None:
    log = StepLog(tmp_path / "rows.jsonl", -1)
    log.append({"step": 1, "value": value})
    log.close()
    (row,) = read_steps(tmp_path / "rows.jsonl")
    assert row == {"step": 1, "value": json.loads(json_text(value))}


def test_run_resumes_with_changed_timeout(tmp_path: Path) -> None:
    support.make_directory(_recipe(tmp_path))
    support.make_directory(_recipe(tmp_path, timeouts={"call_s": 7200}))
    assert "call_s: 7200" in (tmp_path / "recipe.yaml").read_text()


def test_fresh_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    support.make_directory(_recipe(tmp_path)).finish({})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    started = support.make_directory(_recipe(tmp_path, steps=9, fresh=True))
    assert started.result() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["identity.json", "notes.txt", "recipe.yaml"]


@pytest.mark.parametrize(
    "fields", [{}, {"reward": "rewards.py:score"}, {"rollout": {"environment": "env.py:make"}}]
)
def test_project_that_moves_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: Any
) -> None:
    (tmp_path / "old" / "model").mkdir(parents=True)
    for name in ("rewards.py", "env.py"):
        (tmp_path / "old" / name).touch()
    monkeypatch.chdir(tmp_path / "old")
    before = RunIdentity.of(_recipe(Path("out"), model={"path": "model"}, **fields))
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    now = RunIdentity.of(_recipe(Path("out"), model={"path": "model"}, **fields))
    assert before.refused_changes(now) == []
    (tmp_path / "old" / "model").mkdir(parents=True)
    assert before.refused_changes(now) != [], "another model of that name"
