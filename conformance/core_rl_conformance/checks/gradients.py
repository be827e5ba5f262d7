"""Gradients, their norm and the loss: the same however the batch is cut, and equal to the oracle's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add

import torch

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.hints.mistakes import explain_norm
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss, OutputsLoss, SequenceMeanLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import (
    CONFIG,
    backward_on_parts,
    optimizer_config,
    verify_steps_of_losses,
)
from core_rl_oracle.oracle import Gradients, grad_norm
from core_rl_oracle.tolerance import EXACT, Tolerance

TOKEN_MEAN = TokenMeanLoss(temperature=0.8)
CALLS = (2, 3, 5)
LOSSES: tuple[CheckLoss, ...] = (TOKEN_MEAN, SequenceMeanLoss())
OF_ENTROPY = OutputsLoss(names=("entropy",), temperature=0.8)


@check("I1.gradients", images=True, any_model=True)
def gradients_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradient of every parameter is that of (sum of totals) / (sum of weights), the oracle's.

    For losses over log-probs, over the entropy, and over both; their steps are AdamW's.

    A tied embedding is one parameter; its gradient is the sum of its uses at the input and at the head.

    Why: two backends that differ in the loss scale, a denominator or a reduction train differently
    without an error (verl #4710: one backend's gradient norm is three times the other's). A wrapper or an export that
    unties the embedding trains two matrices (verl #6334, Automodel #2511, peft #2018).
    Look at: divisions by the number of ranks or tokens. The core has scaled the loss; the engine adds gradients up,
    over micro-batches and over data-parallel ranks, and divides by nothing. Norms and biases whose tokens are spread
    are added up over tensor-parallel ranks as well, and a tied embedding over the first and the last stage.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model, optimizer=optimizer_config(CONFIG))
    losses = (*LOSSES, OF_ENTROPY)
    for loss in losses:
        label = f"of {type(loss).__name__} over {' and '.join(loss.spec().outputs)}"
        subject.verify_backward(label, group, model, data, loss)
    verify_steps_of_losses(subject, group, losses)


@check("I1.micro-batches", images=True, any_model=True)
def micro_batches_change_nothing(subject: EngineUnderTest) -> None:
    """Loss, metrics and gradients do not depend on the number of micro-batches or their budget.

    Why: a mean for each micro-batch, averaged, weighs tokens by the company they are in (transformers
    #34191, SkyRL #1296, slime #365); a schedule that divides once more scales everything (AReaL #1273).
    Look at: division by a local number of tokens, sequences or micro-batches; gradients that are
    overwritten and not accumulated.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model)
    for cut in (*(MicroBatchSpec(count=count) for count in (2, 3, 5, 8)), MicroBatchSpec(max_tokens=48)):
        label = (
            f"with {cut.count} micro-batches" if cut.count else f"with a budget of {cut.max_tokens} tokens"
        )
        metrics = subject.verify_backward(label, group, model, data, TOKEN_MEAN, cut)
        _verify_metrics(subject, label, metrics, model, data)


def _verify_metrics(
    subject: EngineUnderTest, label: str, metrics: Mapping[str, float], model: TinyModel, data: Ragged
) -> None:
    """Sums, means and extremes of the loss's metrics, over all micro-batches and ranks."""
    logprobs = subject.outputs(model, data, "logprobs", TOKEN_MEAN.temperature)
    entropy = subject.outputs(model, data, "entropy", TOKEN_MEAN.temperature)
    masks = [sequence.fields["mask"] for sequence in data.for_oracle()]
    trained = torch.cat([value[mask] for value, mask in zip(logprobs.values, masks, strict=True)])
    entropies = torch.cat([value[mask] for value, mask in zip(entropy.values, masks, strict=True)])
    expected = {
        "tokens": (float(len(trained)), EXACT),
        "mean_logprob": (float(trained.mean()), logprobs.tolerance),
        "lowest_logprob": (float(trained.min()), logprobs.tolerance),
        "highest_entropy": (float(entropies.max()), entropy.tolerance),
    }
    for name, (value, tolerance) in expected.items():
        got = metrics.get(name, math.nan)
        subject.verify_scalar(f"the metric {name!r} {label}", got, value, tolerance)


@check(
    "I2.data-parallel",
    requires={Capability.DATA_PARALLEL},
    min_dp=2,
    on_three_ranks=True,
    images=True,
    any_model=True,
)
def unequal_ranks_change_nothing(subject: EngineUnderTest) -> None:
    """The gradients do not depend on how sequences fall on data-parallel ranks, even if one has none.

    Why: ranks have unequal numbers of tokens. An average of the ranks' means, or a denominator of one rank, is then
    wrong (verl #3994, AReaL #335, prime-rl #2562, torchtitan #2206, #3575); a rank without work must still take part
    in every collective (verl #5591).
    Look at: the average that a data-parallel wrapper takes over ranks (the core wants the sum),
    empty ranks that skip a forward pass.
    """
    model, data = subject.model(), subject.data()
    ranks, count = subject.layout.dp, len(data.rows)
    busy = [index for index, row in enumerate(data.rows) if any(row.mask[1:])]
    idle = [index for index in range(count) if index not in busy]
    cuts = {
        "with nearly everything on rank 0": [
            list(range(count - ranks + 1)),
            *([count - r] for r in range(1, ranks)),
        ],
        "with one rank empty": [[], *(list(range(r, count, ranks - 1)) for r in range(ranks - 1))],
        "with everything on the last rank": [*([] for _ in range(ranks - 1)), list(range(count))],
        "with nothing to train on rank 0": [idle, *(busy[r :: ranks - 1] for r in range(ranks - 1))],
    }
    group = subject.start(model)
    for loss in LOSSES:
        expected = subject.gradients(model, data, loss)
        for label, parts in cuts.items():
            batches = data.batch().split(parts)
            metrics = group.run(backward_on_parts, batches, loss.spec(), MicroBatchSpec(max_tokens=48))
            subject.require(
                all(m["loss"] == metrics[0]["loss"] for m in metrics),
                f"ranks report different losses {label}: {[m['loss'] for m in metrics]}",
            )
            subject.verify_gradients(label, group, metrics[0], expected)
            group.optimizer_zero_grad()


@check("I2.own-means", requires={Capability.DATA_PARALLEL}, each="layout", min_dp=2)
def means_of_ranks_are_averaged(subject: EngineUnderTest) -> None:
    """With ``normalize_scope="dp"``, loss and gradients are the average of the ranks' own means; of no tokens it is 0.

    Why: a denominator of all ranks gives the global mean, which looks alike as long as ranks have equally many tokens.
    Look at: the scale of the loss on each rank, which has the weight of this rank and the number of ranks.
    """
    model, data, ranks = subject.model(), subject.data(PROBE), subject.layout.dp
    loss = replace(TOKEN_MEAN.spec(), normalize_scope="dp")
    of_all = "the gradient is that of the mean over all ranks' tokens, divided by their common weight"
    rows = range(len(data.rows))
    group = subject.start(model)
    for label, parts in (
        ("of unequal ranks", [rows[rank::ranks] for rank in range(ranks)]),
        ("with one rank empty", [rows[:0], *(rows[rank :: ranks - 1] for rank in range(ranks - 1))]),
    ):
        batches = data.batch().split(list(map(list, parts)))
        trained = [
            data.select(part) for part, batch in zip(parts, batches, strict=True) if loss.weight(batch)
        ]
        metrics = group.run(backward_on_parts, batches, loss, MicroBatchSpec(max_tokens=24))
        shares = [subject.gradients(model, part, TOKEN_MEAN).times(1 / ranks) for part in trained]
        expected = replace(
            reduce(add, shares),
            mistakes=lambda: iter([(of_all, subject.gradients(model, data, TOKEN_MEAN).oracle)]),
        )
        subject.verify_gradients(f"{label}, their means averaged,", group, metrics[0], expected)
        group.optimizer_zero_grad()


@check("I4.grad-norm", images=True, any_model=True)
def reported_norm_is_the_norm_of_the_gradients(subject: EngineUnderTest) -> None:
    """The reported norm is the norm of the gathered gradients before clipping, and the oracle's.

    Why: a norm of one rank's shards or of one pipeline stage clips differently on every layout. So does counting
    replicas (torchtitan #649, AReaL #1497, Megatron-LM #5916); a norm that is taken after clipping hides every
    spike.
    Look at: ``ShardedState.local("grads")``: each part once with ``replica`` 0; whether ``TrainBackend.reduce_grads``
    has run before.
    """
    model, data = subject.model(), subject.data()
    expected = subject.gradients(model, data, TOKEN_MEAN)
    group = subject.start(model, optimizer={"max_grad_norm": 0.05})
    group.forward_backward(data.batch(), TOKEN_MEAN.spec(), MicroBatchSpec(count=2))
    grads = group.named_tensors("grads")
    gathered = grad_norm(grads)
    reported = group.optimizer_step()["grad_norm"]
    # The square root of a float64 sum over float32 entries: a few units in the last place of a float64
    # and, in an engine that sums in float32 chunks, of a float32.
    exact = Tolerance(baseline=0.0, floor=4 * torch.finfo(torch.float32).eps * gathered)
    label = "the reported norm, against that of the exported gradients,"
    explain = partial(explain_norm, reported, grads, exact)
    subject.verify_scalar(label, reported, gathered, exact, explain=explain)
    # From here on the norm is right for its gradients: what differs is wrong in them.
    label = "the norm of the exported gradients (reported as it is: see I1.gradients)"
    subject.verify_norm(label, reported, expected)
    batch_norm = group.train_batch(data.batch(), TOKEN_MEAN.spec(), ONE_PASS)["grad_norm"]
    subject.require(
        math.isfinite(batch_norm) and batch_norm > 0.05,
        f"train_batch() reports the norm {batch_norm}, which is no norm before clipping to 0.05",
    )


@check("I5.two-calls", each="layout", on_three_ranks=True, images=True, any_model=True)
def several_calls_equal_one(subject: EngineUnderTest) -> None:
    """Two, three and five calls of ``forward_backward`` with the ``total_weight`` of all leave the gradients of one.

    Why: a zero_grad or a division inside forward/backward makes accumulation wrong (torchtitan #3575,
    verl #6957); two buffers that take turns are right for two calls.
    Look at: gradients that are dropped, reduced or averaged in each call; they add up until
    ``optimizer_step()`` or an export reduces them once.
    """
    model, data = subject.model(), subject.data()
    expected = subject.gradients(model, data, TOKEN_MEAN)
    group = subject.start(model)
    for count in CALLS:
        group.optimizer_zero_grad()
        parts = [data.select(range(first, len(data.rows), count)) for first in range(count)]
        losses = [_loss_part(group, part, expected.oracle.weight) for part in parts]
        dropped = replace(expected, mistakes=partial(_without_first_calls, subject, parts))
        subject.verify_gradients(f"of {count} calls", group, {"loss": sum(losses)}, dropped)
    norm = group.optimizer_step()["grad_norm"]
    subject.verify_norm(f"the norm of {CALLS[-1]} calls", norm, expected)


def _without_first_calls(
    subject: EngineUnderTest, parts: Sequence[Ragged]
) -> Iterator[tuple[str, Gradients]]:
    """The gradients of the last calls alone, each with a part of the batch."""
    weights = [TOKEN_MEAN.weight(part.batch()) for part in parts]
    shares = [
        subject.gradients(subject.model(), part, TOKEN_MEAN).times(weight / sum(weights))
        for part, weight in zip(parts, weights, strict=True)
        if weight
    ]
    for first in range(1, len(shares)):
        sentence = f"gradients of the last {len(shares) - first} calls: those of the calls before are dropped"
        yield sentence, reduce(add, shares[first:]).oracle


def _loss_part(group: EngineGroup, data: Ragged, total_weight: float) -> float:
    """Accumulate one part; its share of the whole loss."""
    loss = TOKEN_MEAN.spec()
    metrics = group.forward_backward(data.batch(), loss, MicroBatchSpec(count=2), total_weight=total_weight)
    weight = loss.weight(data.batch())
    return metrics["loss"] * weight / total_weight if weight else 0.0


@check("I5.eval-leaves-nothing", each="layout", any_model=True)
def evaluation_leaves_nothing(subject: EngineUnderTest) -> None:
    """``eval_batch`` reports the oracle's loss, never steps, and neither leaves nor disturbs gradients.

    Why: an optimizer step in evaluation trains on evaluation data (NeMo-RL #1012); gradients that stay
    behind are added to the next step's.
    Look at: ``TrainBackend.run`` without a backward pass: no graph, no backward pass, and nothing that stays behind
    it.
    """
    model, data = subject.model(), subject.data()
    second = subject.data(seed=1)
    expected = subject.gradients(model, data, TOKEN_MEAN)
    group = subject.start(model)
    before = group.named_tensors("master")
    evaluated = group.eval_batch(data.batch(), TOKEN_MEAN.spec(), MicroBatchSpec(count=3))
    subject.verify_loss("the loss of eval_batch()", evaluated["loss"], expected)
    _verify_metrics(subject, "of eval_batch()", evaluated, model, data)
    metrics = group.forward_backward(data.batch(), TOKEN_MEAN.spec(), ONE_PASS)
    group.eval_batch(second.batch(), TOKEN_MEAN.spec(), ONE_PASS)
    group.forward(second.batch(), ONE_PASS)
    subject.verify_gradients("with evaluations before and after", group, metrics, expected)
    subject.verify_same("weights after evaluations", group.named_tensors("master"), before)


@check("I6.masked-nan", each="layout", any_model=True)
def masked_nan_is_harmless(subject: EngineUnderTest) -> None:
    """NaN in a field at positions that are not trained changes neither the loss nor any gradient.

    Why: multiplying by a mask keeps NaN, since 0 * NaN is NaN (SkyRL #1635).
    Look at: products with masks; select with ``torch.where`` or `core_rl.data.outputs.masked_sum`.
    """
    model, data = subject.model(), subject.data()
    batch = data.batch()
    poisoned = torch.where(batch.loss_mask, batch["advantages"], torch.nan)
    group = subject.start(model)
    for cut in (ONE_PASS, MicroBatchSpec(count=3)):
        metrics = group.forward_backward(batch.with_tokens(advantages=poisoned), TOKEN_MEAN.spec(), cut)
        expected = subject.gradients(model, data, TOKEN_MEAN)
        subject.verify_gradients("with NaN where nothing is trained", group, metrics, expected)
        group.optimizer_zero_grad()


@check("I6.masked-tokens", each="layout", any_model=True)
def untrained_tokens_count_nothing(subject: EngineUnderTest) -> None:
    """Tokens that are not trained enter neither the loss, nor its weight, nor a gradient through their log-prob.

    Why: the attention mask in place of the response mask trains the prompt (verl #2543, TRL #2708);
    a denominator of all response positions counts masked-out positions (slime #365).
    Look at: the loss mask on its way through packing and micro-batches.
    """
    model, data = subject.model(), subject.data(seed=2)
    trained_rows = [index for index, row in enumerate(data.rows) if any(row.mask[1:])]
    expected = subject.gradients(model, data.select(trained_rows), TOKEN_MEAN)
    group = subject.start(model)
    batch = data.batch()
    elsewhere = torch.where(batch.loss_mask, batch["advantages"], 1e3)
    metrics = group.forward_backward(
        batch.with_tokens(advantages=elsewhere), TOKEN_MEAN.spec(), MicroBatchSpec(count=2)
    )
    subject.verify_gradients("with large advantages at untrained tokens", group, metrics, expected)
