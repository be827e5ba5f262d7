"""Log-probs and entropy over a large vocabulary, forward and backward: time and memory.

    python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --tp 2

`token_logprobs` against the float32 version that keeps its logits; with ``--tp``, each rank has a part of the
vocabulary in both. Memory is what a fresh process for each side adds to its resident set at the peak.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from common.engine import each_rank, join_group
from common.measure import compare, is_first
from common.memory import resident

from core_rl.distributed.process_group import RankAddress
from core_rl.toolkit.parallel_context import VocabularyShard
from core_rl.toolkit.token_logprobs import token_logprobs

LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The straightforward version, with all logits in memory."""
    log_p = F.linear(hidden, weight).float().log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


class AddUp(torch.autograd.Function):
    """The sum over ranks, which all use in the same way: the gradient passes."""

    @staticmethod
    def forward(_ctx: object, own: Tensor) -> Tensor:
        """All-reduce."""
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        """Unchanged."""
        return grad


def naive_sharded(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same where each rank has the rows of ``weight`` that follow those of the rank before."""
    logits = F.linear(hidden, weight).float()
    highest = logits.detach().amax(dim=-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    shifted = logits - highest[:, None]
    exponential = shifted.exp()
    total = AddUp.apply(exponential.sum(dim=-1))
    index = targets - len(weight) * dist.get_rank()
    here = (index >= 0) & (index < len(weight))
    chosen = shifted.gather(1, torch.where(here, index, 0)[:, None]).squeeze(1)
    logprobs = AddUp.apply(torch.where(here, chosen, 0.0)) - total.log()
    mean = AddUp.apply((exponential * shifted).sum(dim=-1)) / total
    return logprobs, total.log() - mean


def core_rl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The function of core-rl."""
    ranks = dist.get_world_size()
    shard = VocabularyShard(dist.group.WORLD, len(weight) * dist.get_rank()) if ranks > 1 else None
    logprobs, entropy = token_logprobs(hidden, weight, targets, with_entropy=True, vocabulary=shard)
    assert entropy is not None
    return logprobs, entropy


def once(function: LogProbs, arguments: argparse.Namespace) -> Callable[[], Tensor]:
    """Forward and backward with the same numbers for every side; returns the gradient of the states."""
    random = torch.Generator().manual_seed(0)
    tokens, width = arguments.tokens, arguments.hidden
    hidden = torch.randn(tokens, width, generator=random).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (tokens,), generator=random)
    rows = arguments.vocabulary // dist.get_world_size()
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    weight = (torch.randn(rows, width, generator=own) / width**0.5).requires_grad_()

    def run() -> Tensor:
        hidden.grad = weight.grad = None
        logprobs, entropy = function(hidden, weight, targets)
        (logprobs.mean() + 0.01 * entropy.mean()).backward()
        assert hidden.grad is not None
        return hidden.grad

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks with a part of the vocabulary each")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="few, since the naive side takes seconds")
    parser.add_argument("--threads", type=int, help="of each rank; 2 in all by default")
    arguments = parser.parse_args()
    for name in ("naive", "core-rl"):
        arguments.side = name
        each_rank(memory, arguments.tp, arguments)
    each_rank(seconds, arguments.tp, arguments)


def functions() -> dict[str, LogProbs]:
    """The sides, in a process that has joined its group."""
    return {"naive": naive if dist.get_world_size() == 1 else naive_sharded, "core-rl": core_rl}


def memory(address: RankAddress, arguments: argparse.Namespace) -> None:
    """Print what one side adds at its peak, on rank 0."""
    join_group(address)
    run = once(functions()[arguments.side], arguments)
    gc.collect()
    start = resident("VmRSS")
    run()
    if is_first():
        Console().print(f"{arguments.side}: {resident('VmHWM') - start:,.0f} MB added at the peak")


def seconds(address: RankAddress, arguments: argparse.Namespace) -> None:
    """Time both sides, after a look at whether they agree."""
    join_group(address)
    runs = {name: once(function, arguments) for name, function in functions().items()}
    torch.testing.assert_close(runs["core-rl"](), runs["naive"](), rtol=1e-3, atol=1e-8)
    where = f"vocabulary {arguments.vocabulary}, {arguments.tokens} tokens, hidden {arguments.hidden}"
    title = f"log-probs and entropy, forward and backward, {where}, tp {arguments.tp}"
    compare(title, runs, arguments.tokens, base="naive", repeats=arguments.repeats, warmup=1)


if __name__ == "__main__":
    main()
