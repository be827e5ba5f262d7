"""verl's actor update over recorded rollouts, on an engine of core-rl and on verl's own.

    python interop/verl/tests/actor_steps.py
    torchrun --nproc-per-node=2 interop/verl/tests/actor_steps.py

Prints loss and gradient norm of each step side by side, as rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import core_rl_verl.cpu  # noqa: F401  # it selects and registers the platform

# isort: split
import torch
import torch.distributed as dist
from core_rl_verl.adapter import nested_batch
from core_rl_verl.config import PREFIX, CoreRLEngineConfig
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
OURS, THEIRS = "core_rl_fsdp", "fsdp2"
COMPARED = ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss")
LIMIT = 2e-6
"""Largest `difference` of a step: float32 sums in another order, and the root of small second moments of AdamW."""


@dataclass(frozen=True)
class Rollout:
    """One prompt with a completion of ``R`` tokens, as a server and a reward recorded it."""

    prompt: Tensor
    response: Tensor
    log_probs: Tensor
    """Of the policy that drew the completion, ``[R]``."""
    advantage: float


def save_model(path: str, config: dict[str, Any]) -> PreTrainedModel:
    """A model of ``config`` with drawn weights, saved in ``path``."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32
    )
    # Larger than usual, so that log-probs differ from token to token.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def record(model: PreTrainedModel, count: int) -> list[Rollout]:
    """``count`` rollouts of ``model``, drawn token by token: 9 to 63 tokens, of which the prompt is 8 to 39."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (count, 8), generator=random)
    while ids.shape[1] < 64:
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=random)], 1)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    rollouts = []
    for row, values in zip(ids, log_probs, strict=True):
        begin, size = (
            int(torch.randint(low, high, (), generator=random)) for low, high in ((8, 40), (1, 25))
        )
        advantage = float(torch.randn((), generator=random))
        end = begin + size
        rollouts.append(Rollout(row[:begin], row[begin:end], values[begin - 1 : end - 1], advantage))
    return rollouts


def batch_of(rollouts: Sequence[Rollout], global_size: int | None = None) -> TensorDict:
    """A batch as verl's trainer passes it to `TrainingWorker.train_mini_batch`."""
    ids = [torch.cat([rollout.prompt, rollout.response]) for rollout in rollouts]
    masks = [torch.ones(len(rollout.response), dtype=torch.long) for rollout in rollouts]
    fields = {
        "prompts": [rollout.prompt for rollout in rollouts],
        "responses": [rollout.response for rollout in rollouts],
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": [rollout.log_probs for rollout in rollouts],
        "advantages": [torch.full((len(rollout.response),), rollout.advantage) for rollout in rollouts],
    }
    data = nested_batch(ids, fields)
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=global_size or len(rollouts))
    return data


def worker_of(
    path: str, strategy: str, *, attention: str = "sdpa", role: str = "language_model", **engine: Any
) -> TrainingWorker:
    """Worker of verl with the engine of ``strategy``, in float32, in micro-batches of at most 256 tokens."""
    join_world()
    kind = CoreRLEngineConfig if strategy.startswith(PREFIX) else FSDPEngineConfig
    fields = {"max_token_len_per_gpu": 256, "infer_max_token_len_per_gpu": 256, **engine}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=role,
            model_config=HFModelConfig(
                path=path,
                load_tokenizer=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": attention},
            ),
            engine_config=kind(
                strategy=strategy,
                mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                use_torch_compile=False,
                **fields,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=1e-3, lr_scheduler_type="cosine", lr_warmup_steps=2, total_training_steps=20
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def actor(path: str, strategy: str, **engine: Any) -> TrainingWorker:
    """The worker with `ppo_loss`, dual-clipped and with entropy."""
    worker = worker_of(path, strategy, **engine)
    config = ActorConfig(strategy=strategy, rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.01)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def join_world() -> None:
    """Join the world of ``torchrun``, or be a rank alone. verl asks for gloo twice where the device is the CPU."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        # Read by verl's workers.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def step(worker: TrainingWorker, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """One update of the actor with ``rollouts`` of all ranks, and the metrics that verl's trainer logs."""
    ranks = dist.get_world_size()
    data = batch_of(rollouts[dist.get_rank() :: ranks], len(rollouts))
    tu.assign_non_tensor(data, mini_batch_size=len(rollouts), calculate_entropy=True)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return {
        name: float(values[0]) for name, values in metrics.items() if not name.startswith(("perf/", "mfu"))
    }


def compared_steps(steps: int = 10, sequences: int = 16) -> Iterator[dict[str, dict[str, float]]]:
    """The metrics of each step by strategy, on the ranks of this world."""
    join_world()
    with tempfile.TemporaryDirectory() as path:
        rollouts = record(save_model(path, TINY), steps * sequences)
        workers = {name: actor(path, name) for name in (OURS, THEIRS)}
        for start in range(0, len(rollouts), sequences):
            part = rollouts[start : start + sequences]
            yield {name: step(worker, part) for name, worker in workers.items()}


def difference(metrics: dict[str, dict[str, float]]) -> float:
    """The largest difference of a step's `COMPARED` metrics, relative to values above 1.

    A loss is a mean of terms of about 1, which may cancel.
    """
    pairs = [(metrics[OURS][name], metrics[THEIRS][name]) for name in COMPARED]
    return max(abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs)


def main() -> None:
    """Run and print; exits with 1 where a step differs by more than `LIMIT`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    rows = list(compared_steps(parser.parse_args().steps))
    if dist.get_rank() == 0:
        show = Console(width=200, highlight=False).print
        show(
            f"| step | loss, core-rl | loss, verl | norm, core-rl | norm, verl | difference |\n|{' --- |' * 6}"
        )
        for number, row in enumerate(rows):
            cells = [row[side][name] for name in ("loss", "grad_norm") for side in (OURS, THEIRS)]
            texts = " | ".join(f"{cell:.7f}" for cell in cells)
            show(f"| {number + 1} | {texts} | {difference(row):.1e} |")
    largest = max(map(difference, rows))
    dist.destroy_process_group()
    if not largest <= LIMIT:
        raise SystemExit(f"a step differs by {largest:.1e}, more than {LIMIT:.0e}")


if __name__ == "__main__":
    main()
