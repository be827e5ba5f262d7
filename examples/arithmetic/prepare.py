"""Everything that ``examples/grpo_arithmetic.yaml`` starts from, built here: prompts, a tokenizer, a tiny model.

    python examples/arithmetic/prepare.py [--tool] [--engine fsdp] [--output runs/arithmetic/start] [--seed 0]

The problems are all sums of two numbers below 100, such as ``23+45=`` with the answer ``068``. Some are
reserved for evaluation; the model is warmed up on the others by supervised fine-tuning, until it answers about four in
ten, and left there: the rest is what GRPO is to do. A second run with the same settings does nothing.

With ``--tool`` the model of ``examples/tool_arithmetic.yaml`` is made, which cannot add: it guesses, and in every
second problem it asks a calculator, ``?23+45``, whose reply ``:068=`` it copies.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl.registry.engines import get_spec
from core_rl_trainer.algorithms import SFTConfig, SFTInterface
from core_rl_trainer.environments import ToolEnvironment, continuation_ids

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CHARACTERS = "0123456789+="
TOOL_CHARACTERS = "?:"
MICRO_BATCH = MicroBatchSpec(max_tokens=8192)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that the outcome depends on."""

    engine: str
    seed: int
    tool: bool = False
    """Whether the answers are guesses, and some ask the calculator."""
    tool_share: float = 0.5
    """The part of them that does."""
    largest: int = 99
    """The largest number in a problem."""
    held_out: int = 256
    """Problems that are never trained on."""
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    batch_size: int = 128
    lr: float = 3e-3
    warmup_steps: int = 20
    target: float = 0.35
    """Stop when a sampled answer is right with this probability; where there is a calculator,"""
    tool_target: float = 0.45
    """with this one, which means that nearly all of its replies are copied."""
    max_steps: int = 1500


@dataclass(frozen=True)
class Problem:
    """A sum, with the right answer or a guess."""

    left: int
    right: int
    guess: int | None = None

    @property
    def prompt(self) -> str:
        """Prompt of the model."""
        return f"{self.left:02d}+{self.right:02d}="

    @property
    def answer(self) -> str:
        """Correct response, or the guess."""
        return f"{self.left + self.right if self.guess is None else self.guess:03d}"

    def turns(self, tool: bool) -> list[tuple[str, bool]]:
        """Text after the prompt, and whether the model writes it: the answer, or a question and then the answer."""
        question = [(f"?{self.left:02d}+{self.right:02d}{EOS}", True), (f":{self.answer}=", False)]
        return [*(question if tool else []), (self.answer + EOS, True)]


def make_problems(settings: Settings) -> tuple[list[Problem], list[Problem]]:
    """All problems, in random order: those to train on, and the evaluation problems."""
    numbers = range(settings.largest + 1)
    problems = [Problem(left, right) for left in numbers for right in numbers]
    random.Random(settings.seed).shuffle(problems)
    return problems[settings.held_out :], problems[: settings.held_out]


def make_tokenizer(tool: bool = False) -> PreTrainedTokenizerFast:
    """One token for each character; the beginning-of-sequence token in front."""
    characters = CHARACTERS + (TOOL_CHARACTERS if tool else "")
    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=64
    )


def calculator(answer: str, _sample: Mapping[str, Any]) -> str | None:
    """The reply to a question such as ``?23+45``, or None for an answer."""
    if not answer.startswith("?"):
        return None
    question = re.fullmatch(r"\?(\d{1,4})\+(\d{1,4})", answer)
    return f":{int(question[1]) + int(question[2]):03d}=" if question else ":="


def calculator_environment(tokenizer: PreTrainedTokenizerBase) -> ToolEnvironment:
    """The environment of one episode of ``examples/tool_arithmetic.yaml``: the model may ask before it answers."""
    return ToolEnvironment(tokenizer, calculator)


def make_engine(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> EngineGroup:
    """A tiny Qwen3 with randomly drawn weights, on two ranks where the engine can be data parallel."""
    config = {
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "intermediate_size": 4 * settings.hidden_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.hidden_size // settings.heads,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    schedule = {"warmup_steps": settings.warmup_steps}
    return EngineGroup(
        settings.engine,
        model={"config": config},
        optimizer={"lr": settings.lr, "betas": (0.9, 0.98), "schedule": schedule},
        layout={"dp": 2 if get_spec(settings.engine).supports(Capability.DATA_PARALLEL) else 1},
        seed=settings.seed,
        device="cpu",
    )


def make_batch(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, tools: Sequence[bool] = ()
) -> SequenceBatch:
    """Prompt, answer and end of each problem, by way of the calculator where ``tools`` is true.

    The model's own tokens are trained.
    """
    ids, masks = [], []
    for problem, tool in zip(problems, tools or [False] * len(problems), strict=True):
        row: list[int] = list(tokenizer(problem.prompt)["input_ids"])
        mask, before = [0] * len(row), problem.prompt
        for text, trained in problem.turns(tool):
            turn = continuation_ids(tokenizer, before, text)
            before += text
            row, mask = row + turn, mask + [int(trained)] * len(turn)
        ids.append(row)
        masks.append(mask)
    return SequenceBatch.from_sequences(ids, tokens={"loss_mask": masks})


def mean_probability(sft: SFTInterface, engine: EngineGroup, batches: Sequence[SequenceBatch]) -> float:
    """The mean probability of all ways to the right answer, one in each batch: the expected reward of sampling."""
    total = 0.0
    for batch in batches:
        scored = sft.inference(engine, batch, MICRO_BATCH)
        logprobs = torch.where(scored.loss_mask, scored["logprobs"], 0.0).double()
        total += float(torch.stack([part.sum().exp() for part in logprobs.split(batch.lengths)]).mean())
    return total


def warm_up(
    settings: Settings, problems: Sequence[Problem], tokenizer_path: Path, model_path: Path, console: Console
) -> float:
    """Fine-tune a new model on ``problems`` and save it; returns the probability of a right answer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_path)
    sft, draw = SFTInterface(SFTConfig()), random.Random(settings.seed)
    probed = draw.sample(problems, 256)
    ways = [False, True] if settings.tool else [False]
    probes = [make_batch(probed, tokenizer, [tool] * len(probed)) for tool in ways]
    target, right = settings.tool_target if settings.tool else settings.target, 0.0
    with make_engine(settings, tokenizer) as engine:
        for step in range(1, settings.max_steps + 1):
            chosen = draw.sample(problems, settings.batch_size)
            tools = [settings.tool and draw.random() < settings.tool_share for _ in chosen]
            if settings.tool:
                pairs = zip(chosen, tools, strict=True)
                chosen = [p if tool else replace(p, guess=draw.randrange(200)) for p, tool in pairs]
            batch = make_batch(chosen, tokenizer, tools)
            metrics = sft.train_step(engine, batch, MICRO_BATCH)
            engine.lr_scheduler_step()
            if step % 10 == 0:
                right = mean_probability(sft, engine, probes)
                if step % 100 == 0 or right >= target:
                    console.print(f"warm-up step {step}  loss {metrics['nll']:.3f}  right {right:.3f}")
                if right >= target:
                    break
        sft.save(engine, str(model_path), tokenizer_path=str(tokenizer_path))
    return right


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Prompts and right answers."""
    write_rows(path, [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])


def write_pairs(path: Path, problems: Sequence[Problem], seed: int) -> None:
    """The right answer to each problem as ``chosen``, and a slightly wrong answer as ``rejected``."""
    draw, rows = random.Random(seed), []
    for problem in problems:
        right = int(problem.answer)
        wrong = draw.choice([n for n in range(max(0, right - 11), right + 12) if n != right])
        rows.append({"prompt": problem.prompt, "chosen": problem.answer, "rejected": f"{wrong:03d}"})
    write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """One JSON object on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(settings: Settings, output: Path, console: Console) -> None:
    """Write problems, pairs of answers to them and ``model`` to ``output``, unless they are there already."""
    done = output / "prepared.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8"))["settings"] == asdict(settings):
        console.print(f"{output} is prepared already")
        return
    output.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    train, held_out = make_problems(settings)
    write_problems(output / "train.jsonl", train)
    write_problems(output / "eval.jsonl", held_out)
    write_pairs(output / "pairs.jsonl", train, settings.seed)
    write_pairs(output / "eval_pairs.jsonl", held_out, settings.seed + 1)
    make_tokenizer(settings.tool).save_pretrained(output / "tokenizer")
    right = warm_up(settings, train, output / "tokenizer", output / "model", console)
    done.write_text(json.dumps({"settings": asdict(settings), "right": right}, indent=2), encoding="utf-8")
    console.print(f"{output}: the model answers {right:.0%} of the problems")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prepare the arithmetic example.")
    parser.add_argument("--engine", default="fsdp", help="the train engine that warms the model up")
    parser.add_argument("--tool", action="store_true", help="teach the model to ask a calculator")
    parser.add_argument(
        "--heads", type=int, default=Settings.heads, help="2 for vLLM on a CPU, which takes no smaller ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="by default runs/arithmetic/start, or tool-start there")
    arguments = vars(parser.parse_args())
    output, settings = arguments.pop("output"), Settings(**arguments)
    output = output or Path("runs/arithmetic", "tool-start" if settings.tool else "start")
    prepare(settings, output, Console(highlight=False, soft_wrap=True))


if __name__ == "__main__":  # the engine's processes import this module again
    main()
