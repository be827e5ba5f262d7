"""Batches of every kind with every head, and the caller's batch, which no call may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.tensors import TensorDict
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.combinations import rows_of
from core_rl_conformance.checks.process_state import public_calls
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.covering import Combination
from core_rl_conformance.inputs.data import PIECES, Ragged, prefix_trees
from core_rl_conformance.inputs.losses import CancellingLoss, CheckLoss, RewardLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.adapters import verify_trained
from core_rl_conformance.procedures.outputs import PROBE, verify_forward

HEADS: Mapping[str, tuple[Head, CheckLoss, tuple[OutputName, ...]]] = {
    "lm": ("lm", TokenMeanLoss(), ("logprobs", "entropy")),
    "lm at a temperature": ("lm", TokenMeanLoss(temperature=0.8), ("logprobs", "entropy")),
    "value": ("value", ValueLoss(temperature=0.7), ("values",)),
    "reward": ("reward", RewardLoss(), ("scores",)),
}
SEQUENCES = {"one token": 0, "1": 1, "2": 2, "64": 64, "65": 65}
CUTS = {
    "none": ONE_PASS,
    "in 12": MicroBatchSpec(count=12),
    "by a budget": MicroBatchSpec(max_tokens=48),
    "none, shared prefixes": MicroBatchSpec(count=1, share_prefixes=True),
    "by a budget, shared prefixes": MicroBatchSpec(max_tokens=48, share_prefixes=True),
}
"""Of micro-batches; the longest sequence has 28 tokens."""
OPTIONS: Mapping[str, Mapping[str, Capability | None]] = {
    "head": dict.fromkeys(("lm", "lm at a temperature"))
    | {"value": Capability.VALUE_HEAD, "reward": Capability.REWARD_HEAD},
    "frozen": {"none": None} | dict.fromkeys(("head", "first layer"), Capability.FROZEN_PARAMETERS),
    "sequences": dict.fromkeys(SEQUENCES),
    "values": dict.fromkeys(("drawn", "equal", "equal rewards", "a loss of 0", "some losses of 0")),
}
"""Values of each option, and the capability that each needs."""
FEWEST = 6
"""Combinations of a quick session."""


@check("I1.combined-batches", on_three_ranks=True)
def batches_of_every_kind_follow_the_oracle(subject: EngineUnderTest) -> None:
    """Outputs and gradients are the oracle's for any pair of a head, frozen parts, a size and kinds of values.

    Each batch is cut in several ways. Batches have one token, or 1, 2, 64 or 65 sequences, which share prefixes: fewer
    sequences than ranks or micro-batches, too. Some sequences are equal; rewards are equal, so that advantages are 0
    next to an entropy bonus; the loss of all micro-batches, or of some, is 0 and has a gradient. All models together
    run each pair; the first has some, which the seed picks.

    Why: in the first step of GRPO the ratio is 1 and advantages cancel, so a pass that skips a loss of 0 learns
    nothing; a feature that is tested with one head is forgotten in another one; ranks with different numbers of
    micro-batches wait for each other forever (verl #5591, AReaL #1139), or scale a critic's gradients (verl #6957); a
    mask or a position of a shared prefix that is wrong by one lets answers see each other.
    Look at: the combination that the message names; conditions on the value of a loss, caches by the tokens of a
    sequence, and buffers with a fixed number of sequences; empty ranks, which must run every collective and add
    nothing; the scalar head, which has float32, no bias and no temperature. With shared prefixes: the state that the
    first token of a branch is predicted from, and gradients of shared states, which are the **sum** over branches.
    """
    engine_of = itemgetter("head", "frozen")
    rows = sorted(rows_of(subject, OPTIONS, FEWEST), key=engine_of)
    for (head, frozen), group in groupby(rows, key=engine_of):
        model = subject.model(head=HEADS[head][0])
        names = subject.expected.oracle(model).parameters()
        of_head = [name for name in names if name.startswith(("score.", "lm_head."))]  # none if it is tied
        patterns = {"none": [], "head": of_head, "first layer": [subject.first_layer]}[frozen]
        engine = subject.start(model, frozen=patterns)
        for options in group:
            _verify(subject, engine, model, patterns, options)


def _verify(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, patterns: list[str], options: Combination
) -> None:
    _, loss, names = HEADS[options["head"]]
    data, temperature = _data(subject, model, options), loss.temperature
    trains, some = loss.weight(data.batch()) != 0, options["values"] == "some losses of 0"
    if some or options["values"] == "a loss of 0":
        loss = CancellingLoss(loss=loss, temperature=temperature, some=some)
    for name, cut in CUTS.items():
        if cut.share_prefixes and not subject.spec.supports(Capability.SHARED_PREFIX):
            continue
        label = (
            f"of a batch with {', '.join(f'{key}: {value}' for key, value in options.items())}, cut: {name}"
        )
        verify_forward(subject, group, names, model, data, label, cut=cut, temperature=temperature)
        if not trains:
            continue
        expected = subject.gradients(model, data, loss)
        metrics = group.forward_backward(data.batch(), loss.spec(), cut)
        if not some:
            subject.verify_loss(f"the loss {label}", metrics["loss"], expected)
        grads = group.named_tensors("grads")
        verify_trained(
            subject, label, grads, expected, lambda name: not any(fnmatchcase(name, p) for p in patterns)
        )
        group.optimizer_zero_grad()


def _data(subject: EngineUnderTest, model: TinyModel, options: Combination) -> Ragged:
    """The sequences of a combination; many are shorter, so that sums over all tokens round little."""
    count, seed = SEQUENCES[options["sequences"]], 1000 * subject.case.seed
    rows = [row for tree in range(6) for row in prefix_trees(model.vocab_size, seed + tree).rows]
    if not count:
        rows, count = rows[10:], 1  # the single token
    if count > len(PIECES):
        rows = [row.after(12) if len(row.ids) > 15 else row for row in rows]
    if options["values"] == "equal":
        rows = [rows[number - (number % 3 == 1)] for number in range(len(rows))]
    if options["values"] == "equal rewards":
        rows = [replace(row, target=0.5) for row in rows]
        if model.head == "lm":
            rows = [replace(row, advantages=(0.0,) * len(row.ids)) for row in rows]
    return Ragged(tuple(rows[:count]))


@check("contract.callers-batch", images=True)
def calls_leave_the_batch(subject: EngineUnderTest) -> None:
    """No public call changes the caller's batch or weights, and a batch that was used is computed as a fresh one.

    Ids, fields and pixels stay bit for bit, and weights that were loaded, after a step too. The same object goes
    to all calls, inside the ranks. Fields that the caller changes between two calls are read anew.

    Why: groups send each call a copy, while a trainer in the ranks passes one batch to the reference, to the policy
    and to several epochs; pixels that are scaled in place are scaled twice.
    Look at: operations in place on fields and pixels, results that are kept with the batch, and parameters that share
    the memory of tensors that were loaded.
    """
    group, path = subject.start(), str(subject.directory("saved"))
    batch = subject.data(PROBE * subject.layout.dp).batch()
    weights = group.named_tensors("master")
    for rank, problems in enumerate(group.run(changed_tensors, path, batch, TokenMeanLoss().spec(), weights)):
        subject.require(not problems, f"on rank {rank}: {'; '.join(problems[:6])}")


def changed_tensors(
    engine: TrainEngine, path: str, batch: SequenceBatch, loss: LossSpec, weights: Mapping[str, Tensor]
) -> list[str]:
    """Tensors of the caller that public calls changed, and outputs that differ from those of a fresh batch."""
    part = engine.shard_data(batch)
    loaded = {name: tensor.clone() for name, tensor in weights.items()}
    engine.load_named_tensors("master", TensorDict(loaded))
    engine.train_batch(part, loss, ONE_PASS)
    problems = [
        f"a step after load_named_tensors() changed the caller's {name}"
        for name, tensor in loaded.items()
        if not torch.equal(tensor, weights[name])
    ]
    part.tokens["advantages"].neg_()  # a trainer may normalize them in place
    losses = {engine.eval_batch(one, loss, ONE_PASS)["loss"] for one in (part, deepcopy(part))}
    if len(losses) > 1:
        problems.append("advantages that the caller changed between two calls are not read again")
    fresh = dict(_tensors_of(deepcopy(part)))
    for name, call in public_calls(engine, path, part, loss):
        if name in ("optimizer_zero_grad()", "set_version()"):
            got, expected = (dict(engine.forward(one, ONE_PASS).items()) for one in (part, deepcopy(part)))
            problems += [
                f"{label} of a batch that was used before {name} differ from a fresh one's"
                for label, value in expected.items()
                if not torch.equal(got[label], value)
            ]
        call()
        problems += [
            f"{name} changed {label} of the caller's batch"
            for label, value in _tensors_of(part)
            if not torch.equal(value, fresh[label])
        ]
    return problems


def _tensors_of(batch: SequenceBatch) -> Iterator[tuple[str, Tensor]]:
    yield "input_ids", batch.input_ids
    yield "cu_seqlens", batch.cu_seqlens
    yield from batch.tokens.items()
    yield from batch.sequences.items()
    for number, media in enumerate(batch.media):
        yield from ((f"{name} of sequence {number}", value) for name, value in media.items())
