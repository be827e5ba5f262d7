"""Faults that are right for one and two calls, micro-batches, ranks, saves and layers, and wrong for three."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from core_rl.state.slices import Shard
from mutants.bases import OwnCheckpoint, Packed
from mutants.thresholds import ThirdCallDropsTwo
from mutants.zoo import DP2, DP3, Mutant


class ReducesInPairs(Packed):
    """Ranks add their gradients up in pairs; the last of an odd number has no partner."""

    def reduce_grads(self) -> None:
        group = self.context.groups.data_parallel
        if group.size % 2 and group.size > 1 and group.rank == group.size - 1:
            for _, grad in self.gradients():
                grad.zero_()
        super().reduce_grads()


class ThirdSaveIsTheSecond(OwnCheckpoint):
    """From the third on, a save writes the tensors of the second."""

    saves: tuple[Shard, ...] = ()
    count = 0

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        self.count += 1
        if self.count == 2:
            self.saves = tuple(replace(s, tensor=s.tensor.clone()) for s in super().shards(True))
        yield from self.saves if self.count > 2 else super().shards(with_optimizer)


def _third_layers(names: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    return (tensor for name, tensor in names if ".layers.2." in name)


class StepsTwoLayers(Packed):
    """Layers from the third on never step."""

    def step(self, scale: float, lr: float, count: int) -> None:
        third = [parameter.detach() for parameter in _third_layers(self.owned.items())]
        before = [tensor.clone() for tensor in third]
        super().step(scale, lr, count)
        for tensor, value in zip(third, before, strict=True):
            tensor.copy_(value)


class LoadsMomentsOfTwoLayers(Packed):
    """After a load, moments of layers from the third on are 0."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        for kind in kinds & {"exp_avg", "exp_avg_sq"}:
            for part in self.state().local(kind):
                if ".layers.2." in part.name:
                    part.tensor.zero_()


MUTANTS = (
    Mutant(
        engine=ThirdCallDropsTwo,
        killed_by="I5.two-calls",
        issue="two gradient buffers that take turns",
        says="gradients of 3 calls",
    ),
    Mutant(
        engine=ReducesInPairs,
        killed_by="I2.data-parallel",
        issue="a tree of ranks",
        says="gradients with nearly everything on rank 0",
        layout=DP3,
    ),
    Mutant(
        engine=ThirdSaveIsTheSecond,
        killed_by="I11.resume",
        issue="staging buffers of a background save",
        says="master after the load",
    ),
    Mutant(
        engine=StepsTwoLayers,
        killed_by="I20.adamw",
        issue="a list of layers that was written for a smaller model",
        says="only parameters of layer 2 are wrong",
        layout=DP2,
    ),
    Mutant(
        engine=LoadsMomentsOfTwoLayers,
        killed_by="I11.resume",
        issue="a list of layers that was written for a smaller model",
        says="exp_avg after the load[\\s\\S]*only parameters of layer 2 are wrong",
    ),
)
