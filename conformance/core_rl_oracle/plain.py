"""The plain Hugging Face model in an engine's dtype: how much error is rounding.

It runs the same sequences in several equivalent ways: other row orders, other cuts into batches, padding on either
side, both attention implementations, and two formulas of log-probs and entropy. Some move weights by one unit in the
last place. All are right; how far they are from the oracle is the baseline of the tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from core_rl_oracle.experts import all_written, balance, gradients_of, overwrite, parameters_of, watched
from core_rl_oracle.layers import recorded_layers
from core_rl_oracle.low_rank import LowRank
from core_rl_oracle.media import joined_media, load_model, media_arguments
from core_rl_oracle.on_disk import copied
from core_rl_oracle.oracle import OracleHead, OracleSequence, SequenceLoss, joined_outputs


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of several equivalent ways to compute the same."""

    rows_at_once: int
    padding: Literal["left", "right"] = "right"
    attention: Literal["eager", "sdpa"] = "eager"
    softmax: Literal["log_softmax", "logsumexp"] = "log_softmax"
    """Entropy as ``-sum(p log p)`` or as ``lse - sum(p z)``: the second, which saves memory and which many
    fused heads use, rounds at the size of the logits, in the backward pass too."""
    shuffle: int | None = None
    """Seed of the row order; None keeps it."""
    nudge: int | None = None
    """Seed of moving each weight by one unit in the last place, up or down; None leaves them."""
    trained_head: bool = False
    """Whether the head is computed at trained tokens alone; log-probs of others are of no distribution then."""


LONG = 64
"""Sequences with more tokens are batches of their own: they would pad all others to their length."""
VARIANTS = (
    Variant(rows_at_once=64),
    Variant(rows_at_once=3, attention="sdpa", softmax="logsumexp"),
    Variant(rows_at_once=5, padding="left", softmax="logsumexp", shuffle=1),
    Variant(rows_at_once=64, nudge=1),
    Variant(rows_at_once=7, attention="sdpa", softmax="logsumexp", shuffle=2, nudge=2),
    Variant(rows_at_once=11, padding="left", nudge=3),
)


ALONE = Variant(rows_at_once=1)
TRAINED_ALONE = Variant(rows_at_once=1, trained_head=True)
"""Each row in a pass of its own: where layers are wide, and the vocabulary large, products of two or three tokens round
ten times as much as larger ones. On a user's model they are variants too."""


MANY_VARIANTS = (
    Variant(rows_at_once=1000, nudge=1),
    Variant(rows_at_once=1000, softmax="logsumexp", shuffle=1, nudge=2),
)
"""For hundreds of sequences, besides `PlainModel.repeated_gradients`: sums over nearly all tokens, which round most."""


EXACT_VARIANTS = (
    Variant(rows_at_once=64),
    Variant(rows_at_once=3, attention="sdpa", softmax="logsumexp"),
    Variant(rows_at_once=5, padding="left", softmax="logsumexp", shuffle=1),
    Variant(rows_at_once=7, attention="sdpa", shuffle=2),
    Variant(rows_at_once=1, softmax="logsumexp"),
    Variant(rows_at_once=11, padding="left"),
)
"""Without moved weights: for a model whose weights are chosen so that nothing rounds."""


EXPERTS = {"eager": "eager", "sdpa": "batched_mm"}
"""The implementation of experts that goes with each attention; other models have none."""

SINKS = ("granite_swa", "gpt_oss")
"""Model types with attention sinks, which transformers computes by eager attention alone."""


class PlainModel:
    """The model in ``directory``, in ``dtype`` on ``device``; everything it returns is on the CPU."""

    def __init__(
        self,
        directory: Path,
        head: OracleHead,
        dtype: torch.dtype,
        device: str = "cpu",
        adapter: LowRank | None = None,
        vision: bool = False,
    ) -> None:
        self.head = head
        self.dtype = dtype
        self.device = device
        self._model = load_model(directory, head, vision, dtype)
        if adapter is not None:
            adapter.attach(self._model)
        torch.nn.Module.to(self._model, device)
        named = parameters_of(self._model)
        self._weights = {name: copied(parameter) for name, parameter in named.items()}
        self._nudged: dict[int, list[Tensor]] = {}

    def outputs(
        self, variant: Variant, sequences: Sequence[OracleSequence], temperature: float
    ) -> list[dict[str, Tensor]]:
        """The outputs of each sequence under ``variant``, in the caller's order; without logits."""
        self.model(variant)
        outputs: dict[int, dict[str, Tensor]] = {}
        with torch.no_grad():
            for rows in _cuts(variant, sequences):
                outputs |= self._batch(variant, rows, sequences, temperature)
        return [outputs[index] for index in range(len(sequences))]

    def hidden_states(self, variant: Variant, sequences: Sequence[OracleSequence]) -> list[Tensor]:
        """``[L, layers + 1, H]`` of each sequence under ``variant``: before the first layer, and after each."""
        model, results = self.model(variant), {}
        for rows in _cuts(variant, sequences):
            with torch.no_grad(), recorded_layers(model) as states:
                self._batch(variant, rows, sequences, temperature=1.0)
            for index, padded in zip(rows, torch.stack(states, dim=2).cpu(), strict=True):
                length = len(sequences[index].input_ids)
                results[index] = padded[-length:] if variant.padding == "left" else padded[:length]
        return [results[index] for index in range(len(sequences))]

    def gradients(
        self, variant: Variant, sequences: Sequence[OracleSequence], loss: SequenceLoss, temperature: float
    ) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of (sum of totals) / (sum of weights), accumulated over the cuts."""
        model = self.model(variant)
        total, weight = 0.0, sum(_weight(loss, sequence, self.head) for sequence in sequences)
        for rows in _cuts(variant, sequences):
            total += self._add_gradients(variant, rows, sequences, loss, temperature, weight)
        return total, _written(gradients_of(model))

    def repeated_gradients(
        self, distinct: Sequence[OracleSequence], order: Sequence[int], loss: SequenceLoss, temperature: float
    ) -> tuple[float, dict[str, Tensor]]:
        """The same of the sequences ``distinct[number]`` for each of ``order``, one by one and added up in this order.

        Equal sequences have equal gradients, which are computed once.
        """
        weights = [_weight(loss, sequence, self.head) for sequence in distinct]
        weight = sum(weights[number] for number in order)
        results: list[tuple[float, list[Tensor]]] = []
        for number in range(len(distinct)):
            model = self.model(ALONE)
            part = self._add_gradients(ALONE, [number], distinct, loss, temperature, weight)
            results.append((part, list(gradients_of(model).values())))
        total, sums = 0.0, [torch.zeros_like(grad) for grad in results[0][1]]
        for number in order:
            part, grads = results[number]
            total += part
            torch._foreach_add_(sums, grads)
        return total, _written(dict(zip(gradients_of(model), sums, strict=True)))

    def _add_gradients(
        self,
        variant: Variant,
        rows: Sequence[int],
        sequences: Sequence[OracleSequence],
        loss: SequenceLoss,
        temperature: float,
        weight: float,
    ) -> float:
        """Run one batch forward and backward; its part of the loss."""
        outputs = self._batch(variant, rows, sequences, temperature)
        parts = [loss(outputs[index], sequences[index].in_dtype(torch.float32))[0] for index in rows]
        part = torch.stack(parts).sum() / weight
        if part.requires_grad:
            part.backward()
        return float(part.detach())

    def set_weights(self, values: Mapping[str, Tensor]) -> None:
        """Compute with ``values`` from now on, rounded to the model's dtype."""
        self._nudged.clear()
        overwrite(self._weights, values)

    def model(self, variant: Variant) -> PreTrainedModel:
        """The model with the weights and the attention of ``variant`` and without gradients; always one object."""
        values = list(self._weights.values())
        if variant.nudge is not None:
            if variant.nudge not in self._nudged:
                self._nudged[variant.nudge] = _nudged(values, variant.nudge)
            values = self._nudged[variant.nudge]
        model, config = self._model, self._model.config
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        model.zero_grad(set_to_none=True)
        # torch's sdpa cannot cap the scores, and has no sinks.
        only_eager = getattr(config, "attn_logit_softcapping", None) or config.model_type in SINKS
        attention = "eager" if only_eager else variant.attention
        model.set_attn_implementation(attention)
        model.set_experts_implementation(EXPERTS[attention])
        return model

    def _batch(
        self, variant: Variant, rows: Sequence[int], sequences: Sequence[OracleSequence], temperature: float
    ) -> dict[int, dict[str, Tensor]]:
        """The outputs of the sequences ``rows``, and of their partners in the same batch."""
        parts = [part for index in rows for part in sequences[index].parts]
        results = iter(self._padded_batch(variant, parts, temperature))
        return {index: joined_outputs([next(results) for _ in sequences[index].parts]) for index in rows}

    def _padded_batch(
        self, variant: Variant, sequences: Sequence[OracleSequence], temperature: float
    ) -> list[dict[str, Tensor]]:
        model = self._model
        lists = [sequence.input_ids for sequence in sequences]
        width = max(map(len, lists))
        starts = [width - len(ids) if variant.padding == "left" else 0 for ids in lists]
        ids, mask = torch.zeros(2, len(sequences), width, dtype=torch.long)
        for row, (start, row_ids) in enumerate(zip(starts, lists, strict=True)):
            ids[row, start : start + len(row_ids)] = torch.tensor(row_ids)
            mask[row, start : start + len(row_ids)] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ids, mask, positions = ids.to(self.device), mask.to(self.device), positions.to(self.device)
        joined = joined_media([sequence.media for sequence in sequences])
        media = media_arguments(model, ids, {name: value.to(self.device) for name, value in joined.items()})
        if "mm_token_type_ids" not in media:
            media["position_ids"] = positions  # others are the model's own rule
        with watched(model, _replay(sequences, starts, width)) as choices:
            hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **media)
        states = hidden.last_hidden_state
        result = []
        for row, (row_list, start) in enumerate(zip(lists, starts, strict=True)):
            own = states[row, start : start + len(row_list)]
            trained = sequences[row].fields["mask"][1:] if variant.trained_head else None
            row_ids = ids[row, start : start + len(own)]
            outputs = _head_outputs(model, self.head, variant, own, row_ids, temperature, trained)
            if choices:
                first = row * width + start
                outputs["aux_loss"] = balance([choice.rows(first, first + len(own)) for choice in choices])
            result.append({name: value.cpu() for name, value in outputs.items()})
        return result


def _replay(sequences: Sequence[OracleSequence], starts: Sequence[int], width: int) -> Tensor | None:
    """The experts to choose, ``[rows * width, layers, k]``, any for padding; None leaves it to the routers."""
    inputs = [sequence.fields.get("routing") for sequence in sequences]
    if inputs[0] is None:
        return None
    layers, k = inputs[0].shape[1:]
    replay = torch.arange(k).repeat(len(sequences), width, layers, 1)
    for row, (start, routing) in enumerate(zip(starts, inputs, strict=True)):
        assert routing is not None
        replay[row, start : start + len(routing)] = routing
    return replay.flatten(0, 1)


def _head_outputs(
    model: PreTrainedModel,
    head: OracleHead,
    variant: Variant,
    states: Tensor,
    ids: Tensor,
    temperature: float,
    trained: Tensor | None,
) -> dict[str, Tensor]:
    """Outputs of a sequence with the hidden ``states [L, D]``; with ``trained [L - 1]``, other logits are 0."""
    zero = torch.zeros(1, device=states.device)
    if head != "lm":
        weight = model.get_parameter("score.weight").float()
        scalars = (states.float() @ weight.T)[:, 0]
        return {"values": torch.cat([zero, scalars[:-1]]), "bootstrap": scalars[-1], "scores": scalars[-1]}
    embeddings = model.get_output_embeddings()
    assert isinstance(embeddings, torch.nn.Module)
    behind = states[:-1] if trained is None else states[:-1][trained]
    logits = embeddings(behind).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = (logits if cap is None else torch.tanh(logits / cap) * cap) / temperature
    if trained is not None:
        logits = logits.new_zeros(len(trained), logits.shape[1]).index_put((trained,), logits)
    logprobs, entropy = (
        _log_softmax(logits, ids[1:]) if variant.softmax == "log_softmax" else _lse(logits, ids[1:])
    )
    return {
        "logprobs": torch.cat([zero, logprobs]),
        "entropy": torch.cat([zero, entropy]),
        "logits": torch.cat([zero.expand(1, logits.shape[1]), logits]),
    }


def _log_softmax(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of ``ids [L]`` and entropies, from ``logits [L, V]``."""
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _lse(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the log-sum-exp."""
    lse = torch.logsumexp(logits, dim=-1)
    p = (logits - lse[:, None]).exp()
    return logits.gather(1, ids[:, None])[:, 0] - lse, lse - (p * logits).sum(-1)


def _written(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``grads`` under the names of the checkpoint, in float32 on the CPU."""
    return {name: grad.float().cpu() for name, grad in all_written(grads).items()}


def _cuts(variant: Variant, sequences: Sequence[OracleSequence]) -> Iterator[list[int]]:
    order = list(range(len(sequences)))
    if variant.shuffle is not None:
        random.Random(variant.shuffle).shuffle(order)
    long = [row for row in order if len(sequences[row].input_ids) > LONG]
    yield from ([row] for row in long)
    order = [row for row in order if row not in long]
    for start in range(0, len(order), variant.rows_at_once):
        yield order[start : start + variant.rows_at_once]


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """``tensor`` with each entry moved by one unit in the last place, up or down."""
    up = torch.rand(tensor.shape, generator=generator) < 0.5
    return torch.nextafter(tensor, torch.where(up, torch.inf, -torch.inf).to(tensor))


def _nudged(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [copied(nudged(weight, generator)) for weight in weights]


def _weight(loss: SequenceLoss, sequence: OracleSequence, head: OracleHead) -> float:
    """The weight of one sequence, computed with outputs of zero."""
    return loss(joined_outputs([_zeros(part, head) for part in sequence.parts]), sequence)[1]


def _zeros(sequence: OracleSequence, head: OracleHead) -> dict[str, Tensor]:
    zeros = torch.zeros(len(sequence.input_ids))
    names = ("logprobs", "entropy") if head == "lm" else ("values",)
    scalars = ("scores", "bootstrap", "aux_loss")
    outputs = dict.fromkeys(names, zeros) | dict.fromkeys(scalars, torch.zeros(()))
    outputs["logits"] = zeros[:, None]
    return outputs
