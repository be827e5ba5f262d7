"""Dropout in training: which heads it drops, and whether gradients use the very same masks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import shard_plan
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.checks.optimizer import HEADS
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.expected_values import ExpectedGradients, Snapshot
from core_rl_conformance.hints.diagnose import compare_named
from core_rl_conformance.inputs.data import Ragged, ragged
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import DropoutPlace, TinyModel, dropout_fields
from core_rl_conformance.procedures.adapters import adapter_of, start, written
from core_rl_conformance.procedures.masks import CUT, RATE, PairMasks, verify_draws, verify_rate_and_ranks
from core_rl_conformance.profile import DENSE

LOSS = TokenMeanLoss()
PASSES = 16
HEAD_PASSES = 3
"""A quarter of a head's inputs would be dropped in each."""
LENGTHS = (2, 40)
"""Lengths of the sequences of a pass, in turns."""
PLACES: dict[DropoutPlace, re.Pattern[str]] = {
    "embedding": re.compile(r"wpe\.weight$"),
    "residual": re.compile(r"c_proj\.bias$"),
    "attention": re.compile(r"(attn\.c|\.o)_proj\.weight$"),
}
"""Parameters whose gradients over a single token are 0 where a number at the place was dropped."""


@check(
    "I9.dropout-masks",
    requires={Capability.DROPOUT},
    each="layout",
    families=DENSE,
    dtype="float32",
    on_three_ranks=True,
)
def masks_are_independent_draws(subject: EngineUnderTest) -> None:
    """In training, each head is dropped independently at the config's rate; the remaining heads are divided by ``1 -
    rate``.

    The masks are found from log-probs of second tokens, in passes with short sequences and with long ones. Gradients
    use the same masks. So it is in the first pass, after a step, after evaluation and after a load; there is no dropout
    in ``forward`` at any time. A seed that is given twice gives the same masks, and another one gives others.

    Why: dropout that a step or a load turns off, or leaves on in evaluation; recomputation with other masks than the
    forward pass had; one mask on all data-parallel ranks: the loss still falls, and the policy is another one.
    Look at: the message, which names the part that is off; ``set_training``; the random state around recomputed layers,
    and its seed on each rank: of heads and tokens that only this rank has, it is the rank's own.
    """
    masks = PairMasks(subject)
    group = subject.start(masks.model, optimizer={"lr": 0.0})
    passes = [_watch(subject, group, masks, "in the first training pass")]
    expected = masks.gradients(passes[0][1])
    loss = {"loss": expected.oracle.loss}  # it follows from the log-probs
    subject.verify_gradients("with the masks of the forward pass", group, loss, expected)
    group.optimizer_step()
    _verify_off(subject, group, masks, "after an optimizer step")
    passes.append(_watch(subject, group, masks, "in training after an optimizer step and a forward()"))
    group.optimizer_zero_grad()
    path = str(subject.directory("saved"))
    group.save(SaveLoadMeta(path=path, format="hf"))
    group.load(SaveLoadMeta(path=path, format="hf"))
    _verify_off(subject, group, masks, "after a load()")
    passes.append(_watch(subject, group, masks, "in training after a load()"))
    group.optimizer_zero_grad()
    passes.append(_watch(subject, group, masks, "in training with long sequences", long=True))
    for seed, when in ((0, "in a second engine with the same seed"), (1, "with another seed")):
        group = subject.start(masks.model, changes={"seed": seed})
        passes.append(_watch(subject, group, masks, when))
    when, again = passes.pop(-2)
    subject.require(torch.equal(again, passes[0][1]), f"{when}, the first masks are others than in the first")
    verify_draws(subject, passes, masks.spread)


def _watch(
    subject: EngineUnderTest, group: EngineGroup, masks: PairMasks, when: str, *, long: bool = False
) -> tuple[str, Tensor]:
    """Run a training pass and find its masks."""
    data = masks.long_data if long else masks.data
    metrics = group.forward_backward(data.batch(), masks.loss.spec(), CUT)
    return when, masks.found(subject, when, metrics)


def _verify_off(subject: EngineUnderTest, group: EngineGroup, masks: PairMasks, when: str) -> None:
    """Require that two passes of ``forward`` equal each other and the model without dropout."""
    first, second = (group.forward(masks.data.batch(), ONE_PASS)["logprobs"] for _ in range(2))
    subject.require(
        torch.equal(first, second), f"two passes of forward() {when} differ: dropout is on in evaluation"
    )
    subject.verify_logprobs(f"{when}, without dropout,", group, masks.model, masks.data)


@check("I9.dropout-places", requires={Capability.DROPOUT}, each="layout")
def each_place_drops_at_its_rate(subject: EngineUnderTest) -> None:
    """In training, numbers are dropped at the config's rate at each place of the model, and at that place alone.

    GPT-2 has three: the embedding, the residual stream and attention. It is the model here where the profile has it.
    Gradients over a single token are 0 where a number was dropped, in passes with short sequences, and with long ones.
    Each data-parallel rank draws on its own. The inputs of a scalar head are not dropped.

    Why: a module of its own reads the rate of attention and leaves the other two out; all else looks right.
    Look at: every field of the config with a rate, and the module that reads it.
    """
    families = subject.case.setting.suited(subject.case.target.profile.families)
    family = "gpt2" if "gpt2" in families else subject.case.family
    for place, field in dropout_fields(family).items():
        model = replace(subject.model(dropout=RATE), family=family, dropout_at=place)
        group = subject.start(model, optimizer={"lr": 0.0})
        kept = [_kept_numbers(subject, group, model, place, rank) for rank in range(subject.layout.dp)]
        verify_rate_and_ranks(subject, f"with {field} = {RATE:g}, a number at the {place}", kept)
    for head, needed, loss in HEADS:
        if subject.spec.supports(needed):
            _verify_head(subject, replace(model, head=head), loss)


def _verify_head(subject: EngineUnderTest, model: TinyModel, loss: CheckLoss) -> None:
    """Require that no input of a scalar head is dropped: a number dropped at both tokens leaves a gradient of 0."""
    group = subject.start(model, optimizer={"lr": 0.0})
    (row,) = ragged(model.vocab_size, subject.case.seed, (2,)).rows
    data = Ragged((replace(row, mask=(False, True)),))
    for _ in range(HEAD_PASSES):
        group.forward_backward(data.batch(), loss.spec(), ONE_PASS)
        dropped = int(group.named_tensors("grads")["score.weight"].eq(0).sum())
        group.optimizer_zero_grad()
        problem = f"in training, {dropped} inputs of the {model.head} head are dropped; the config has no rate for it"
        subject.require(not dropped, problem)


def _kept_numbers(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, place: DropoutPlace, rank: int
) -> dict[str, Tensor]:
    """The numbers at ``place`` that passes with a single token of ``rank`` keep, bool ``[N]`` by pass and tensor."""
    kept = {}
    for number in range(PASSES):
        data = _one_token_of_rank(subject, rank, model, LENGTHS[number % len(LENGTHS)])
        group.forward_backward(data.batch(), LOSS.spec(), ONE_PASS)
        for name, grad in group.named_tensors("grads").items():
            if PLACES[place].search(name):
                kept[f"{name} in pass {number}"] = _numbers(grad, name, place, model).ne(0)
        group.optimizer_zero_grad()
    return kept


def _numbers(grad: Tensor, name: str, place: DropoutPlace, model: TinyModel) -> Tensor:
    """The part of a gradient that a number at ``place`` scales, ``[N]``."""
    if place == "embedding":
        return grad[0]
    if place == "residual":
        return grad
    inputs = grad if name.endswith("c_proj.weight") else grad.T
    return inputs.reshape(model.config().num_attention_heads, -1).abs().amax(1)


@check(
    "I9.adapter-dropout-masks",
    requires={Capability.LORA, Capability.DROPOUT},
    each="layout",
    families=DENSE,
    dtype="float32",
)
def inputs_of_the_adapter_are_dropped(subject: EngineUnderTest) -> None:
    """In training, each input of an adapter is dropped at the adapter's rate; the others are divided by ``1 - rate``.

    The masks are found from gradients of ``A`` over a single token, where a dropped input leaves a column of zeros.
    All gradients use these masks, which each token and each data-parallel rank draws on its own.

    Why: a rate that is not the config's, a model's own dropout in place of the adapter's, inputs that are not
    scaled: the adapter learns something else, and its loss looks like any other.
    Look at: the dropout module of the adapter layers, its config, and the seed of each rank.
    """
    adapter = TinyAdapter(model=subject.model())
    passes: list[Mapping[str, Tensor]] = []
    for rank in range(subject.layout.dp):
        group = start(subject, adapter, fields={"dropout": RATE}, given=f"adapter-{rank}")
        passes.append(
            {
                f"{layer} in a sequence of {length}": keep_mask
                for length in LENGTHS
                for layer, keep_mask in _watch_inputs(subject, group, adapter, rank, length).items()
            }
        )
        _verify_tokens(subject, group, adapter)
    verify_rate_and_ranks(subject, "in training, an input of the adapter", passes)


def _verify_tokens(subject: EngineUnderTest, group: EngineGroup, adapter: TinyAdapter) -> None:
    """Require that no input of the adapter is dropped at all tokens of a pass."""
    data = ragged(adapter.model.vocab_size, subject.case.seed, (LENGTHS[-1],) * subject.layout.dp)
    group.forward_backward(data.batch(), LOSS.spec(), ONE_PASS)
    grads = adapter_of(group.named_tensors("grads"))
    group.optimizer_zero_grad()
    for layer in adapter.low_rank().layers:
        dropped = int(grads[f"{PREFIX}{layer}.lora_A.weight"].eq(0).all(0).sum())
        problem = f"in training, {dropped} inputs of the adapter at {layer} are dropped at all {LENGTHS[-1]} tokens: "
        subject.require(not dropped, problem + "is there one mask for all?")


def _watch_inputs(
    subject: EngineUnderTest, group: EngineGroup, adapter: TinyAdapter, rank: int, length: int
) -> Mapping[str, Tensor]:
    """Run a training pass and find the inputs that it has kept, bool ``[in]`` by layer."""
    data = _one_token_of_rank(subject, rank, adapter.model, length)
    metrics = group.forward_backward(data.batch(), LOSS.spec(), ONE_PASS)
    grads = adapter_of(group.named_tensors("grads"))
    group.optimizer_zero_grad()
    # Without layers that the single token cannot show.
    columns = {
        layer: grads[f"{PREFIX}{layer}.lora_A.weight"].ne(0).any(0) for layer in adapter.low_rank().layers
    }
    keep_mask = {layer: column for layer, column in columns.items() if bool(column.any())}
    subject.require(bool(keep_mask), "a training pass leaves no gradient in any factor A of the adapter")
    expected = _gradients_with(subject, adapter, keep_mask, data)
    label = (
        f"of one token on data-parallel rank {rank}, in a sequence of {length}, with the masks that they show"
    )
    truth, allowed = written(expected.oracle.grads), written(expected.tolerances)
    unscaled = partial(_unscaled, subject, adapter, keep_mask, data, grads)
    required = {name: truth[name] for name in grads}
    subject.verify_named(f"gradients {label}", grads, required, allowed, explain=unscaled)
    subject.verify_loss(f"the loss {label}", metrics["loss"], expected)
    return keep_mask


def _one_token_of_rank(subject: EngineUnderTest, rank: int, model: TinyModel, length: int = 2) -> Ragged:
    """A sequence of ``length`` tokens for each data-parallel rank; the second token of one is trained."""
    data = ragged(model.vocab_size, 1000 * subject.case.seed, (length,) * subject.layout.dp)
    (trained,) = shard_plan(data.batch(), subject.layout.dp)[rank]
    masks = [
        tuple(number == trained and place == 1 for place in range(length)) for number in range(len(data.rows))
    ]
    return Ragged(tuple(replace(row, mask=mask) for row, mask in zip(data.rows, masks, strict=True)))


def _unscaled(
    subject: EngineUnderTest,
    adapter: TinyAdapter,
    keep_mask: Mapping[str, Tensor],
    data: Ragged,
    grads: Mapping[str, Tensor],
) -> str | None:
    """Whether the engine masks inputs, and does not scale the others."""
    expected = _gradients_with(subject, adapter, keep_mask, data, scale=1.0)
    truth, allowed = written(expected.oracle.grads), written(expected.tolerances)
    required = {name: truth[name] for name in grads}
    same = compare_named("gradients", grads, required, allowed).problem is None
    return "inputs that dropout keeps are not divided by 1 - rate" if same else None


def _gradients_with(
    subject: EngineUnderTest,
    adapter: TinyAdapter,
    keep_mask: Mapping[str, Tensor],
    data: Ragged,
    scale: float = 1.0 / (1.0 - RATE),
) -> ExpectedGradients:
    """Gradients of the adapter with these masks on its inputs."""
    factors = {layer: column * scale for layer, column in keep_mask.items()}
    model = adapter.model
    masked = replace(adapter.low_rank(), inputs=factors)
    return subject.gradients(
        Snapshot(subject.expected.models.directory(model), model.head, masked), data, LOSS
    )
