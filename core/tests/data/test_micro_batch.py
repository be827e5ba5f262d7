"""Cutting and sharding: nothing is lost, budgets hold, units stay whole, order comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cost_support import Comparable, CountedCalls
from hypothesis import given
from hypothesis import strategies as st

from core_rl.backend.steps import MicroBatches
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import (
    MicroBatchSpec,
    best_fit,
    count_micro_batches,
    plan_micro_batches,
    shard,
    shard_plan,
    unshard_output,
)
from core_rl.data.order import WHOLE_FROM
from core_rl.data.outputs import ModelOutput
from core_rl.errors import BatchError


def ragged(lengths: list[int], units: list[int] | None = None) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [[b] * n for b, n in enumerate(lengths)], unit=None if units is None else torch.tensor(units)
    )


LENGTHS = st.lists(st.integers(1, 9), min_size=0, max_size=12)


@given(LENGTHS, st.integers(9, 30), st.integers(0, 3))
def test_a_token_budget_holds_and_nothing_is_lost(lengths: list[int], budget: int, more: int) -> None:
    batch, spec = ragged(lengths), MicroBatchSpec(max_tokens=budget)
    count = count_micro_batches(batch, spec) + more
    plan = plan_micro_batches(batch, spec, count)
    assert len(plan) == count
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for part in plan)


@given(LENGTHS, st.integers(1, 6))
def test_parts_by_count_are_balanced(lengths: list[int], count: int) -> None:
    plan = plan_micro_batches(ragged(lengths), MicroBatchSpec(count=count), count)
    loads = [sum(lengths[i] for i in part) for part in plan]
    assert len(plan) == count and sum(loads) == sum(lengths)
    # Largest-first is within the largest item of the mean.
    assert max(loads) <= sum(lengths) / count + max(lengths, default=0)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=10), st.integers(1, 4))
def test_units_are_never_separated(items: list[tuple[int, int]], parts: int) -> None:
    lengths, units = [n for n, _ in items], [u for _, u in items]
    batch = ragged(lengths, units)
    cuts = [plan_micro_batches(batch, MicroBatchSpec(count=parts), parts), shard_plan(batch, parts)]
    for plan in cuts:
        homes = [{units[i] for i in part} for part in plan]
        assert sum(map(len, homes)) == len(set(units))


@given(LENGTHS | st.lists(st.integers(WHOLE_FROM, WHOLE_FROM + 9), max_size=4), st.integers(1, 5))
def test_outputs_of_shards_come_back_in_order(lengths: list[int], parts: int) -> None:
    batch = ragged(lengths)
    pieces = shard(batch, parts)
    outputs = [
        ModelOutput(logprobs=p.input_ids.float(), scores=p.input_ids[p.cu_seqlens[:-1].long()].float())
        for p in pieces
    ]
    merged = unshard_output(outputs, batch, shard_plan(batch, parts))
    assert torch.equal(merged["logprobs"], batch.input_ids.float())
    assert torch.equal(merged["scores"], torch.arange(len(lengths), dtype=torch.float32))


def test_every_sequence_over_the_budget_is_named() -> None:
    with pytest.raises(BatchError, match="2 problems") as caught:
        count_micro_batches(ragged([3, 8, 2, 9]), MicroBatchSpec(max_tokens=7))
    assert "sequence 1 has 8 tokens, and max_tokens is 7" in str(caught.value)
    assert "sequence 3 has 9 tokens" in str(caught.value)


def test_a_unit_over_the_budget_is_named() -> None:
    with pytest.raises(BatchError, match=r"the unit of sequences \[0, 2\] has 8 tokens"):
        count_micro_batches(ragged([4, 1, 4], [5, 6, 5]), MicroBatchSpec(max_tokens=7))


@pytest.mark.parametrize("wrong", [{}, {"max_tokens": 4, "count": 1}, {"count": 0}, {"max_tokens": -1}])
def test_spec_needs_a_positive_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(BatchError, match="MicroBatchSpec"):
        MicroBatchSpec(**wrong)


def test_empty_part_has_dummy_with_all_fields() -> None:
    batch = SequenceBatch.from_sequences(
        [[3, 4]],
        tokens={"advantages": [[1.0, 2.0]]},
        sequences={"reward": torch.ones(1)},
        meta={"name": ["a"]},
    )
    dummy = batch.select([]).dummy()
    assert dummy.lengths == [1] and not dummy.loss_mask.any()
    assert dummy.tokens.keys() >= batch.tokens.keys() and dummy.sequences.keys() == batch.sequences.keys()


def _elements_of_cutting(count: int) -> int:
    """Elements that cutting ``count`` sequences into micro-batches of two or three computes."""
    batch, spec = ragged([1, 2, 3, 4] * (count // 4)), MicroBatchSpec(max_tokens=6)
    calls = CountedCalls()
    with calls:
        plan = plan_micro_batches(batch, spec, count_micro_batches(batch, spec))
        MicroBatches(batch, plan, batch.device)
    return calls.elements


def test_cutting_a_batch_is_linear_in_its_sequences() -> None:
    assert _elements_of_cutting(512) < 10 * _elements_of_cutting(64)


def _comparisons_of_packing(count: int) -> int:
    """Comparisons that packing ``count`` weights into bins of some eight computes."""
    before, draw = Comparable.comparisons, random.Random(0)
    best_fit([Comparable(draw.randint(16, 240)) for _ in range(count)], 1024)
    return Comparable.comparisons - before


def test_packing_compares_n_log_n_times() -> None:
    assert _comparisons_of_packing(2048) < 20 * _comparisons_of_packing(256)


def test_the_lengths_of_many_sequences_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each sequence would be quadratic: 20,000 take a minute."""
    batch, read = SequenceBatch.from_sequences([[1, 2]] * 20_000), [0]
    lengths = SequenceBatch.lengths

    def counted(batch: SequenceBatch) -> list[int]:
        read[0] += 1
        return lengths.fget(batch)  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(SequenceBatch, "lengths", property(counted))
    parts = shard_plan(batch, 64)
    assert sorted(index for part in parts for index in part) == list(range(20_000))
    plan_micro_batches(batch, MicroBatchSpec(count=8), 8)
    assert read[0] <= 4
