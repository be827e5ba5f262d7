"""Everything that the recipes of shapes start from, drawn here: images, prompts, a tokenizer, a tiny vision model.

    python examples/shapes/prepare.py [--output runs/shapes/start] [--seed 0]

Each image has a shape of some colour in some place, and the prompt asks for its initial. Nothing but the image tells:
``eval_shuffled.jsonl`` has the prompts and answers of ``eval.jsonl`` with the images of other rows. The model has
random weights.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SHAPES = {"s": "square", "c": "circle", "x": "cross", "t": "triangle"}
SIDE = 24
"""Pixels of an image in height and width."""
PATCH, MERGE = 4, 2


@dataclass(frozen=True)
class Drawing:
    """One image and its answer."""

    answer: str
    corner: tuple[int, int]
    size: int
    colour: tuple[int, int, int]

    @staticmethod
    def drawn(rng: random.Random) -> Drawing:
        """A random one."""
        size = rng.randint(12, 18)
        corner = (rng.randint(1, SIDE - size - 2), rng.randint(1, SIDE - size - 2))
        colour = (rng.randint(120, 255), rng.randint(120, 255), rng.randint(120, 255))
        return Drawing(rng.choice(list(SHAPES)), corner, size, colour)

    def image(self) -> Image.Image:
        """The shape on black."""
        image = Image.new("RGB", (SIDE, SIDE))
        draw = ImageDraw.Draw(image)
        (left, top), size = self.corner, self.size
        right, bottom = left + size, top + size
        match SHAPES[self.answer]:
            case "square":
                draw.rectangle((left, top, right, bottom), outline=self.colour, width=3)
            case "circle":
                draw.ellipse((left, top, right, bottom), fill=self.colour)
            case "cross":
                draw.line((left, top, right, bottom), fill=self.colour, width=3)
                draw.line((left, bottom, right, top), fill=self.colour, width=3)
            case "triangle":
                draw.polygon(((left, bottom), (right, bottom), (left + size // 2, top)), fill=self.colour)
        return image


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, and for parts of images."""
    tokens = [PAD, BOS, EOS, *VISION, "?", *SHAPES]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(VISION),
        model_max_length=64,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> Any:
    """A tiny Qwen3-VL."""
    start, image, end, video = map(tokenizer.convert_tokens_to_ids, VISION)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "pad_token_id": tokenizer.pad_token_id,
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        **ends,
    )


def write_model(path: Path, seed: int) -> None:
    """Random weights, the tokenizer and the image processor."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(model_config(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    pixels = SIDE * SIDE
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, min_pixels=pixels, max_pixels=pixels
    ).save_pretrained(path)


def write_rows(path: Path, drawings: list[Drawing], images: list[str]) -> None:
    """A prompt with an image, and the answer, on each line."""
    rows = [
        {"prompt": "<image>?", "images": [image], "answer": drawing.answer}
        for drawing, image in zip(drawings, images, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(output: Path, seed: int, trained: int, held_out: int) -> None:
    """Write images, rows and ``model`` to ``output``."""
    rng = random.Random(seed)
    (output / "images").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", trained), ("eval", held_out)):
        drawings = [Drawing.drawn(rng) for _ in range(count)]
        images = [f"images/{name}-{number}.png" for number in range(count)]
        for drawing, image in zip(drawings, images, strict=True):
            drawing.image().save(output / image)
        write_rows(output / f"{name}.jsonl", drawings, images)
        if name == "eval":
            rng.shuffle(images)
            write_rows(output / "eval_shuffled.jsonl", drawings, images)
    write_model(output / "model", seed)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prepare the example of shapes.")
    parser.add_argument("--output", type=Path, default=Path("runs/shapes/start"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", type=int, default=1024, help="images to train on")
    parser.add_argument("--held-out", type=int, default=256, help="images for evaluation")
    arguments = parser.parse_args()
    prepare(arguments.output, arguments.seed, arguments.trained, arguments.held_out)
    Console(highlight=False, soft_wrap=True).print(
        f"{arguments.output}: {arguments.trained} images to train on, {arguments.held_out} for evaluation, and a model"
    )


if __name__ == "__main__":
    main()
