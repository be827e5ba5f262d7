"""Engines of core-rl inside verl: its workers, losses, checkpoints, exports and configs."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import actor_steps  # it selects the platform before verl is imported

# isort: split
import pytest
import torch
from actor_steps import (
    LIMIT,
    OURS,
    TINY,
    Rollout,
    actor,
    batch_of,
    compared_steps,
    difference,
    record,
    save_model,
    step,
    worker_of,
)
from core_rl_verl.config import CoreRLEngineConfig, first_lr_step, train_config
from hydra import compose, initialize_config_module
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from verl.utils import tensordict_utils as tu
from verl.workers.config import CriticConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import no_padding_2_padding

from core_rl.errors import ConfigError


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model."""
    path = str(tmp_path_factory.mktemp("model"))
    save_model(path, TINY)
    return path


@pytest.fixture(scope="module")
def rollouts(model_path: str) -> list[Rollout]:
    """Rollouts of that model."""
    return record(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), 12)


def _response_values(
    worker: TrainingWorker, rollouts: list[Rollout], name: str, **fields: Any
) -> list[Tensor]:
    """Values at responses of each sequence, by verl's own slices."""
    data = batch_of(rollouts)
    tu.assign_non_tensor(data, compute_loss=False, **fields)
    padded = no_padding_2_padding(worker.infer_batch(data)[name], data)
    return [row[: len(rollout.response)] for row, rollout in zip(padded, rollouts, strict=True)]


def test_ten_actor_steps_match_verl() -> None:
    assert max(map(difference, compared_steps(10))) <= LIMIT


def test_two_ranks_match_verl() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, actor_steps.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("cut", [{}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3}])
def test_log_probs_are_of_responses(model_path: str, rollouts: list[Rollout], cut: dict[str, Any]) -> None:
    values = _response_values(actor(model_path, OURS), rollouts, "log_probs", **cut)
    torch.testing.assert_close(torch.cat(values), torch.cat([row.log_probs for row in rollouts]))


def test_reference_computes_log_probs_alone(model_path: str, rollouts: list[Rollout]) -> None:
    worker = actor(model_path, OURS, forward_only=True)
    values = _response_values(worker, rollouts, "log_probs")
    torch.testing.assert_close(torch.cat(values), torch.cat([row.log_probs for row in rollouts]))
    with pytest.raises(AssertionError, match="forward_only"):
        step(worker, rollouts)


def test_critic_learns_returns(tmp_path: Path, model_path: str, rollouts: list[Rollout]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    worker = worker_of(str(tmp_path), OURS, role="value_model")
    values = _response_values(worker, rollouts, "values")
    for row, rollout in zip(values, rollouts, strict=True):
        ids = torch.cat([rollout.prompt, rollout.response])
        hidden = model.model(ids[None]).last_hidden_state[0]
        # The value of the state before each token of the response.
        expected = model.score(hidden)[len(rollout.prompt) - 1 : -1, 0]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    worker.set_loss_fn(partial(value_loss, config=CriticConfig(strategy=OURS, use_dynamic_bsz=True)))
    losses = []
    for _ in range(5):
        data = batch_of(rollouts)
        data["values"] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        data["returns"] = torch.nested.as_nested_tensor(
            [torch.full_like(row, rollout.advantage) for row, rollout in zip(values, rollouts, strict=True)],
            layout=torch.jagged,
        )
        tu.assign_non_tensor(data, mini_batch_size=len(rollouts))
        losses.append(tu.get(worker.train_mini_batch(data), "metrics")["critic/vf_loss"][0])
    assert losses[-1] < losses[0]


def test_resumed_steps_are_bitwise_equal(tmp_path: Path, model_path: str, rollouts: list[Rollout]) -> None:
    worker = actor(model_path, OURS)
    for number in range(3):
        step(worker, rollouts)
        worker.save_checkpoint(str(tmp_path / f"global_step_{number}" / "actor"), max_ckpt_to_keep=2)
    assert not (tmp_path / "global_step_0" / "actor").exists()
    resumed = actor(model_path, OURS)
    resumed.load_checkpoint(str(tmp_path / "global_step_2" / "actor"))
    assert step(resumed, rollouts) == step(worker, rollouts)


def test_exported_weights_equal_model(model_path: str) -> None:
    weights, peft_config = actor(model_path, OURS).engine.get_per_tensor_param()
    expected = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    exported = dict(weights)
    assert peft_config is None
    assert expected.keys() - exported.keys() == {"lm_head.weight"}  # tied
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_offloaded_steps_are_bitwise_equal(model_path: str, rollouts: list[Rollout]) -> None:
    plain = actor(model_path, OURS)
    offloading = actor(model_path, OURS, param_offload=True, optimizer_offload=True)
    assert step(offloading, rollouts) == step(plain, rollouts)
    offloading.to("cpu")
    exported, expected = (dict(side.engine.get_per_tensor_param()[0]) for side in (offloading, plain))
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_loss_gets_each_row_once(model_path: str, rollouts: list[Rollout]) -> None:
    worker, seen = actor(model_path, OURS), list[float]()

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        assert dp_group is not None
        seen.extend(row.sum().item() for row in data["input_ids"].unbind())
        return model_output["log_probs"].values().sum(), {"rows": len(data)}

    worker.set_loss_fn(loss)
    data = batch_of(rollouts)
    tu.assign_non_tensor(data, mini_batch_size=len(rollouts))
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert sorted(seen) == sorted(row.sum().item() for row in batch_of(rollouts)["input_ids"].unbind())
    assert sum(metrics["rows"]) == len(rollouts)


def _config(model: dict[str, Any], **engine: Any) -> Any:
    fields = {"load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}, **model}
    return train_config(
        HFModelConfig(**fields), CoreRLEngineConfig(strategy=OURS, **engine), FSDPOptimizerConfig(), 2
    )


def test_foreign_fields_are_refused_together(model_path: str) -> None:
    model = {"path": model_path, "use_liger": True, "lora_rank": 8}
    with pytest.raises(ConfigError) as raised:
        _config(model, offload_policy=True)
    for name in ("engine.offload_policy", "model.use_liger", "model.lora.merge"):
        assert name in str(raised.value)


def test_overrides_replace_fields(model_path: str) -> None:
    config = _config({"path": model_path}, overrides={"layout": {"tp": 2}, "options": {"compile": True}})
    assert (config.layout.dp, config.layout.tp) == (1, 2)
    assert config.options.compile
    assert config.options.gradient_checkpointing  # verl's default


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates_equal_verl(model_path: str, kind: str, warmup: int) -> None:
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    from core_rl.engine.schedule import learning_rate, schedule_length

    fields = {"lr_scheduler_type": kind, "lr_warmup_steps": warmup, "total_training_steps": 9}
    optimizer = FSDPOptimizerConfig(lr=0.5, min_lr_ratio=0.1, **fields)
    config = train_config(
        HFModelConfig(path=model_path, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}),
        CoreRLEngineConfig(strategy=OURS),
        optimizer,
        1,
    ).optimizer
    assert config is not None
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    if kind == "constant":
        schedule = get_constant_schedule_with_warmup(theirs, warmup)
    else:
        schedule = get_cosine_schedule_with_warmup(theirs, warmup, 9, min_lr_ratio=0.1)
    for number in range(9):
        ours = learning_rate(config, number + first_lr_step(optimizer), schedule_length(config, None))
        assert ours == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        theirs.step()
        schedule.step()


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_one_hydra_line_selects_engine(model_path: str, rollouts: list[Rollout], role: str) -> None:
    overrides = [
        f"actor_rollout_ref.actor.strategy={OURS}",
        f"actor_rollout_ref.model.path={model_path}",
        "+actor_rollout_ref.model.load_tokenizer=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
    worker.init_model()
    data = batch_of(rollouts)
    tu.assign_non_tensor(data, compute_loss=False)
    output = (worker.compute_log_prob if role == "actor" else worker.compute_ref_log_prob)(data)
    values = no_padding_2_padding(output["log_probs"], data)
    rows = [row[: len(rollout.response)] for row, rollout in zip(values, rollouts, strict=True)]
    expected = torch.cat([rollout.log_probs for rollout in rollouts])
    # In bfloat16, verl's default.
    torch.testing.assert_close(torch.cat(rows), expected, rtol=5e-2, atol=1e-1)
