"""Prefixes that sequences share, computed once: the values and gradients of the whole sequences."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.data import Ragged, Row, ragged
from core_rl_conformance.inputs.losses import BalanceLoss
from core_rl_conformance.profile import MOE

PIECES: Sequence[Sequence[tuple[int, int]]] = (
    ((0, 16), (1, 12)),
    ((4, 1), (5, 9)),
    ((0, 16), (2, 20)),
    ((0, 16), (3, 7)),
    ((6, 11),),
    ((0, 16),),
    ((0, 16), (3, 7)),
    ((4, 1), (7, 15)),
    ((0, 16), (3, 7), (8, 5)),
    ((0, 16), (3, 4), (9, 7)),
    ((4, 1),),
)
"""The random rows that each sequence consists of, and the tokens of each.

A prompt has answers, of which two are equal, one continues another, one leaves another half-way and one is empty. Two
sequences share a single token, which is a sequence too, and one shares nothing."""
CUTS = {
    "in one micro-batch": MicroBatchSpec(count=1, share_prefixes=True),
    "in three micro-batches": MicroBatchSpec(count=3, share_prefixes=True),
    "with a budget that splits a tree": MicroBatchSpec(max_tokens=48, share_prefixes=True),
}
BALANCE = BalanceLoss()


def prefix_trees(vocab_size: int, seed: int) -> Ragged:
    """Two trees and a sequence alone. Masks and advantages differ between sequences also where tokens are shared."""
    source = ragged(vocab_size, seed, lengths=(24,) * 10).rows
    rng = random.Random(seed)
    rows = []
    for pieces in PIECES:
        ids = [token for number, count in pieces for token in source[number].ids[:count]]
        rows.append(
            Row(
                ids=tuple(ids),
                mask=tuple(rng.random() < 0.7 for _ in ids),
                advantages=tuple(rng.randrange(-128, 129) / 64 for _ in ids),
                target=rng.randrange(-128, 129) / 64,
            )
        )
    return Ragged(tuple(rows))


@check(
    "I18.shared-aux", requires={Capability.SHARED_PREFIX, Capability.AUX_LOSS}, families=(MOE,), each="layout"
)
def shared_prefixes_change_no_balance(subject: EngineUnderTest) -> None:
    """The routers' balance counts a shared token for every sequence that it belongs to, as the oracle does.

    Why: a balance over computed tokens gives prompts less weight the more answers they have.
    Look at: the tokens that ``aux_loss`` is over: of the whole batch, not of the rows that were computed.
    """
    model, data = subject.model(), _data(subject)
    expected = subject.gradients(model, data, BALANCE)
    group = subject.start(changes={"model": {"router_aux_coef": 1.0}})
    for label, cut in CUTS.items():
        metrics = group.forward_backward(data.batch(), BALANCE.spec(), cut)
        value, grads = metrics.get("aux_loss", math.nan), group.named_tensors("grads")
        subject.verify_loss(f"the metric 'aux_loss' {label}", value, expected)
        subject.verify_named(f"gradients {label}", grads, expected.oracle.grads, expected.tolerances)
        group.optimizer_zero_grad()


def _data(subject: EngineUnderTest) -> Ragged:
    return prefix_trees(subject.model().vocab_size, subject.case.seed)
