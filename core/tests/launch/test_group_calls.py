"""`EngineGroup`: calls on ranks, splitting and merging, layouts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import group_support as support
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import FinetuneSpec
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import (
    BatchError,
    ConfigError,
    EngineNotFound,
    EngineStateError,
    LayoutError,
    LossError,
    RankFailed,
)
from core_rl.launch.group import EngineGroup

MB = MicroBatchSpec(max_tokens=1024)

MODEL = {"config": {"model_type": "none"}}


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with support.echo_group(support.SPEC, support.config(dp=2, tp=2), timeout_s=120) as group:
        yield group


def batch_of(*lengths: int) -> SequenceBatch:
    return SequenceBatch.from_sequences([torch.arange(n) + 100 * i for i, n in enumerate(lengths)])


def test_forward_pass_gets_only_forward_fields(group: EngineGroup) -> None:
    """And a hook gets all of them."""
    batch = batch_of(3, 2).with_tokens(advantages=torch.zeros(5), routing=torch.zeros(5, 1, 2).long())
    batch = batch.with_tokens(loss_mask=torch.ones(5, dtype=torch.bool)).with_sequences(reward=torch.ones(2))
    group.forward(batch, MB)
    assert group.run(support.fields) == [["loss_mask", "routing"]] * 4
    group.forward(batch, MB, post_hook=support.double_tokens)
    assert group.run(support.fields) == [["advantages", "loss_mask", "reward", "routing"]] * 4


def test_results_come_in_rank_order(group: EngineGroup) -> None:
    assert group.run(support.whoami, "x", 3) == [(rank, "x", 3) for rank in range(4)]
    assert group.run_each(support.whoami, [(r * 10,) for r in range(4)]) == [(r, r * 10) for r in range(4)]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_run_each_wants_arguments_for_every_rank(group: EngineGroup, count: int) -> None:
    with pytest.raises(ConfigError, match=f"arguments for {count} ranks; the group has 4"):
        group.run_each(support.whoami, [()] * count)


def test_large_values_travel_both_ways(group: EngineGroup) -> None:
    value = torch.arange(2_000_000)
    assert all(torch.equal(value, answer) for answer in group.run(support.echo, value))


def test_metrics_come_from_the_parts_output_rank(group: EngineGroup) -> None:
    assert group.train_batch(batch_of(9, 5, 5), LossSpec(fn=support.unused_loss), MB) == {
        "tokens": 9,
        "rank": 1,
    }


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9), temperature=st.sampled_from([1.0, 0.5]))
def test_forward_restores_the_order(group: EngineGroup, lengths: list[int], temperature: float) -> None:
    batch = batch_of(*lengths)
    output = group.forward(batch, MB, temperature=temperature)
    assert torch.equal(output.logprobs, batch.input_ids * temperature)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_hook_results_return_in_caller_order(group: EngineGroup, lengths: list[int]) -> None:
    batch = batch_of(*lengths)
    doubled = group.forward(batch, MB, post_hook=support.double_tokens)
    assert torch.equal(doubled, batch.input_ids * 2)
    sizes = [min(2, length) for length in lengths]
    ends = group.forward(
        batch, MB, post_hook=support.last_two, output_seqlens=sizes, aggregate_fn=lambda rows: rows
    )
    assert [row.tolist() for row in ends] == [ids[-2:].tolist() for ids in batch.input_ids.split(lengths)]


def test_wrong_output_lengths_are_refused(group: EngineGroup) -> None:
    with pytest.raises(BatchError, match="output_seqlens has 3 entries for 2 sequences"):
        group.forward(batch_of(2, 3), MB, output_seqlens=[1, 1, 1], post_hook=support.last_two)


def test_total_weight_needs_the_global_scope(group: EngineGroup) -> None:
    with pytest.raises(LossError, match="normalize_scope='global'"):
        group.forward_backward(
            batch_of(3), LossSpec(fn=support.unused_loss, normalize_scope="dp"), MB, total_weight=3.0
        )


def test_batch_error_lists_sequences_of_each_rank(group: EngineGroup) -> None:
    batch = SequenceBatch.from_sequences([torch.tensor([1, 2, 3]), torch.tensor([1000])])
    with pytest.raises(BatchError, match="outside the vocabulary") as caught:
        group.forward(batch, MB)
    notes = "\n".join(caught.value.__notes__)
    assert "of the data-parallel ranks: rank 0 has [0]; rank 1 has [1]." in notes
    assert group.run(support.whoami)  # nothing is lost


def test_named_tensors_come_from_the_writer(group: EngineGroup) -> None:
    tensors = group.named_tensors("params")
    assert list(tensors) == ["a", "b"]
    assert tensors["b"].tolist() == [1.0, 1.0]  # rank 1: the output rank of data-parallel rank 0


def test_wrong_arguments_are_refused_in_the_driver(group: EngineGroup) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'meta'"):
        group.save()  # type: ignore[call-arg]


def test_plain_methods_reach_every_rank(group: EngineGroup) -> None:
    group.onload()
    assert group.run(support.calls) == [["onload"]] * 4


def test_ranks_adopt_the_drivers_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with support.echo_group(support.SPEC, support.config(dp=1)):
        pass  # the fork server runs now, and has its own environment
    monkeypatch.setenv("CORE_RL_TEST", "later")
    monkeypatch.chdir(tmp_path)
    ft_spec = FinetuneSpec(dataset_size=7)
    settings: dict[str, Any] = {"timeout_s": 140, "threads_per_rank": 3, "devices": (5, 4)}
    with support.echo_group(support.SPEC, support.config(dp=2), ft_spec=ft_spec, **settings) as group:
        for rank, actual in enumerate(group.run(support.surroundings)):
            assert actual == {
                "cwd": str(tmp_path),
                "variable": "later",
                "path": sys.path,
                "threads": 3,
                "ft_spec": ft_spec,
                "world": (2, 5 - rank, 140),
                "preloaded": True,
                "sigint": signal.SIG_IGN,
            }


def test_output_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with support.echo_group(support.SPEC, support.config(dp=2)) as group:
        group.run(support.say)
        out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(err.splitlines()) == ["err of rank 0", "err of rank 1"]


def test_ranks_may_have_children(group: EngineGroup) -> None:
    assert group.run(support.child_process) == [42] * 4


def test_new_layout_keeps_the_processes() -> None:
    with support.echo_group(support.SPEC, support.config(dp=2)) as group:
        first = group.pids
        assert len(first) == 2
        group.initialize()
        assert group.pids == first
        group.initialize(config=support.config(dp=1))
        assert (group.pids, group.world_size, group.data_parallel_size) == (first, 1, 1)
        assert group.run(support.whoami) == [(0,)]
        group.initialize(config=support.config(dp=2, tp=2))
        assert group.pids[:2] == first
        assert (len(group.pids), group.world_size, group.data_parallel_size) == (4, 4, 2)
        assert group.run(support.whoami) == [(0,), (1,), (2,), (3,)]
        everyone = group.pids
    assert not support.survivors(everyone)


def test_a_refused_config_changes_nothing(group: EngineGroup) -> None:
    with pytest.raises(LayoutError, match="pipeline_parallel"):
        group.initialize(config=support.config(pp=2))
    assert (group.world_size, group.layout.tp) == (4, 2)
    assert len(group.run(support.whoami)) == 4


def test_process_group_meets_in_first_ranks_store() -> None:
    with support.echo_group(support.SPEC, support.config(dp=2)) as group:
        for world in (2, 1, 3):
            group.initialize(config=support.config(dp=world))
            assert group.run(support.gloo_sum) == [world * (world + 1) / 2] * world


def test_a_group_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with support.echo_group(support.SPEC, support.config(dp=2)) as group:
        group.initialize()
        group.destroy()
        with pytest.raises(EngineStateError, match=r"call initialize\(\) first"):
            group.run(support.whoami)
        group.initialize()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"engine": "no-such-engine"}, EngineNotFound, "no-such-engine"),
        ({"timeout_s": 0}, ConfigError, "timeout_s = 0"),
        ({"threads_per_rank": 0}, ConfigError, "threads_per_rank = 0"),
        ({"devices": (0, 1)}, ConfigError, r"devices = \[0, 1\] for 1 ranks"),
        ({"devices": (1, 1), "config": support.config(dp=2)}, ConfigError, r"devices = \[1, 1\] for 2 ranks"),
        ({"config": support.config(pp=2)}, LayoutError, "pipeline_parallel"),
        (
            {"seed": 1, "layout": {"dp": 2}},
            ConfigError,
            r"a config and its fields \(layout, seed\) for 'echo'",
        ),
        (
            {"config": None, "model": MODEL, "dtype": "int8"},
            ConfigError,
            "config of 'echo': field 'dtype' = 'int8'",
        ),
        ({"config": None}, ConfigError, "config of 'echo': field 'model' is required"),
        ({"config": None, "model": MODEL, "options": {"a": 1}}, ConfigError, "unknown field 'options'"),
    ],
)
def test_bad_arguments(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        support.echo_group(**{"engine": support.SPEC, "config": support.config(dp=1), **arguments})


def test_a_config_is_made_of_its_fields() -> None:
    """Config objects or plain values, and the defaults of the engine's config class."""
    fields: dict[str, Any] = {
        "optimizer": {"lr": 0.5},
        "layout": ParallelLayout(dp=2),
        "dtype": "bfloat16",
        "device": "cpu",
        "seed": 7,
    }
    group = support.echo_group(support.SPEC, model=MODEL, **fields)
    assert group.config == TrainEngineConfig.model_validate({"model": MODEL, **fields})
    group.close()
    choices: tuple[dict[str, Any], ...] = ({}, {"optimizer": None})
    for optimizer in choices:
        group = support.echo_group(support.SPEC, model=ModelConfig.model_validate(MODEL), **optimizer)
        assert group.config == TrainEngineConfig.model_validate({"model": MODEL, **optimizer})
        group.close()


def test_failed_context_leaves_no_process() -> None:
    group = support.echo_group(support.SPEC, support.config(support.FAILING_SEED, dp=1))
    pids = group.pids
    with pytest.raises(RankFailed, match="no memory for the model"), group:
        raise AssertionError("the body does not run")
    assert not support.survivors(pids, within_s=0)


def test_before_initialize_there_is_no_engine() -> None:
    with closing(support.echo_group(support.SPEC, support.config(dp=1))) as group:
        with pytest.raises(EngineStateError, match=r"call initialize\(\) first"):
            group.run(support.whoami)
        with group:
            assert group.run(support.whoami) == [(0,)]


def test_all_groups_share_a_fork_server() -> None:
    """The expensive imports happen in the server, and a second group waits for none."""
    servers: set[int] = set()
    for size in (1, 2):
        with support.echo_group(support.SPEC, support.config(dp=size)) as group:
            servers.update(group.run(support.parent_pid))
    assert len(servers) == 1
