"""Images of sequences: no operation on batches loses, moves or copies them, and wrong ones are named."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl.backend.steps import MicroBatches
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import NO_MEDIA, Media, count_patches, join_media
from core_rl.data.micro_batch import MicroBatchSpec, count_micro_batches, plan_micro_batches, shard
from core_rl.errors import BatchError
from core_rl.launch.messages import cut, packed, unpacked

GRID = torch.tensor([[1, 2, 2]])


def picture(value: float, patches: int = 4) -> Media:
    return {"pixel_values": torch.full((patches, 6), value), "image_grid_thw": GRID * (patches // 4)}


def pictured(patches: Sequence[int]) -> SequenceBatch:
    """Sequence ``b`` has the ids ``b`` and, unless ``patches[b]`` is 0, so many patches of the value ``b``."""
    media = [picture(b, count) if count else NO_MEDIA for b, count in enumerate(patches)]
    return SequenceBatch.from_sequences([[b] * (b % 3 + 1) for b in range(len(patches))], media=media)


def values(batch: SequenceBatch) -> list[list[int]]:
    """The id of each sequence, and the values of its patches."""
    rows = batch.input_ids.split(batch.lengths)
    media = batch.media or (NO_MEDIA,) * batch.num_sequences
    pixels = [arguments["pixel_values"][:, 0].tolist() if arguments else [] for arguments in media]
    return [[int(ids[0]), *map(int, own)] for ids, own in zip(rows, pixels, strict=True)]


def expected(patches: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    return [[b, *[b] * patches[b]] for b in order]


PATCHES = st.lists(st.sampled_from([0, 4, 8]), min_size=1, max_size=9)


@given(PATCHES, st.randoms(use_true_random=False))
def test_images_travel_with_their_sequences(patches: list[int], random: Any) -> None:
    batch = pictured(patches)
    order = random.choices(range(len(patches)), k=len(patches))
    assert values(batch.select(order)) == expected(patches, order)
    at = random.randrange(len(order) + 1)
    first, second = batch.split([order[:at], order[at:]])
    assert values(first) + values(second) == expected(patches, order)
    text = SequenceBatch.from_sequences([[90], [91]])
    assert values(SequenceBatch.concat([text, batch, text])) == [
        [90],
        [91],
        *expected(patches, range(len(patches))),
        [90],
        [91],
    ]
    assert values(batch.only([])) == expected(patches, range(len(patches)))


@given(PATCHES, st.integers(1, 4))
def test_shards_and_micro_batches_lose_no_image(patches: list[int], ranks: int) -> None:
    batch = pictured(patches)
    spec = MicroBatchSpec(max_tokens=max(batch.computed_lengths))
    parts = []
    for rank in shard(batch, ranks):
        plan = plan_micro_batches(rank, spec, count_micro_batches(rank, spec))
        parts += [rank.select(part) for part in plan]
    assert all(sum(part.computed_lengths) <= max(batch.computed_lengths) for part in parts)
    assert sorted(row for part in parts for row in values(part)) == expected(patches, range(len(patches)))


def test_text_batches_have_no_media() -> None:
    text = SequenceBatch.from_sequences([[1], [2]])
    assert text.select([1]).media == SequenceBatch.concat([text, text]).media == ()
    assert text.computed_lengths == text.lengths


def test_ranks_without_sequences_get_text() -> None:
    batch = pictured([4])
    micro_batches = MicroBatches(batch, [[], [0]], torch.device("cpu"))
    assert batch.dummy().media == ()
    assert [values(micro_batch) for micro_batch in micro_batches.items] == [[[0]], [[0, 0, 0, 0, 0]]]


def test_images_stay_on_the_cpu() -> None:
    batch = pictured([4, 0])
    moved = batch.to("meta")
    assert moved.media is batch.media and moved.input_ids.is_meta
    assert moved.select([1]).media[0] is NO_MEDIA


def test_patches_of_images_are_counted() -> None:
    whole: Media = {
        "pixel_values": torch.zeros(2, 3, 28, 30)
    }  # 4 patches of 14 x 14, and a part of another one
    assert count_patches({**picture(0.0, 8), "second_per_grid_ts": torch.ones(3)}) == 8
    assert count_patches(whole) == 2 * 5
    assert count_patches({**picture(0.0), "pixel_values_videos": torch.zeros(6, 6)}) == 4 + 6
    assert pictured([4, 0, 8]).computed_lengths == [1 + 4, 2, 3 + 8]


def test_budgets_count_patches() -> None:
    batch = pictured([4, 0, 8])
    assert count_micro_batches(batch, MicroBatchSpec(max_tokens=11)) == 2
    with pytest.raises(BatchError, match="sequence 2 has 11 tokens and patches, and max_tokens is 10"):
        count_micro_batches(batch, MicroBatchSpec(max_tokens=10))
    with pytest.raises(BatchError, match="sequence 2 has 3 tokens, and max_tokens is 2"):
        count_micro_batches(
            SequenceBatch.from_sequences([[0], [1, 1], [2, 2, 2]]), MicroBatchSpec(max_tokens=2)
        )


def test_joined_images_keep_their_order() -> None:
    joined = join_media([picture(1.0), NO_MEDIA, picture(2.0, 8)])
    assert joined["pixel_values"][:, 0].tolist() == [1.0] * 4 + [2.0] * 8
    assert joined["image_grid_thw"].tolist() == [[1, 2, 2], [2, 4, 4]]
    assert join_media([NO_MEDIA]) == {}


PIXELS = picture(0.0)["pixel_values"]
WRONG: list[tuple[Any, str]] = [
    ([picture(0.0)], "'media' must have B=2 entries, or none; it has 1"),
    ([{}, {"pixel_values": PIXELS * float("nan")}], "'pixel_values' of sequence 1 holds NaN or infinity"),
    ([{"pixel_values": PIXELS.fill_(0) / 0}, {}], "'pixel_values' of sequence 0 holds NaN or infinity"),
    ([{"pixel_values": torch.zeros(0, 6)}, {}], r"sequence 0 has no pixels \(shape \[0, 6\]\); leave"),
    ([{}, {"pixel_values": [1.0]}], r"of sequence 1 must be a tensor \[N, ...\]; it is a list"),
    ([{}, {"fps": torch.tensor(2.0)}], "'fps' of sequence 1 must be a tensor .* it is a number 2.0"),
]


@pytest.mark.parametrize(("media", "message"), WRONG)
def test_wrong_images_are_named(media: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        SequenceBatch.from_sequences([[1], [2]], media=media)


def group_of(count: int) -> tuple[SequenceBatch, int]:
    """Answers to one question about a picture, and the bytes of its pixels."""
    shared = picture(1.0, 4096)
    rows = SequenceBatch.from_sequences([[b] for b in range(count)], media=[shared] * count)
    return SequenceBatch.concat([rows, SequenceBatch.from_sequences([[99]])]), shared["pixel_values"].nbytes


def test_shared_image_is_pickled_once() -> None:
    batch, size = group_of(8)
    data = pickle.dumps(batch)
    assert size < len(data) < size + 8192
    media = pickle.loads(data).media
    assert all(one is media[0] for one in media[:8]) and media[8] == {}


def test_shared_image_is_sent_once() -> None:
    batch, size = group_of(8)
    for part, images in zip(cut(batch, [[0, 2, 4, 8], [1, 3], [8]]), (1, 1, 0), strict=True):
        buffers = packed(part)
        sent = sum(memoryview(buffer).nbytes for buffer in buffers)
        assert images * size <= sent < images * size + 8192
        restored: SequenceBatch = unpacked(buffers)
        assert len({id(media) for media in restored.media if media}) == images
        assert values(restored) == values(part)
