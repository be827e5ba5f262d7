"""Outputs of a forward pass, of language models and of scalar heads: every single token against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.data.outputs import OutputName
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedOutputs
from core_rl_conformance.findings import reproduced, reproduced_tokens
from core_rl_conformance.hints.diagnose import compare_tokens
from core_rl_conformance.inputs.data import LONG, Ragged, part_edges, ragged
from core_rl_conformance.inputs.losses import OutputsLoss, TokenMeanLoss
from core_rl_conformance.procedures.outputs import PROBE, verify_forward
from core_rl_conformance.procedures.training import (
    CONFIG,
    forward_inside_train_mode,
    optimizer_config,
    train_mode_losses,
    verify_steps_of_losses,
)
from core_rl_conformance.reproduction import Output, computation_of

WITH_LOGITS: tuple[tuple[OutputName, ...], ...] = (
    ("logprobs", "logits"),
    ("logits",),
    ("entropy", "logits"),
    ("logprobs", "entropy", "logits"),
)
MAP_COLUMNS = 72
LARGE_VOCABULARY = 1543
"""Prime, and more than the usual blocks of kernels that loop over the vocabulary."""


@check("I7.logprobs", images=True, any_model=True)
def logprobs_match_the_oracle(subject: EngineUnderTest) -> None:
    """The log-prob of every token, the first and the last included, is the oracle's.

    Why: values that are off by one position, or wrong only at the prompt boundary, train a wrong
    policy without any error (verl #3287, SkyRL #1304, OpenRLHF #217).
    Look at: the alignment of logits and tokens (``logprobs[t] = log p(x_t | x_<t)``, 0 at first
    tokens), positions that restart in each sequence, attention that stays inside it.
    """
    _verify_token_output(subject, "logprobs", 1.0, plotted=True)


@check("I7.layers", requires={Capability.TAPS}, each="layout", any_model=True)
def layers_match_the_oracle(subject: EngineUnderTest) -> None:
    """The hidden state of every token before the first layer, and after each layer, is the oracle's.

    Why: log-probs that are off name no place, and training moves around an error in one layer.
    Look at: the layer that the message names, since the states before it are right; layer 0 is the embedding.
    """
    model, data = subject.model(), subject.data(PROBE)
    output = subject.start(model).forward(data.batch(), BUDGET, ("hidden_states",))
    states = per_sequence(output, "hidden_states", data)
    expected = subject.expected.hidden_states(model, data, subject.dtype, subject.case.device)
    count = states[0].shape[1]
    subject.require(
        count == len(expected),
        f"the output 'hidden_states' has {count} states of each token; expected {len(expected)}",
    )
    places = subject.places(data)
    for layer, truth in enumerate(expected):
        got, label = [part[:, layer] for part in states], f"hidden states after layer {layer}"
        values, within = (got, truth.values, truth.tolerance), f"layer {layer}, "
        finding = compare_tokens(label, *values, places, within=within)
        if finding.problem is not None and [x.shape for x in got] == [x.shape for x in truth.values]:
            problem = "\n".join([finding.problem, *_error_map(states, expected, layer)])
            finding = replace(finding, problem=problem)
        subject.verify(reproduced_tokens(subject.case, finding, truth.computation, *values))


def _error_map(states: Sequence[Tensor], expected: Sequence[ExpectedOutputs], layer: int) -> Iterator[str]:
    """Lines of a map over layers and tokens: the first sequence that is off after ``layer``.

    ``states`` are ``[L, layers + 1, H]`` of each sequence. Columns of a long sequence are several tokens each.
    """

    def ratios(row: int, layer: int) -> Tensor:
        difference = (states[row][:, layer].double() - expected[layer].values[row]).abs().amax(dim=-1)
        return torch.nan_to_num(difference, nan=math.inf) / expected[layer].tolerance.limit

    row = next(row for row in range(len(states)) if bool((ratios(row, layer) > 1).any()))
    width = math.ceil(len(states[row]) / MAP_COLUMNS)
    yield f"errors by layer and token of sequence {row}: . is within rounding, 1 above it, 2 above 10 times that, ..."
    for number in range(len(expected)):
        worst = [float(part.max()) for part in ratios(row, number).split(width)]
        marks = ["." if ratio <= 1 else str(min(9, 1 + int(math.log10(min(ratio, 1e9))))) for ratio in worst]
        yield f"  {number:3} {''.join(marks)}"


@check("I7.entropy", images=True, any_model=True)
def entropy_matches_the_oracle(subject: EngineUnderTest) -> None:
    """The entropy of the distribution that each token was drawn from is the oracle's.

    Why: an entropy over padded vocabulary rows or padded tokens is a wrong bonus (TRL #3715).
    Look at: the softmax (float32, over the true vocabulary only) and the alignment with the tokens.
    """
    _verify_token_output(subject, "entropy", 1.0)


@check("I8.temperature", each="layout", images=True, any_model=True)
def temperature_scales_the_logits(subject: EngineUnderTest) -> None:
    """At a temperature T, log-probs and entropy follow ``softmax(logits / T)``.

    Why: a temperature that is left out when log-probs are computed again makes the importance
    ratio wrong (NeMo-RL #316, verl #3133, OpenRLHF #857, TRL #3029, AReaL #581, slime #557).
    Look at: where logits become log-probs; divide by ``step.temperature`` before the softmax.
    """
    group = subject.start(subject.model())
    for temperature in (0.6, 1.7):
        _verify_token_output(subject, "logprobs", temperature, group=group)
        _verify_token_output(subject, "entropy", temperature, group=group)


@check("I7.logits", requires={Capability.LOGITS}, each="layout")
def logits_match_the_oracle(subject: EngineUnderTest) -> None:
    """The logits that each token was drawn from are the oracle's, divided by the temperature.

    Why: a loss over the full distribution (distillation, exact KL) needs every entry, and the log-prob
    of the drawn tokens cannot show an error in the others.
    Look at: padded vocabulary rows, the alignment with the tokens, the temperature.
    """
    model, label = subject.model(), "asked together at temperature 0.6"
    group = subject.start(model)
    _verify_token_output(subject, "logits", 1.0, group=group)
    names: tuple[OutputName, ...] = ("logprobs", "entropy", "logits")
    verify_forward(subject, group, names, model, subject.data(), label, cut=BUDGET, temperature=0.6)
    long = subject.data(lengths=LONG, seed=3)
    verify_forward(subject, group, ("logits",), model, long, "of a long batch")


@check("I1.logits-gradients", requires={Capability.LOGITS}, each="layout")
def logits_gradients_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradients of a loss that reads all logits, alone or with other outputs, are the oracle's at a temperature.

    Their steps are AdamW's.

    Why: logits that come detached, or that lose the temperature in training only, give a distillation loss
    that looks right and trains nothing, or something else. An engine has a branch for each set of outputs.
    Look at: ``detach`` and in-place changes on the way of the logits, the temperature where ``step.trained_only`` is
    set, and the branch for the outputs that the message names.
    """
    model = subject.model()
    group = subject.start(model, optimizer=optimizer_config(CONFIG))
    losses = [OutputsLoss(names=names, temperature=0.8) for names in WITH_LOGITS]
    for loss in losses:
        data = subject.data() if len(loss.names) == 3 else subject.data(PROBE)
        label = f"of a loss over {' and '.join(loss.names)} with {BUDGET}"
        subject.verify_backward(label, group, model, data, loss, BUDGET)
    verify_steps_of_losses(subject, group, losses)


def _verify_token_output(
    subject: EngineUnderTest,
    name: OutputName,
    temperature: float,
    *,
    plotted: bool = False,
    group: EngineGroup | None = None,
) -> None:
    model = subject.model()
    verify_forward(
        subject,
        group or subject.start(model),
        (name,),
        model,
        subject.data(),
        f"at temperature {temperature:g}",
        cut=BUDGET,
        temperature=temperature,
        overall=name != "logits",
        plotted=plotted,
    )


@check("I7.long-batch", each="layout")
def long_batches_match_the_oracle(subject: EngineUnderTest) -> None:
    """In one pass over more than 1,000 tokens on a rank, every log-prob, entropy and gradient is the oracle's.

    The vocabulary is larger than 1,024 and odd; from four ranks on, each has some 500 tokens. Among these are the
    ids where halves and quarters of the vocabulary meet.

    Why: kernels that work in chunks of tokens or vocabulary fail at edges, or in the last incomplete chunk. Small
    batches never reach an edge (I7).
    Look at: the loop over chunks, in the forward and in the backward pass; which rank has the first and the last row
    of its part of the vocabulary.
    """
    model = replace(subject.model(), vocabulary=LARGE_VOCABULARY)
    data = ragged(model.vocab_size, 1000 * subject.case.seed + 3, LONG * min(subject.layout.dp, 2))
    data = data.with_ids(part_edges(model.vocab_size))
    group = subject.start(model)
    verify_forward(subject, group, ("logprobs", "entropy"), model, data, "of a long batch")
    subject.verify_backward("of a long batch", group, model, data, TokenMeanLoss())


@check("I6.neighbours", each="layout", any_model=True)
def neighbours_change_nothing(subject: EngineUnderTest) -> None:
    """The log-probs of a sequence do not depend on its neighbours in a batch, nor on the order.

    Why: attention that crosses packed sequences, or positions that run on, change every log-prob a
    little and nothing fails (AReaL #1442, transformers #46634).
    Look at: the attention's sequence boundaries (``cu_seqlens``), position ids, padding masks.
    """
    model, data = subject.model(), subject.data()
    expected = subject.outputs(model, data, "logprobs")
    second = subject.data(seed=1)
    mixed = Ragged(tuple(second.rows[i] if i % 2 else row for i, row in enumerate(data.rows)))
    order = range(len(data.rows))
    group = subject.start(model)
    for label, batch, originals, places in (
        ("next to other neighbours", mixed, order[::2], order[::2]),
        ("in the reverse order", data.select(order[::-1]), order[::-1], order),
        ("alone", data.select([2]), [2], [0]),
    ):
        rows = per_sequence(group.forward(batch.batch(), ONE_PASS), "logprobs", batch)
        got, values = [rows[place] for place in places], [expected.values[index] for index in originals]
        finding = compare_tokens(f"log-probs {label}", got, values, expected.tolerance)
        names = [f"sequence {place}" for place in places]
        left, right = (dict(zip(names, part, strict=True)) for part in (got, values))
        computation = computation_of(model, Output("logprobs", 1.0), batch)
        allowed = dict.fromkeys(names, expected.tolerance)
        subject.verify(reproduced(subject.case, finding, computation, left, right, allowed))


@check("I9.dropout-off", requires={Capability.DROPOUT}, each="layout")
def forward_runs_without_dropout(subject: EngineUnderTest) -> None:
    """``forward`` and ``eval_batch`` run without dropout, also inside ``train_mode()``, which they restore.

    So does a model with a value head.

    Why: log-probs of a model in training mode are noise, and a mode that is not restored turns
    dropout off for the rest of the training (verl #4708).
    Look at: ``TrainBackend.set_training``, and whether the module hands ``self.training`` to its attention.
    """
    model, data = subject.model(dropout=0.5), subject.data()
    expected = subject.outputs(replace(model, dropout=0.0), data, "logprobs")
    loss = TokenMeanLoss()
    truth = subject.gradients(replace(model, dropout=0.0), data, loss)
    group = subject.start(model, optimizer={"lr": 0.0})
    losses = group.run(train_mode_losses, data.batch(), loss.spec(), ONE_PASS)[0]
    for when, pair in (("before a forward()", losses[:2]), ("after a forward()", losses[2:])):
        subject.require(
            pair[0] != pair[1],
            f"two training passes {when} inside train_mode() have the same loss: dropout is off in "
            "training, or both have the same masks",
        )
    group.train_batch(data.batch(), loss.spec(), ONE_PASS)
    batch = data.batch()
    for label, output in (
        ("by forward()", group.forward(batch, BUDGET)),
        ("by a second forward()", group.forward(batch, BUDGET)),
        ("inside train_mode()", group.run(forward_inside_train_mode, batch, ONE_PASS, ("logprobs",))[0]),
    ):
        got = per_sequence(output, "logprobs", data)
        subject.verify_tokens(f"log-probs {label}", got, expected, subject.places(data))
    evaluated = group.eval_batch(data.batch(), loss.spec(), ONE_PASS)["loss"]
    label = "the loss of eval_batch(), without dropout,"
    subject.verify_loss(label, evaluated, truth)
    if subject.spec.supports(Capability.VALUE_HEAD):
        critic = subject.model(dropout=0.5, head="value")
        without = replace(critic, dropout=0.0)
        verify_forward(subject, subject.start(critic), ("values",), without, data, "by forward()")


@check("I7.values", requires={Capability.VALUE_HEAD}, each="layout")
def values_match_the_oracle(subject: EngineUnderTest) -> None:
    """The value of the state before each token, and after the last, is the oracle's at any temperature.

    Why: a value that belongs to the token before or after shifts every advantage by one; a temperature
    has no meaning for it.
    Look at: the alignment (``values[t]`` comes from the hidden state of token ``t - 1``), the scalar
    head in float32 without bias.
    """
    _verify_scalars(subject, "value", "values")


@check("I7.scores", requires={Capability.REWARD_HEAD}, each="layout")
def scores_match_the_oracle(subject: EngineUnderTest) -> None:
    """The score of each sequence is the head on its last token, at any temperature, also if padding has its id.

    Why: a score that is read at the end of the padding, at the first EOS, or before it as in transformers, ranks noise.
    Look at: which position of each packed sequence the head reads; a temperature, which has no meaning for it.
    """
    _verify_scalars(subject, "reward", "scores")


def _verify_scalars(subject: EngineUnderTest, head: Head, name: OutputName) -> None:
    model = subject.model(head=head)
    group = subject.start(model)
    for of, data, cut, temperature in (
        ("", subject.data(), BUDGET, 1.0),
        ("", subject.data(), BUDGET, 0.6),
        ("of a long batch ", subject.data(lengths=LONG, seed=3), ONE_PASS, 1.0),
    ):
        label = f"{of}at temperature {temperature:g}"
        verify_forward(subject, group, (name,), model, data, label, cut=cut, temperature=temperature)
    model = replace(model, pad_is_eos=True)
    eos = model.config().eos_token_id
    assert isinstance(eos, int)
    label, data = "of sequences that end in the id of padding", subject.data().ending_in(eos)
    verify_forward(subject, subject.start(model), (name,), model, data, label, cut=BUDGET)
