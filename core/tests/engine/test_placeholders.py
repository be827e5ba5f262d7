"""Placeholders against images: each problem is named with its sequence, before a model computes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.data.media import Media
from core_rl.engine.placeholders import placeholder_violations

IMAGE = 50


class Vision(PretrainedConfig):
    def __init__(self, spatial_merge_size: int | None = None) -> None:
        super().__init__()
        if spatial_merge_size is not None:
            self.spatial_merge_size = spatial_merge_size


class Model(PretrainedConfig):
    """The fields of a config that placeholders depend on."""

    def __init__(self, vision: Vision, **each: int) -> None:
        super().__init__()
        self.image_token_id = IMAGE
        self.vision_config = vision
        for name, value in each.items():
            setattr(self, name, value)


GRID = Model(Vision(2))
FIXED = {"InternVL": Model(Vision(), image_seq_length=4), "Gemma 3": Model(Vision(), mm_tokens_per_image=4)}


def problems(
    rows: Sequence[Sequence[int]], media: Sequence[Media], model: Model = GRID, vision: bool = True
) -> list[str]:
    return list(placeholder_violations([torch.tensor(row) for row in rows], media, model if vision else None))


def gridded(*sizes: tuple[int, int], patches: int | None = None) -> Media:
    grid = torch.tensor([[1, height, width] for height, width in sizes])
    return {
        "pixel_values": torch.ones(int(grid.prod(-1).sum()) if patches is None else patches, 6),
        "image_grid_thw": grid,
    }


def ids(features: int) -> list[int]:
    return [1, *[IMAGE] * features, 2]


SIZES = st.lists(st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6])), max_size=3)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(-1, 1))
def test_grids_count_placeholders(images: list[list[tuple[int, int]]], surplus: int) -> None:
    media = [gridded(*sizes) if sizes else {} for sizes in images]
    counts = [sum(height * width // 4 for height, width in sizes) for sizes in images]
    rows = [ids(count) for count in counts]
    assert problems(rows, media) == []
    rows[-1] = ids(max(0, counts[-1] + surplus))
    assert len(problems(rows, media)) == (len(rows[-1]) != counts[-1] + 2)


@pytest.mark.parametrize("family", FIXED)
def test_each_image_has_equal_features(family: str) -> None:
    two: Media = {"pixel_values": torch.ones(2, 3, 8, 8)}
    assert problems([ids(8), ids(0)], [two, {}], FIXED[family]) == []
    assert problems([ids(4), ids(0)], [two, {}], FIXED[family]) == [
        "sequence 0 has 4 placeholders (token 50) for 8 features of its images; take ids and images from one call of "
        "the processor"
    ]


@pytest.mark.parametrize("family", FIXED)
def test_grids_are_for_models_of_patches(family: str) -> None:
    reported = problems(
        [ids(4)], [{**gridded((2, 2)), "pixel_values": torch.ones(1, 3, 8, 8)}], FIXED[family]
    )
    assert reported == [
        "sequence 0: the media have image_grid_thw, and images of the model type '' are pixel_values; leave out the "
        "rest"
    ]


WITHOUT_GRID: Media = {"pixel_values": torch.ones(4, 6)}
WRONG: dict[str, tuple[Media, int, str]] = {
    "no image": ({}, 1, "sequence 1 has 1 placeholders (token 50) for 0 features of its images; take ids"),
    "no placeholder": (gridded((2, 2)), 0, "sequence 1 has 0 placeholders (token 50) for 1 features"),
    "no grid": (
        WITHOUT_GRID,
        1,
        "sequence 1: 'image_grid_thw' must be [images, 3] next to 'pixel_values'; it is none",
    ),
    "flat grid": (
        {**WITHOUT_GRID, "image_grid_thw": torch.tensor([1, 2, 2])},
        1,
        "sequence 1: 'image_grid_thw' must be [images, 3] next to 'pixel_values'; it is [3]",
    ),
    "short grid": (
        {**WITHOUT_GRID, "image_grid_thw": torch.tensor([[2, 2]])},
        1,
        "sequence 1: 'image_grid_thw' must be [images, 3] next to 'pixel_values'; it is [1, 2]",
    ),
    "other grid": (
        gridded((4, 2), patches=4),
        2,
        "sequence 1: 'pixel_values' has 4 patches, and 'image_grid_thw' [[1, 4, 2]] is of 8",
    ),
    "odd grid": (
        gridded((3, 4)),
        3,
        "sequence 1: 'image_grid_thw' [[1, 3, 4]] has sides that 2 does not divide",
    ),
    "only a grid": (
        {"image_grid_thw": torch.tensor([[1, 2, 2]])},
        0,
        "sequence 1: 'image_grid_thw' is there without 'pixel_values'; pass both",
    ),
    "a video": (
        {"pixel_values_videos": torch.ones(4, 6), "video_grid_thw": torch.tensor([[1, 2, 2]])},
        0,
        "sequence 1: the media have pixel_values_videos, video_grid_thw; pass the frames of a video as images",
    ),
    "kinds of tokens": (
        {**gridded((2, 2)), "mm_token_type_ids": torch.ones(1, 3)},
        1,
        "sequence 1: the media have mm_token_type_ids, and images of the model type '' are image_grid_thw, pixel",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_image_is_named(case: str) -> None:
    media, features, message = WRONG[case]
    reported = problems([ids(1), ids(features)], [gridded((2, 2)), media])
    assert len(reported) == 1 and reported[0].startswith(message), reported


def test_every_sequence_is_reported() -> None:
    reported = problems([ids(1), ids(1), ids(2)], [{}, gridded((2, 2)), {}])
    assert [message.split(" has")[0] for message in reported] == ["sequence 0", "sequence 2"]


def test_batches_without_media_have_no_placeholders() -> None:
    assert problems([ids(0)], []) == []
    assert problems([ids(0), ids(3)], [])[0].startswith(
        "sequence 1 has 3 placeholders (token 50) for 0 features"
    )


@pytest.mark.parametrize("model", [GRID, PretrainedConfig()])
def test_text_engine_refuses_images(model: Model) -> None:
    """Whatever its model: some checkpoints with a tower are trained as text."""
    reported = problems([ids(0), ids(1)], [{}, gridded((2, 2))], model, vision=False)
    assert reported == [
        "sequence 1 has images, and this engine computes text alone; set model.vision to true, with a "
        "vision-language model"
    ]
    assert problems([ids(0), ids(1)], [{}, {}], model, vision=False) == []


def test_rows_may_be_tensors_of_any_integers() -> None:
    row: Tensor = torch.tensor(ids(1), dtype=torch.int32)
    assert not list(placeholder_violations([row], [gridded((2, 2))], GRID))
