"""Known mistakes in the outputs of a language model, each computed from the right outputs of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

Outputs = Mapping[str, Tensor]
Mistake = Callable[[Outputs, Tensor], dict[str, Tensor]]
"""Wrong outputs, from all right ones and the token ids ``[L]``; ``logits [L, V]`` is among them."""
COLUMNS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
MULTIPLES = (64, 128, 256)


def _roll(shift: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    log_p = outputs["logits"].log_softmax(-1)
    drawn = log_p.gather(-1, ids.roll(-shift)[:, None])[:, 0]
    return {"logprobs": torch.cat([torch.zeros_like(drawn[:1]), drawn[1:]])}


def _add_columns(count: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    """The softmax with ``count`` more logits of 0."""
    logits = outputs["logits"]
    total = torch.logaddexp(logits.logsumexp(-1), logits.new_tensor(math.log(count)))
    drawn = logits.gather(-1, ids[:, None])[:, 0] - total
    entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
    later = torch.arange(len(ids)) > 0
    return {"logprobs": drawn * later, "entropy": entropy * later}


def _pad(multiple: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    return _add_columns(-outputs["logits"].shape[-1] % multiple or multiple, outputs, ids)


def _round(outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    """Logits in bfloat16."""
    log_p = outputs["logits"].bfloat16().double().log_softmax(-1)
    later = torch.arange(len(ids)) > 0
    drawn, entropy = log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return {"logprobs": drawn * later, "entropy": entropy * later}


MISTAKES: Mapping[str, Mistake] = {
    "logits are rounded to bfloat16": _round,
    "labels are rolled one token too far: a position is compared with the token after its own": partial(
        _roll, 1
    ),
    "labels are not rolled: a position is compared with the token before its own": partial(_roll, -1),
    **{
        f"the softmax counts {count} more columns than the vocabulary has, with logits of 0": partial(
            _add_columns, count
        )
        for count in COLUMNS
    },
    **{
        f"the softmax counts the columns that pad the vocabulary to a multiple of {multiple}": partial(
            _pad, multiple
        )
        for multiple in MULTIPLES
    },
}
