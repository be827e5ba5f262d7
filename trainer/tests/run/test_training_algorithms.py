"""Whole runs of each algorithm on the reference engines: critics, reward models, adapters, data without rollouts."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_support as support
from safetensors.torch import load_file
from torch import Tensor
from training_support import run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from core_rl.data.batch import SequenceBatch
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import BatchError, ConfigError, WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.weight_sync.delta import DeltaDecoder, DeltaWeights
from core_rl_trainer.api import dry_run
from core_rl_trainer.recipe.recipe import load_recipe
from core_rl_trainer.run.engines import Roles
from core_rl_trainer.run.online import OnlineLearner
from core_rl_trainer.run.supervised import SupervisedLearner

PPO = {"type": "ppo", "args": {"kl_coef": 0.05, "kl_target": 0.01, "kl_horizon": 100, "minibatches": 2}}
CRITIC = {"args": {"minibatches": 2}, "optimizer": {"lr": 0.02}}


@pytest.fixture(scope="module")
def reward_model(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that trained a reward model."""
    directory = tmp_path_factory.mktemp("reward_model")
    run(support.supervised_values(start, directory / "out", "reward_model", steps=8))
    return directory / "out"


@pytest.fixture(scope="module")
def ppo(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of PPO with a critic that nothing disturbed."""
    directory = tmp_path_factory.mktemp("ppo")
    run(support.recipe_values(start, directory / "out", algorithm=PPO, critic=CRITIC))
    return directory / "out"


# ------------------------------------------------------------------ rollouts


def test_ppo_trains_actor_and_critic(ppo: Path) -> None:
    rows = support.curve(ppo)[1:]
    assert all(row["update_successful"] == row["critic_update_successful"] == 1 for row in rows)
    assert all(row["updates"] == row["critic_updates"] == 2 for row in rows)
    assert rows[-1]["critic_value_loss"] < rows[0]["critic_value_loss"]
    assert rows[0]["kl_before"] == pytest.approx(0, abs=1e-5)
    coefficients = [row["kl_coef"] for row in rows]
    assert coefficients[0] == 0.05
    assert coefficients[1] == pytest.approx(0.05 * (1 - 0.2 * 18 / 100))


@pytest.mark.nightly
def test_interrupted_ppo_run_resumes_exactly(
    ppo: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor, critic, KL coefficient and data order are all from the checkpoint."""
    values = support.recipe_values(start, tmp_path / "out", algorithm=PPO, critic=CRITIC)
    publish = OnlineLearner.sync

    def interrupted(loop: OnlineLearner, version: int) -> None:
        publish(loop, version)
        if version == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OnlineLearner, "sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(values)
    run(values)
    assert support.curve(tmp_path / "out") == support.curve(ppo)


@pytest.mark.nightly
def test_killed_ppo_run_resumes_exactly(ppo: Path, start: Path, tmp_path: Path) -> None:
    """``kill -9`` at drawn moments, also between the actor's part of a checkpoint and the critic's."""
    values = support.recipe_values(start, tmp_path / "out", algorithm=PPO, critic=CRITIC, save_every=1)
    recipe = support.write_recipe(tmp_path / "r.yaml", values)
    support.run_killed([sys.executable, "-m", "core_rl.cli", "train", str(recipe)], tmp_path / "out", seed=1)
    assert support.curve(tmp_path / "out") == support.curve(ppo)


@pytest.mark.nightly
def test_taking_turns_in_the_same_processes_changes_nothing(
    ppo: Path, start: Path, tmp_path: Path, memory_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: dict[str, tuple[int, ...]] = {}
    working = Roles.working

    def noted(roles: Roles, group: EngineGroup) -> Any:
        pids[f"{group.config.model.head}, trained: {group.config.optimizer is not None}"] = tuple(group.pids)
        return working(roles, group)

    monkeypatch.setattr(Roles, "working", noted)
    values = support.recipe_values(start, tmp_path / "out", algorithm=PPO, critic=CRITIC, colocated=True)
    run(values)
    assert support.curve(tmp_path / "out") == support.curve(ppo)
    steps = len(support.curve(ppo)) - 1
    assert memory_calls == ["release", "resume"] * steps, "rollouts have no memory while others train"
    assert len(pids) == 3
    assert len(set(pids.values())) == 1


@pytest.fixture
def memory_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that free the memory of rollouts, and take it again, in order."""
    calls: list[str] = []
    for name in ("release", "resume"):
        original = getattr(InferenceEngine, f"{name}_memory")

        def noted(engine: InferenceEngine, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(engine)

        monkeypatch.setattr(InferenceEngine, f"{name}_memory", noted)
    return calls


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The heads of the models that were moved to host memory, in order."""
    moved: list[str] = []
    offload = EngineGroup.offload

    def noted(group: EngineGroup) -> None:
        moved.append(group.config.model.head)
        offload(group)

    monkeypatch.setattr(EngineGroup, "offload", noted)
    return moved


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("placement", "moved"),
    [
        ({"critic": [1], "rollout": [0]}, {"lm"}),
        ({"actor": [0], "critic": [1], "reference": {"devices": [2]}, "rollout": {"devices": [3]}}, set()),
    ],
    ids=["critic", "all"],
)
def test_separate_devices_leave_curve_equal(
    ppo: Path,
    start: Path,
    tmp_path: Path,
    offloads: list[str],
    memory_calls: list[str],
    placement: dict[str, Any],
    moved: set[str],
) -> None:
    values = support.recipe_values(start, tmp_path / "out", algorithm=PPO, critic=CRITIC, colocated=True)
    run(values | {"placement": placement})
    assert support.curve(tmp_path / "out") == support.curve(ppo)
    assert set(offloads) == moved
    assert bool(memory_calls) == ("lm" in moved), "rollouts keep memory that nobody else uses"


@pytest.mark.nightly
def test_scores_of_a_reward_model_are_the_rewards(start: Path, reward_model: Path, tmp_path: Path) -> None:
    """In evaluations too, which use the training prompts here."""
    section = {"path": str(reward_model / "model"), "weight": 2.0}
    values = support.recipe_values(
        start,
        tmp_path / "out",
        algorithm={"type": "rloo"},
        rewards=[
            {"function": "core_rl_trainer.rewards.text:text_match", "weight": 0.5},
            {"function": f"{tmp_path}/ranks.py:ranks", "batched": True},
        ],
        reward_model=section,
        colocated=True,
        steps=2,
    )
    del values["reward"]
    (tmp_path / "ranks.py").write_text("def ranks(texts, sample):\n    return [*range(len(texts))]\n")
    result = run(values)
    row = support.curve(tmp_path / "out")[1]
    assert row["reward/ranks"] == (values["rollout"]["group_size"] - 1) / 2
    assert row["groups_without_signal"] == 0
    for prefix, metrics in (("", row), ("eval_", result["before"])):
        terms = {name: metrics[f"{prefix}reward/{name}"] for name in ("text_match", "reward_model", "ranks")}
        total = 0.5 * terms["text_match"] + 2 * terms["reward_model"] + terms["ranks"]
        assert metrics[f"{prefix}reward"] == pytest.approx(total)
        assert metrics[f"{prefix}reward/reward_model"] != 0
    assert result["before"]["eval_reward_greedy"] != 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_adapter_reference_is_base_model(start: Path, tmp_path: Path, sync: str) -> None:
    """And answers are drawn by both, whether the adapter is merged into weights that are sent or sent alone."""
    lora = {"path": str(start / "model"), "lora": {"rank": 4, "alpha": 8}}
    values = support.recipe_values(start, tmp_path / "out", model=lora, steps=2)
    values["rollout"]["sync"] = sync
    run(values)
    rows = support.curve(tmp_path / "out")[1:]
    assert rows[0]["kl_before"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["kl_before"] > 1e-6
    assert all(row["mismatch_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize("sync", ["disk", pytest.param("tensor", marks=pytest.mark.nightly)])
def test_delta_sync_has_the_actors_weights(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    sent = []
    decode = DeltaDecoder.decode

    def decoded(decoder: DeltaDecoder, items: Iterable[tuple[str, Tensor]]) -> DeltaWeights:
        sent.append(decoder.base is not None)
        return decode(decoder, items)

    monkeypatch.setattr(DeltaDecoder, "decode", decoded)
    values = support.recipe_values(start, tmp_path / "out", steps=2)
    values["rollout"].update({"sync": sync, "sync_delta": True})
    run(values)
    assert all(row["mismatch_max"] < 1e-4 for row in support.curve(tmp_path / "out")[1:])
    assert sent == [False, True, True]


@pytest.mark.parametrize(
    "algorithm",
    [
        "remax",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("reinforce_plus_plus", "dapo", "gspo")),
    ],
)
def test_named_algorithms_run(start: Path, tmp_path: Path, algorithm: str) -> None:
    section = {"type": algorithm}
    run(support.recipe_values(start, tmp_path / "out", algorithm=section, steps=2))
    rows = support.curve(tmp_path / "out")[1:]
    assert all(row["update_successful"] == 1 for row in rows)


CONFLICTS = [
    ({"algorithm": {"type": "ppo"}}, "'ppo' needs a critic; add a section 'critic'"),
    ({"critic": {}}, "'ppo_actor' has no use for a critic"),
    ({"algorithm": PPO, "critic": {"args": {"clip": 1}}}, "'ppo_critic': unknown field 'clip'"),
    (
        {"placement": {"actor": [0, 1]}},
        r"actor = devices \[0, 1\]: it has 1 rank, and there is room for 2: .* name as many as it has ranks",
    ),
    ({"rollout": {"sync": "lora", "sync_delta": True}}, "an adapter is sent whole; set sync_delta to false"),
    ({"placement": {"rollout": [0, 1]}}, r"devices = \[0, 1\]: layout .* has 1 ranks"),
    (
        {"rollout": {"max_head_offpolicyness": 1}, "colocated": True},
        "completions are generated while others train.*placement.rollout",
    ),
    ({"engines": {"reference-rollout": {"devices": [0]}}}, "devices follows from the section 'placement'"),
    ({"placement": {"critic": [0]}}, r"critic = devices \[0\]: this run has no such role"),
    ({"placement": {"actor": [-1]}}, "'placement.actor.devices.0' = -1"),
    ({"reward": None}, "reward = null needs a rollout.environment .*, or a reward_model"),
    ({"reward_model": {"path": "nowhere"}}, "reward_model.path = '.*/nowhere': no such directory"),
    (
        {
            "algorithm": {
                "type": "ppo",
                "args": {
                    "mask_truncated_completions": True,
                    "advantage": {"type": "gae", "bootstrap_truncated": True},
                },
            }
        },
        "'ppo'.*bootstrap_truncated has no effect; set either to false",
    ),
    ({"algorithm": {"type": "sft"}, "critic": {}}, "'sft' trains on data and has no use for 'critic'"),
    ({"algorithm": {"type": "dpo", "args": {"clip_low": 0.1}}}, "'dpo': unknown field 'clip_low'"),
    ({"rollout": {"max_new_tokens": 32}}, "leaves no room for a prompt in the context of 32 tokens"),
    ({"algorithm": {"type": "ppo_critic"}}, "'ppo_critic' trains a critic.*set algorithm.type=ppo"),
    ({"algorithm": {"type": "grpo", "args": {"advantage": "gae"}}}, "'grpo' needs a critic"),
    (
        {"algorithm": {"type": "rloo"}, "rollout": {"group_size": 1}},
        "rollout.group_size = 1: the interface 'rloo' compares",
    ),
    (
        {"rollout": {"environment": "nowhere:Env"}},
        "rollout.environment = 'nowhere:Env': there is no module 'nowhere'",
    ),
    ({"rollout": {"should_accept": "core_rl_trainer.rewards.functions:no"}}, "has no attribute 'no'"),
    (
        {"engines": {"reference-rollout": {"max_head_offpolicyness": 2}}},
        "engines.reference-rollout: max_head_offpolicyness follows from the section",
    ),
    ({"rollout": {"sync": "lora"}}, "rollout.sync = 'lora' sends an adapter, and model.lora is not set"),
]


@pytest.mark.parametrize(("changes", "message"), CONFLICTS)
def test_conflicting_settings_are_named_early(
    start: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(support.recipe_values(start, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_reward_filter_without_rewards_is_refused(start: Path, tmp_path: Path) -> None:
    section, name = {"path": str(start / "model")}, "core_rl_trainer.rewards.functions:rewards_differ"
    values = support.recipe_values(start, tmp_path / "out", reward=None, reward_model=section)
    values["rollout"]["should_accept"] = name
    with pytest.raises(ConfigError, match="would reject every prompt.*drop_equal_groups=true"):
        run(values)


def test_slow_sync_names_time_limit(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(sender: object, receiver: object, meta: object, timeout_s: float, receiving: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("core_rl_trainer.run.online.sync_weights", late)
    values = support.recipe_values(start, tmp_path / "out", timeouts={"sync_s": 7.0})
    with pytest.raises(
        WeightsError, match=r"version 0 within 7 s; if the sync is only slow, raise timeouts.sync_s"
    ):
        run(values)


def test_small_shared_memory_is_named_early(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, statvfs = SimpleNamespace(f_bavail=1, f_blocks=64, f_frsize=1024), os.statvfs
    monkeypatch.setattr("os.statvfs", lambda path: full if str(path) == "/dev/shm" else statvfs(path))
    with pytest.raises(ConfigError, match=r"rollout.sync = 'tensor' for the weights .* of shared memory"):
        run(support.recipe_values(start, tmp_path / "out", rollout={"sync": "tensor"}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("algorithm", "set_too", "message"),
    [
        (
            "sft",
            {"rollout": {"group_size": 2}, "colocated": True},
            "'sft' trains on data .* 'rollout', 'colocated'",
        ),
        (
            "ppo_actor",
            {"rollout": {"max_new_tokens": 4}},
            "'ppo_actor' trains on rollouts .* 'data.batch_size'; there is 'rollout.prompts",
        ),
    ],
)
def test_unused_settings_are_reported(
    start: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    set_too: dict[str, Any],
    message: str,
) -> None:
    path = support.write_recipe(
        tmp_path / "recipe.yaml", support.supervised_values(start, tmp_path / "out", algorithm, **set_too)
    )
    with caplog.at_level(logging.WARNING):
        dry_run(load_recipe(path))
    assert re.search(message, caplog.text)
    caplog.clear()
    dry_run(load_recipe(support.write_recipe(path, support.recipe_values(start, tmp_path / "out"))))
    assert not caplog.text


def test_overlong_prompts_are_named_or_dropped(
    start: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}] * 6 + [{"prompt": "1+" * 14 + "=", "answer": 14}]
    support.write_jsonl(tmp_path / "long.jsonl", rows)
    data = {"train": str(tmp_path / "long.jsonl"), "eval": str(start / "eval.jsonl")}
    values = support.recipe_values(start, tmp_path / "out", data=data, steps=2)
    with pytest.raises(BatchError, match=r"line 7 has 30 tokens, longer than the 28 tokens"):
        run(values)
    with caplog.at_level(logging.WARNING):
        run(values, "data.unusable=drop")
    assert "1 of 7 prompts cannot be trained" in caplog.text


# ---------------------------------------------------------------------- data


def test_sft_lowers_the_loss_on_the_data(start: Path, tmp_path: Path) -> None:
    result = run(support.supervised_values(start, tmp_path / "out", "sft"))
    assert result["after"]["eval_loss"] < result["before"]["eval_loss"]
    rows = support.curve(tmp_path / "out")
    assert [row["step"] for row in rows if "eval_nll" in row] == [0, 3, 4]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "eval_loss" in page and ">complete<" in page and "Samples of rollouts" not in page


def test_a_reward_model_tells_chosen_from_rejected(reward_model: Path) -> None:
    rows = support.curve(reward_model)
    assert rows[-1]["accuracy"] > 0.5
    assert rows[-1]["preference_loss"] < rows[1]["preference_loss"]
    model = AutoModelForSequenceClassification.from_pretrained(reward_model / "model")
    assert model.score.weight.shape == (1, 16)


def test_dpo_starts_at_the_reference_and_leaves_it(start: Path, tmp_path: Path) -> None:
    result = run(support.supervised_values(start, tmp_path / "out", "dpo"))
    rows = support.curve(tmp_path / "out")
    assert rows[1]["preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert result["before"]["eval_reward_gap"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["reward_gap"] > 0
    assert {path.name for path in (tmp_path / "out" / "reference").iterdir()} == {
        "train.safetensors",
        "eval.safetensors",
    }


def test_dpo_extends_with_references_of_new_rows(start: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (start / "pairs.jsonl").read_text().splitlines()]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({**row, "index": 7}) + "\n" for row in rows))  # a column of the user's

    def reference_rows(output: str, steps: int) -> int:
        values = support.supervised_values(start, tmp_path / output, "dpo", steps=steps, eval_every=0)
        run({**values, "data": {"train": str(data), "batch_size": 2}})
        return len(load_file(tmp_path / output / "reference" / "train.safetensors"))

    assert (
        reference_rows("extended", 2)
        < reference_rows("extended", 6)
        == reference_rows("whole", 6)
        < len(rows)
    )
    curves = [support.curve(tmp_path / output)[1:] for output in ("extended", "whole")]
    assert curves[0] == curves[1]
    assert curves[0][0]["preference_loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", [pytest.param("sft", marks=pytest.mark.nightly), "dpo"])
def test_interrupted_supervised_run_resumes_exactly(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    rule = {"metric": "eval_loss", "mode": "min"}
    run(support.supervised_values(start, tmp_path / "whole", algorithm, keep_best=rule, keep=1))
    values = support.supervised_values(start, tmp_path / "broken", algorithm, keep_best=rule, keep=1)
    update = SupervisedLearner.update

    def interrupted(learner: SupervisedLearner, batch: SequenceBatch, step: int) -> dict[str, float]:
        if step == 4:
            raise KeyboardInterrupt
        return update(learner, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLearner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(values)
    resumed = run(values)
    assert support.curve(tmp_path / "broken") == support.curve(tmp_path / "whole")
    losses = {
        row["step"]: row["eval_loss"] for row in support.curve(tmp_path / "whole") if "eval_loss" in row
    }
    assert resumed["best"]["step"] == min(losses, key=losses.__getitem__)
    weights = [tmp_path / name / "best_model" / "model.safetensors" for name in ("broken", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert len(list((tmp_path / "broken" / "best").iterdir())) == 1


def test_data_of_wrong_algorithm_is_named(start: Path, tmp_path: Path) -> None:
    values = support.supervised_values(start, tmp_path / "out", "dpo")
    values["data"]["train"] = str(start / "train.jsonl")
    with pytest.raises(BatchError, match="train.jsonl: line 1 needs a text 'chosen'; it has None"):
        run(values)
    assert json.loads((start / "pairs.jsonl").read_text().splitlines()[0])["chosen"] == "0"
