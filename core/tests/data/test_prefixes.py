"""Prefix trees and cuts that share, over drawn batches."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches, shard_plan
from core_rl.data.prefixes import PrefixTree, SharedUnits
from core_rl.errors import BatchError

# Two ids, so that prefixes are shared often.
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=9)


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row in rows for end in range(len(row))}


@given(ROWS)
def test_tree_has_each_prefix_once(rows: list[list[int]]) -> None:
    batch = SequenceBatch.from_sequences(rows)
    tree = PrefixTree.of(batch)
    if tree is None:
        assert len(prefixes(rows)) == batch.num_tokens
        return
    assert len(tree.kept) == tree.bounds[-1] == len(prefixes(rows))
    for values in (batch.input_ids, batch.position_ids):
        assert torch.equal(values[tree.kept][tree.rows], values)
    stretches = [list(range(first, end)) for first, end in pairwise(tree.bounds)]
    paths = [[row for stretch in path for row in stretches[stretch]] for path in tree.paths]
    for rows_of_sequence in tree.rows.split(batch.lengths):
        assert rows_of_sequence.tolist() in paths


@given(ROWS, st.integers(7, 20), st.integers(1, 4))
def test_cuts_keep_sequences_and_budget(rows: list[list[int]], budget: int, count: int) -> None:
    batch = SequenceBatch.from_sequences(rows)
    spec = MicroBatchSpec(max_tokens=budget, share_prefixes=True)
    needed = count_micro_batches(batch, spec)
    plan = plan_micro_batches(batch, spec, needed)
    assert len(plan) == needed
    assert max(len(prefixes([rows[index] for index in part])) for part in plan) <= budget
    even = plan_micro_batches(batch, MicroBatchSpec(count=count, share_prefixes=True), count)
    parts = shard_plan(batch, count, share_prefixes=True)
    assert len(even) == len(parts) == count
    for cut in (plan, even, parts):
        assert sorted(index for part in cut for index in part) == list(range(len(rows)))


@pytest.mark.parametrize(
    ("rows", "unit", "budget", "plan"),
    [
        # Two prompts with two answers each, in turns: each pair fits once the prompt counts once.
        ([[5] * 6 + [1], [6] * 6 + [1], [5] * 6 + [2], [6] * 6 + [2]], None, 8, [[0, 2], [1, 3]]),
        # A tree that exceeds the budget is split where the least is shared.
        ([[5] * 4 + [1] * 4 + [2], [5] * 4 + [1] * 4 + [3], [5] * 4 + [4] * 6], None, 12, [[0, 1], [2]]),
        # Units stay whole.
        ([[5] * 6 + [1], [6, 7], [5] * 6 + [2], [6, 8]], [0, 0, 1, 1], 9, [[0, 1], [2, 3]]),
    ],
)
def test_cut_computes_the_fewest_tokens(
    rows: list[list[int]], unit: list[int] | None, budget: int, plan: list[list[int]]
) -> None:
    batch = SequenceBatch.from_sequences(rows, unit=None if unit is None else torch.tensor(unit))
    spec = MicroBatchSpec(max_tokens=budget, share_prefixes=True)
    assert plan_micro_batches(batch, spec, count_micro_batches(batch, spec)) == plan


def slowest(rows: list[list[int]], plan: list[list[int]]) -> int:
    return max(len(prefixes([rows[index] for index in part])) for part in plan)


@given(ROWS, st.sets(st.integers(0, 8)))
def test_order_counts_tokens_of_any_part(rows: list[list[int]], drawn: set[int]) -> None:
    part = [index for index in sorted(drawn) if index < len(rows)]
    order = SequenceBatch.from_sequences(rows).prefix_order
    assert order.computed(part) == len(prefixes([rows[index] for index in part]))


@given(ROWS, st.integers(1, 4), st.data())
def test_spread_slows_no_rank_and_keeps_units(rows: list[list[int]], ranks: int, data: st.DataObject) -> None:
    unit = data.draw(st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)))
    batch = SequenceBatch.from_sequences(rows, unit=torch.tensor(unit))
    plan = shard_plan(batch, ranks, share_prefixes=True)
    assert slowest(rows, plan) <= slowest(rows, shard_plan(batch, ranks))
    assert sorted(index for part in plan for index in part) == list(range(len(rows)))
    homes = [{unit[index] for index in part} for part in plan]
    assert sum(map(len, homes)) == len(set(unit))


def answers(prompt: int, lengths: list[int]) -> list[list[int]]:
    """Rows of one prompt of eight tokens, each with an answer of a length."""
    return [[prompt] * 8 + [100 + number] * length for number, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("rows", "ranks", "tokens"),
    [
        # Groups stay whole where they balance.
        (answers(1, [2] * 4) + answers(2, [2] * 4), 2, [16, 16]),
        # Groups that are no neighbours in the order are paired by their tokens.
        (answers(1, [8]) * 2 + answers(2, [4]) * 2 + answers(3, [4]) * 2 + answers(4, [8]) * 2, 2, [28, 28]),
        # A group is cut where a rank would have nothing, and the prompt is computed on both.
        (answers(1, [4] * 4), 2, [16, 16]),
        # One long sequence is on a rank of its own.
        ([*answers(1, [1] * 8), [2] * 24], 2, [16, 24]),
    ],
)
def test_spread_computes_prompts_once(rows: list[list[int]], ranks: int, tokens: list[int]) -> None:
    plan = shard_plan(SequenceBatch.from_sequences(rows), ranks, share_prefixes=True)
    assert sorted(len(prefixes([rows[index] for index in part])) for part in plan) == tokens


def test_other_experts_are_not_shared() -> None:
    routing = [torch.tensor([[[0, 1]], [[1, 2]], [[0, 2]]]), torch.tensor([[[0, 1]], [[1, 3]], [[0, 2]]])]
    batch = SequenceBatch.from_sequences([[5, 6, 7], [5, 6, 7]], tokens={"routing": routing})
    tree = PrefixTree.of(batch)
    assert tree is not None
    assert len(tree.kept) == 5


def test_copies_of_the_same_tokens_are_sorted_once() -> None:
    batch = SequenceBatch.from_sequences([[5, 6, 7], [5, 6, 8]])
    order = batch.prefix_order
    zeros = torch.zeros(6)
    assert batch.with_tokens(advantages=zeros).only(["advantages"]).prefix_order is order
    assert batch.with_sequences(rewards=zeros[:2]).prefix_order is order
    for other, common in [
        (batch.select([1]), [0]),
        (batch.split([[0], [1]])[1], [0]),
        (batch.with_tokens(routing=torch.arange(6).view(6, 1, 1)), [0, 0]),
    ]:
        assert other.prefix_order.common.tolist() == common


def test_nothing_shared_is_cut_as_before() -> None:
    batch = SequenceBatch.from_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]])
    for spec in (MicroBatchSpec(max_tokens=5), MicroBatchSpec(count=3)):
        count = count_micro_batches(batch, spec)
        sharing = MicroBatchSpec(max_tokens=spec.max_tokens, count=spec.count, share_prefixes=True)
        assert plan_micro_batches(batch, sharing, count) == plan_micro_batches(batch, spec, count)


def test_sequence_beyond_budget_is_named() -> None:
    batch = SequenceBatch.from_sequences([[5] * 6 + [1], [5] * 6 + [2], [5] * 9])
    with pytest.raises(BatchError, match="sequence 2 has 9 tokens, and max_tokens is 8"):
        count_micro_batches(batch, MicroBatchSpec(max_tokens=8, share_prefixes=True))


def all_cuts(count: int) -> list[list[range]]:
    """All ways to cut ``count`` units into runs of neighbours."""
    inner = chain.from_iterable(combinations(range(1, count), size) for size in range(count))
    return [[range(first, end) for first, end in pairwise([0, *starts, count])] for starts in inner]


@given(ROWS, st.integers(0, 20))
def test_cut_within_a_budget_is_the_best(rows: list[list[int]], more: int) -> None:
    batch = SequenceBatch.from_sequences(rows)
    shared = SharedUnits.of(batch, [[index] for index in range(len(rows))])
    if shared is None:
        return
    budget = max(shared.weights) + more

    def cost(cut: list[range]) -> tuple[int, int]:
        return sum(map(shared.weight, cut)), len(cut)

    allowed = [cut for cut in all_cuts(len(rows)) if all(shared.weight(run) <= budget for run in cut)]
    cut = shared.within(budget)
    assert cut in allowed
    assert cost(cut) == min(map(cost, allowed))
