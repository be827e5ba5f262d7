"""CPU of the driver for each completion of a GRPO rollout: request, reward, text, record and tensors.

    python benchmarks/rollout_cost.py --completions 512
    python benchmarks/rollout_cost.py --parts

The trainer's `Rollouts` draws from an engine that responds at once. Milliseconds are CPU time of all threads of the
process; wall time is not measured.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common.options import options, read
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.config.engine import InferenceEngineConfig, ModelConfig
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.engine.inference import InferenceEngine
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.data.plain import NUMBER
from core_rl_trainer.recipe.rollout import RolloutSection
from core_rl_trainer.rewards.config import RewardSection
from core_rl_trainer.run.rollouts import Rollouts, rare_collections
from core_rl_trainer.workflows.user_code import LoadedCode, open_user_code

VOCABULARY, PROMPT, COMPLETION = 1000, 8, 12
"""Ids of tokens, and tokens of a prompt and of a completion."""
SHOWN = 14
"""Modules in the table of parts."""
OURS = ("core_rl_trainer", "core_rl", "asyncio", "torch", "transformers", "threading")


class InstantBackend(InferenceBackend[InferenceEngineConfig]):
    """Responds at once."""

    version = 0

    def build(
        self,
        context: InferenceContext[InferenceEngineConfig],
        addresses: tuple[str, ...],
        ft_spec: FinetuneSpec,
    ) -> ModelLimits:
        return ModelLimits(vocab_size=VOCABULARY, context_length=None)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        count, first = request.sampling.max_new_tokens, (request.sampling.seed or 0) % VOCABULARY
        return LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=tuple((first + place) % VOCABULARY for place in range(count)),
            logprobs=(-1.0,) * count,
            versions=(self.version,) * count,
            stop_reason="length",
        )

    def set_version(self, version: int) -> None:
        self.version = version


def reward(completion: str, _: Mapping[str, Any]) -> float:
    """The reward of a completion."""
    return float(len(completion) % 7)


@contextmanager
def open_rollouts(completions: int, group: int) -> Iterator[Rollouts]:
    """Rollouts of a step of so many ``completions``, all of which run at one time."""
    prompts = completions // group
    spec = EngineSpec(
        name="instant",
        kind="inference",
        protocol=(0, 3),
        factory="x:X",
        config="x:X",
        capabilities=frozenset(),
    )
    config = InferenceEngineConfig(
        model=ModelConfig(config={"model_type": "instant"}),
        max_concurrent_rollouts=prompts,
        consumer_batch_size=prompts,
    )
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    section = RewardSection(function="benchmark:reward")
    code = LoadedCode(
        sections=(section,), rewards={section.call: reward}, environment=None, should_accept=None
    )
    settings = RolloutSection(prompts_per_step=prompts, group_size=group, max_new_tokens=COMPLETION)
    engine = InferenceEngine(spec, config, InstantBackend())
    engine.initialize()
    try:
        with (
            open_user_code(
                code, tokenizer, reward_processes=0, reward_timeout_s=None, skip_special_tokens=True
            ) as user,
            rare_collections(),
        ):
            yield Rollouts(
                engine=engine,
                user=user,
                tokenizer=tokenizer,
                settings=settings,
                seed=0,
                eval_samples=1,
                with_baseline=False,
            )
    finally:
        engine.destroy()


def batches(prompts: int) -> Iterator[list[dict[str, Any]]]:
    """Prompts of one step after the other."""
    for step in itertools.count():
        numbers = range(step * prompts, (step + 1) * prompts)
        yield [{"prompt_ids": [number % VOCABULARY] * PROMPT, NUMBER: number} for number in numbers]


def measure(completions: int, group: int, repeats: int) -> list[float]:
    """CPU milliseconds for each completion, of ``repeats`` steps after one for warming up."""
    times = []
    with open_rollouts(completions, group) as rollouts:
        data = batches(completions // group)
        for step in range(1 + repeats):
            start = time.process_time()
            rollouts.training_batch(step, data)
            times.append(1e3 * (time.process_time() - start) / completions)
            rollouts.engine.set_version(step + 1)
    return times[1:]


def parts(completions: int, group: int) -> Counter[str]:
    """The share of each module in the time of the event loop; a builtin counts for its caller."""
    profile = cProfile.Profile()
    with open_rollouts(completions, group) as rollouts:
        data = batches(completions // group)
        rollouts.training_batch(0, data)
        rollouts.engine.rollouts._loop.soon(profile.enable)
        rollouts.engine.set_version(1)
        rollouts.training_batch(1, data)
        rollouts.engine.rollouts._loop.soon(profile.disable)
    seconds = Counter[str]()
    for (file, _, _), (_, _, total, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file != "~" or not callers:
            seconds[_module(file)] += total
            continue
        for (caller, _, _), (_, _, spent, _) in callers.items():
            seconds[_module(caller)] += spent
    return seconds


def _module(file: str) -> str:
    """``core_rl_trainer/rewards/calls.py``, or the library's name."""
    places = Path(file).parts
    first = next((places.index(name) for name in OURS if name in places), None)
    if first is None:
        return Path(file).name
    return "/".join(places[first:]) if places[first].startswith("core_rl") else places[first]


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--completions", type=int, nargs="+", default=(512, 4096, 16384))
    parser.add_argument("--groups", type=int, nargs="+", default=(8, 1), help="completions of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="also the shares of modules, profiled")
    arguments = read(parser, {"completions": [64], "repeats": 1})
    torch.set_num_threads(1)
    console = Console(width=100)
    table = Table("group", "completions", "CPU ms for each", title="driver of a GRPO rollout")
    for group in arguments.groups:
        for completions in arguments.completions:
            times = measure(completions, group, arguments.repeats)
            table.add_row(str(group), f"{completions:,}", f"{statistics.median(times):.3f}")
    console.print(table)
    for group in arguments.groups if arguments.parts else ():
        shares = parts(arguments.completions[0], group)
        table = Table("module", "% of the loop", title=f"groups of {group}")
        for module, spent in shares.most_common(SHOWN):
            table.add_row(module, f"{100 * spent / shares.total():.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
