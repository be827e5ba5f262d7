"""Losses of trainers on pairs of a preferred and a rejected sequence: DPO, and reward models."""

from __future__ import annotations

from functools import partial

from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.rollouts import PAIR
from core_rl_conformance.outcomes import NotSupported
from core_rl_conformance.procedures.trainers import (
    WHOLE,
    build,
    cuts_of,
    draw,
    need,
    pair_losses,
    spec_of,
    verify_gradients,
)
from core_rl_conformance.trainers.interface import MicroBatches
from core_rl_conformance.trainers.spec import Feature
from core_rl_oracle.loss_names import Objective
from core_rl_oracle.policy_losses import PolicyLoss

REFUSALS = (ValueError, CoreRLError)
SPECIAL = (0, 1, 2)
"""Ids that tokenizers often take for padding, BOS and EOS."""
UNEVEN = MicroBatches(sequences=3 * PAIR)
"""Three pairs, of eight, so that the last micro-batch has two."""


def _loss(subject: EngineUnderTest, objective: Objective) -> PolicyLoss:
    if objective not in spec_of(subject).objectives:
        raise NotSupported(f"the trainer names no objective {objective}")
    return PolicyLoss(objective=objective)


def _losses(subject: EngineUnderTest) -> list[PolicyLoss]:
    losses = pair_losses(subject)
    if not losses:
        raise NotSupported("the trainer names no objective on pairs")
    return losses


@check("T1.dpo", kind="trainer", each="layout and model")
def dpo_follows_its_definition(subject: EngineUnderTest) -> None:
    """DPO's sigmoid loss has the float64 gradients, loss and norm, at every cut that leaves pairs together.

    Why: without the reference, with a mean over tokens, or with another beta it still falls and still prefers the right
    sequence, and trains another objective.
    Look at: the sum over trained tokens of both log-probs, beta, and which sequence is the preferred one.
    """
    loss = _loss(subject, "dpo")
    verify_gradients(subject, "DPO", draw(subject, loss, seed=10), loss, cuts_of(subject, loss))


@check("T1.bradley-terry", kind="trainer", each="layout and model")
def bradley_terry_follows_its_definition(subject: EngineUnderTest) -> None:
    """A reward model's Bradley-Terry loss has the float64 gradients, loss and norm, at every cut.

    Why: a score that is read at a padded position, or at the first token, depends on the neighbours in the batch.
    Look at: the position of the score in padded rows, and the order of a pair.
    """
    loss = _loss(subject, "bradley_terry")
    rollouts = draw(subject, loss, seed=11)
    verify_gradients(subject, "the Bradley-Terry loss", rollouts, loss, cuts_of(subject, loss))


@check("T3.pairs", kind="trainer", each="layout")
def pairs_of_a_short_micro_batch_count_alike(subject: EngineUnderTest) -> None:
    """Each pair has the same weight, also in a last micro-batch with fewer of them.

    Why: a mean of micro-batch means weighs the pairs of a short micro-batch more; without a division at all, TRL's DPO
    loss grew with the number of micro-batches (TRL #2615).
    Look at: the divisor of the loss: it counts the pairs of all micro-batches.
    """
    need(subject, Feature.SEQUENCE_COUNT)
    for loss in _losses(subject):
        rollouts = draw(subject, loss, seed=12)
        verify_gradients(subject, f"{loss.objective} with a short micro-batch", rollouts, loss, [UNEVEN])


@check("T4.last-token", kind="trainer", each="layout")
def score_is_that_of_the_last_token(subject: EngineUnderTest) -> None:
    """The score of a sequence is read at its last token, whatever the id of that token.

    Why: transformers looks for the last token that is not padding by its id; where the padding token is EOS, as for
    tokenizers without one, it reads the score of a finished sequence one token early (transformers #35352).
    Look at: the position of the score, which lengths or the attention mask give.
    """
    loss = _loss(subject, "bradley_terry")
    rollouts = draw(subject, loss, seed=13).ending_in(SPECIAL)
    verify_gradients(subject, "sequences that end in special tokens", rollouts, loss, cuts_of(subject, loss))


@check("T4.broken-pairs", kind="trainer", each="layout")
def broken_pairs_are_refused(subject: EngineUnderTest) -> None:
    """A batch with an odd number of sequences, or with neighbours of two groups, is refused with a ValueError.

    Why: taken as they come, the sequences after a missing one are compared with completions of other prompts.
    Look at: what makes pairs of the sequences of a batch, before the forward pass.
    """
    for loss in _losses(subject):
        rollouts = draw(subject, loss, seed=14)
        present = range(len(rollouts.rows))
        trainer = build(subject, loss)
        for label, absent in {"an odd number of sequences": {1}, "neighbours of two groups": {1, 4}}.items():
            batch = rollouts.select([index for index in present if index not in absent]).for_trainer()
            subject.require_error(
                REFUSALS,
                partial(trainer.train_batch, batch, WHOLE, apply=False),
                f"{loss.objective} took a batch with {label}; raise a ValueError",
            )
