"""Steps of the core on each micro-batch's output: a loss to run backward on, or values to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.metrics import Metric
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import unshard_output, unshard_rows
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.errors import BatchError, EngineContractError

PostHook = Callable[[ModelOutput, SequenceBatch], Tensor]
AggregateFn = Callable[[list[Tensor]], Any]


class MicroBatchStep(Protocol):
    """The callback of `TrainBackend.run`, called once for each micro-batch, on the ranks where outputs appear.

    The backend runs backward on the scalar that it returns, unless the mode is ``"forward"``. One in another framework
    gives outputs that are leaves of torch's graph, and passes their gradients on. A step never raises: after
    an error it returns a zero that is connected to the graph, so that ranks stay in step; the core raises the error on
    all ranks after the pass.
    """

    @property
    def outputs(self) -> tuple[OutputName, ...]:
        """Names of the outputs that the `ModelOutput` must have."""

    @property
    def temperature(self) -> float:
        """Temperature of log-probs, entropy and logits."""

    @property
    def trained_only(self) -> bool:
        """Whether token outputs count only where ``loss_mask`` is true, so that the head may skip the rest."""

    @property
    def share_prefixes(self) -> bool:
        """Whether prefixes that sequences share are computed once; never without ``Capability.SHARED_PREFIX``."""

    def __call__(self, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor: ...


class MicroBatches:
    """The micro-batches of one pass, on the engine's device, with dummies where this rank has none."""

    def __init__(
        self,
        batch: SequenceBatch,
        plan: Sequence[Sequence[int]],
        device: torch.device,
        share_prefixes: bool = False,
    ) -> None:
        self.share_prefixes = share_prefixes
        self.plan = [list(part) for part in plan]
        self._originals = [batch.select(part) if part else batch.dummy() for part in self.plan]
        self.items = [original.to(device) for original in self._originals]
        self._index = {id(item): number for number, item in enumerate(self.items)}

    def real(self) -> list[SequenceBatch]:
        """The micro-batches that are no dummies, on the device of the batch: weights are counted without a GPU."""
        return [original for original, part in zip(self._originals, self.plan, strict=True) if part]

    def claim(self, micro_batch: SequenceBatch) -> int:
        """The number of ``micro_batch``; `EngineContractError` when it is foreign or comes twice."""
        number = self._index.pop(id(micro_batch), None)
        if number is None:
            raise EngineContractError(
                "run() called step() with a micro-batch that it was not given, or twice with the same; "
                "call it once for each, with the very object"
            )
        return number

    def reached(self) -> str:
        """Progress of a pass that ran out of memory."""
        started = len(self.items) - len(self._index)
        following = self.items[min(started, len(self.items) - 1)]
        largest = max(item.num_tokens for item in self.items)
        return (
            f"out of memory on the device, with {started} of {len(self.items)} micro-batches begun; the next one has "
            f"{following.num_tokens} tokens in {following.num_sequences} sequences (the longest has "
            f"{following.max_length}), and the largest {largest} tokens"
        )

    def unclaimed(self) -> list[int]:
        """The numbers of micro-batches that `claim` has not seen."""
        return sorted(self._index.values())


class _Step:
    """Errors of a pass, kept until all ranks can raise them together."""

    def __init__(
        self, micro_batches: MicroBatches, outputs: tuple[OutputName, ...], temperature: float
    ) -> None:
        self._micro_batches = micro_batches
        self.share_prefixes = micro_batches.share_prefixes
        self.outputs = outputs
        self.temperature = temperature
        self._failure: Exception | None = None

    def __call__(self, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor:
        # Connected to the graph in any case: collectives in the backward pass must run on every rank.
        connected = output.zero_loss()
        try:
            number = self._micro_batches.claim(micro_batch)
            output.check(self.outputs, micro_batch.num_tokens, micro_batch.num_sequences)
            is_dummy = not self._micro_batches.plan[number]
            return connected if is_dummy else connected + self._handle(number, output, micro_batch)
        except Exception as error:  # noqa: BLE001  # of a user's loss: the other ranks are in the middle of the pass
            self._failure = self._failure or error
            return connected

    def _handle(self, number: int, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor | float:
        """The value to add to the connected zero."""
        raise NotImplementedError

    def require_all(self) -> None:
        """Keep an `EngineContractError` for micro-batches that the backend left out."""
        if numbers := self._micro_batches.unclaimed():
            error = EngineContractError(f"run() left out the micro-batches {numbers}")
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the first error of the pass."""
        if self._failure is not None:
            raise self._failure


class LossStep(_Step):
    """Computes the loss, scaled so that the sum over micro-batches and ranks is the whole loss.

    The routers' load-balancing loss has a scale of its own; 0 leaves it out.
    """

    trained_only = True

    def __init__(
        self, micro_batches: MicroBatches, loss: LossSpec, scale: float, aux_scale: float = 0.0
    ) -> None:
        outputs = (*loss.outputs, "aux_loss") if aux_scale else loss.outputs
        super().__init__(micro_batches, outputs, loss.temperature)
        self._loss = loss
        self._scale = scale
        self._aux_scale = aux_scale
        self.metrics: list[Mapping[str, Metric]] = []
        self.totals: list[Tensor] = []

    def _handle(self, number: int, output: ModelOutput, micro_batch: SequenceBatch) -> Tensor:
        total, metrics = self._loss.total(output.masked(micro_batch.loss_mask), micro_batch)
        self.totals.append(total.detach())
        scaled = total * self._scale
        if self._aux_scale:
            aux = output["aux_loss"]
            metrics = {**metrics, "aux_loss": Metric.mean(aux, micro_batch.num_tokens)}
            scaled = scaled + aux * self._aux_scale
        self.metrics.append(metrics)
        return scaled

    def total(self) -> float:
        """The sum of the losses of this rank's micro-batches, unscaled."""
        return float(torch.stack([total.double() for total in self.totals]).sum()) if self.totals else 0.0


class CollectStep(_Step):
    """Keeps the outputs of a forward pass, or the results of ``post_hook``."""

    trained_only = False

    def __init__(
        self,
        micro_batches: MicroBatches,
        outputs: tuple[OutputName, ...],
        temperature: float,
        post_hook: PostHook | None = None,
    ) -> None:
        super().__init__(micro_batches, outputs, temperature)
        self._post_hook = post_hook
        self.collected: dict[int, Any] = {}

    def _handle(self, number: int, output: ModelOutput, micro_batch: SequenceBatch) -> float:
        value = output.detached() if self._post_hook is None else self._post_hook(output, micro_batch)
        self.collected[number] = value
        return 0.0

    def in_order(
        self,
        batch: SequenceBatch,
        collected: Mapping[int, ModelOutput | Tensor],
        output_seqlens: Sequence[int] | None,
        aggregate_fn: AggregateFn | None,
    ) -> Any:
        """Outputs that the output rank ``collected`` for each micro-batch, in the order of ``batch``."""
        plan = self._micro_batches.plan
        numbers = [number for number, part in enumerate(plan) if part]
        parts, values = [plan[number] for number in numbers], [collected[number] for number in numbers]
        outputs = [value for value in values if isinstance(value, ModelOutput)]
        if len(outputs) == len(values):
            return unshard_output(outputs, batch, parts)
        sizes = batch.lengths if output_seqlens is None else output_seqlens
        rows = [
            _rows(value, [sizes[index] for index in part], fixed=output_seqlens is not None)
            for value, part in zip(values, parts, strict=True)
        ]
        return (aggregate_fn or torch.cat)(unshard_rows(rows, parts))


def _rows(value: ModelOutput | Tensor, sizes: list[int], *, fixed: bool) -> Sequence[Tensor]:
    """One tensor for each sequence of a micro-batch: ``sizes`` rows each, or one where they are not ``fixed``."""
    if not isinstance(value, Tensor):
        raise BatchError(f"post_hook must return a tensor; it returned a {type(value).__name__}")
    if not fixed and len(value) != sum(sizes):
        sizes = [1] * len(sizes)
    if len(value) != sum(sizes):
        raise BatchError(
            f"post_hook returned {len(value)} rows for {len(sizes)} sequences with {sum(sizes)} expected rows; "
            "return one row for each token or sequence, or pass output_seqlens"
        )
    rows: tuple[Tensor, ...] = value.detach().to("cpu").split(sizes)
    return rows
