"""Losses of whole trainers, on sequences and on pairs, against float64, at any cut and on any ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.rollouts import NEAR, PAIR, Rollouts
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.outcomes import NotSupported
from core_rl_conformance.procedures.trainers import (
    DISTANCES,
    WHOLE,
    aggregated_losses,
    at_temperature,
    build,
    cuts_of,
    draw,
    loss_of,
    need,
    pair_losses,
    plain_loss,
    policy_loss,
    spec_of,
    token_loss,
    train,
    verify_gradients,
    verify_objective,
)
from core_rl_conformance.trainers.interface import MicroBatches
from core_rl_conformance.trainers.spec import Feature
from core_rl_oracle.group_advantages import mistaken_advantages
from core_rl_oracle.loss_names import AdvantageRule
from core_rl_oracle.policy_losses import PolicyLoss

KL, BONUS = 0.5, 0.25
"""Factors of the KL term and of the entropy bonus."""
EQUAL = 1
"""The group of equal rewards."""
COLD, WARM = 0.8, 1.25
"""Temperatures."""
REFUSALS = (ValueError, CoreRLError)
SPECIAL = (0, 1, 2)
"""Ids that tokenizers often take for padding, BOS and EOS."""
UNEVEN = MicroBatches(sequences=3 * PAIR)
"""Three pairs, of eight, so that the last micro-batch has two."""


@check("T1.cross-entropy", kind="trainer", each="layout")
def cross_entropy_follows_its_definition(subject: EngineUnderTest) -> None:
    """Supervised training has the gradients, loss and norm of the float64 cross entropy, at every cut.

    Why: a mean of micro-batch means weighs tokens by the micro-batch that they lie in (transformers #34191), and a
    mean of ranks' means does so by ranks.
    Look at: the divisor of the loss: it counts trained tokens, or sequences, of all micro-batches and ranks.
    """
    verify_objective(subject, "cross_entropy")


@check("T1.reinforce", kind="trainer", each="layout")
def reinforce_follows_its_definition(subject: EngineUnderTest) -> None:
    """``A * log p`` has the float64 gradients, loss and norm, at every cut.

    Why: advantages one token off, or normalised a second time by the trainer, change every gradient and raise nothing.
    Look at: the alignment of advantages with the tokens that they belong to, and any whitening.
    """
    verify_objective(subject, "reinforce")


@check("T1.clipped", kind="trainer", each="layout")
def clipped_follows_its_definition(subject: EngineUnderTest) -> None:
    """PPO's clipped objective has the float64 gradients, loss and norm, at every cut, with ratios on all sides.

    Why: the minimum taken on the wrong side, or one clip bound for both sides, only shows off-policy.
    Look at: ``min(r * A, clip(r) * A)`` for negative advantages, and which log-probs the ratio is taken to.
    """
    verify_objective(subject, "clipped")


@check("T1.dual-clipped", kind="trainer", each="layout")
def dual_clipped_follows_its_definition(subject: EngineUnderTest) -> None:
    """Dual-clip PPO has the float64 gradients, loss and norm, at every cut.

    Why: the second bound holds for negative advantages alone; elsewhere it would cut gains.
    Look at: the sign of the advantages in its condition.
    """
    verify_objective(subject, "dual_clipped")


@check("T1.gspo", kind="trainer", each="layout")
def gspo_follows_its_definition(subject: EngineUnderTest) -> None:
    """GSPO has the float64 gradients, loss and norm, at every cut: one ratio for each sequence.

    Why: the mean of log-ratios is over trained tokens; over padded or all tokens it is another ratio.
    Look at: the mask in the mean, and whether the gradient flows through the sequence's ratio.
    """
    verify_objective(subject, "gspo")


@check("T1.cispo", kind="trainer", each="layout")
def cispo_follows_its_definition(subject: EngineUnderTest) -> None:
    """CISPO has the float64 gradients, loss and norm, at every cut: clipped weights, and a gradient for every token.

    Why: a weight that is not detached gives the gradient of another objective.
    Look at: ``detach()`` of the clipped ratio.
    """
    verify_objective(subject, "cispo")


@check("T1.aggregations", kind="trainer", each="layout and model", on_three_ranks=True)
def every_aggregation_is_independent_of_the_cut(subject: EngineUnderTest) -> None:
    """Each aggregation that the trainer names has the float64 gradients, loss and norm, at every cut.

    Why: verl's ``seq-mean-token-sum-norm`` took the padded length of each micro-batch for its constant: gradients were
    88 % off at five micro-batches, and right at one.
    Look at: every length, count or mean that is taken inside a micro-batch or a rank.
    """
    for loss in aggregated_losses(subject):
        verify_gradients(subject, f"the aggregation {loss.aggregation}", draw(subject, loss, seed=1), loss)


@check("T1.lora", kind="trainer", each="layout")
def adapters_have_their_gradients(subject: EngineUnderTest) -> None:
    """A given adapter is trained with the float64 gradients of its factors, at every cut, and nothing else is.

    Why: a scale that is left out, or has rank and alpha the wrong way round, trains another adapter than is served.
    Look at: ``alpha / rank``, parameters with ``requires_grad``, and a new adapter in place of the given one.
    """
    need(subject, Feature.LORA, Feature.GRADIENTS)
    loss = token_loss(subject)
    adapter = TinyAdapter(model=subject.model(), seed=1)
    verify_gradients(subject, "the factors", draw(subject, loss, seed=10), loss, of=adapter)


@check("T2.kl", kind="trainer", each="layout")
def divergence_is_the_named_estimator(subject: EngineUnderTest) -> None:
    """Each KL estimator in the loss has the float64 value and gradient, near the reference and far from it.

    Why: k3 with its arguments exchanged is a divergence too; in the loss its gradient is another one. A clamp that acts
    far from the reference alone takes the gradient away where it matters most.
    Look at: the order of policy and reference, the temperature of log-probs, the aggregation of the term, and clamps;
    a documented one belongs into the spec's ``kl_clamp`` or ``log_ratio_clamp``.
    """
    estimators = sorted(spec_of(subject).kl_estimators)
    if not estimators:
        raise NotSupported("the trainer names no KL estimator")
    for estimator in estimators:
        loss = replace(policy_loss(subject), kl_coef=KL, kl_estimator=estimator)
        loss, cuts = at_temperature(subject, loss, COLD), cuts_of(subject, loss)[-1:]
        for name, distance in DISTANCES.items():
            # Of the reference alone: large ratios would hide its terms.
            rollouts = draw(subject, loss, 2, replace(NEAR, references=distance.references))
            verify_gradients(
                subject, f"the loss with KL {estimator}, {name} the reference", rollouts, loss, cuts
            )


@check("T2.entropy", kind="trainer", each="layout")
def entropy_bonus_has_its_gradient(subject: EngineUnderTest) -> None:
    """The entropy bonus has the float64 value and gradient, at the loss's temperature and aggregated as the objective.

    Why: an entropy that is computed for a metric alone has no gradient, or is that at temperature 1.
    Look at: the graph of the entropy, its sign, its temperature, and its aggregation.
    """
    need(subject, Feature.ENTROPY)
    loss = at_temperature(subject, replace(policy_loss(subject), entropy_coef=BONUS), WARM)
    rollouts = draw(subject, loss, seed=3)
    verify_gradients(subject, "the loss with an entropy bonus", rollouts, loss)


@check("T2.temperature", kind="trainer", each="layout")
def temperature_divides_logits(subject: EngineUnderTest) -> None:
    """At a temperature of 0.8, log-probs of the loss belong to the distribution that tokens were drawn from.

    Why: ratios of a policy at temperature 1 to rollouts at another one are off before the first update.
    Look at: the division of logits, in float32, before log-softmax and entropy.
    """
    need(subject, Feature.TEMPERATURE)
    loss = replace(policy_loss(subject), temperature=COLD)
    rollouts, cuts = draw(subject, loss, seed=4), cuts_of(subject, loss)[-1:]
    verify_gradients(subject, f"the loss at temperature {COLD}", rollouts, loss, cuts)


@check("T3.metrics", kind="trainer", each="layout")
def metrics_are_independent_of_the_cut(subject: EngineUnderTest) -> None:
    """Every metric of a batch is the same at every cut.

    Why: verl's ``pg_clipfrac`` and ``ppo_kl`` are means over micro-batches, so that a change of the budget looks like a
    change of the policy.
    Look at: metrics that are averaged over micro-batches or ranks, in place of their sums and counts.
    """
    loss = plain_loss(subject)
    if len(cuts_of(subject, loss)) < 2:
        raise NotSupported("the trainer takes one cut only")
    if "clipped" in spec_of(subject).objectives:
        loss = replace(loss, objective="clipped")
    for judged in dict.fromkeys([loss, *pair_losses(subject)]):
        spec, rollouts, cuts = spec_of(subject), draw(subject, judged, seed=5), cuts_of(subject, judged)
        # Another cut rounds differently, and a metric may amplify it.
        small = math.sqrt(torch.finfo(subject.dtype).eps)
        trainer = build(subject, judged)
        runs = [train(subject, trainer, rollouts, cut, apply=False) for cut in cuts]
        for cut, metrics in zip(cuts[1:], runs[1:], strict=True):
            for name, value in runs[0].items():
                changed = metrics.get(name)
                near = changed is not None and abs(changed - value) <= small * max(abs(value), small)
                subject.require(
                    near or name in spec.cut_metrics,
                    f"the metric {name!r} is {value:.9g} of the whole batch, and {changed!r} at {cut}; a metric that "
                    "counts micro-batches belongs into the spec's 'cut_metrics'",
                )


@check("T3.order", kind="trainer", each="layout", min_dp=2, on_three_ranks=True)
def spread_over_ranks_does_not_matter(subject: EngineUnderTest) -> None:
    """Gradients are the same however unequal the ranks' parts are.

    Why: a mean of ranks' means is right while all ranks have as many tokens, and wrong on real data.
    Look at: the sum of weights over ranks, and the factor by which the framework's reduction divides.
    """
    loss = token_loss(subject)
    rollouts, cuts = draw(subject, loss, seed=6), cuts_of(subject, loss)[-1:]
    by_length = sorted(range(len(rollouts.rows)), key=lambda index: sum(rollouts.rows[index].mask))
    for label, order in (("shortest first", by_length), ("longest first", by_length[::-1])):
        verify_gradients(subject, f"a batch with the {label}", rollouts.select(order), loss, cuts)


@check("T4.untrained", kind="trainer", each="layout")
def untrained_sequences_count_nothing(subject: EngineUnderTest) -> None:
    """A sequence without a trained token adds nothing, neither to the sum nor to the divisor.

    Why: completions that are filtered out or were cut off stay in a batch with an empty mask; where they count in the
    divisor, the rest is trained at a lower rate (verl's ``rollout_rs``: 0.43 of the gradient).
    Look at: the count of sequences or tokens in the divisor, and divisions by an empty mask.
    """
    for loss in aggregated_losses(subject):
        rollouts, cuts = draw(subject, loss, seed=7).untrained((0, 5, 6, 11)), cuts_of(subject, loss)[-1:]
        label = f"a batch with untrained sequences, {loss.aggregation}"
        verify_gradients(subject, label, rollouts, loss, cuts)


@check("T4.first-token", kind="trainer", each="layout")
def first_tokens_are_not_predicted(subject: EngineUnderTest) -> None:
    """A mask that names the first token of a sequence trains nothing there: no token predicts it.

    Why: in a packed row the last token of one sequence would predict the first of the next (verl's ``sft_loss``: 19 %).
    Look at: the shift of labels in packed rows, and the count of trained tokens.
    """
    loss = token_loss(subject)
    rollouts = draw(subject, loss, seed=8).with_first_tokens()
    verify_gradients(subject, "a mask with first tokens", rollouts, loss, [WHOLE])


@check("T4.zero-loss", kind="trainer", each="layout")
def loss_of_zero_has_its_gradient(subject: EngineUnderTest) -> None:
    """A batch whose loss is 0 at every cut has the float64 gradients.

    Why: in GRPO's first update ratios are 1, and advantages cancel; a loss of 0 looks like an empty micro-batch, and
    where its backward pass is skipped, nothing is trained.
    Look at: conditions on the value of the loss, or on the sum of advantages.
    """
    need(subject, Feature.TOKEN_ADVANTAGES)
    loss = policy_loss(subject)
    loss = replace(loss, objective="clipped" if "clipped" in spec_of(subject).objectives else loss.objective)
    model = replace(subject.model(), uniform=True)
    logprob = float(torch.tensor(1 / model.vocab_size).log())  # in float32, as trainers have it
    rollouts = draw(subject, loss, seed=11).with_value_zero(logprob)
    verify_gradients(subject, "a loss of 0", rollouts, loss, of=model)


@check("T5.advantages", kind="trainer", each="layout")
def advantages_follow_their_rule(subject: EngineUnderTest) -> None:
    """Advantages from rewards follow the rule that the trainer names, within each group; equal rewards give zeros.

    Why: a baseline over the batch or the micro-batch, a division that the rule does not have, or groups that are torn
    apart by sharding train another objective under the same name. A group of equal rewards that is skipped loses its
    KL term and its entropy bonus as well.
    Look at: which sequences the mean and the deviation are taken over, and when: before sharding and cutting; and any
    filter of sequences whose advantages are 0.
    """
    spec = spec_of(subject)
    if not spec.advantages:
        raise NotSupported("the trainer names no rule for advantages")
    loss = policy_loss(subject)
    if spec.kl_estimators:
        loss = replace(loss, kl_coef=KL, kl_estimator=max(spec.kl_estimators))
    if Feature.ENTROPY in spec.features:
        loss = replace(loss, entropy_coef=BONUS)
    rollouts, cuts = draw(subject, loss, seed=9).with_equal_rewards(EQUAL), cuts_of(subject, loss)[-1:]
    for rule in sorted(spec.advantages):
        mistaken = partial(_mistaken_rules, rollouts, loss, rule)
        right = rollouts.by_rule(rule)
        label = f"advantages by {rule}"
        verify_gradients(subject, label, right, loss, cuts, rule, mistaken=mistaken)


def _mistaken_rules(
    rollouts: Rollouts, loss: PolicyLoss, rule: AdvantageRule
) -> Iterator[tuple[str, Rollouts, PolicyLoss]]:
    rewards, groups = [row.reward for row in rollouts.rows], [row.group for row in rollouts.rows]
    for sentence, values in mistaken_advantages(rule, rewards, groups):
        yield sentence, rollouts.with_advantages(values), loss
    equal = [index for index, group in enumerate(groups) if group == EQUAL]
    right = rollouts.by_rule(rule)
    yield "groups of equal rewards are left out", right.untrained(equal), loss
    counts = [sum(row.mask[1:]) if loss.aggregation == "token_mean" else 1 for row in right.rows]
    larger = loss.kl_coef * sum(counts) / (sum(counts) - sum(counts[index] for index in equal))
    yield (
        "groups of equal rewards are not in the divisor of the KL term",
        right,
        replace(loss, kl_coef=larger),
    )


def _losses(subject: EngineUnderTest) -> list[PolicyLoss]:
    losses = pair_losses(subject)
    if not losses:
        raise NotSupported("the trainer names no objective on pairs")
    return losses


@check("T1.dpo", kind="trainer", each="layout and model")
def dpo_follows_its_definition(subject: EngineUnderTest) -> None:
    """DPO's sigmoid loss has the float64 gradients, loss and norm, near the reference and far, if pairs are together.

    Why: without the reference, with a mean over tokens, or with another beta it still falls and still prefers the right
    sequence, and trains another objective.
    Look at: the sum over trained tokens of both log-probs, beta, and which sequence is the preferred one.
    """
    verify_objective(subject, "dpo")


@check("T1.bradley-terry", kind="trainer", each="layout and model")
def bradley_terry_follows_its_definition(subject: EngineUnderTest) -> None:
    """A reward model's Bradley-Terry loss has the float64 gradients, loss and norm, at every cut.

    Why: a score that is read at a padded position, or at the first token, depends on the neighbours in the batch.
    Look at: the position of the score in padded rows, and the order of a pair.
    """
    verify_objective(subject, "bradley_terry")


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
    loss = loss_of(subject, "bradley_terry")
    rollouts = draw(subject, loss, seed=13).ending_in(SPECIAL)
    verify_gradients(subject, "sequences that end in special tokens", rollouts, loss)


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
