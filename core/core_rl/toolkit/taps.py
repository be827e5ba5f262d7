"""Taps on hidden states: recorded between layers during a pass, and put together over ranks after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.collectives import gather
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.dtensor import own_part
from core_rl.toolkit.parallel_context import ModelShards


def decoder_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The layers of ``model``, or of its text model, by number from 1; raises `UnsupportedCapability` without any."""
    text = model.config.get_text_config(decoder=True)
    several = hasattr(text, "altup_num_inputs")  # Gemma 3n has several states of each token
    for module in () if several else model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
            return dict(enumerate(module, start=1))
    raise UnsupportedCapability(
        f"output 'hidden_states': the model type {model.config.model_type!r} has no list of {text.num_hidden_layers} "
        "layers with one state of each token; leave it out"
    )


@contextmanager
def tapped(
    layers: Mapping[int, nn.Module], micro_batches: Sequence[SequenceBatch], shards: ModelShards
) -> Iterator[dict[int, list[Tensor]]]:
    """`SupportsTaps.tap` for this rank's ``layers`` by number, which take hidden states as their first argument."""
    local: dict[int, list[Tensor]] = {}
    states: dict[int, list[Tensor]] = {}
    with ExitStack() as stack:
        for number, layer in layers.items():
            if number == 1:
                before = partial(_record_input, local.setdefault(0, []))
                stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            after = partial(_record_output, local.setdefault(number, []))
            stack.callback(layer.register_forward_hook(after).remove)
        yield states
    for number, parts in local.items():
        states[number] = list(_whole(torch.cat(parts), micro_batches, shards))


def _record_input(parts: list[Tensor], *call: Any) -> None:
    _, args, kwargs = call
    parts.append(_rows(next(iter((*args, *kwargs.values())))))


def _record_output(parts: list[Tensor], *call: Any) -> None:
    output = call[-1]
    parts.append(_rows(output if isinstance(output, Tensor) else output[0]))


def _rows(hidden: Tensor) -> Tensor:
    """``[L, H]`` of a layer's ``[1, L, H]`` or ``[L, 1, H]``, copied: some layers add to their input in place."""
    return own_part(hidden.detach()).flatten(0, 1).clone()


def _whole(hidden: Tensor, micro_batches: Sequence[SequenceBatch], shards: ModelShards) -> Iterator[Tensor]:
    """``[T, H]`` of each micro-batch from this rank's rows of all."""
    slices = [shards.slice_of(micro_batch) for micro_batch in micro_batches]
    spread = shards.tensor.size if shards.sequence_parallel else 1
    rows = hidden.split([len(tokens.input_ids) // spread for tokens in slices])
    for part, tokens, micro_batch in zip(rows, slices, micro_batches, strict=True):
        here = gather(part, shards.tensor, 0, partial=False) if shards.sequence_parallel else part
        everywhere = gather(here, shards.context, 0, partial=False)
        yield tokens.in_batch(everywhere, micro_batch.num_tokens).float().cpu()
