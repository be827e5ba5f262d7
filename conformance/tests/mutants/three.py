"""Faults that are right for one and two calls, micro-batches, ranks, saves and layers, and wrong for three."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from core_rl.state.slices import Shard
from mutants.bases import OwnCheckpoint, Packed
from mutants.zoo import DP2, DP3, Mutant


@Mutant("I2.data-parallel", "a tree of ranks", "gradients with nearly everything on rank 0", layout=DP3)
class ReducesInPairs(Packed):
    """Ranks add their gradients up in pairs; the last of an odd number has no partner."""

    def reduce_grads(self) -> None:
        group = self.context.groups.data_parallel
        if group.size % 2 and group.size > 1 and group.rank == group.size - 1:
            for _, grad in self.gradients():
                grad.zero_()
        super().reduce_grads()


@Mutant("I11.resume", "staging buffers of a background save", "master after the load")
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


@Mutant(
    "I20.adamw",
    "a list of layers that was written for a smaller model",
    "only parameters of layer 2 are wrong",
    layout=DP2,
)
class StepsTwoLayers(Packed):
    """Layers from the third on never step."""

    def step(self, scale: float, lr: float, count: int) -> None:
        third = [parameter.detach() for parameter in _third_layers(self.owned.items())]
        before = [tensor.clone() for tensor in third]
        super().step(scale, lr, count)
        for tensor, value in zip(third, before, strict=True):
            tensor.copy_(value)


@Mutant(
    "I11.resume",
    "a list of layers that was written for a smaller model",
    r"exp_avg after the load[\s\S]*only parameters of layer 2 are wrong",
)
class LoadsMomentsOfTwoLayers(Packed):
    """After a load, moments of layers from the third on are 0."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        for kind in kinds & {"exp_avg", "exp_avg_sq"}:
            for part in self.state().local(kind):
                if ".layers.2." in part.name:
                    part.tensor.zero_()
