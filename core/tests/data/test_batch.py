"""`SequenceBatch`: refused input, and that no operation loses or moves a value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl.data.batch import SequenceBatch
from core_rl.data.order import WHOLE_FROM
from core_rl.data.outputs import masked_mean, masked_sum, segment_sum
from core_rl.errors import BatchError


def make_batch(lengths: list[int], *, unit: list[int] | None = None) -> SequenceBatch:
    """A batch whose values encode their positions."""
    total = sum(lengths)
    return SequenceBatch.from_sequences(
        [list(range(10 * b, 10 * b + n)) for b, n in enumerate(lengths)],
        tokens={"value": [[100.0 * b + t for t in range(n)] for b, n in enumerate(lengths)]},
        sequences={"reward": torch.arange(len(lengths), dtype=torch.float32)},
        meta={"name": [f"s{b}" for b in range(len(lengths))]},
        unit=None if unit is None else torch.tensor(unit),
    ).with_tokens(index=torch.arange(total))


def same(left: SequenceBatch, right: SequenceBatch) -> bool:
    return (
        torch.equal(left.input_ids, right.input_ids)
        and torch.equal(left.cu_seqlens, right.cu_seqlens)
        and left.tokens.keys() == right.tokens.keys()
        and all(torch.equal(left.tokens[name], right.tokens[name]) for name in left.tokens)
        and all(torch.equal(left.sequences[name], right.sequences[name]) for name in left.sequences)
        and dict(left.meta) == dict(right.meta)
    )


IDS, BOUNDS = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.rand(5)}, r"'input_ids' must be integers \[T\]; got float32 \[5\]"),
    ({"input_ids": torch.tensor([1, 2, 3, -4, 5])}, "'input_ids' of sequence 1 holds -4"),
    ({"cu_seqlens": torch.tensor([0, 2, 4])}, "must run from 0 to T=5; it runs from 0 to 4"),
    ({"cu_seqlens": torch.tensor([0, 2, 2, 5])}, "sequence 1 has length 0"),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "'cu_seqlens' must be integers"),
    (
        {"tokens": {"loss_mask": torch.ones(4)}},
        r"token field 'loss_mask' must be \[T=5, ...\]; got float32 \[4\]",
    ),
    ({"sequences": {"reward": torch.ones(3)}}, r"sequence field 'reward' must be \[B=2"),
    ({"meta": {"name": ["a"]}}, "meta field 'name' must have B=2 entries; it has 1"),
    ({"unit": torch.tensor([1, 1, 2])}, r"'unit' must be integers \[B=2\]"),
    ({"tokens": {"x": torch.ones(5)}, "sequences": {"x": torch.ones(2)}}, "'x' is a field of two kinds"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        SequenceBatch(**({"input_ids": IDS, "cu_seqlens": BOUNDS} | change))


def test_all_violations_come_at_once() -> None:
    with pytest.raises(BatchError, match="2 problems") as caught:
        SequenceBatch(
            input_ids=IDS, cu_seqlens=BOUNDS, tokens={"a": torch.ones(1)}, sequences={"b": torch.ones(1)}
        )
    assert "'a'" in str(caught.value) and "'b'" in str(caught.value)


ADDED: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("with_tokens", {"value": torch.rand(4)}, r"token field 'value' must be \[T=5, ...\]; got float32 \[4\]"),
    ("with_tokens", {"reward": torch.rand(5)}, "'reward' is a field of two kinds"),
    ("with_sequences", {"size": torch.rand(3)}, r"sequence field 'size' must be \[B=2, ...\]"),
    ("with_sequences", {"name": torch.rand(2)}, "'name' is a field of two kinds"),
]


@pytest.mark.parametrize(("method", "fields", "message"), ADDED)
def test_added_wrong_field_is_named(method: str, fields: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        getattr(make_batch([2, 3]), method)(**fields)


def test_an_added_mask_is_boolean() -> None:
    assert make_batch([2]).with_tokens(loss_mask=torch.tensor([0, 1])).tokens["loss_mask"].dtype == torch.bool


def test_valid_fields_are_validated_once() -> None:
    batch = make_batch([2, 3], unit=[0, 1])
    batch.input_ids[0] = -1  # a validation of the ids would raise
    added = batch.with_tokens(value=batch["value"]).with_sequences(reward=batch["reward"])
    added.select([0]).to("meta")


def test_mismatched_lengths_name_field_and_sequence() -> None:
    with pytest.raises(BatchError, match=r"token field 'logprobs' of sequence 1 has 1 values for 2 tokens"):
        SequenceBatch.from_sequences([[1], [2, 3]], tokens={"logprobs": [[0.0], [0.0]]})


def test_first_tokens_are_never_trained() -> None:
    batch = SequenceBatch.from_sequences([[1, 2, 3], [4, 5]], tokens={"loss_mask": [[1, 0, 1], [1, 1]]})
    assert batch.loss_mask.tolist() == [False, False, True, False, True]
    assert make_batch([2, 1]).loss_mask.tolist() == [False, True, False]


def test_positions_start_again_in_each_sequence() -> None:
    assert make_batch([3, 1, 2]).position_ids.tolist() == [0, 1, 2, 0, 0, 1]


def test_select_out_of_range_and_unknown_field() -> None:
    with pytest.raises(BatchError, match="cannot select sequence 2 of a batch with 2"):
        make_batch([1, 2]).select([0, 2])
    with pytest.raises(
        BatchError, match=re.escape("no field 'logprob'; it has ['index', 'reward', 'value']")
    ):
        make_batch([1])["logprob"]


def test_concat_keeps_units_and_refuses_differing_fields() -> None:
    left, right = make_batch([1, 2], unit=[7, 7]), make_batch([3, 1], unit=[7, 9])
    joined = SequenceBatch.concat([left, right])
    assert joined.unit is not None
    groups = [int(number) for number in joined.unit]
    assert groups[0] == groups[1] and len({groups[1], groups[2], groups[3]}) == 3
    with pytest.raises(BatchError, match=r"batch 1 and batch 0 differ in the fields \['unit'\]"):
        SequenceBatch.concat([left, make_batch([1])])


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=8) | st.lists(
    st.integers(WHOLE_FROM, WHOLE_FROM + 9), min_size=1, max_size=4
)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_select_and_concat_are_inverse(lengths: list[int], random: Any) -> None:
    batch = make_batch(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = batch.select(order)
    assert shuffled.lengths == [lengths[i] for i in order]
    back = [order.index(i) for i in range(len(order))]
    assert same(shuffled.select(back), batch)
    parts = [shuffled.select([i]) for i in back]
    assert same(SequenceBatch.concat(parts), batch)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_selected_sequences_may_repeat(lengths: list[int], random: Any) -> None:
    batch = make_batch(lengths)
    order = [random.randrange(len(lengths)) for _ in lengths]
    assert same(batch.select(order), SequenceBatch.concat([batch.select([index]) for index in order]))


@given(LENGTHS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_split_selects_each_part_and_gathers_once(lengths: list[int], count: int, random: Any) -> None:
    batch = make_batch(lengths, unit=list(range(len(lengths))))
    order = list(range(len(lengths)))
    random.shuffle(order)
    plan = [order[number::count] for number in range(count)]  # some may be empty
    parts = batch.split(plan)
    assert all(same(part, batch.select(indices)) for part, indices in zip(parts, plan, strict=True))
    for name in ("input_ids", "value"):
        tensors = [part.input_ids if name == "input_ids" else part[name] for part in parts]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert [part.unit.tolist() for part in parts if part.unit is not None] == plan
    assert batch.split([]) == []


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_nan_outside_the_mask_is_harmless(
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    values = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    result = reduce(values, mask)
    result.backward()
    assert result.item() in (4.0, 2.0)
    assert values.grad is not None and values.grad[1] == 0 and values.grad.isfinite().all()


def test_segment_sum() -> None:
    sums = segment_sum(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 4]))
    assert sums.tolist() == [1.0, 9.0]
