"""Tensors on their way to the ranks of a group and back, beside the same in torch's pickles.

    python benchmarks/calls.py --ranks 4

Each call gives every rank one tensor, the same for all, or takes one from each.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from common.measure import compare
from common.workload import MODEL

from core_rl import EngineGroup
from core_rl.engine.train import TrainEngine

MIB = 2**20


class Pickled:
    """A tensor that travels as torch pickles it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (pickle.dumps(self.tensor, protocol=pickle.HIGHEST_PROTOCOL),)


def _restored(data: bytes) -> Pickled:
    return Pickled(pickle.loads(data))  # noqa: S301 - made just now


def take(_: TrainEngine, value: Tensor | Pickled) -> None:
    """Receive a tensor."""


def give(_: TrainEngine, count: int, pickled: bool) -> Tensor | Pickled:
    """Send a tensor of ``count`` bytes."""
    tensor = torch.zeros(count, dtype=torch.uint8)
    return Pickled(tensor) if pickled else tensor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    model, layout = {"config": MODEL}, {"dp": arguments.ranks}
    with EngineGroup("fsdp", model=model, layout=layout, optimizer=None) as group:
        for size in (10, 100):
            tensor = torch.randint(0, 255, (size * MIB,), dtype=torch.uint8)
            for title, sides in (
                (
                    f"{size} MiB to each of {arguments.ranks} ranks",
                    {
                        "group.run": partial(group.run, take, tensor),
                        "torch's pickle": partial(group.run, take, Pickled(tensor)),
                    },
                ),
                (
                    f"{size} MiB from each of {arguments.ranks} ranks",
                    {
                        "group.run": partial(group.run, give, size * MIB, False),
                        "torch's pickle": partial(group.run, give, size * MIB, True),
                    },
                ),
            ):
                compare(
                    title,
                    sides,
                    size * arguments.ranks,
                    base="torch's pickle",
                    repeats=arguments.repeats,
                    unit="MiB",
                )


if __name__ == "__main__":
    main()
