"""Expected values and their tolerances, each computed once in a process, and the groups of ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from core_rl.config.engine import Head
from core_rl.data.micro_batch import shard_plan
from core_rl.engine.loading import load_engine
from core_rl_conformance.disk_cache import DiskCache
from core_rl_conformance.hints.diagnose import Mistakes, Shares
from core_rl_conformance.hints.mistakes import OUTPUTS, misread_options, misrouted
from core_rl_conformance.inputs.data import Ragged, Repeated
from core_rl_conformance.inputs.losses import CheckLoss, RepeatedLoss, TokenMeanLoss, wrong_temperatures
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import ModelStore, TinyModel
from core_rl_conformance.pools import CALL_TIMEOUT_S, GroupPool, MakeEngine, ServerPool
from core_rl_conformance.reproduction import Computation, HiddenStates, Output, computation_of
from core_rl_conformance.trainers.pool import TrainerPool
from core_rl_conformance.trajectory import AnyTraining, ExpectedTraining, expected_training
from core_rl_oracle.experts import parameters_of
from core_rl_oracle.low_rank import LowRank
from core_rl_oracle.oracle import Gradients, Oracle, OracleSequence, SequenceLoss, grad_norm
from core_rl_oracle.plain import ALONE, MANY_VARIANTS, TRAINED_ALONE, VARIANTS, PlainModel, Variant
from core_rl_oracle.tolerance import (
    Tolerance,
    mean_square,
    scalar_tolerance,
    signed_mean,
    tolerance,
    tolerances,
)


class Snapshot(NamedTuple):
    """The weights that a model directory has now, and an adapter over them; nothing is kept for it."""

    directory: Path
    head: Head = "lm"
    adapter: LowRank | None = None
    vision: bool = False


Judged = TinyModel | TinyAdapter | Snapshot
"""A model, with or without an adapter, whose outputs and gradients the oracle knows."""

ValueT = TypeVar("ValueT")
LARGE_KEPT = 4
"""Values of a user's model that are kept: an oracle, a plain model, and two that these have computed."""


@dataclass(frozen=True, kw_only=True)
class ExpectedOutputs:
    """One output for each sequence, from the oracle and from the plain model's variants."""

    values: list[Tensor]
    variants: list[list[Tensor]]
    tolerance: Tolerance
    mistakes: Callable[[], Iterator[tuple[str, Sequence[Tensor]]]] = lambda: iter(())
    """Sentences about known mistakes, and the values that each would give; computed when asked for."""
    computation: Computation | None = None
    """For a script that computes them again."""

    def signed_mean(self, got: Sequence[Tensor]) -> tuple[float, float]:
        """The mean error of ``got`` and its limit; first tokens, which are 0 by definition, left out."""
        return signed_mean(self._errors(got), self._plain_errors(), self.tolerance.floor)

    def mean_square(self, got: Sequence[Tensor]) -> tuple[float, Tolerance]:
        """The root mean square error of ``got``, and its tolerance."""
        return mean_square(self._errors(got), self._plain_errors(), self.tolerance.floor)

    def _plain_errors(self) -> list[list[Tensor]]:
        return [self._errors(variant) for variant in self.variants]

    def _errors(self, got: Sequence[Tensor]) -> list[Tensor]:
        return [_errors(left, right) for left, right in zip(got, self.values, strict=True)]


@dataclass(frozen=True, kw_only=True)
class ExpectedGradients:
    """Loss, gradients and their norm, each with its tolerance."""

    oracle: Gradients
    tolerances: dict[str, Tolerance]
    loss: Tolerance
    norm: Tolerance
    mistakes: Mistakes = lambda: iter(())
    shares: Shares = lambda: iter(())
    """The part of each sequence in the gradients."""
    computation: Computation | None = None
    """For a script that computes them again."""

    def times(self, factor: float) -> ExpectedGradients:
        """The same of the loss times ``factor``."""
        truth = self.oracle
        return ExpectedGradients(
            oracle=Gradients(
                loss=truth.loss * factor,
                weight=truth.weight,
                grads={name: grad * factor for name, grad in truth.grads.items()},
            ),
            tolerances={name: allowed.times(factor) for name, allowed in self.tolerances.items()},
            loss=self.loss.times(factor),
            norm=self.norm.times(factor),
        )

    def __add__(self, other: ExpectedGradients) -> ExpectedGradients:
        """Gradients of the sum of two losses."""
        left, right = self.oracle, other.oracle
        return ExpectedGradients(
            oracle=Gradients(
                loss=left.loss + right.loss,
                weight=left.weight,
                grads={name: grad + right.grads[name] for name, grad in left.grads.items()},
            ),
            tolerances={name: allowed + other.tolerances[name] for name, allowed in self.tolerances.items()},
            loss=self.loss + other.loss,
            norm=self.norm + other.norm,
        )


class ExpectedValues:
    """Expected values that checks share in one process. Close it, or use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        timeout_s: float = CALL_TIMEOUT_S,
        make_engine: MakeEngine = load_engine,
        cache: DiskCache | None = None,
    ) -> None:
        self.directory = directory
        self._cache = cache
        self.models = ModelStore(directory / "models")
        self.groups = GroupPool(timeout_s, make_engine)
        self.servers = ServerPool(make_engine)
        self.trainers = TrainerPool(timeout_s)
        self._kept: dict[Hashable, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def discard(self, name: str) -> None:
        """End all processes of the engine ``name``: they may be gone, or in an unknown state."""
        self.groups.discard(name)
        self.servers.discard(name)
        self.trainers.discard(name)

    def close(self) -> None:
        """End all processes of the groups, all inference engines and all trainers."""
        with ExitStack() as stack:
            for pool in (self.trainers, self.servers, self.groups):
                stack.callback(pool.close)

    def oracle(self, of: Judged) -> Oracle:
        """The oracle with the weights of the model's directory, and the adapter."""
        return self.keep(of, ("oracle",), partial(self.own_oracle, of))

    def own_oracle(self, of: Judged) -> Oracle:
        """The same for a caller that changes its weights."""
        return Oracle(*self._snapshot(of))

    def mistaken_oracles(self, of: Judged) -> Iterator[tuple[str, Oracle]]:
        """Sentences about mistakes with the adapter or the config of ``of``, and an oracle with each."""
        snapshot = self._snapshot(of)
        if snapshot.adapter is not None and not _is_large(of):
            for sentence, wrong in snapshot.adapter.mistaken():
                yield sentence, Oracle(*snapshot._replace(adapter=wrong))
        if not snapshot.vision:
            for sentence, options in misread_options(AutoConfig.from_pretrained(snapshot.directory)):
                yield sentence, Oracle(*snapshot, options)

    def outputs(
        self, of: Judged, data: Ragged, name: str, temperature: float, dtype: torch.dtype, device: str = "cpu"
    ) -> ExpectedOutputs:
        """The output ``name`` of each sequence."""
        key = (data, temperature, dtype, device)
        sequences, oracle = data.for_oracle(), partial(self.oracle, of)

        def run() -> _OutputRuns:
            plain = self.plain(of, dtype, device)
            variants = (*VARIANTS, ALONE) if _is_large(of) else VARIANTS
            runs = (plain.outputs(variant, sequences, temperature) for variant in variants)
            return [oracle().evaluate(sequences, temperature), *runs]

        def select() -> _Values:
            runs = self.keep(of, ("outputs", *key), run)
            return [[outputs[name] for outputs in sequence] for sequence in runs]

        truth, *variants = self.stored(of, ("output", name, *key), select)
        return ExpectedOutputs(
            values=truth,
            variants=variants,
            tolerance=tolerance([_flat(variant) for variant in variants], _flat(truth), dtype),
            mistakes=partial(
                _output_mistakes, oracle, partial(self.mistaken_oracles, of), sequences, name, temperature
            ),
            computation=computation_of(of, Output(name, temperature), data),
        )

    def hidden_states(
        self, of: Judged, data: Ragged, dtype: torch.dtype, device: str = "cpu"
    ) -> list[ExpectedOutputs]:
        """The hidden states of each sequence before the first layer, and after each."""

        def run() -> _Values:
            plain, sequences = self.plain(of, dtype, device), data.for_oracle()
            variants = (*VARIANTS, ALONE) if _is_large(of) else VARIANTS
            runs = [plain.hidden_states(variant, sequences) for variant in variants]
            return [self.oracle(of).hidden_states(sequences), *runs]

        def of_layer(layer: int) -> ExpectedOutputs:
            truth, *variants = [[states[:, layer] for states in run] for run in runs]
            return ExpectedOutputs(
                values=truth,
                variants=variants,
                tolerance=tolerance([_flat(variant) for variant in variants], _flat(truth), dtype),
                computation=computation_of(of, HiddenStates(layer), data),
            )

        runs = self.stored(of, ("hidden states", data, dtype, device), run)
        return [of_layer(layer) for layer in range(runs[0][0].shape[1])]

    def gradients(
        self,
        of: Judged,
        data: Ragged,
        loss: CheckLoss,
        dtype: torch.dtype,
        device: str = "cpu",
        ranks: int = 1,
    ) -> ExpectedGradients:
        """Loss, gradients (with an adapter also of its factors) and norm of ``loss`` over ``data``.

        Known mistakes come from a group with so many data-parallel ``ranks``.
        """

        def run() -> GradientRuns:
            plain, sequences = self.plain(of, dtype, device), data.for_oracle()
            variants = (*VARIANTS, TRAINED_ALONE) if _is_large(of) else VARIANTS
            of_loss = (loss.of_sequence, loss.temperature)
            return run_gradients(self.oracle(of), plain, sequences, *of_loss, variants=variants)

        # The digest of the suite's code says nothing about losses of other distributions.
        keep = self.stored if type(loss).__module__ == RepeatedLoss.__module__ else self.keep
        runs = keep(of, ("gradients", data, loss, dtype, device), run)
        mistaken = partial(self.mistaken_oracles, of)
        # Of a large model outputs alone name its mistakes: gradients take an oracle several times as long.
        wrong = (lambda: iter(())) if _is_large(of) else mistaken
        expected = _expected_gradients(runs, partial(self.oracle, of), wrong, data, loss, ranks)
        return replace(expected, computation=computation_of(of, loss, data))

    def gradients_of_many(
        self, of: Judged, data: Repeated, dtype: torch.dtype, device: str = "cpu"
    ) -> ExpectedGradients:
        """The same of `TokenMeanLoss` over all sequences of ``data``."""

        def run() -> GradientRuns:
            # Sums over all tokens round more than sums over distinct sequences.
            plain, loss, all_ = self.plain(of, dtype, device), TokenMeanLoss(), data.all.for_oracle()
            full = [plain.gradients(variant, all_, loss.of_sequence, 1.0) for variant in MANY_VARIANTS]
            one_by_one = (data.distinct.for_oracle(), data.order)
            full.append(plain.repeated_gradients(*one_by_one, loss.of_sequence, 1.0))
            repeated = RepeatedLoss()
            return run_gradients(
                self.oracle(of), plain, data.distinct.for_oracle(), repeated.of_sequence, 1.0, full
            )

        runs = self.stored(of, ("gradients of many", data, dtype, device), run)
        oracles = partial(self.oracle, of), partial(self.mistaken_oracles, of)
        return _expected_gradients(runs, *oracles, data.distinct, RepeatedLoss())

    def training(
        self, model: TinyModel, training: AnyTraining, dtype: torch.dtype, device: str = "cpu"
    ) -> ExpectedTraining:
        """Losses, norms and weights of ``model`` after ``training``."""
        return self.keep(
            model,
            ("training", training, dtype, device),
            lambda: expected_training(self.models.directory(model), model.head, training, dtype, device),
        )

    def plain(self, of: Judged, dtype: torch.dtype, device: str = "cpu") -> PlainModel:
        """The plain Hugging Face model in ``dtype``, and the adapter."""

        def load() -> PlainModel:
            directory, head, low_rank, vision = self._snapshot(of)
            return PlainModel(directory, head, dtype, device, low_rank, vision)

        return self.keep(of, ("plain", dtype, device), load)

    def _snapshot(self, of: Judged) -> Snapshot:
        if isinstance(of, Snapshot):
            return of
        model, low_rank = (of, None) if isinstance(of, TinyModel) else (of.model, of.low_rank())
        return Snapshot(self.models.directory(model), model.head, low_rank, model.vision)

    def stored(self, of: Judged, key: tuple[Hashable, ...], compute: Callable[[], ValueT]) -> ValueT:
        """As `keep`, and on disk as well."""
        cache = self._cache
        if cache is None or isinstance(of, Snapshot) or _is_large(of):
            return self.keep(of, key, compute)
        return self.keep(of, key, lambda: cache.get(repr((of, *key)), compute))

    def keep(self, of: Judged, key: tuple[Hashable, ...], compute: Callable[[], ValueT]) -> ValueT:
        """The value of ``of`` and ``key``, computed once in this process."""
        if isinstance(of, Snapshot):
            return compute()
        if (of, *key) not in self._kept:
            if _is_large(of):  # each may be as large as the model
                for oldest in list(self._kept)[: 1 - LARGE_KEPT]:
                    del self._kept[oldest]
            self._kept[of, *key] = compute()
        value: ValueT = self._kept[of, *key]
        return value


def _is_large(of: Judged) -> bool:
    """Whether ``of`` is a directory of the user's, whose files may change between sessions."""
    if isinstance(of, Snapshot):
        return False
    return bool(of.source if isinstance(of, TinyModel) else of.model.source)


_Values = list[list[Tensor]]
"""One output for each sequence, of the oracle and then of each variant of the plain model."""
_OutputRuns = list[list[dict[str, Tensor]]]
"""The same of all outputs."""
WrongOracles = Callable[[], Iterator[tuple[str, Oracle]]]
"""Sentences about mistakes, and oracles with each."""
GradientRuns = tuple[Gradients, dict[str, Tolerance], Tolerance, Tolerance]
"""The oracle's, and the tolerances of gradients, loss and norm."""


def _output_mistakes(
    oracle: Callable[[], Oracle],
    mistaken_oracles: WrongOracles,
    sequences: Sequence[OracleSequence],
    name: str,
    temperature: float,
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    for sentence, wrong in wrong_temperatures(temperature):
        yield sentence, [outputs[name] for outputs in oracle().evaluate(sequences, wrong)]
    truth = oracle().evaluate(sequences, temperature)
    if name == "entropy":
        sentence = "the entropy is minus the log-prob of the drawn token, and not its mean over all tokens"
        yield sentence, [-outputs["logprobs"] for outputs in truth]
    if name == "scores":
        states = [torch.cat([row["values"][1:], row["scores"][None]]) for row in truth]
        yield "the score of the first token", [row[0] for row in states]
        yield "the score of the token before the last", [row[-2:][0] for row in states]
        masks = [sequence.fields["mask"] for sequence in sequences]
        lasts = [int(mask.nonzero()[-1]) if mask.any() else -1 for mask in masks]
        yield "the score of the last trained token", [row[n] for row, n in zip(states, lasts, strict=True)]
    for sentence, routed in misrouted(sequences):
        yield sentence, [outputs[name] for outputs in oracle().evaluate(routed, temperature)]
    for sentence, runs in _mistaken(truth, sequences):
        if name in ("logprobs", "entropy"):
            yield sentence, [outputs[name] for outputs in runs]
    for sentence, mistaken in mistaken_oracles():
        yield sentence, [outputs[name] for outputs in mistaken.evaluate(sequences, temperature)]


def run_gradients(
    oracle: Oracle,
    plain: PlainModel,
    sequences: Sequence[OracleSequence],
    loss: SequenceLoss,
    temperature: float,
    rest: Sequence[tuple[float, dict[str, Tensor]]] = (),
    variants: Sequence[Variant] = VARIANTS,
) -> GradientRuns:
    """The oracle's gradients of ``loss``, with the tolerances of each, of the loss and of the norm.

    ``rest`` are runs of the plain model that compute the same from more sequences.
    """
    truth = oracle.gradients(sequences, loss, temperature)
    runs = (plain.gradients(variant, sequences, loss, temperature) for variant in variants)
    losses, norms = [], []

    def gradients() -> Iterator[dict[str, Tensor]]:
        for value, grads in chain(runs, rest):
            losses.append(value)
            norms.append(grad_norm(grads))
            yield grads

    return (
        truth,
        tolerances(gradients(), truth.grads, plain.dtype),
        scalar_tolerance(losses, truth.loss, plain.dtype),
        scalar_tolerance(norms, truth.norm, plain.dtype),
    )


def _expected_gradients(
    runs: GradientRuns,
    oracle: Callable[[], Oracle],
    mistaken_oracles: WrongOracles,
    data: Ragged,
    loss: CheckLoss,
    ranks: int = 1,
) -> ExpectedGradients:
    truth, allowed, loss_allowed, norm_allowed = runs

    def mistakes() -> Iterator[tuple[str, Gradients]]:
        yield from _gradient_mistakes(oracle, data.for_oracle(), loss)
        for sentence, routed in misrouted(data.for_oracle()):
            yield sentence, oracle().gradients(routed, loss.of_sequence, loss.temperature)
        yield from _unreduced_gradients(oracle, data, loss, truth, ranks)
        yield from _uses_of_a_tied_embedding(oracle(), data.for_oracle(), loss, truth)
        for sentence, wrong in mistaken_oracles():
            yield sentence, wrong.gradients(data.for_oracle(), loss.of_sequence, loss.temperature)

    def shares() -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for number in range(len(data.rows)):
            alone = data.select([number])
            if loss.weight(alone.batch()):
                of_row = oracle().gradients(alone.for_oracle(), loss.of_sequence, loss.temperature)
                part = of_row.weight / truth.weight
                yield str(number), {name: grad * part for name, grad in of_row.grads.items()}

    return ExpectedGradients(
        oracle=truth,
        tolerances=allowed,
        loss=loss_allowed,
        norm=norm_allowed,
        mistakes=mistakes,
        shares=shares,
    )


def _gradient_mistakes(
    oracle: Callable[[], Oracle], sequences: Sequence[OracleSequence], loss: CheckLoss
) -> Iterator[tuple[str, Gradients]]:
    """Of a mistake in the outputs the loss alone, which it always changes."""
    right = oracle().evaluate(sequences, loss.temperature)
    for sentence, wrong in loss.mistakes(right):
        yield sentence, oracle().gradients(sequences, wrong.of_sequence, wrong.temperature)
    for sentence, runs in _mistaken(right, sequences):
        pairs = zip(runs, sequences, strict=True)
        sums = [loss.of_sequence(outputs, sequence.in_dtype(torch.float64)) for outputs, sequence in pairs]
        weight = sum(counted for _, counted in sums)
        yield sentence, Gradients(loss=sum(float(part) for part, _ in sums) / weight, weight=weight, grads={})


def _unreduced_gradients(
    oracle: Callable[[], Oracle], data: Ragged, loss: CheckLoss, truth: Gradients, ranks: int
) -> Iterator[tuple[str, Gradients]]:
    """The share of each data-parallel rank in the right gradients; the loss is reported for all ranks."""
    parts = shard_plan(data.batch(), ranks) if ranks > 1 else []
    for rank, part in enumerate(parts):
        sequences = data.select(part).for_oracle()
        if not sequences or not loss.weight(data.select(part).batch()):
            continue
        share = oracle().gradients(sequences, loss.of_sequence, loss.temperature)
        grads = {name: grad * share.weight / truth.weight for name, grad in share.grads.items()}
        sentence = f"gradients of data-parallel rank {rank} alone: they are not summed over the {ranks} ranks"
        yield sentence, Gradients(loss=truth.loss, weight=truth.weight, grads=grads)


def _uses_of_a_tied_embedding(
    oracle: Oracle, sequences: Sequence[OracleSequence], loss: CheckLoss, truth: Gradients
) -> Iterator[tuple[str, Gradients]]:
    """The right gradients, but of a tied embedding the part of one use, as on the first or the last stage."""
    embedding, head = oracle.model.get_input_embeddings(), oracle.model.get_output_embeddings()
    if not isinstance(head, nn.Module) or head.weight is not embedding.weight:
        return
    name = next(name for name, value in parameters_of(oracle.model).items() if value is head.weight)
    if name not in truth.grads:  # frozen
        return
    hook = embedding.register_forward_hook(lambda *call: call[-1].detach())
    of_head = oracle.gradients(sequences, loss.of_sequence, loss.temperature).grads[name]
    hook.remove()
    for use, grad in (("head", of_head), ("input", truth.grads[name] - of_head)):
        sentence = f"the gradient of a tied embedding's use at the {use} alone"
        yield sentence, replace(truth, grads={**truth.grads, name: grad})


def _mistaken(
    truth: Sequence[dict[str, Tensor]], sequences: Sequence[OracleSequence]
) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
    """Sentences about mistakes of language models, and all outputs with each."""
    if all("logits" in outputs for outputs in truth):
        ids = [torch.tensor(sequence.input_ids) for sequence in sequences]
        for sentence, mistake in OUTPUTS.items():
            yield sentence, [{**right, **mistake(right, row)} for right, row in zip(truth, ids, strict=True)]


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])


def _errors(got: Tensor, expected: Tensor) -> Tensor:
    difference = got.double() - expected.double()
    return difference[1:] if difference.dim() else difference.reshape(1)
