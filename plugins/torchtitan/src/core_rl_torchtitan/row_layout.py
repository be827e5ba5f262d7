"""Checkpoint layout of torchtitan's parameters, found by sending row numbers through its own state-dict adapter.

The adapter and the hooks of its modules split fused projections and experts, reorder rows for rotary embeddings, and
drop tied weights. No table of any of that is kept here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torchtitan.models.common.decoder import Decoder

from core_rl.errors import EngineContractError
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import LocalPart
from core_rl_torchtitan.translation import adapter_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Rows ``start, start + step, ...`` of a parameter: consecutive rows of the checkpoint tensor ``name``."""

    name: str
    expert: int | None
    """The matrix of a parameter with three dimensions."""
    start: int
    step: int
    count: int
    first: int
    """The first of them in the checkpoint tensor."""

    def of(self, part: LocalPart) -> tuple[Shape, Tensor] | None:
        """Offsets in the checkpoint tensor, and a view of the rows that ``part`` has; None if it has none."""
        tensor, offsets = part.tensor, part.offsets
        if self.expert is not None:
            if not 0 <= self.expert - offsets[0] < len(tensor):
                return None
            tensor, offsets = tensor[self.expert - offsets[0]], offsets[1:]
        low, high = offsets[0], offsets[0] + len(tensor)
        begin = max(0, -(-(low - self.start) // self.step))
        end = min(self.count, -(-(high - self.start) // self.step))
        if begin >= end or 0 in tensor.shape:
            return None
        at = self.start + begin * self.step - low
        return (self.first + begin, *offsets[1:]), tensor[
            at : at + (end - begin - 1) * self.step + 1 : self.step
        ]


class RowLayout(CheckpointLayout):
    """The runs of each parameter, by its name in the engine's module."""

    def __init__(self, runs: Mapping[str, tuple[Run, ...]]) -> None:
        super().__init__({})
        self._runs = runs

    def names(self, parameter: str) -> list[str]:
        return list(dict.fromkeys(run.name for run in self._runs[parameter]))

    def shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        written: dict[str, Shape] = {}
        for name, shape in shapes.items():
            for run in self._runs[name]:
                rest = shape[1:] if run.expert is None else shape[2:]
                written[run.name] = (max(run.first + run.count, written.get(run.name, (0,))[0]), *rest)
        return written

    def local(self, name: str, part: LocalPart, shape: Shape) -> Iterator[tuple[str, Shape, Tensor]]:
        for run in self._runs[name]:
            if (box := run.of(part)) is not None:
                yield run.name, *box


def probed_runs(config: Decoder.Config) -> dict[str, tuple[Run, ...]]:
    """The runs of each parameter of a decoder with ``config``, by torchtitan's name of the parameter."""
    with torch.device("meta"):
        decoder = config.build()
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    starts, total = {}, 0
    for name, shape in shapes.items():
        starts[name] = total
        total += _rows(shape)
    _number_rows(decoder, starts)
    # One column is enough, and the adapter asks the config for the number of columns.
    written = adapter_of(replace(config, dim=1)).to_hf(decoder.state_dict())
    runs: dict[str, list[Run]] = {name: [] for name in shapes}
    owners = torch.tensor([*starts.values(), total])
    for hf_name, numbers in written.items():
        rows = numbers.flatten()
        owner = int(torch.searchsorted(owners, rows[:1], right=True)) - 1
        name = list(shapes)[owner]
        runs[name] += _runs(hf_name, rows - starts[name], shapes[name])
    for name, shape in shapes.items():
        count = sum(run.count for run in runs[name])
        if count != _rows(shape):
            raise EngineContractError(
                f"torchtitan's adapter writes {count} of the {_rows(shape)} rows of {name!r}"
            )
    return {name: tuple(parts) for name, parts in runs.items()}


def _rows(shape: Shape) -> int:
    return math.prod(shape[:2]) if len(shape) == 3 else shape[0]


def _number_rows(decoder: nn.Module, starts: Mapping[str, int]) -> None:
    """Replace each parameter by the numbers of its rows, in one column."""
    tied: dict[int, nn.Parameter] = {}
    for module_name, module in decoder.named_modules():
        for name, parameter in [*module.named_parameters(module_name, recurse=False)]:
            if id(parameter) not in tied:
                shape = parameter.shape[:2] if parameter.dim() == 3 else parameter.shape[:1]
                numbers = torch.arange(starts[name], starts[name] + shape.numel()).view(shape)
                column = numbers[..., None] if parameter.dim() > 1 else numbers
                tied[id(parameter)] = nn.Parameter(column, requires_grad=False)
            module.register_parameter(name.rpartition(".")[2], tied[id(parameter)])


def _runs(name: str, rows: Tensor, shape: Shape) -> Iterator[Run]:
    """``rows`` of one parameter as runs with a constant step."""
    height = shape[1] if len(shape) == 3 else _rows(shape)
    expert = int(rows[0]) // height if len(shape) == 3 else None
    rows = rows - (expert or 0) * height
    if rows.min() < 0 or rows.max() >= height:
        raise EngineContractError(f"torchtitan writes {name!r} out of several matrices of one parameter")
    steps = rows.diff()
    # The last index of each stretch of equal steps.
    changes = [*(steps.diff().nonzero().flatten() + 1).tolist(), len(steps)]
    at = 0
    for change in changes:
        if at < change:
            start, step = int(rows[at]), int(steps[at])
            if step < 1:
                raise EngineContractError(f"torchtitan writes rows of {name!r} backwards")
            yield Run(name, expert, start, step, change - at + 1, at)
            at = change + 1
    if at < len(rows):
        yield Run(name, expert, int(rows[at]), 1, 1, at)
