"""verl's batches as batches of core-rl, and outputs of an engine in verl's alignment."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.model import extract_multi_modal_inputs

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.errors import ConfigError

UNSUPPORTED = (
    "distillation_use_topk",
    "distillation_only",
    "calculate_sum_pi_squared",
    "enable_routing_replay",
)
"""Requests of a batch that have no counterpart."""


def as_verl(output: ModelOutput, batch: SequenceBatch) -> dict[str, Tensor]:
    """Nested outputs under verl's names, shifted so that position ``t`` is of token ``t + 1``."""
    offsets = batch.cu_seqlens.to(batch.device, torch.long)
    named = {}
    for ours, theirs in (("logprobs", "log_probs"), ("entropy", "entropy"), ("values", "values")):
        tensor = getattr(output, ours)
        if tensor is not None:
            # The last position takes the first of the next sequence, which is 0.
            shifted = tensor.roll(-1)
            if ours == "values" and output.bootstrap is not None:
                last = (offsets[1:] - 1).to(tensor.device)
                shifted = shifted.index_copy(0, last, output.bootstrap.to(shifted))
            named[theirs] = torch.nested.nested_tensor_from_jagged(shifted, offsets.to(tensor.device))
    return named


def nested_rows(outputs: list[dict[str, Tensor]], rows: list[Any]) -> dict[str, Tensor]:
    """Outputs of micro-batches with the rows ``rows``, in the order of the rows."""
    order = [row for part in rows for row in part]
    joined = {}
    for name in outputs[0] if outputs else ():
        parts = [row for output in outputs for row in output[name].unbind()]
        pairs = sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])
        joined[name] = torch.nested.as_nested_tensor([part for _, part in pairs], layout=torch.jagged)
    return joined


def sequences(data: TensorDict, responses_only: bool) -> SequenceBatch:
    """The sequences of ``data`` with their row numbers.

    With ``responses_only`` the head may skip prompts, which verl's losses on responses never read.
    """
    ids = data["input_ids"]
    bounds = ids.offsets().to("cpu", torch.int32)
    tokens = {}
    if responses_only and "prompts" in data.keys() and data["prompts"].is_nested:  # noqa: SIM118
        lengths, prompts = ids.offsets().diff(), data["prompts"].offsets().diff()
        starts = torch.repeat_interleave(ids.offsets()[:-1] + prompts, lengths)
        tokens["loss_mask"] = torch.arange(len(starts), device=starts.device) >= starts
    group = tu.get_non_tensor_data(data, "force_group_size", 1)
    count = len(bounds) - 1
    return SequenceBatch(
        input_ids=ids.values(),
        cu_seqlens=bounds,
        tokens=tokens,
        meta={"row": list(range(count))},
        unit=None if group == 1 else torch.arange(count) // group,
    )


def cut(data: TensorDict) -> MicroBatchSpec:
    """Token budget of verl, or as many micro-batches as its number of sequences makes."""
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
        return MicroBatchSpec(max_tokens=tu.get_non_tensor_data(data, "max_token_len_per_gpu", None))
    size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
    return MicroBatchSpec(count=max(1, -(-len(data) // size)))


def temperature(data: TensorDict) -> float:
    """The one temperature of all sequences."""
    value = tu.get_non_tensor_data(data, "temperature", 1.0)
    values = set(value.tolist()) if isinstance(value, Tensor) else {float(value)}
    if len(values) != 1:
        raise ConfigError(f"temperature = {sorted(values)}: one for all sequences is needed; split the batch")
    return float(values.pop())


def check_data(data: TensorDict) -> None:
    """Raise `ConfigError` for requests that have no counterpart."""
    asked = [name for name in UNSUPPORTED if tu.get_non_tensor_data(data, name, False)]
    if asked:
        raise ConfigError(f"{', '.join(asked)}: an engine of core-rl does not compute this; turn it off")
    if tu.get_non_tensor_data(data, "pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING:
        raise ConfigError("pad_mode: the rows are padded; pass nested tensors (DatasetPadMode.NO_PADDING)")
    if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])):
        raise ConfigError("multi_modal_inputs: an engine of core-rl takes text alone; remove the images")
