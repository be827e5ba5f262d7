"""Tiny models and rows that stand where pages and recipes look for them."""

from __future__ import annotations

from pathlib import Path

from arithmetic_support import load_example

from core_rl_conformance.inputs.tiny_models import TinyModel, build


def write_tiny_model(directory: Path) -> None:
    """A model that was not trained, with the tokenizer of the arithmetic example."""
    build(TinyModel(family="qwen3")).save_pretrained(directory)
    load_example().make_tokenizer().save_pretrained(directory)


def write_arithmetic_start(directory: Path) -> None:
    """``model``, ``train.jsonl`` and ``eval.jsonl`` of the arithmetic example."""
    write_tiny_model(directory / "model")
    example = load_example()
    settings = example.Settings(engine="reference", seed=0, largest=9, held_out=16)
    train, held_out = example.make_problems(settings)
    example.write_problems(directory / "train.jsonl", train)
    example.write_problems(directory / "eval.jsonl", held_out)
