"""A tiny model directory with a tokenizer, prompts, and recipes over them."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl_trainer.api import train
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.config import DataSource
from core_rl_trainer.data.datasets import SampleDataset, encode_examples
from core_rl_trainer.data.kinds import ExampleKind
from core_rl_trainer.data.sources import open_source
from core_rl_trainer.plan.identity import RunIdentity
from core_rl_trainer.plan.run_plan import RunFiles
from core_rl_trainer.recipe.recipe import Recipe, RecipeSource
from core_rl_trainer.run.run_directory import RunDirectory, open_run_directory

CHARACTERS = "0123456789+="
BOS, EOS = 1, 2
SHIFT = 1e-3
SHIFTED = replace(ROLLOUT_SPEC, name="shifted-rollout", factory=f"{__name__}:ShiftedRollout")


class ShiftedRollout(ReferenceRolloutBackend):
    """Reports log-probs that are too high by `SHIFT`: log-probs of the reference engines may agree to the last bit."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        response = await super().agenerate(request)
        return replace(response, logprobs=tuple(value + SHIFT for value in response.logprobs))


REWARD = '''
"""A reward that a random model can earn."""


def even_digits(answer, sample):
    return sum(character in "02468" for character in answer) / 4
'''


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each character, with the beginning-of-sequence token in front."""
    vocabulary = {token: n for n, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", BOS)]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template,
    )


def read_dataset(
    kind: ExampleKind, path: Path, tokenizer: Any, limit: int | None = None, drop: bool = False
) -> SampleDataset:
    """The encoded examples of a file."""
    source = open_source(DataSource(path=str(path)))
    return SampleDataset([encode_examples(source, kind, chat_format(tokenizer), drop, limit)])


def chat_format(tokenizer: Any) -> ChatFormat:
    """The tokenizer's chat template and its end token."""
    return ChatFormat(tokenizer=tokenizer, ends=frozenset({tokenizer.eos_token_id} - {None}))


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_start(directory: Path, head_size: int = 8) -> Path:
    """``model/``, ``train.jsonl``, ``eval.jsonl`` and ``reward.py`` in ``directory``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_size,
        max_position_embeddings=32,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(4) for b in range(5)]
    write_jsonl(directory / "train.jsonl", rows[:16])
    write_jsonl(directory / "eval.jsonl", rows[16:])
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "="} for a in range(4) for b in range(5)
    ]
    write_jsonl(directory / "pairs.jsonl", pairs[:16])
    write_jsonl(directory / "held_out_pairs.jsonl", pairs[16:])
    (directory / "reward.py").write_text(REWARD)
    return directory


def recipe_values(start: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of four short steps on the reference engine."""
    return {
        "engine": "reference",
        "model": {"path": str(start / "model")},
        "data": {"train": str(start / "train.jsonl"), "eval": str(start / "eval.jsonl")},
        "reward": f"{start / 'reward.py'}:even_digits",
        "rollout": {"prompts_per_step": 6, "group_size": 3, "max_new_tokens": 4},
        "algorithm": {"type": "ppo_actor", "args": {"kl_coef": 0.05, "minibatches": 2}},
        "optimizer": {"lr": 0.02, "schedule": {"type": "linear", "warmup_steps": 1}},
        "steps": 4,
        "save_every": 2,
        "eval_every": 3,
        "device": "cpu",
        "output_dir": str(output),
    } | changes


def supervised_values(start: Path, output: Path, algorithm: str, **changes: Any) -> dict[str, Any]:
    """A recipe of four short steps of SFT, or of DPO or a reward model on pairs."""
    pairs = algorithm in ("dpo", "reward_model")
    names = ("pairs", "held_out_pairs") if pairs else ("train", "eval")
    train, held_out = (str(start / f"{name}.jsonl") for name in names)
    return {
        "engine": "reference",
        "model": {"path": str(start / "model")},
        "data": {"train": train, "eval": held_out, "batch_size": 6},
        "algorithm": {"type": algorithm},
        "optimizer": {"lr": 0.01},
        "steps": 4,
        "save_every": 2,
        "eval_every": 3,
        "device": "cpu",
        "output_dir": str(output),
    } | changes


def write_recipe(path: Path, values: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(values)))
    return path


def run(recipe: RecipeSource, *overrides: str) -> dict[str, Any]:
    """The result of a run whose lines nobody sees."""
    return train(recipe, overrides, console=Console(file=io.StringIO(), width=200))


def curve(output: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what depends on the clock."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith("time_") and name != "tokens_per_s"
        }
        for row in rows
    ]


def run_killed(command: Sequence[str], output: Path, seed: int = 0, rows: Sequence[int] = (1, 3, 4)) -> None:
    """Run ``command``, which trains four steps into ``output``, to its end; before, ``kill -9`` ends it now and then.

    Each time somewhere in what follows so many ``rows`` of metrics, its checkpoint or the next step, as ``seed`` draws.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    draw, metrics = random.Random(seed), output / "metrics.jsonl"
    for count in rows:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < count:
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        # In its last step it may have come to its end.
        assert process.wait() == -signal.SIGKILL or count == 4
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def open_directory(recipe: Recipe) -> AbstractContextManager[RunDirectory]:
    """The directory of a run of ``recipe``, whose plan is not resolved."""
    return open_run_directory(_run_files(recipe), RunIdentity.of(recipe))


def make_directory(recipe: Recipe) -> RunDirectory:
    """As `open_directory`, without a lock."""
    return RunDirectory(_run_files(recipe), RunIdentity.of(recipe))


def _run_files(recipe: Recipe) -> RunFiles:
    return RunFiles(
        directory=recipe.directory,
        fresh=recipe.fresh,
        keep=recipe.keep,
        checkpoint_url=recipe.checkpoint_url,
        resume_from=recipe.resume_from,
    )
