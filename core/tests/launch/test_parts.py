"""Parts of a batch on their way to ranks, and what all ranks get alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import group_support as support
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.engine.train import TrainEngine
from core_rl.launch.messages import SMALLEST_BYTES, cut, packed, unpacked


def batch_of(lengths: list[int], with_unit: bool = True) -> SequenceBatch:
    """Every kind of field."""
    total, count = sum(lengths), len(lengths)
    return SequenceBatch(
        input_ids=torch.arange(total),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        tokens={
            "loss_mask": torch.arange(total) % 3 == 0,
            "half": torch.randn(total).bfloat16(),
            "routing": torch.arange(total * 6, dtype=torch.int16).reshape(total, 3, 2),
            "nothing": torch.zeros(total, 0),
        },
        sequences={"rewards": torch.randn(count, 2).T.contiguous().T, "group": torch.arange(count)},
        meta={"stop_reason": [f"reason {number}" for number in range(count)]},
        unit=torch.arange(count) // 2 if with_unit else None,
    )


def tensors(batch: SequenceBatch) -> dict[str, Tensor | None]:
    local = {"ids": batch.input_ids, "bounds": batch.cu_seqlens, "unit": batch.unit}
    return {**local, **batch.tokens, **batch.sequences}


def arrived(value: object) -> Any:
    """Arguments of a rank, in memory of its own."""
    return unpacked([memoryview(bytearray(part)) for part in packed(value)])


@given(
    st.lists(st.sampled_from([1, 2, 7, SMALLEST_BYTES]), max_size=7),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_parts_arrive_as_the_batches_of_a_split(
    lengths: list[int], count: int, with_unit: bool, random: Any
) -> None:
    batch = batch_of(lengths, with_unit)
    order = list(range(len(lengths)))
    random.shuffle(order)
    plan = [order[number::count] for number in range(count)]  # some may be empty
    for part, expected in zip(cut(batch, plan), batch.split(plan), strict=True):
        actual = arrived(part)
        assert type(actual) is SequenceBatch
        assert actual.meta == expected.meta
        for (name, value), (second, required) in zip(
            tensors(actual).items(), tensors(expected).items(), strict=True
        ):
            assert name == second and type(value) is type(required)
            if value is not None and required is not None:
                assert value.dtype == required.dtype and torch.equal(value, required)
                value.zero_()  # its memory is its own
    assert torch.equal(batch.input_ids, torch.arange(sum(lengths)))


def test_single_part_batch_is_not_copied() -> None:
    batch = batch_of([SMALLEST_BYTES, 3])
    _, ids, *_ = packed(cut(batch, [[0, 1]])[0])
    assert torch.frombuffer(ids, dtype=torch.long).data_ptr() == batch.input_ids.data_ptr()


class Counted:
    """A function that counts how often it is pickled."""

    times = 0

    def __call__(self, engine: TrainEngine, value: int) -> int:
        return value + support.rank_of(engine)

    def __reduce__(self) -> tuple[Callable[[], Counted], tuple[()]]:
        Counted.times += 1
        return Counted, ()


def test_shared_arguments_are_pickled_once() -> None:
    with support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120) as group:
        Counted.times = 0
        assert group.run_each(Counted(), [(10,), (20,)]) == [10, 21]
        assert Counted.times == 1
