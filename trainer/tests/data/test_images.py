"""Images of examples: their places, their tokens, and files that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shapes_support import shapes

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.batches import demonstration_batch, preference_batch
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.kinds import DEMONSTRATIONS, MEDIA, PREFERENCES, PROMPTS, ExampleKind
from core_rl_trainer.data.tokenizers import load_tokenizer
from core_rl_trainer.data.training_data import TrainingData, load_training_data

FEATURES = 9
"""Features of one image of the example."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with its tokenizer and image processor."""
    path = tmp_path_factory.mktemp("model")
    shapes().write_model(path, seed=0)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.new("RGB", (24, 24), "red").save(tmp_path / "red.png")
    return tmp_path / "red.png"


def load(
    model: Path,
    rows: list[dict[str, Any]],
    directory: Path,
    kind: ExampleKind = PROMPTS,
    vision: bool = True,
    **section: Any,
) -> TrainingData:
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_training_data(
        DataSection(train=str(data), **section),
        kind,
        load_tokenizer(str(model)),
        0,
        limit=None,
        budget=1000,
        vocabulary=12,
        vision_model=str(model) if vision else None,
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>?", "images": ["red.png"]},
        {"prompt": "<image>?", "images": "red.png"},
        {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["red.png"]},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            "images": ["red.png"],
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "?"}],
                }
            ]
        },
    ],
)
def test_each_form_of_images_is_read(model: Path, image: Path, row: dict[str, Any]) -> None:
    tokenizer_config = model / "chat_template.jinja"
    tokenizer_config.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    sample = load(model, [row], image.parent).train[0]
    tokenizer = load_tokenizer(str(model))
    start, placeholder, end = map(
        tokenizer.convert_tokens_to_ids, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    )
    ids = list(sample["prompt_ids"])
    assert ids[-FEATURES - 3 :] == [
        start,
        *[placeholder] * FEATURES,
        end,
        tokenizer.convert_tokens_to_ids("?"),
    ]
    assert sample[MEDIA][0]["image_grid_thw"].tolist() == [[1, 6, 6]]
    assert sample[MEDIA][0]["pixel_values"].shape == (36, 96)


def test_batches_have_images_of_their_sequences(model: Path, image: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>?", "images": ["red.png"], "answer": "s"},
        {"prompt": "?", "answer": "c"},
    ]
    train = load(model, rows, image.parent, DEMONSTRATIONS).train
    batch = demonstration_batch([train[0], train[1]])
    assert [sorted(media) for media in batch.media] == [["image_grid_thw", "pixel_values"], []]
    assert batch.lengths == [FEATURES + 6, 4]
    assert batch.loss_mask.sum() == 4
    assert train.size(0).largest_unit == FEATURES + 6 + 36
    pair = load(
        model,
        [{"prompt": "<image>?", "images": ["red.png"], "chosen": "s", "rejected": "c"}],
        image.parent,
        PREFERENCES,
    ).train[0]
    assert preference_batch([pair]).media[0] is preference_batch([pair]).media[1]


def test_equal_images_are_held_once(model: Path, image: Path) -> None:
    rows = [{"prompt": "<image>?", "images": ["red.png"], "answer": answer} for answer in "sc"]
    train = load(model, rows, image.parent, DEMONSTRATIONS).train
    assert train[0][MEDIA][0] is train[1][MEDIA][0]


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (24, 24), colour) for colour in ("red", "green", "blue")]
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "is not there; correct the path"),
        (lambda path: path.write_bytes(b"no image"), "cannot be read: Pillow knows no such format"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (
            lambda path: Image.new("RGB", (101, 100)).save(path, format="PNG"),
            "101 x 100 pixels, more than data.max_image_pixels = 10000",
        ),
        (animated, r"is an animation or several pages \(3 frames\)"),
    ],
    ids=["missing", "text", "empty", "large", "animated"],
)
def test_bad_images_are_named(
    model: Path, tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / "bad.img")
    rows: list[dict[str, Any]] = [{"prompt": "?"}, {"prompt": "<image>?", "images": ["bad.img"]}]
    with pytest.raises(BatchError, match=rf"(?s)line 2.*image 1 in 'images', '.*bad\.img'.*{message}"):
        load(model, rows, tmp_path, max_image_pixels=10_000)


def test_truncated_images_are_named(model: Path, image: Path) -> None:
    image.write_bytes(image.read_bytes()[:-30])
    with pytest.raises(BatchError, match=r"red\.png', that cannot be read"):
        load(model, [{"prompt": "<image>?", "images": ["red.png"]}], image.parent)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?", "images": ["red.png"]}, "1 images and 0 places"),
        ({"prompt": "<image><image>?", "images": ["red.png"]}, "1 images and 2 places"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "0 images and 1 places",
        ),
        ({"prompt": "<image>?", "images": [7]}, "image 1 in 'images' that is 7; write a path"),
        (
            {"prompt": "<image><|image_pad|>?", "images": ["red.png"]},
            "spells the placeholder",
        ),
    ],
)
def test_wrong_places_are_refused(model: Path, image: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        load(model, [row], image.parent)


def test_text_models_refuse_images(model: Path, image: Path) -> None:
    with pytest.raises(BatchError, match=r"the model is trained on text alone; set model\.vision=true"):
        load(model, [{"prompt": "<image>?", "images": ["red.png"]}], image.parent, vision=False)


def test_missing_processor_is_named(model: Path, image: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        if file.name != "preprocessor_config.json":
            (copy / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"has no image processor.*copy preprocessor_config\.json"):
        load(copy, [{"prompt": "?"}], image.parent)
