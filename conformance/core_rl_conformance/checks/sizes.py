"""Sizes and constants that tiny models do not have: long sequences, many of them, large ids, gradients of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedOutputs, Snapshot
from core_rl_conformance.hints.diagnose import compare_tokens
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_conformance.inputs.data import Ragged, Repeated, ragged
from core_rl_conformance.inputs.losses import ScaledLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import DEEP, UNUSUAL, TinyModel
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_conformance.profile import DENSE
from core_rl_oracle.oracle import AdamW, Schedule

LENGTHS = (523, 17, 2, 31, 5, 1, 23, 9, 40, 3, 64, 12)
"""A long sequence, and others as they are elsewhere."""
ROWS = 260
"""Sequences on each data-parallel rank: more than 8 bits count, with more than 4,096 tokens in all."""
TRAINED_ROWS = 190
"""The same in training, with more than 4,096 tokens too."""
MANY = MicroBatchSpec(count=20)
BEYOND_16_BITS = 65_543
"""A vocabulary with ids that 16 bits do not hold, with a sign or without."""
WIDE_VOCABULARY, WIDE_INNER = 200_003, 34_002
"""Sizes with which most tiny models have 70 MB or more: an embedding of 32 MiB, and 6 MB in a matrix of an MLP."""
FEW = (13, 2, 19, 5)
"""Lengths of sequences for a vocabulary of that size."""
SMALL_IDS = (5, 21, 300, 7, 2**15 - 1)
OUTPUTS: tuple[OutputName, ...] = ("logprobs", "entropy")
COLD, WARMER = 0.05, (0.1, 0.2, 0.25, 0.5, 1.0)
SMALLEST, BETWEEN, LARGEST = -80, (-40, 16, 40), 64
"""Powers of two: gradients that float16 flushes to 0, or that overflow it, and norms whose squares are no float32."""
CLIPPING = AdamW(lr=0.1, eps=0.1, weight_decay=0.1, max_grad_norm=0.5)
"""With a large epsilon an update shows the scale of its gradients."""
CONFIG = AdamW(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)
UPDATES, DECAYED = 20, 16
"""Updates, and the one from which the learning rate is exactly 0."""
FALLING = Schedule(type="linear", total_steps=DECAYED)


@check("I7.long-sequences", each="layout", families=DENSE)
def long_sequences_match_the_oracle(subject: EngineUnderTest) -> None:
    """A sequence of 523 tokens, among 260 on each rank with more than 4,096 tokens in a pass, is computed as any other.

    The model has three layers or more, an unusual rotary base and epsilon, and the rotary scaling of published models
    of its family, which an engine may refuse.

    Why: a window, a table of positions, a buffer or a constant that is right for all tiny models fails in a real one,
    and nothing raises: a mask of 128 positions, rotary frequencies of the default base.
    Look at: the message: the positions, sequences or tokens of a pass from which on values are wrong, or the constant
    of the config that is ignored.
    """
    (group, model), data = subject.start_long(subject.model()), _repeated(subject, ROWS)
    output = group.forward(data.all.batch(), ONE_PASS, OUTPUTS)
    for name in OUTPUTS:
        expected = subject.outputs(model, data.distinct, name)
        got = per_sequence(output, name, data.all)
        label = f"{name} of {len(got)} sequences"
        values = [expected.values[number] for number in data.order]
        finding = compare_tokens(label, got, values, expected.tolerance, subject.places(data.all))
        if finding.problem is not None:
            firsts = [got[data.order.index(number)] for number in range(len(LENGTHS))]
            ignored = _ignored_constant(subject, model, data.distinct, firsts, name)
            finding = replace(finding, problem=finding.problem + ignored)
        subject.verify(finding)


@check("I8.low-temperature", each="layout")
def low_temperatures_match_the_oracle(subject: EngineUnderTest) -> None:
    """At a temperature of 0.05, log-probs and entropy follow ``softmax(logits / 0.05)``; so do gradients.

    Why: a clamp against division by 0 makes the importance ratio of cold samples wrong, and a softmax without its
    maximum overflows.
    Look at: bounds of the temperature; the subtraction of the largest logit.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model)
    output = group.forward(data.batch(), ONE_PASS, OUTPUTS, COLD)
    for name in OUTPUTS:
        expected = subject.outputs(model, data, name, COLD)
        got = per_sequence(output, name, data)
        label = f"{name} at temperature {COLD:g}"
        finding = compare_tokens(label, got, expected.values, expected.tolerance, subject.places(data))
        if finding.problem is not None and (warmer := _warmer(subject, model, data, got, name)):
            finding = replace(finding, problem=finding.problem + warmer, names_cause=True)
        subject.verify(finding)
    short = subject.data(PROBE)
    subject.verify_backward(
        f"in training at temperature {COLD:g}", group, model, short, TokenMeanLoss(temperature=COLD)
    )


def _warmer(
    subject: EngineUnderTest, model: TinyModel, data: Ragged, got: Sequence[Tensor], name: OutputName
) -> str:
    """The higher temperature whose values these are."""
    for temperature in WARMER:
        expected = subject.outputs(model, data, name, temperature)
        if compare_tokens(name, got, expected.values, expected.tolerance).problem is None:
            return f"\nthe values are those of temperature {temperature:g}: is it clamped?"
    return ""


@check("I1.many-sequences", each="layout", families=DENSE)
def gradients_of_many_sequences_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradients of 190 sequences on each rank, in 20 micro-batches and in one pass, are the oracle's.

    The one pass has more than 4,096 tokens, and some sequences have 523. The model has three layers or more.

    Why: buffers and loops that end at 16 micro-batches, 128 sequences or 4,096 tokens; layers that a table of a smaller
    model lacks.
    Look at: the micro-batches from the 17th on, and the layers whose gradients differ. If only one micro-batch is
    wrong: buffers and kernels with a number of tokens in them.
    """
    (group, model), data = subject.start_long(subject.model()), _repeated(subject, TRAINED_ROWS)
    expected = subject.gradients_of_many(model, data)
    for cut, where in ((MANY, "20 micro-batches"), (ONE_PASS, "one pass")):
        metrics = group.forward_backward(data.all.batch(), TokenMeanLoss().spec(), cut)
        subject.verify_gradients(f"of {len(data.order)} sequences in {where}", group, metrics, expected)
        group.optimizer_zero_grad()


def _repeated(subject: EngineUnderTest, rows: int) -> Repeated:
    """For each rank, two long sequences and many short ones, of which few are different: ``rows`` in all."""
    distinct = subject.data(LENGTHS, seed=9)
    short = [1 + number % (len(LENGTHS) - 1) for number in range(rows - 2)]
    return Repeated.of(distinct, [0, *short[: rows // 2], 0, *short[rows // 2 :]] * subject.layout.dp)


def _ignored_constant(
    subject: EngineUnderTest, model: TinyModel, data: Ragged, got: list[Tensor], name: OutputName
) -> str:
    """The part of `UNUSUAL` without which the values are right."""
    for part in UNUSUAL:
        usual = replace(model, usual=part)
        if usual.config().to_dict() == model.config().to_dict():
            continue
        expected: ExpectedOutputs = subject.outputs(usual, data, name)
        if compare_tokens(name, got, expected.values, expected.tolerance).problem is None:
            return f"\n{LOOKS_LIKE}{part} of the config is ignored; the values are those with the usual one"
    return ""


@check("I7.large-vocabulary", each="layout", families=DENSE)
def large_ids_match_the_oracle(subject: EngineUnderTest) -> None:
    """With a vocabulary of more than 65,536, log-probs and entropy at ids of every size are the oracle's.

    So are the loss and the gradients of a training pass, also of the embedding and the head.

    Why: ids in 16 bits, or a kernel that gives up behind a number of columns, are right for all small vocabularies, and
    a head whose rows behind 32,768 have no gradient computes every output right.
    Look at: the dtype of ids on their way to the embedding and to the head, also in training; indices of kernels over
    the vocabulary.
    """
    model = replace(subject.model(), vocabulary=BEYOND_16_BITS)
    data = ragged(BEYOND_16_BITS, 1000 * subject.case.seed + 4, FEW).all_trained()
    # The first ones are small, so that tokens after a large one stand out.
    data = data.with_ids([*SMALL_IDS, 2**15, 11, BEYOND_16_BITS - 1, 300, 2**15 + 99, 12, 2**14, 2**16 + 1])
    group = subject.start(model)
    output = group.forward(data.batch(), ONE_PASS, OUTPUTS)
    for name in OUTPUTS:
        got, expected = per_sequence(output, name, data), subject.outputs(model, data, name)
        subject.verify_tokens(f"{name} with a large vocabulary", got, expected, subject.places(data))
    subject.verify_backward("with a large vocabulary", group, model, data, TokenMeanLoss())


@check("I1.large-tensors", each="engine", min_dp=2, families=DENSE, quick=False)
def gradients_of_large_tensors_match_the_oracle(subject: EngineUnderTest) -> None:
    """Loss and gradients of a model of some 70 MB, with matrices of 6 and 36 MB, are the oracle's over several ranks.

    Why: gradients are reduced in buckets, often of 25 or 32 MiB, and all parameters of a tiny model fit into one: a
    last bucket that nobody reduces, or a matrix that fits into none, shows in real models alone.
    Look at: the loop over buckets of gradients, its last one, and tensors larger than a bucket.
    """
    model = replace(subject.model(), vocabulary=WIDE_VOCABULARY, inner=WIDE_INNER)
    data = ragged(WIDE_VOCABULARY, 1000 * subject.case.seed + 5, FEW).all_trained()
    # Nothing is kept of a snapshot: some 400 MB.
    weights = Snapshot(subject.expected.models.directory(model))
    subject.verify_backward("of large tensors", subject.start(model), weights, data, TokenMeanLoss())


@check("I1.gradient-sizes", each="layout")
def gradients_of_any_size_match_the_oracle(subject: EngineUnderTest) -> None:
    """Gradients of a loss times 2^-80 to 2^64 are the oracle's times that, and so are the reported norm and a step.

    Both ends are run, and a power between that the seed and the layout pick.

    Why: gradients that pass through float16 are 0 where they are tiny and infinite where they are large, and the square
    of a norm below 1e-22 or above 1e19 is no float32. A loss of a usual size never shows it.
    Look at: the dtype of gradients in buffers and reductions, and that of the squares of the norm; loss scalers; clamps
    and ``nan_to_num``. If the step alone is wrong: how ``TrainBackend.step`` uses its ``scale``.
    """
    model, data = subject.model(), subject.data(PROBE)
    expected = subject.gradients(model, data, TokenMeanLoss())
    turn = subject.case.seed + subject.layout.world_size
    for exponent in (SMALLEST, BETWEEN[turn % len(BETWEEN)], LARGEST):
        size, of = f"of a loss times 2^{exponent}", expected.times(2.0**exponent)
        group = subject.start(model, optimizer=optimizer_config(CLIPPING))
        shadow = Shadow.of(group, CLIPPING)
        metrics = group.forward_backward(
            data.batch(), ScaledLoss(exponent=exponent).spec(), MicroBatchSpec(count=2)
        )
        subject.verify_gradients(size, group, metrics, of)
        norm = shadow.step(subject, group, size)
        subject.verify_norm(f"the norm {size}", norm, of)
        shadow.verify(subject, group, f"after a step {size}")


@check("I20.many-updates", each="layout")
def many_updates_are_those_of_adamw(subject: EngineUnderTest) -> None:
    """After 20 updates, of which the last four have a learning rate of exactly 0, all is as a float64 AdamW leaves it.

    The gradients of the update before those are exactly 0.

    Why: a rate of 0 that is taken for none at all, so that another one is used; small errors of each step that add up.
    Look at: ``lr or ...`` and defaults of the optimizer's groups; the dtype of weights and moments.
    """
    model = subject.model(layers=DEEP)
    group = subject.start(model, optimizer=optimizer_config(CONFIG, FALLING))
    shadow = Shadow.of(group, CONFIG, FALLING)
    loss, batches = TokenMeanLoss().spec(), [subject.data((9, 2, 6), seed).batch() for seed in range(UPDATES)]
    shadow.train(subject, group, batches[: DECAYED - 1], loss, ONE_PASS)
    shadow.train(subject, group, batches[DECAYED - 1 : DECAYED], ScaledLoss(exponent=-2000).spec(), ONE_PASS)
    shadow.verify(subject, group, f"after {DECAYED} updates")
    weights = group.named_tensors("master")
    shadow.train(subject, group, batches[DECAYED:], loss, ONE_PASS)
    label = f"weights after {UPDATES - DECAYED} updates with a learning rate of 0"
    subject.verify_same(label, group.named_tensors("master"), weights)
    shadow.verify(subject, group, f"after {UPDATES} updates")
