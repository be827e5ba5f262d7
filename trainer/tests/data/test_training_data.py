"""Prompts: damaged files, one beginning-of-sequence token, and an order that survives an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import training_support as support
from hypothesis import given, settings
from hypothesis import strategies as st

from core_rl.errors import CheckpointMismatch
from core_rl_trainer.data.batches import NumberedBatches, row_of
from core_rl_trainer.data.datasets import MixedOrder, Order, SampleDataset, ShuffledOrder
from core_rl_trainer.data.encoding import encode_prompt
from core_rl_trainer.data.kinds import PROMPTS


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return support.make_tokenizer()


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: Any) -> SampleDataset:
    rows = [{"prompt": f"{n}=", "answer": n} for n in range(10)]
    support.write_jsonl(tmp_path / "data.jsonl", rows)
    return support.read_dataset(PROMPTS, tmp_path / "data.jsonl", tokenizer)


@pytest.mark.parametrize("prompt", ["1+2=", "<s>1+2=", "<s><s>1+2=", "1+2=</s>"])
def test_prompts_begin_with_bos_without_eos(tokenizer: Any, prompt: str) -> None:
    ids = encode_prompt(support.chat_format(tokenizer), prompt)
    assert (ids[0], ids.count(support.BOS), ids.count(support.EOS)) == (support.BOS, 1, 0)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1+2="


def test_a_tokenizer_without_bos_adds_none() -> None:
    tokenizer = support.make_tokenizer()
    tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = None
    assert tokenizer.decode(encode_prompt(support.chat_format(tokenizer), "1+2=")) == "1+2="


def test_fields_of_a_row_are_never_replaced(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": "1=", "index": "gsm-7", "number": 40}
    support.write_jsonl(tmp_path / "data.jsonl", [row, row])
    dataset = support.read_dataset(PROMPTS, tmp_path / "data.jsonl", tokenizer)
    batches = NumberedBatches(dataset, 2, seed=0)
    for sample in next(batches):
        assert {name: sample[name] for name in row} == row


@settings(max_examples=30)
@given(size=st.integers(1, 20), seed=st.integers(0, 50), drawn=st.integers(0, 45))
def test_the_order_goes_on_where_it_was(size: int, seed: int, drawn: int) -> None:
    order = ShuffledOrder(size, seed)
    for _ in range(drawn):
        next(order)
    again = ShuffledOrder(size, seed)
    again.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert [next(again) for _ in range(2 * size)] == [next(order) for _ in range(2 * size)]


def test_each_pass_shuffles_every_sample_again() -> None:
    order = ShuffledOrder(20, seed=3)
    first, second = ([next(order) for _ in range(20)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first != [next(ShuffledOrder(20, seed=4)) for _ in range(20)]


@pytest.mark.parametrize("drawn", [0, 1, 2, 3, 7])
def test_batches_resume_at_their_position(dataset: SampleDataset, drawn: int) -> None:
    batches, resumed = (NumberedBatches(dataset, batch_size=4, seed=1) for _ in range(2))
    for _ in range(drawn):
        next(batches)
    resumed.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    assert resumed.state_dict() == batches.state_dict()
    assert [next(resumed) for _ in range(6)] == [next(batches) for _ in range(6)]


@settings(max_examples=30)
@given(
    answers=st.lists(st.sampled_from(["0.50", "1e3", '"068"', "null", "[1.0]"]), min_size=2),
    seed=st.integers(0, 9),
)
def test_named_rows_restore_samples(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, answers: list[str], seed: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}=", "answer": {text}}}\n' for n, text in enumerate(answers)))
    batches, resumed = (
        NumberedBatches(support.read_dataset(PROMPTS, path, tokenizer), 3, seed) for _ in range(2)
    )
    for sample in [*next(batches), *next(batches)]:
        again = resumed.sample_at(json.loads(json.dumps(row_of(sample))))
        assert again == sample and str(again["answer"]) == str(sample["answer"])


def test_other_number_of_samples_is_refused(dataset: SampleDataset) -> None:
    batches = NumberedBatches(dataset, 2, seed=0)
    with pytest.raises(CheckpointMismatch, match=r"had \[9\] samples .* and have \[10\] now"):
        batches.load_state_dict({**batches.state_dict(), "samples": [9]})


class StoredDataset:
    """Ten samples in the order of a run that stored ``STORED_STATES``."""

    parts = (range(10),)

    def __init__(self, order: Callable[[int], Order]) -> None:
        self.order = order

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}

    def row_of(self, index: int) -> tuple[int, int]:
        return 0, index


STORED_STATES: list[tuple[Callable[[int], Order], dict[str, Any], list[int], list[int]]] = [
    (
        lambda seed: ShuffledOrder(10, seed),
        {"position": 15},
        [6, 7, 5, 2, 9, 0, 8, 4, 3, 1, 0, 2, 5, 8, 7],
        [9, 6, 4, 3, 1, 5, 8, 0, 4, 1, 3, 2],
    ),
    (
        lambda seed: MixedOrder([ShuffledOrder(4, seed), ShuffledOrder(6, seed + 1)], [4, 6], [2.0, 1.0]),
        {"drawn": [10, 5], "parts": [{"position": 10}, {"position": 5}]},
        [2, 9, 1, 3, 7, 0, 0, 8, 2, 3, 6, 1, 1, 5, 2],
        [3, 4, 0, 3, 8, 2, 0, 5, 1, 2, 6, 3],
    ),
]
"""Order, state after five batches of three, and the samples before and after it."""


@pytest.mark.parametrize(("order", "state", "before", "after"), STORED_STATES)
def test_batches_resume_from_stored_state(
    order: Callable[[int], Order], state: dict[str, Any], before: list[int], after: list[int]
) -> None:
    dataset = cast("SampleDataset", StoredDataset(order))
    batches, resumed = (NumberedBatches(dataset, 3, seed=7) for _ in range(2))
    assert [sample["index"] for _ in range(5) for sample in next(batches)] == before
    resumed.load_state_dict({"drawn": 15, "order": state, "samples": [10]})
    assert [sample["index"] for _ in range(4) for sample in next(resumed)] == after
