"""Cuts of a batch: balanced shards over data-parallel ranks and back, and micro-batches that fit one pass."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.data.order import bounds_of, gather_sequences
from core_rl.data.outputs import SEQUENCE_OUTPUTS, ModelOutput
from core_rl.data.prefixes import SharedUnits
from core_rl.errors import BatchError, raise_all


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """A token budget, or a number of micro-batches; exactly one is set."""

    max_tokens: int | None = None
    """Upper bound on the tokens of a micro-batch, and the patches of its images, in as few balanced micro-batches as
    fit."""
    count: int | None = None
    """This many micro-batches of nearly equal numbers of tokens."""
    share_prefixes: bool = False
    """Compute a prefix of several sequences of a micro-batch once, on engines with ``Capability.SHARED_PREFIX``; others
    compute each sequence whole. Micro-batches are cut so that the fewest tokens are computed, and ``max_tokens`` bounds
    these. Raises `UnsupportedCapability` where such an engine cannot share with this model or layout."""

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.count is None):
            raise BatchError("MicroBatchSpec needs exactly one of max_tokens and count")
        value = self.max_tokens if self.count is None else self.count
        if value is None or value < 1:
            raise BatchError(f"MicroBatchSpec must be positive; got {value}")


def count_micro_batches(batch: SequenceBatch, spec: MicroBatchSpec) -> int:
    """The number of micro-batches that this rank needs, at least one.

    Raises one `BatchError` that names each sequence or unit longer than the budget.
    """
    if spec.max_tokens is None:
        return spec.count or 1
    if sum(batch.computed_lengths) <= spec.max_tokens:
        return 1
    groups, weights, shared = _planned_units(batch, spec)
    counted = "tokens and patches" if batch.media else "tokens"
    too_long = [
        f"{f'sequence {group[0]}' if len(group) == 1 else f'the unit of sequences {group}'} has {weight} {counted}, "
        f"and max_tokens is {spec.max_tokens}; raise max_tokens or cut it"
        for group, weight in zip(groups, weights, strict=True)
        if weight > spec.max_tokens
    ]
    raise_all(BatchError, "micro-batches", too_long)
    runs = best_fit(weights, spec.max_tokens) if shared is None else shared.within(spec.max_tokens)
    return max(1, len(runs))


def plan_micro_batches(batch: SequenceBatch, spec: MicroBatchSpec, count: int) -> list[list[int]]:
    """The sequences of each of ``count`` micro-batches; each sequence once, and units stay whole.

    ``count`` is the largest `count_micro_batches` of the data-parallel ranks, so that all run
    equally many; an empty list stands for a dummy.
    """
    if count == 1:
        return [list(range(batch.num_sequences))]
    groups, weights, shared = _planned_units(batch, spec)
    budget = spec.max_tokens
    if shared is not None:
        runs = shared.evenly(count) if budget is None else shared.within(budget)
        return [shared.sequences(run) for run in runs] + [[] for _ in range(count - len(runs))]
    parts = balanced(weights, count)
    if budget is not None and any(sum(weights[i] for i in part) > budget for part in parts):
        # LPT balances best but does not know the budget; best fit keeps it, in no more bins.
        packed = best_fit(weights, budget)
        parts = packed + [[] for _ in range(count - len(packed))]
    return [[index for item in part for index in groups[item]] for part in parts]


def _planned_units(
    batch: SequenceBatch, spec: MicroBatchSpec
) -> tuple[Sequence[Sequence[int]], Sequence[int], SharedUnits | None]:
    """The sequences of each unit, its tokens, and the order for sharing where that saves enough."""
    groups, weights = weighted_units(batch)
    shared = SharedUnits.of(batch, groups) if spec.share_prefixes and groups else None
    return (groups, weights, None) if shared is None else (shared.groups, shared.weights, shared)


def units(batch: SequenceBatch) -> list[list[int]]:
    """The sequences of each unit, in order of first appearance; a sequence alone without ``unit``."""
    if batch.unit is None:
        return [[index] for index in range(batch.num_sequences)]
    groups: dict[int, list[int]] = {}
    for index, number in enumerate(batch.unit.tolist()):
        groups.setdefault(number, []).append(index)
    return list(groups.values())


def weighted_units(batch: SequenceBatch) -> tuple[list[list[int]], list[int]]:
    """The sequences of each unit, and its tokens and patches."""
    groups, lengths = units(batch), batch.computed_lengths
    return groups, lengths if batch.unit is None else [sum(lengths[i] for i in group) for group in groups]


def shard_plan(batch: SequenceBatch, parts: int, share_prefixes: bool = False) -> list[list[int]]:
    """The sequences of each of ``parts`` ranks: nearly equal tokens, whole units, deterministic.

    With ``share_prefixes`` sequences with a common prefix, which counts once, are on one rank as far as the rank with
    the most tokens gets no more of them: no rank is slower than the slowest one without. A rank's list is empty when
    there are fewer units than ranks.
    """
    if parts == 1:
        return [list(range(batch.num_sequences))]
    groups, weights = weighted_units(batch)
    plan = [[i for item in part for i in groups[item]] for part in balanced(weights, parts)]
    shared = SharedUnits.of(batch, groups) if share_prefixes and groups else None
    if shared is None:
        return plan
    runs = shared.evenly(parts)
    plans = [plan, [shared.sequences(run) for run in runs] + [[] for _ in range(parts - len(runs))]]
    for trees in shared.least_shared(parts):
        spread = balanced([shared.weight(run) for run in trees], parts)
        plans.append([sorted(i for item in part for i in shared.sequences(trees[item])) for part in spread])
    return min(plans, key=shared.cost)


def shard(batch: SequenceBatch, parts: int) -> list[SequenceBatch]:
    """One batch for each of ``parts`` ranks, by `shard_plan`; a single part is the batch itself."""
    return [batch] if parts == 1 else batch.split(shard_plan(batch, parts))


def unshard_output(
    outputs: Sequence[ModelOutput], batch: SequenceBatch, plan: Sequence[Sequence[int]]
) -> ModelOutput:
    """Outputs of the parts in ``plan`` as one output in the order of ``batch``."""
    pairs = [(output, part) for output, part in zip(outputs, plan, strict=True) if part]
    if not pairs:
        return outputs[0] if outputs else ModelOutput()
    if len(pairs) == 1 and list(pairs[0][1]) == list(range(batch.num_sequences)):
        return pairs[0][0]
    # Outputs lie end to end as their sequences do in `order`; `places` finds each sequence of `batch` in it.
    order = torch.tensor([index for _, part in pairs for index in part], dtype=torch.long)
    places, bounds = order.argsort(), bounds_of(batch.cu_seqlens.diff()[order])
    names = [name for name, _ in pairs[0][0].items()]
    values: dict[str, Tensor] = {}
    for name in names:
        joined = torch.cat([output[name] for output, _ in pairs])
        if name in SEQUENCE_OUTPUTS:
            values[name] = joined[places.to(joined.device)]
        else:
            (values[name],) = gather_sequences([joined], bounds, places)
    return ModelOutput(**values)


def unshard_rows(rows: Sequence[Sequence[Tensor]], plan: Sequence[Sequence[int]]) -> list[Tensor]:
    """One tensor for each sequence of the parts in ``plan``, in the order of the batch that was cut.

    ``rows`` has an entry for each part; that of an empty part is ignored.
    """
    pairs = [(tensors, part) for tensors, part in zip(rows, plan, strict=True) if part]
    by_index = dict(chain.from_iterable(zip(part, tensors, strict=True) for tensors, part in pairs))
    return [by_index[index] for index in range(len(by_index))]


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into ``parts`` lists of nearly equal weight (largest first onto the lightest).

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969). Deterministic; items keep their order inside
    a part; some parts are empty when there are fewer items than parts.
    """
    heap = [(0, 0, part) for part in range(parts)]
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        load, count, part = heapq.heappop(heap)
        result[part].append(item)
        heapq.heappush(heap, (load + weights[item], count + 1, part))
    return [sorted(part) for part in result]


def best_fit(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items into bins of at most ``budget``, largest first into the fullest bin that has room.

    Best-fit decreasing uses at most 11/9 of the optimal number of bins, plus four (Johnson et al., SIAM
    J. Comput. 3, 1974). No item may be heavier than the budget.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """The room of each bin and its number, ascending."""
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        fullest = bisect_left(rooms, (weights[item], 0))
        if fullest == len(rooms):
            rooms.append((budget, len(bins)))
            bins.append([])
        room, number = rooms.pop(fullest)
        bins[number].append(item)
        insort(rooms, (room - weights[item], number))
    return [sorted(items) for items in bins]
