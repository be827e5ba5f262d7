"""Images of examples: their places, their tokens, and files that cannot be used."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shapes_support import shapes

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.batches import demonstration_batch, preference_batch
from core_rl_trainer.data.config import DataSection
from core_rl_trainer.data.image_files import image_name, read_image, to_rgb
from core_rl_trainer.data.kinds import DEMONSTRATIONS, PREFERENCES, PROMPTS, ExampleKind
from core_rl_trainer.data.plain import MEDIA
from core_rl_trainer.data.tokenizers import load_tokenizer, marked_text
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
    return load_path(model, data, kind, vision, **section)


def load_path(
    model: Path, data: Path, kind: ExampleKind = PROMPTS, vision: bool = True, **section: Any
) -> TrainingData:
    return load_training_data(
        DataSection(train=str(data), **section),
        kind,
        load_tokenizer(str(model)),
        0,
        limit=None,
        vocabulary=12,
        vision_model=str(model) if vision else None,
    )


def content(*parts: Any) -> list[dict[str, Any]]:
    """A prompt with parts of a single turn."""
    return [{"role": "user", "content": list(parts)}]


QUESTION = {"type": "text", "text": "?"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>?", "images": ["red.png"]},
        {"prompt": "<image>?", "images": "red.png", "chosen": "s", "sequences": [3]},
        {"prompt": "<image>?", "images": '["red.png"]'},
        {"prompt": "<image>?", "images": '[{"path": "red.png"}]'},
        {"prompt": "<image>?", "images": '{"path": "red.png"}'},
        {"prompt": [{"role": "user", "content": "<image>?"}], "images": ["red.png"]},
        {"prompt": content({"type": "image"}, QUESTION), "images": ["red.png"]},
        {"prompt": content({"type": "image", "index": 0}, QUESTION), "image": "red.png"},
        {"prompt": content({"type": "text", "text": "<image>"}, QUESTION), "image": "red.png"},
        {"prompt": content({"type": "image", "image": "red.png"}, QUESTION)},
        {"prompt": content({"type": "image", "path": "red.png"}, QUESTION)},
        {"prompt": content({"type": "image_url", "image_url": "red.png"}, QUESTION)},
        {"prompt": content({"type": "image_url", "image_url": {"url": "red.png"}}, QUESTION)},
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
    assert sample["images"] == [str(image)]


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
        (lambda path: path.write_bytes(png(Image.new("RGB", (24, 24)))[:-30]), "cannot be read"),
    ],
    ids=["missing", "text", "empty", "large", "truncated"],
)
def test_bad_images_are_named(
    model: Path, tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    write(tmp_path / "bad.img")
    rows: list[dict[str, Any]] = [{"prompt": "?"}, {"prompt": "<image>?", "images": ["bad.img"]}]
    with pytest.raises(BatchError, match=rf"(?s)line 2.*image 1 in 'images', '.*bad\.img'.*{message}"):
        load(model, rows, tmp_path, max_image_pixels=10_000)


@pytest.mark.parametrize("embedded", [False, True])
def test_limit_of_pixels_is_ours_alone(
    model: Path, image: Path, monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)  # Pillow warns of 24 x 24
    value = base64.b64encode(image.read_bytes()).decode() if embedded else image.name
    with catch_warnings(action="error"):
        assert load(model, [{"prompt": "<image>?", "images": [value]}], image.parent).train


USER = {"role": "user", "content": "?"}
AGAIN = {"role": "assistant", "content": "s"}


@pytest.mark.parametrize(
    ("prompt", "images", "problem"),
    [
        ("?", ["red.png"], None),
        ("?", ["red.png", "red.png"], None),
        ([USER], ["red.png", "red.png"], None),
        ([{"role": "user", "content": [{"type": "text", "text": "?"}]}], ["red.png"], None),
        ([USER, AGAIN, USER], ["red.png"], None),
        ([USER, AGAIN, USER], ["red.png", "red.png"], "2 images and 0 places"),
        ([{"role": "system", "content": "?"}], ["red.png"], "1 images and 0 places"),
    ],
)
def test_images_without_places_come_first(
    model: Path, image: Path, prompt: Any, images: list[str], problem: str | None
) -> None:
    template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    template += "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    row = {"prompt": prompt, "images": images}
    if problem is not None:
        with pytest.raises(BatchError, match=problem):
            load(model, [row], image.parent)
        return
    ids = list(load(model, [row], image.parent).train[0]["prompt_ids"])
    placeholder = load_tokenizer(str(model)).convert_tokens_to_ids("<|image_pad|>")
    places = [position for position, token in enumerate(ids) if token == placeholder]
    assert len(places) == FEATURES * len(images)
    assert places[0] == 1 + (ids[0] != ids[places[0] - 1])  # behind a BOS token, if any


def test_images_of_untrained_turns_are_read(model: Path, image: Path) -> None:
    row = {"messages": [USER, AGAIN, {"role": "user", "content": "<image>?"}], "images": ["gone.png"]}
    with pytest.raises(BatchError, match=r"gone\.png', that is not there"):
        load(model, [row], image.parent, DEMONSTRATIONS)


@pytest.mark.parametrize("value", [None, "", [], {"bytes": None, "path": None}])
def test_rows_may_have_no_image(model: Path, image: Path, value: Any) -> None:
    rows = [{"prompt": "?", "image": value}, {"prompt": "<image>?", "image": "red.png"}]
    train = load(model, rows, image.parent).train
    assert [sample.get("images") for sample in (train[0], train[1])] == [None, [str(image)]]


@pytest.mark.parametrize("value", ["red.png", {"bytes": "/9j/4AAQ", "path": None}])
def test_unread_columns_of_images_are_refused(model: Path, image: Path, value: Any) -> None:
    with pytest.raises(BatchError, match=r"one in the column 'img'.*data\.columns\.images=img"):
        load(model, [{"prompt": "?", "img": value}], image.parent)


def test_digest_follows_bytes_of_images(model: Path, image: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "<image>?", "images": ["red.png"]}, {"prompt": "?"}]
    before = load(model, rows, image.parent).digests()
    assert list(before) == ["data.train.0.images"]
    times = image.stat()
    os.utime(image, (0, 0))
    assert load(model, rows, image.parent).digests() == before
    content = bytearray(image.read_bytes())
    Image.new("RGB", (24, 24), "blue").save(image)
    os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load(model, rows, image.parent).digests() != before
    (image.parent / "moved").mkdir()
    (image.parent / "moved/red.png").write_bytes(content)
    assert load(model, rows, image.parent / "moved").digests() == before


# ------------------------------------------------------------------- pictures

COLOURS = ("RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "L", "1", "P")
ALPHAS = ("RGBA", "RGBa", "LA", "La", "PA")
DEPTHS = ("I;16", "I;16B", "I;16L")
FILES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"),
    "TIFF": ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I;16B"),
    "JPEG2000": ("L", "LA", "RGB", "RGBA", "CMYK", "I;16"),
    "TGA": ("L", "LA", "P", "RGB", "RGBA"),
}
"""Modes that a format keeps without loss."""


def picture(mode: str, seed: int) -> Image.Image:
    """Noise of 6 x 5 pixels in a mode of Pillow."""
    random = np.random.default_rng(seed)
    if mode in DEPTHS:
        values = random.integers(0, 65536, (5, 6)).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, (6, 5), values.tobytes())
    image = Image.fromarray(random.integers(0, 256, (5, 6, 4), dtype=np.uint8))
    if mode in ("P", "PA"):
        indexed = image.convert("RGB").quantize(8)
        return indexed if mode == "P" else Image.merge("PA", (indexed, image.getchannel("A")))
    if mode in ("LA", "La"):
        return image.convert("LA").convert(mode)
    return image.convert("RGB").convert(mode) if mode not in ("RGBA", "RGBa") else image.convert(mode)


def over_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Colours ``[H, W, 3]`` with opacities ``[H, W]``, both of 8 bits, on white."""
    opacity = alpha[..., None] / 255
    return np.rint(rgb * opacity + 255 * (1 - opacity))


def expected(image: Image.Image) -> np.ndarray:
    """The picture ``[H, W, 3]`` that the page *Train on images* states."""
    if image.mode in DEPTHS:
        return np.rint(np.asarray(image)[..., None].repeat(3, axis=2) / 257.0)
    if image.mode in ALPHAS:
        straight = image.convert("LA") if image.mode == "La" else image
        rgba = np.asarray(straight.convert("RGBA")).astype(float)
        return over_white(rgba[..., :3], rgba[..., 3])
    return np.asarray(image.convert("RGB")).astype(float)


def difference(image: Image.Image, values: np.ndarray) -> float:
    return float(np.abs(np.asarray(image).astype(float) - values).max())


@settings(max_examples=60)
@given(mode=st.sampled_from((*COLOURS, *ALPHAS, *DEPTHS)), seed=st.integers(0, 2**32 - 1))
def test_each_mode_becomes_rgb_over_white(mode: str, seed: int) -> None:
    image = picture(mode, seed)
    rgb = to_rgb(image)
    assert rgb.mode == "RGB"
    assert difference(rgb, expected(image)) <= (1 if mode in ALPHAS else 0)


@pytest.mark.parametrize(
    ("file_format", "mode"), [(name, mode) for name, modes in FILES.items() for mode in modes]
)
def test_each_format_keeps_the_rule(file_format: str, mode: str) -> None:
    content, image = BytesIO(), picture(mode, 7)
    image.save(content, file_format, **({"irreversible": False} if file_format == "JPEG2000" else {}))
    rgb = read_image(content.getvalue(), 1000)
    assert difference(rgb, expected(image)) <= (1 if mode in ALPHAS else 0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "I;16"])
def test_transparent_colours_become_white(mode: str) -> None:
    image, content = picture(mode, 3), BytesIO()
    key = image.getpixel((0, 0))
    image.save(content, "PNG", transparency=key)
    values = expected(image)
    pixels = np.array([[image.getpixel((x, y)) == key for x in range(6)] for y in range(5)])
    values[pixels] = 255
    assert difference(read_image(content.getvalue(), 1000), values) == 0


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize(("depth", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
def test_transparent_colours_have_the_depth_of_the_file(depth: int, channels: int) -> None:
    most = 2**depth - 1
    values = np.random.default_rng(depth).integers(0, most + 1, (9, channels))
    bits = "".join(f"{value:0{depth}b}" for value in values.flatten())
    row = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    content = b"\x89PNG\r\n\x1a\n" + chunk(
        b"IHDR", struct.pack(">IIBBBBB", 9, 1, depth, channels - 1, 0, 0, 0)
    )
    content += chunk(b"tRNS", values[4].astype(">u2").tobytes())
    content += chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    rgb = values * 255 / most if depth < 16 or channels == 1 else values >> 8
    rgb = np.where((values == values[4]).all(1, keepdims=True), 255, np.rint(rgb))
    assert difference(read_image(content, 1000), np.broadcast_to(rgb, (1, 9, 3))) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    from transformers.image_utils import load_image

    content, image, exif = BytesIO(), picture("RGB", 1), Image.Exif()
    exif[0x0112] = orientation
    image.save(content, "PNG", exif=exif)
    upright = load_image(base64.b64encode(content.getvalue()).decode())
    assert difference(read_image(content.getvalue(), 1000), np.asarray(upright).astype(float)) == 0


@pytest.mark.parametrize("mode", ["F", "I"])
def test_values_of_32_bits_are_refused(mode: str) -> None:
    content = BytesIO()
    Image.new(mode, (4, 4), 70_000).save(content, "TIFF")
    with pytest.raises(BatchError, match=f"32 bits .Pillow's mode {mode}.*save it with 8 or 16 bits"):
        read_image(content.getvalue(), 1000)


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_several_frames_are_refused(file_format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    content = BytesIO()
    frames[0].save(content, file_format, save_all=True, append_images=frames[1:])
    with pytest.raises(BatchError, match="2 frames"):
        read_image(content.getvalue(), 1000)
    content = BytesIO()
    frames[0].save(content, "MPO", save_all=True, append_images=frames[1:], quality=100)
    assert difference(read_image(content.getvalue(), 1000), np.array([255.0, 0, 0])) <= 3


# -------------------------------------------------------------------- sources


def png(image: Image.Image) -> bytes:
    content = BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def encoded(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


SOURCES: dict[str, Callable[[Image.Image, Path], Any]] = {
    "absolute path": lambda _, path: str(path),
    "relative path": lambda _, path: path.name,
    "file URI": lambda _, path: path.as_uri(),
    "path in an object": lambda _, path: {"bytes": None, "path": path.name},
    "bytes": lambda image, _: png(image),
    "bytes in an object": lambda image, _: {"bytes": png(image), "path": "gone.png"},
    "base64 in an object": lambda image, _: {"bytes": encoded(image)},
    "data URI": lambda image, _: f"data:image/png;base64,{encoded(image)}",
    "base64": lambda image, _: encoded(image),
    "OpenAI's URL": lambda image, _: {"url": f"data:image/png;base64,{encoded(image)}"},
    "Anthropic's source": lambda image, _: {"source": {"type": "base64", "data": encoded(image)}},
    "array": lambda image, _: np.asarray(image),
    "lists": lambda image, _: np.asarray(image).tolist(),
    "picture": lambda image, _: image,
}


ARRAYS = ("array", "lists")
"""Sources without modes of Pillow."""
PATHS = sorted(SOURCES.keys() - {*ARRAYS})


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        *((source, mode) for source in ARRAYS for mode in ("RGB", "RGBA", "L")),
        *((source, mode) for source in PATHS for mode in FILES["PNG"]),
        *(("picture", mode) for mode in sorted({*COLOURS, *ALPHAS, *DEPTHS} - {*FILES["PNG"]})),
    ],
)
def test_each_source_gives_the_picture(tmp_path: Path, source: str, mode: str) -> None:
    image = picture(mode, 5)
    if source != "picture":
        (tmp_path / "a b.png").write_bytes(png(image))
    value = SOURCES[source](image, tmp_path / "a b.png")
    name = image_name(value, "image 1 in 'images'", "row 3, image 1", tmp_path)
    assert difference(read_image(name.source, 1000), expected(image)) <= (1 if mode in ALPHAS else 0)
    assert str(name) in (str(tmp_path / "a b.png"), "row 3, image 1 (PNG, 6 x 5)")


@pytest.mark.parametrize(
    "white", [np.uint8(255), np.uint16(65535), np.float32(1), np.float64(1), np.int64(255)]
)
@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_each_array_is_scaled_to_8_bits(white: Any, channels: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).random((5, 6, *channels))
    array = (values * white).astype(white.dtype)
    name = image_name(array, "", "", None)
    scaled = np.rint(array * (255 / float(white)))
    scaled = scaled.reshape(5, 6, -1)
    rgb = (
        over_white(scaled[..., :3], scaled[..., 3])
        if channels == (4,)
        else np.broadcast_to(scaled, (5, 6, 3))
    )
    assert difference(read_image(name.source, 1000), rgb) <= (1 if channels == (4,) else 0)


def test_relative_paths_of_the_hub_are_refused() -> None:
    with pytest.raises(BatchError, match=r"'a\.png' in a dataset of the Hub.*hf download"):
        image_name("a.png", "image 1 in 'images'", "row 3", None)


def test_paths_of_no_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in (tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(BatchError, match="is no file"):
            read_image(str(path), 1000)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert image_name("~/a.png", "", "", Path("/data")) == str(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://x.org/a.png", "the URL 'https://x.org/a.png', and nothing is downloaded"),
        ("s3://bucket/a.png", "nothing is downloaded"),
        ("data:image/png;base64,%%%", "is no base64"),
        ("", "empty text"),
        ({"bytes": None, "path": None}, "neither 'bytes' nor 'path'"),
        (None, "is None"),
        ([[1, 2], [3]], "not equally long"),
        ([[1.5, 0.5]], r"array of float64 of shape \[1, 2\] with values from 0.5 to 1.5"),
        ([[256, 0]], "array of int64"),
        ({"x": "y" * 100_000}, r"characters\)"),
        (["a.png"], "has no numbers; write one list of all images"),
        ([[]], "of shape"),
    ],
)
def test_values_that_are_no_images_are_refused(value: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message) as caught:
        image_name(value, "image 1 in 'images'", "row 3, image 1", Path())
    assert len(str(caught.value)) < 500


def table(directory: Path, rows: list[dict[str, Any]], features: datasets.Features | None = None) -> Path:
    path = directory / "rows.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    return path


@pytest.mark.parametrize("nested", [False, True], ids=["one", "list"])
@pytest.mark.parametrize("feature", [datasets.Image(), datasets.Value("binary")], ids=["feature", "bytes"])
def test_tables_with_embedded_images_are_read(
    model: Path, tmp_path: Path, feature: Any, nested: bool
) -> None:
    content = png(Image.new("RGB", (24, 24), "red"))
    value: Any = content if isinstance(feature, datasets.Value) else {"bytes": content, "path": None}
    column = "images" if nested else "image"
    features = datasets.Features(
        {"prompt": datasets.Value("string"), column: datasets.List(feature) if nested else feature}
    )
    path = table(tmp_path, [{"prompt": "<image>?", column: [value] if nested else value}], features)
    sample = load_path(model, path).train[0]
    assert sample["prompt"] == "<image>?"
    assert [str(image) for image in sample["images"]] == ["row 1, image 1 (PNG, 24 x 24)"]
    assert sample["images"][0].content == content


# ------------------------------------------------------------------ sequences


def test_sequences_have_images_up_to_their_end(model: Path, image: Path) -> None:
    Image.new("RGB", (24, 24), "blue").save(image.parent / "blue.png")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '' }}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "s"},
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "<image>?"},
    ]
    row = {"messages": turns, "images": ["red.png", "blue.png", "red.png"]}
    train = load(model, [row], image.parent, DEMONSTRATIONS).train
    red, both = train[0][MEDIA]
    assert [len(media["image_grid_thw"]) for media in (red, both)] == [1, 2]
    assert torch.equal(both["pixel_values"][:36], red["pixel_values"])
    assert [len(media["image_grid_thw"]) for media in demonstration_batch([train[0]]).media] == [1, 2]
    assert train.size(0).images == 3


def test_runs_of_placeholders_are_counted(model: Path, image: Path) -> None:
    sample = load(model, [{"prompt": "<image>?", "images": ["red.png"]}], image.parent).train[0]
    text = marked_text(
        load_tokenizer(str(model)), (sample["prompt_ids"], [False] * len(sample["prompt_ids"]))
    )
    assert f"<|image_pad|> ×{FEATURES}<|vision_end|>" in text  # noqa: RUF001


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"prompt": "<image>?"}, PROMPTS, "0 images and 1 places.*data.columns.images=COLUMN"),
        ({"prompt": "<image 1>?", "images": ["red.png"]}, PROMPTS, "1 images and 0 places"),
        ({"prompt": "<image><image>?", "images": ["red.png"]}, PROMPTS, "1 images and 2 places"),
        ({"prompt": content({"type": "image"})}, PROMPTS, "0 images and 1 places"),
        ({"prompt": "<image>?", "images": [7]}, PROMPTS, "image 1 in 'images' that is 7; write a path"),
        ({"prompt": "<image><|image_pad|>?", "images": ["red.png"]}, PROMPTS, "spells the placeholder"),
        ({"prompt": "<img>?", "image": "red.png"}, PROMPTS, "1 images and 0 places"),
        (
            {"prompt": "<img>red.png</img>\n?"},
            PROMPTS,
            "path 'red.png' .* write '<image>' there, and the path in",
        ),
        ({"prompt": "<image>", "image": "red.png", "images": ["red.png"]}, PROMPTS, "'images' and 'image'"),
        ({"prompt": "?", "answer": "<image>"}, DEMONSTRATIONS, "a text that the model writes"),
        ({"text": "<image>", "image": "red.png"}, DEMONSTRATIONS, "a text that the model writes"),
        (
            {"prompt": content({"type": "image", "image": "red.png", "max_pixels": 9})},
            PROMPTS,
            "an image with 'max_pixels'",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_unused_images_and_places_are_refused(
    model: Path, image: Path, row: dict[str, Any], kind: ExampleKind, message: str, first: bool
) -> None:
    good = {"prompt": "?", "answer": "s"}
    with pytest.raises(BatchError, match=rf"(?s)rows\.jsonl.*line {1 if first else 2}.*{message}"):
        load(model, [row, good] if first else [good, row], image.parent, kind)


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        ({"prompt": "?", "image": "red.png"}, True),
        ({"prompt": "<image>?", "image": "red"}, True),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, True),
        ({"prompt": "s"}, False),
        ({"prompt": "s", "image": "ubuntu:22.04"}, False),
        ({"prompt": "s", "images": []}, False),
    ],
)
def test_text_models_refuse_only_images(model: Path, image: Path, row: dict[str, Any], refused: bool) -> None:
    if not refused:
        assert len(load(model, [row], image.parent, vision=False).train) == 1
        return
    with pytest.raises(BatchError, match=r"trained on text alone; set model\.vision=true"):
        load(model, [row], image.parent, vision=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"has no image processor that works.*copy preprocessor_config\.json"),
        ({"patch_size": 8}, "patch_size = 8, and the model has"),
        ({"merge_size": 1}, "merge_size = 1, and the model"),
        ({"image_processor_type": "CLIPImageProcessor"}, "gives no 'image_grid_thw'"),
        ({"image_mean": [0.5], "image_std": [0.5]}, "no image processor that works: mean must"),
    ],
)
def test_processor_of_another_model_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    file = copy / "preprocessor_config.json"
    config = json.loads(file.read_text())
    file.unlink()
    if change is not None:
        file.write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        load(copy, [{"prompt": "?"}], tmp_path)
