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
from core_rl_conformance.inputs.losses import BalanceLoss, OutputsLoss, TokenMeanLoss
from core_rl_conformance.procedures.outputs import verify_forward
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
TOKEN_MEAN = TokenMeanLoss(temperature=0.8)
OF_ENTROPY = OutputsLoss(names=("entropy",), temperature=0.8)
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


@check("I7.shared-prefix", requires={Capability.SHARED_PREFIX}, each="layout")
def shared_prefixes_change_no_output(subject: EngineUnderTest) -> None:
    """Log-probs and entropy of sequences that share prefixes are the oracle's, which computes each alone.

    Why: the tokens of one prompt are computed once for all its answers, and a mask or a position that is wrong by one
    lets answers see each other. Nothing raises, and training goes on.
    Look at: which tokens a branch attends to; its positions, which go on from its own prefix; the state that its
    first token is predicted from, the last one of that prefix and not of the branch before it.
    """
    model, data = subject.model(), _data(subject)
    group = subject.start(model)
    for label, cut in CUTS.items():
        subject.verify_logprobs(f"of shared prefixes {label}", group, model, data, cut)
    cut = CUTS["in one micro-batch"]
    verify_forward(subject, group, ("entropy",), model, data, "of shared prefixes", cut=cut)


@check("I1.shared-prefix", requires={Capability.SHARED_PREFIX}, each="layout")
def shared_prefixes_change_no_gradient(subject: EngineUnderTest) -> None:
    """Loss and gradients of sequences that share prefixes are the oracle's, which computes each alone.

    The loss masks of sequences differ inside their common prefix.

    Why: a shared token has the gradient of every sequence that continues from it. Counted once, or divided by their
    number, prompts are trained less than with any other engine.
    Look at: that the gradient of shared keys, values and states is the **sum** over branches; that a token which only
    some sequences train counts for these alone.
    """
    model, data = subject.model(), _data(subject)
    group = subject.start(model)
    for label, cut in CUTS.items():
        subject.verify_backward(f"of shared prefixes {label}", group, model, data, TOKEN_MEAN, cut)
    label = "of the entropy of shared prefixes"
    subject.verify_backward(label, group, model, data, OF_ENTROPY, CUTS["in one micro-batch"])


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
