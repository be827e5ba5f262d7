"""Collectives with a gradient over two ranks: their values, and their calls of the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from group_support import SPEC, config, echo_group, join_gloo, rank_of
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from core_rl.distributed.collectives import gather, reduce_scatter
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.toolkit.parallel_context import VocabularyShard

RANKS = 2
SHAPE = (2, 4, 6)
Seen: TypeAlias = tuple[dict[str, Tensor], list[str]]


def value_of(rank: int) -> Tensor:
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(rank))


def results(engine: TrainEngine) -> Seen:
    """Results, gradients and the names of the collectives on one rank."""
    join_gloo(engine)
    comm = Comm(dist.group.WORLD)
    found: dict[str, Tensor] = {}
    with CommDebugMode() as seen:
        for dim in range(len(SHAPE)):
            value = value_of(rank_of(engine)).requires_grad_()
            for name, collective in collectives(comm, dim).items():
                result = collective(value)
                (grad,) = torch.autograd.grad((result * result.detach()).sum(), value)
                found |= {f"{name} {dim}": result.detach(), f"{name} {dim} grad": grad}
        assert dist.group.WORLD is not None
        found["normaliser"] = VocabularyShard(dist.group.WORLD, 0).normaliser(value_of(rank_of(engine))[0, 0])
    dist.destroy_process_group()
    return found, sorted({str(name) for name in seen.get_comm_counts()})


def collectives(comm: Comm, dim: int) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "gather": lambda value: gather(value, comm, dim, partial=True),
        "reduce_scatter": lambda value: reduce_scatter(value, comm, dim),
    }


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    with echo_group(SPEC, config(dp=RANKS)) as group:
        return group.run(results)


@pytest.mark.parametrize("dim", range(len(SHAPE)))
def test_values_are_joined_along_any_dimension(seen: list[Seen], dim: int) -> None:
    values = [value_of(rank) for rank in range(RANKS)]
    joined, total = torch.cat(values, dim), torch.stack(values).sum(0)
    for rank, (found, _) in enumerate(seen):
        pieces = total.chunk(RANKS, dim)
        torch.testing.assert_close(found[f"gather {dim}"], joined, rtol=0, atol=0)
        torch.testing.assert_close(found[f"gather {dim} grad"], RANKS * values[rank])
        torch.testing.assert_close(found[f"reduce_scatter {dim}"], pieces[rank])
        torch.testing.assert_close(found[f"reduce_scatter {dim} grad"], total)
        assert all(tensor.is_contiguous() for tensor in found.values())


def test_no_collective_copies_a_list_of_tensors(seen: list[Seen]) -> None:
    for found, names in seen:
        rows = torch.stack([value_of(rank)[0, 0] for rank in range(RANKS)])
        torch.testing.assert_close(found["normaliser"], rows.logsumexp(0))
        assert names == ["c10d._allgather_base_", "c10d._reduce_scatter_base_"]
