"""Images of requests, as SGLang servers of this engine read them."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load
from server_stub import engine_of

from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.servers.calls import ImageFields
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.inputs.tiny_vision import TinyImages, vision_config
from core_rl_sglang.backend import SglangWire
from core_rl_sglang.serve import IMAGES, _processed, _tell_apart

MODEL = vision_config("qwen3_vl")
SIZES = ((2, 4), (2, 2))
MEDIA = TinyImages("qwen3_vl", 0, SIZES).media()


def test_server_reads_the_tensors_sent() -> None:
    body = ImageFields(SglangWire(), MODEL).of(MEDIA)
    (sent,) = body["image_data"]
    actual = _processed(sent)
    assert isinstance(actual, dict) and actual.pop("format") == "processor_output"
    assert {name: value.tolist() for name, value in actual.items()} == {
        name: value.tolist() for name, value in MEDIA.items()
    }
    assert set(load(base64.b64decode(sent.removeprefix(IMAGES)))) == {"pixel_values", "image_grid_thw"}


def test_shared_images_are_encoded_once() -> None:
    fields = ImageFields(SglangWire(), MODEL)
    assert fields.of(MEDIA)["image_data"][0] is fields.of(MEDIA, scoring=True)["image_data"][0]


def test_scores_of_placeholders_are_asked_for() -> None:
    assert ImageFields(SglangWire(), MODEL).of(MEDIA, scoring=True)["token_ids_logprob"] == [
        MODEL.image_token_id
    ]


def test_scores_of_placeholders_replace_digests() -> None:
    image = MODEL.image_token_id
    meta = {
        "input_token_logprobs": [[None, 5, None], [-9.0, 0, None], [-1.0, 7, None]],
        "input_token_ids_logprobs": [None, [[-2.0, image, None]], [[-3.0, image, None]]],
    }
    scores = SglangWire().scores({"meta_info": meta}, [5, image, 7], 0, "server")
    assert scores.logprobs.tolist() == [-2.0, -1.0]


def test_text_has_no_fields_of_images() -> None:
    assert ImageFields(SglangWire(), MODEL).of({}) == {}


def test_equal_pixels_of_other_shapes_differ() -> None:
    pixels = torch.ones(8, 4)
    grids = [torch.tensor([[1, 2, 4]]), torch.tensor([[1, 4, 2]])]
    hashes: list[int] = []
    _tell_apart(
        [SimpleNamespace(image_grid_thw=grid, feature=pixels, set_hash=hashes.append) for grid in grids]
    )
    assert hashes[0] != hashes[1]


def test_servers_of_others_take_no_images() -> None:
    with pytest.raises(ConfigError, match="api_contract"):
        engine_of("sglang", model={"path": "model", "vision": True}, options={"addresses": ["127.0.0.1:1"]})


def test_unsupported_vision_model_is_refused(tmp_path: Path) -> None:
    model = str(ModelStore(tmp_path).directory(TinyModel(family="qwen2_5_vl")))
    with pytest.raises(UnsupportedCapability, match="qwen2_5_vl"):
        engine_of("sglang", model={"path": model, "vision": True}).initialize()
