"""The page of a run: curves, samples of rollouts, and what happens to it when a run stops."""

from __future__ import annotations

import base64
import math
import re
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import training_support as support
from hypothesis import given, settings
from hypothesis import strategies as st
from page_policy import blocked_sources
from PIL import Image

from core_rl.config.base import parse_config
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.launch.hosts import Slot
from core_rl.pages import POINTS, Chart
from core_rl.registry.engines import get_spec
from core_rl_trainer.logs.metrics_log import Row
from core_rl_trainer.logs.page import RunPage, charts_of
from core_rl_trainer.logs.samples import SHOWN, ExampleSample, RolloutSample, example_samples, rollout_samples
from core_rl_trainer.plan.run_plan import EnginePlan
from core_rl_trainer.plan.slots import describe_ranks
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run.records import RunRecords

ROWS: list[Row] = [
    {"step": 0, "eval_reward": 0.2, "eval_reward_greedy": 0.3},
    *(
        dict[str, float | None](step=step, reward=step / 10, grad_norm=2.0, time_update_s=0.5)
        | {"odd_<one>": -1.0 * step}
        for step in range(1, 8)
    ),
    {"step": 8, "reward": None, "eval_reward": 0.7, "eval_reward_greedy": 0.8},
]


def recipe(output: Path, **changes: Any) -> Recipe:
    return parse_config(Recipe, support.recipe_values(Path("start"), output, **changes))


# ----------------------------------------------------------------------- curves


def test_related_metrics_share_chart() -> None:
    charts = charts_of(ROWS)
    assert {chart.title: [curve.name for curve in chart.curves] for chart in charts.first + charts.main} == {
        "Reward": ["reward", "eval_reward", "eval_reward_greedy"],
        "Gradient norm": ["grad_norm"],
        "Seconds of each phase": ["time_update_s"],
    }
    assert [chart.title for chart in charts.further] == ["odd_<one>"]


@pytest.mark.parametrize(
    ("metrics", "first"),
    [
        (("grad_norm", "loss", "kl_k3", "reward"), ["Reward", "KL to the reference"]),
        (
            ("lr", "loss", "approx_kl", "reward/a", "reward"),
            ["Reward", "Terms of the reward", "KL of the step's updates"],
        ),
        (("time_update_s", "accuracy", "loss"), ["Loss", "Accuracy"]),
        (("time_update_s", "lr"), []),
    ],
)
def test_reward_and_kl_come_first(metrics: tuple[str, ...], first: list[str]) -> None:
    rows = [
        {"step": step} | {name: step * index + 0.5 for index, name in enumerate(metrics, 1)}
        for step in (1, 2)
    ]
    charts = charts_of(rows)
    assert [chart.title for chart in charts.first] == first
    assert {chart.title for chart in charts.main}.isdisjoint(first)


@pytest.mark.parametrize(
    ("series", "legends"),
    [
        ({"reward": (0.1, 0.2), "reward/f": (0.1, 0.2)}, ["reward = reward/f"]),
        ({"reward": (0.0, 0.0), "reward/f": (0.0, 0.0)}, ["reward = reward/f"]),
        ({"loss": (0.3, None), "nll": (0.3, None)}, ["loss = nll"]),
        ({"loss": (6.358758334455819,), "nll": (6.358758334455819,)}, ["loss = nll"]),
        ({"staleness_mean": (0.0, 0.0), "staleness_max": (0.0, 0.0)}, ["staleness_mean = staleness_max"]),
        ({"reward": (0.5, 0.5), "truncated": (0.5, 0.5)}, ["reward", "truncated"]),
        ({"a": (1, 2), "b": (1, 2), "c": (1, 2), "d": (2, 1)}, ["a = b = c", "d"]),
    ],
)
def test_equal_series_are_drawn_once(series: dict[str, tuple[float, ...]], legends: list[str]) -> None:
    steps = range(len(next(iter(series.values()))))
    charts = charts_of(
        [{"step": step} | {name: values[step] for name, values in series.items()} for step in steps]
    )
    drawn = [curve.name for chart in charts.first + charts.main + charts.further for curve in chart.curves]
    assert drawn == legends


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ([0.001] * 5, "0.001"),
        ([0.0, 0.0], "0"),
        ([-7.25], "-7.25"),
        ([0.1 + 0.2, 0.3, 0.3 + 1e-9], "0.3"),
        ([0.0, 5e-324], "0"),
        ([None, 4.0, None], "4"),
    ],
)
def test_constant_is_flat_with_its_value(values: list[float | None], label: str) -> None:
    chart = charts_of([{"step": step, "loss": value} for step, value in enumerate(values)]).first[0]
    assert [tick.label for tick in chart.y_ticks] == [label]
    middle = (chart.area.top + chart.area.bottom) / 2
    assert {y for _, y in _places(chart.curves[0].line)} == {middle}


def test_values_that_are_not_finite_are_counted() -> None:
    (chart,) = charts_of(
        [{"step": step, "loss": value} for step, value in enumerate([2.0, None, None])]
    ).first
    assert chart.curves[0].last == "2 (not finite 2 of 3 times)"
    (chart,) = charts_of([{"step": 1, "loss": None}]).first
    assert (chart.curves[0].line, chart.curves[0].last) == ("", "- (not finite 1 of 1 times)")


def _places(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in points.split())]


def _inside(chart: Chart) -> bool:
    area = chart.area
    return all(
        area.left <= x <= area.right and area.top <= y <= area.bottom
        for curve in chart.curves
        for x, y in _places(curve.line) + _places(curve.band)
    )


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.floats(), st.floats(-9, 9)), min_size=1, max_size=POINTS * 3))
def test_every_value_is_inside_its_axes(values: list[float | None]) -> None:
    rows: list[Row] = [{"step": step, "reward": value} for step, value in enumerate(values)]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    (chart,) = charts_of(rows).first
    (curve,) = chart.curves
    assert _inside(chart)
    assert len(_places(curve.line)) == math.ceil(len(finite) / max(1, math.ceil(len(finite) / POINTS)))
    labels = [tick.label for tick in chart.y_ticks]
    assert len(set(labels)) == len(labels) <= 8
    assert len(labels) == 1 or max(finite) > min(finite)


def test_spike_is_visible_in_long_runs() -> None:
    rows: list[Row] = [{"step": step, "grad_norm": 100.0 if step == 5003 else 1.0} for step in range(10_000)]
    (chart,) = charts_of(rows).main
    top = min(y for _, y in _places(chart.curves[0].band))
    assert top == chart.area.top


# ---------------------------------------------------------------------- samples


def test_samples_tell_prompt_model_and_environment_apart() -> None:
    tokenizer = support.make_tokenizer()
    prompt, answer, reply = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1+2=", "3", "4+")
    )
    ids = [support.BOS, *prompt, *answer, *reply, *answer, support.EOS]
    mask = [False] * 5 + [True] + [False] * 2 + [True] * 2
    batch = SequenceBatch.from_sequences(
        [ids] * 2 * (SHOWN + 1),
        tokens={
            "loss_mask": [mask] * 2 * (SHOWN + 1),
            "versions": [torch.tensor([-1] * 5 + [3] + [-1] * 2 + [4, 4])] * 2 * (SHOWN + 1),
        },
        meta={"stop_reason": ["stop"] * 2 * (SHOWN + 1)},
    ).with_sequences(
        rewards=torch.arange(2.0 * (SHOWN + 1)), group=torch.arange(SHOWN + 1).repeat_interleave(2)
    )
    samples: list[dict[str, Any]] = [{"answer": 3}, {"answer": None}, {}, {"answer": "½"}, {}]
    rendered = rollout_samples(batch, tokenizer, samples)
    assert [sample.answer for sample in rendered] == ["3", None, None, "½"]
    assert [sample.reward for sample in rendered] == [2.0 * n for n in range(SHOWN)]  # one for each prompt
    assert rendered[0] == RolloutSample(
        prompt="<s>1+2=",
        segments=(("model", "3"), ("environment", "4+"), ("model", "3</s>")),
        reward=0.0,
        tokens=3,
        versions=(3, 4),
        stop_reason="stop",
        answer="3",
    )


def test_examples_show_trained_tokens_and_metrics() -> None:
    tokenizer = support.make_tokenizer()
    prompt, good, bad = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1+2=", "3", "4+")
    )
    masks = [[False] * 4 + [True], [False] * 4 + [True, False]]
    batch = SequenceBatch.from_sequences([prompt + good, prompt + bad], tokens={"loss_mask": masks})
    metrics = {"loss": float("nan"), "accuracy": 0.5}
    assert example_samples(batch, ("chosen", "rejected"), tokenizer, metrics) == (
        ExampleSample(
            title="chosen",
            prompt="1+2=",
            segments=(("model", "3"),),
            tokens=1,
            metrics={"loss": None, "accuracy": 0.5},
        ),
        ExampleSample(
            title="rejected",
            prompt="1+2=",
            segments=(("model", "4"), ("environment", "+")),
            tokens=1,
            metrics={"loss": None, "accuracy": 0.5},
        ),
    )


# ------------------------------------------------------------------------- page

HOSTILE = "<script>alert(1)</script> & “quotes”"


def sample(text: str) -> dict[str, Any]:
    return {
        "step": 8,
        "prompt": text,
        "segments": [["model", text], ["environment", text]],
        "reward": 1.0,
        "tokens": 3,
        "versions": [7, 8],
        "stop_reason": "stop",
    }


def page(directory: Path) -> RunPage:
    return RunPage(recipe(directory).model_dump(mode="json"), directory)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], []], ids=["run", "start", "nothing"])
def test_page_is_self_contained_and_escapes_text(tmp_path: Path, rows: list[Row]) -> None:
    text = page(tmp_path).render(rows, [sample(HOSTILE)] if rows else [], status="running", problem=HOSTILE)
    assert not re.search(r"<script|https?://|\bsrc=|<link|url\(", text)
    assert blocked_sources(text) == []
    assert (text.count("&lt;script&gt;alert") == 4) == bool(rows)
    assert 'http-equiv="refresh"' in text
    assert "core-rl train" in text and "torch" in text and "kl_coef: 0.05" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(drawing)


def test_images_of_samples_are_in_the_page(tmp_path: Path) -> None:
    picture, missing = tmp_path / "a.png", str(tmp_path / "gone.png")
    Image.new("RGB", (640, 320), "red").save(picture)
    uri = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    broken = tmp_path / "b.png"
    broken.write_bytes(picture.read_bytes()[:60])
    images = [str(picture), missing, uri, uri[:60], str(broken)]
    text = page(tmp_path).render(
        ROWS, [sample("<|image_pad|> \N{MULTIPLICATION SIGN}16") | {"images": images}], status="complete"
    )
    copies = re.findall(r'src="data:image/png;base64,([^"]+)" alt="([^"]+)"', text)
    assert [name for _, name in copies] == [str(picture), "embedded image 3"]
    for copy, _ in copies:
        with Image.open(BytesIO(base64.b64decode(copy))) as image:
            assert (image.size, image.getpixel((3, 3))) == ((160, 80), (255, 0, 0))
    assert f"<code>{missing}</code>" in text and f"<code>{broken}</code>" in text
    assert "<code>embedded image 4</code>" in text and "&lt;|image_pad|&gt; \N{MULTIPLICATION SIGN}16" in text
    assert blocked_sources(text) == []
    assert len(blocked_sources(text.replace("img-src data:", ""))) == len(copies)


def test_finished_page_is_static_with_best_model(tmp_path: Path) -> None:
    best = {"step": 3, "metric": "eval_reward", "value": 0.5, "model": "out/best/step-00000003"}
    text = page(tmp_path).render(ROWS, [], status="complete", best=best)
    assert "refresh" not in text
    assert "Best model: step 3" in text and "out/best/step-00000003" in text
    assert "Samples of rollouts" not in text


def test_page_shows_roles_with_devices(tmp_path: Path) -> None:
    two, spec = (Slot(0, 0), Slot(0, 1)), get_spec("reference")
    config = TrainEngineConfig(model=ModelConfig(path="model"))
    plans = {
        "actor": EnginePlan(spec=spec, config=config, slots=two),
        "critic": EnginePlan(spec=spec, config=config, slots=two, colocated_with="actor"),
        "reward": EnginePlan(spec=spec, config=config, slots=(Slot(1, 3),)),
        "rollout": EnginePlan(spec=spec, config=config, slots=()),
    }
    roles = {
        name: ("vllm" if name == "rollout" else "fsdp", describe_ranks(plan)) for name, plan in plans.items()
    }
    values = recipe(tmp_path).model_dump(mode="json")
    text = RunPage(values, tmp_path, "this machine", roles).render(ROWS, [], status="running")
    fsdp = "<code>fsdp</code>"
    assert f"<th>actor</th><td>{fsdp}: 2 ranks, on devices 0, 1, in processes of its own</td>" in text
    assert f"<th>critic</th><td>{fsdp}: 2 ranks, on devices 0, 1, in the processes of the actor</td>" in text
    assert (
        f"<th>reward</th><td>{fsdp}: 1 rank, on device 3 of machine 1, in a process of its own</td>" in text
    )
    assert "<th>rollout</th><td><code>vllm</code></td>" in text
    assert "with fsdp and vllm <span" in text


def test_page_shows_examples_and_expected_answers(tmp_path: Path) -> None:
    text = page(tmp_path).render(ROWS, [sample("7") | {"answer": HOSTILE}, sample("8")], status="running")
    assert text.count("expected <code>&lt;script&gt;") == 1
    example = {"step": 8, "title": "chosen", "prompt": "1+", "segments": [["model", HOSTILE]], "tokens": 1}
    text = page(tmp_path).render(
        ROWS, [example | {"metrics": {"loss": None, "accuracy": 0.5}}], status="running"
    )
    assert "<h2>Examples</h2>" in text and "Samples of rollouts" not in text
    assert "chosen<br>loss -<br>accuracy 0.5<br>1 trained tokens" in text and "<script" not in text


def test_a_long_answer_is_shortened(tmp_path: Path) -> None:
    text = page(tmp_path).render(ROWS, [sample("7" * 100_000)], status="running")
    assert "96000 more characters" in text
    assert len(text) < 60_000


def test_the_page_says_why_a_run_stopped(tmp_path: Path) -> None:
    values = recipe(tmp_path)
    with support.open_directory(values) as directory:
        with pytest.raises(RuntimeError), RunRecords(directory, -1, page(tmp_path)):
            raise RuntimeError("rank 1 is <gone>")
        text = directory.page.read_text(encoding="utf-8")
    assert "RuntimeError: rank 1 is &lt;gone&gt;" in text and ">stopped<" in text
    assert list(tmp_path.glob(".*.tmp")) == []
