"""The plan of a run: its counts and estimates, and that nothing starts or is written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training_support as support
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from core_rl.config.base import parse_config
from core_rl.config.engine import LoraConfig, ModelConfig, OptimizerConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.errors import ConfigError, LayoutError
from core_rl.launch.hosts import LocalHosts
from core_rl.toolkit.build import build_model, use_experts_kernel
from core_rl.toolkit.footprint import footprint_of
from core_rl_trainer import dry_run, load_recipe
from core_rl_trainer.cli.plan import print_plan
from core_rl_trainer.plan.engine_config import EngineSections
from core_rl_trainer.plan.engines import other_trainers
from core_rl_trainer.plan.report import MemoryEstimate, PlanReport, estimate_memory
from core_rl_trainer.plan.resolve import resolve
from core_rl_trainer.recipe.recipe import Recipe
from core_rl_trainer.run import engines
from core_rl_trainer.run.training import open_learner


def plan(directory: Path, values: dict[str, Any], *overrides: str) -> PlanReport:
    report = dry_run(load_recipe(support.write_recipe(directory / "r.yaml", values), list(overrides)))
    assert not (directory / "out").exists()
    return report


def test_plan_counts_work_of_run(start: Path, tmp_path: Path) -> None:
    algorithm = {"type": "ppo", "args": {"kl_coef": 0.05, "minibatches": 2, "epochs": 2}}
    values = support.recipe_values(start, tmp_path / "out", algorithm=algorithm, critic={})
    report = plan(tmp_path, values, "steps=8", "micro_batch_tokens=20")
    assert (report.steps, report.workload.updates_per_step, report.passes) == (8, 4, 3.0)
    assert (report.sequences_per_step, report.workload.longest) == (18, 5 + 4)  # <s>3+4= and four tokens
    assert (report.evaluations, report.checkpoints) == (4, 4)  # after 0, 3, 6, 8 and 2, 4, 6, 8
    roles = {role.role: role for role in report.roles}
    assert list(roles) == ["actor", "critic", "reference", "rollout"]
    assert roles["actor"].micro_batches == 9  # two sequences of nine tokens fit into twenty
    assert roles["reference"].memory.gradients == roles["reference"].memory.moments == 0
    assert roles["critic"].memory.logits == 0


@pytest.mark.parametrize(
    ("changes", "evaluations", "remarked"),
    [
        ({}, 3, False),
        ({"eval_samples": 40}, 2, True),
        ({"eval_samples": 40, "eval_first": True}, 3, False),
        ({"eval_first": False}, 2, False),
    ],
)
def test_long_evaluations_are_not_first(
    start: Path, tmp_path: Path, changes: dict[str, Any], evaluations: int, remarked: bool
) -> None:
    report = plan(tmp_path, support.recipe_values(start, tmp_path / "out", **changes))
    assert report.evaluations == evaluations
    assert any("no evaluation before the first step" in text for text in report.remarks) is remarked


@pytest.mark.parametrize("path", [None, "adapter"])
def test_reference_has_the_initial_adapter(start: Path, tmp_path: Path, path: str | None) -> None:
    (tmp_path / "adapter").mkdir()
    lora = LoraConfig(rank=4, path=None if path is None else str(tmp_path / path))
    values = support.recipe_values(start, tmp_path / "out")
    values["model"] = {"path": str(start / "model"), "lora": lora.model_dump()}
    model = load_recipe(values).model
    sections = EngineSections(sections={}, shared={})
    trainers = other_trainers("reference", sections, model, None, None, with_reference=True)
    assert ("reference" in trainers) == (path is not None)
    if path is not None:
        _, config = trainers["reference"]
        assert (config.model.lora, config.optimizer) == (lora, None)


def test_epochs_become_steps_of_the_data(start: Path, tmp_path: Path) -> None:
    values = support.recipe_values(start, tmp_path / "out")
    values["data"] |= {"train": str(tmp_path / "ten.jsonl")}
    values["rollout"] |= {"prompts_per_step": 2}
    del values["steps"]
    support.write_jsonl(
        tmp_path / "ten.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    )
    plans = [plan(tmp_path, values, f"epochs={epochs}") for epochs in (1, 0.3, 2.5)]
    assert [report.steps for report in plans] == [5, 2, 13]
    assert plans[0].passes == 1.0
    recipe = resolve(load_recipe(values | {"epochs": 1})).recipe
    assert (recipe.steps, recipe.epochs) == (5, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "missing field 'steps'"),
        ({"steps": 2, "epochs": 1}, "steps = 2 and epochs = 1: leave either out"),
        (
            {"epochs": 1, "data": {"train": [{"path": "a", "weight": 1}]}},
            "epochs = 1, and the sources .* weights",
        ),
    ],
)
def test_recipe_has_steps_or_epochs(fields: dict[str, Any], message: str) -> None:
    values = {"engine": "fsdp", "model": {"path": "m"}, "data": {"train": "a"}, "output_dir": "out"}
    with pytest.raises(ConfigError, match=message):
        parse_config(Recipe, values | fields)


def printed(report: PlanReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_plan(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Started(Exception):
    """Raised instead of starting a group, with the time limit of its calls."""


@pytest.mark.parametrize(
    "values", [support.recipe_values, partial(support.supervised_values, algorithm="sft")]
)
def test_train_engine_calls_have_recipe_timeout(
    start: Path, tmp_path: Path, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_group(*plan: object, timeout_s: float, **settings: object) -> None:
        raise Started(timeout_s)

    monkeypatch.setattr(engines, "EngineGroup", start_group)
    written = values(start, tmp_path / "out", timeouts={"call_s": 1234.0})
    recipe = load_recipe(support.write_recipe(tmp_path / "r.yaml", written))
    run_plan = resolve(recipe)
    with (
        support.open_directory(recipe) as directory,
        pytest.raises(Started, match="1234"),
        open_learner(run_plan, directory, LocalHosts()),
    ):
        pass


PPO: dict[str, Any] = {"algorithm": {"type": "ppo", "args": {"kl_coef": 0.05}}, "critic": {}}
DP2 = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}}
TWO_BY_TWO = {"actor": [0, 1], "critic": [2, 3], "reference": [3, 2]}


@pytest.mark.parametrize(
    ("changes", "colocated_with", "devices", "says"),
    [
        ({}, (None, "actor", "actor"), "000", "actor, critic and reference live in the same 1 process."),
        ({"colocated": False}, (None, None, None), "000", None),
        ({"placement": {"critic": [3]}}, (None, None, "actor"), "030", "actor and reference live"),
        ({"placement": {"actor": [1], "critic": [1]}}, (None, "actor", None), "110", "actor and critic live"),
        (DP2, (None, "actor", "actor"), ("01", "01", "01"), "live in the same 2 processes."),
        (DP2 | {"critic": {"layout": {"cp": 2}}}, (None, None, "actor"), ("01", "01", "01"), "actor and ref"),
        (DP2 | {"placement": TWO_BY_TWO}, (None, None, None), ("01", "23", "32"), None),
    ],
    ids=["all", "no turns", "a device of its own", "two on one device", "two ranks", "layout", "order"],
)
def test_plan_shows_colocated_roles(
    start: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    colocated_with: tuple[str | None, ...],
    devices: Sequence[str],
    says: str | None,
) -> None:
    pytest.importorskip("core_rl_fsdp")
    values = support.recipe_values(start, tmp_path / "out", **({"colocated": True} | PPO | changes))
    report = plan(tmp_path, values)
    *roles, rollout = report.roles
    assert [role.colocated_with for role in roles] == list(colocated_with)
    assert [role.devices for role in roles] == [tuple(map(int, numbers)) for numbers in devices]
    assert (rollout.colocated_with, rollout.devices) == (None, ())
    text = printed(report)
    assert says in text if says else "live in the same" not in text
    assert ", ".join(devices[1]) in text


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_supervised_runs_have_single_model(start: Path, tmp_path: Path, algorithm: str) -> None:
    report = plan(tmp_path, support.supervised_values(start, tmp_path / "out", algorithm))
    (role,) = report.roles
    assert role.memory.moments == 2 * role.memory.weights
    assert report.sequences_per_step == (6 if algorithm == "sft" else 12)


def test_a_plan_is_printed_in_full(start: Path, tmp_path: Path) -> None:
    report = plan(tmp_path, support.recipe_values(start, tmp_path / "out", colocated=False))
    text = printed(report)
    for words in (
        "6 examples * 3 = 18 sequences",
        "reference-rollout",
        "activations",
        "sequences of a rank",
        "Nothing was started",
    ):
        assert words in text


def test_unsupported_layout_is_named_early(start: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="layout dp2 needs data_parallel"):
        plan(tmp_path, support.recipe_values(start, tmp_path / "out"), "engines.reference.layout.dp=2")


# ----------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "changes", [{}, {"head": "value"}, {"frozen": ("model.embed_tokens.*",)}, {"lora": {"rank": 2}}], ids=str
)
def test_weights_are_counted_without_being_built(start: Path, changes: dict[str, Any]) -> None:
    model = ModelConfig.model_validate({"path": str(start / "model"), **changes})
    built = build_model(model, seed=0, attn_implementation="eager")
    footprint = footprint_of(model)
    assert footprint.parameters == sum(p.numel() for p in built.parameters())
    assert footprint.trained == sum(p.numel() for p in built.parameters() if p.requires_grad)


def _config(layout: ParallelLayout, **changes: Any) -> TrainEngineConfig:
    return TrainEngineConfig(model=ModelConfig(path="model"), layout=layout, **changes)


SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = LlamaConfig(**SHAPE, tie_word_embeddings=False)
# Queries are twice as wide as the model, and have norms, as have keys.
QWEN3 = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
MOE = Qwen3MoeConfig(**SHAPE, num_experts=16, num_experts_per_tok=8, moe_intermediate_size=48)


def test_footprint_follows_model_shape() -> None:
    llama, qwen3 = (footprint_of(ModelConfig(config=shape.to_dict())) for shape in (LLAMA, QWEN3))
    mlp, norms = 3 * 64 * 172, 2 * 64
    assert llama.parameters == 2 * 32 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + mlp + norms)
    assert qwen3.parameters == 32 * 64 + 64 + 2 * (2 * 64 * 128 + 2 * 64 * 64 + mlp + norms + 2 * 32)
    assert (llama.outer, qwen3.outer) == (2 * 32 * 64, 32 * 64)
    assert llama.largest == qwen3.largest == 32 * 64
    assert (llama.inner, qwen3.inner) == (3 * 64 + 2 * 32 + 4 * 172, 3 * 128 + 2 * 64 + 4 * 172)
    assert (llama.normed, qwen3.normed) == (0, 128 + 64)
    critic = footprint_of(ModelConfig(config=QWEN3.to_dict(), head="value"))
    assert critic.parameters == qwen3.parameters + 64 and critic.outer == qwen3.outer
    adapter = ModelConfig(config=QWEN3.to_dict(), lora=LoraConfig(rank=2))
    assert footprint_of(adapter).largest == 0


@pytest.mark.parametrize("shape", [LLAMA, QWEN3, MOE], ids=["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_estimate_is_close_to_autograd(dtype: str, shape: PretrainedConfig) -> None:
    """For a model of transformers, within a tenth."""
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype))
    use_experts_kernel(model, "grouped")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    measured = sum(
        tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in weights
    )
    config = _config(ParallelLayout(), dtype=dtype)
    footprint = footprint_of(ModelConfig(config=shape.to_dict()))
    assert estimate_memory(config, footprint, tokens).activations == pytest.approx(measured, rel=0.1)


def test_state_is_sharded_over_replica_ranks(start: Path) -> None:
    footprint = footprint_of(ModelConfig(path=str(start / "model")))
    unsharded = estimate_memory(_config(ParallelLayout()), footprint, 100)
    spread = estimate_memory(_config(ParallelLayout(dp=2, tp=2, pp=2)), footprint, 100)
    assert spread.weights == unsharded.weights / 4 and spread.moments == unsharded.moments / 4
    assert unsharded.moments == 2 * unsharded.weights == 8 * footprint.parameters
    forward = estimate_memory(_config(ParallelLayout(), optimizer=None), footprint, 100)
    assert forward.total < unsharded.total and forward.gradients == 0
    assert (
        estimate_memory(_config(ParallelLayout(), dtype="bfloat16"), footprint, 100).weights
        == 1.5 * unsharded.weights
    )
    assert OptimizerConfig() == _config(ParallelLayout()).optimizer


def test_peak_memory_is_in_pass_or_step() -> None:
    estimate = MemoryEstimate(weights=4, gradients=4, moments=8, transient=1, activations=2, logits=3)
    assert estimate.total == 16 + 6
    assert (
        replace(estimate, activations=0, logits=0).total == 16 + 4
    )  # a step takes half of the moments again


def test_head_gradient_adds_to_footprint() -> None:
    footprint = footprint_of(ModelConfig(config=LLAMA.to_dict()))
    assert estimate_memory(_config(ParallelLayout()), footprint, 100).transient == 4 * 32 * 64
    assert estimate_memory(_config(ParallelLayout(), optimizer=None), footprint, 100).transient == 0


@given(*(st.integers(1, 4) for _ in range(4)))
def test_every_rank_has_a_place_of_its_own(dp: int, tp: int, pp: int, cp: int) -> None:
    layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert places[-1] == (tp - 1, cp - 1, dp - 1, pp - 1)


@pytest.mark.parametrize(("budget", "fits"), [(8, False), (9, True)])
def test_oversized_completions_are_refused_early(
    start: Path, tmp_path: Path, budget: int, fits: bool
) -> None:
    """Prompts have up to five tokens and completions four; the plan is refused with both numbers."""
    values = support.recipe_values(start, tmp_path / "out")
    if fits:
        assert plan(tmp_path, values, f"micro_batch_tokens={budget}").workload.largest_unit == 9
        return
    with pytest.raises(ConfigError, match=r"micro_batch_tokens = 8, .* may have 9 tokens.*raise .* to 9"):
        plan(tmp_path, values, f"micro_batch_tokens={budget}")


def test_pair_must_fit_into_micro_batch(start: Path, tmp_path: Path) -> None:
    values = support.supervised_values(start, tmp_path / "out", "dpo")
    workload = plan(tmp_path, values).workload
    assert workload.longest < workload.largest_unit <= 2 * workload.longest
    with pytest.raises(ConfigError, match=rf"pair .* may have {workload.largest_unit} tokens"):
        plan(tmp_path, values, f"micro_batch_tokens={workload.largest_unit - 1}")
