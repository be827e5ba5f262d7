"""Pairs of a preferred and a rejected sequence, and the losses on them.

A pair is a ``unit`` of two sequences, of which ``chosen [B]`` marks one, so it is never cut apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import units
from core_rl.errors import BatchError, raise_all
from core_rl_trainer.algorithms.fields import CHOSEN

__all__ = [
    "bradley_terry_loss",
    "check_pairs",
    "count_pairs",
    "dpo_loss",
    "find_pairs",
    "hinge_loss",
    "ipo_loss",
]


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """``-log sigmoid(chosen - rejected - margin)`` of scores, each ``[P]``.

    Bradley and Terry, Biometrika 39, 1952; as a reward model's loss in InstructGPT, arXiv:2203.02155,
    equation 1; the margin as in Llama 2, arXiv:2307.09288, equation 2.
    """
    return -logsigmoid(chosen - rejected - margin)


def dpo_loss(gain: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290, equation 7): ``-log sigmoid(beta * gain)``, ``[P]``.

    ``gain`` is the log-ratio to the reference of the chosen sequence, minus that of the rejected one. With
    ``label_smoothing`` the labels are taken to be wrong this often (conservative DPO, the same paper's
    authors: https://ericmitchell.ai/cdpo.pdf).
    """
    right, wrong = logsigmoid(beta * gain), logsigmoid(-beta * gain)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def ipo_loss(mean_gain: Tensor, beta: float) -> Tensor:
    """IPO (arXiv:2310.12036, equation 17): ``(gain - 1 / (2 * beta))^2``, ``[P]``.

    The log-ratios are means over the tokens of each sequence, as its authors have it and TRL computes it.
    """
    return (mean_gain - 1 / (2 * beta)).square()


def hinge_loss(gain: Tensor, beta: float) -> Tensor:
    """SLiC's hinge on DPO's gain (arXiv:2305.10425; as in RSO, arXiv:2309.06657): ``max(0, 1 - beta * gain)``."""
    return torch.relu(1 - beta * gain)


def find_pairs(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected sequence of each pair, int64 ``[P]`` each, in order of first appearance.

    Raises as `check_pairs` does.
    """
    check_pairs(batch)
    marked = batch[CHOSEN].bool().tolist()
    ordered = [sorted(unit, key=lambda b: not marked[b]) for unit in units(batch)]
    chosen, rejected = torch.tensor(ordered, dtype=torch.long, device=batch.device).reshape(-1, 2).unbind(1)
    return chosen, rejected


def count_pairs(batch: SequenceBatch) -> float:
    """The number of pairs: the weight of a loss on them."""
    return batch.num_sequences / 2


def check_pairs(batch: SequenceBatch) -> None:
    """Raise one `BatchError` that names every unit that is no pair."""
    there = {"unit": batch.unit is not None, CHOSEN: CHOSEN in batch}
    if missing := [name for name, found in there.items() if not found]:
        raise BatchError(f"preference pairs need {missing}: sequences of a pair share a number in 'unit'")
    raise_all(BatchError, "preference pairs", _pair_violations(batch))


def _pair_violations(batch: SequenceBatch) -> Iterable[str]:
    marked = batch[CHOSEN].bool().tolist()
    for unit in units(batch):
        if len(unit) != 2:
            yield f"the unit of sequences {unit} has {len(unit)} sequences; a pair has two"
        elif marked[unit[0]] == marked[unit[1]]:
            yield f"sequences {unit} are {'both' if marked[unit[0]] else 'neither'} 'chosen'; one of a pair is"
