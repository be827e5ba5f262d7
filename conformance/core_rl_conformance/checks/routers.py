"""Routers of a mixture of experts: their balance, and choices that are recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, ONE_PASS, EngineUnderTest
from core_rl_conformance.expected_values import ExpectedGradients
from core_rl_conformance.hints.diagnose import explain_loss, explain_named
from core_rl_conformance.inputs.data import Ragged, prefix_trees
from core_rl_conformance.inputs.losses import BalancedTokenMeanLoss, BalanceLoss, TokenMeanLoss
from core_rl_conformance.inputs.tiny_experts import alike
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.training import backward_on_parts
from core_rl_conformance.profile import MOE, ROUTED

LOSS = TokenMeanLoss()
EQUAL = 6
"""Tokens of sequences of one length, whose rows transposed are of the same shape."""
ALONE = BalanceLoss()
COEF = 0.25


@check("I7.gates", families=(MOE,), each="layout")
def gates_are_what_the_config_says(subject: EngineUnderTest) -> None:
    """Gates are the probabilities of the chosen experts, not divided by their sum, if ``norm_topk_prob`` is false.

    Engines that cannot have such gates refuse the model by an `UnsupportedCapability`. Where all
    tokens choose the same experts, these compute all of them.

    Why: of the published mixtures some divide the gates by their sum and some do not (Mixtral and OLMoE), and a model
    that is computed the other way answers plausibly. Experts with a fixed capacity drop tokens.
    Look at: how the engine reads ``norm_topk_prob``; whether its softmax is over all experts or over the chosen ones;
    the capacity of experts.
    """
    model, data = replace(subject.model(), plain_gates=True), subject.data()
    group = subject.start_unless_refused(model)
    if group is None:
        model = subject.model()
        group = subject.start(model)
    else:
        subject.verify_logprobs("with gates that are not normalised", group, model, data, BUDGET)
    crowded = Ragged(tuple(replace(row, ids=tuple(map(alike, row.ids))) for row in data.rows))
    subject.verify_logprobs("where all tokens choose the same experts", group, model, crowded, BUDGET)


@check("I18.aux-gradient", requires={Capability.AUX_LOSS}, families=ROUTED)
def balance_follows_the_oracle(subject: EngineUnderTest) -> None:
    """The gradient of the routers' balance alone is the oracle's, however the batch is cut; replayed choices count.

    Why: a balance over a micro-batch depends on what happens to be in it; an average over
    micro-batches, or added once for each context-parallel rank, grows with the layout (verl #6836).
    Look at: ``aux_loss`` of the `ModelOutput`, a **sum** over the tokens of the micro-batch in which each
    sequence stands for itself; the core divides it by all tokens of the step. Tokens that are not trained
    count, and padding and dummies do not. With ``routing`` in the batch, the shares are those of its choices.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(changes={"model": {"router_aux_coef": 1.0}})
    spec, ranks, count = ALONE.spec(), subject.layout.dp, len(data.rows)
    cuts: dict[str, Callable[[], Mapping[str, float]]] = {
        f"of the routers' balance alone with {cut}": partial(group.forward_backward, data.batch(), spec, cut)
        for cut in (ONE_PASS, MicroBatchSpec(count=count // ranks), BUDGET)  # a sequence each, trained or not
    }
    if ranks > 1:
        parts = [list(range(count - ranks + 1)), *([count - r] for r in range(1, ranks))]
        batches = data.batch().split(parts)
        cuts["of the routers' balance alone with nearly everything on rank 0"] = lambda: group.run(
            backward_on_parts, batches, spec, BUDGET
        )[0]
    for label, backward in cuts.items():
        _verify_balance(subject, group, model, data, label, backward())
    if subject.spec.supports(Capability.ROUTING_REPLAY):
        routed = _routed(data, _moved(data, group.forward(data.batch(), BUDGET, ("routing",)).routing, model))
        metrics = group.forward_backward(routed.batch(), ALONE.spec(), BUDGET)
        _verify_balance(subject, group, model, routed, "of the balance with replayed routing", metrics)


def _verify_balance(
    subject: EngineUnderTest,
    group: EngineGroup,
    model: TinyModel,
    data: Ragged,
    label: str,
    metrics: Mapping[str, float],
) -> None:
    expected = subject.gradients(model, data, ALONE)
    subject.verify_gradients(label, group, metrics, expected, name="aux_loss")
    group.optimizer_zero_grad()


@check(
    "I18.shared-aux", requires={Capability.SHARED_PREFIX, Capability.AUX_LOSS}, families=(MOE,), each="layout"
)
def shared_prefixes_change_no_balance(subject: EngineUnderTest) -> None:
    """The routers' balance counts a shared token for every sequence that it belongs to, as the oracle does.

    Why: a balance over computed tokens gives prompts less weight the more answers they have.
    Look at: the tokens that ``aux_loss`` is over: of the whole batch, not of the rows that were computed.
    """
    model = subject.model()
    data = prefix_trees(model.vocab_size, subject.case.seed)
    group = subject.start(changes={"model": {"router_aux_coef": 1.0}})
    for label, cut in (
        ("in one micro-batch", MicroBatchSpec(count=1, share_prefixes=True)),
        ("in three micro-batches", MicroBatchSpec(count=3, share_prefixes=True)),
        ("with a budget that splits a tree", MicroBatchSpec(max_tokens=48, share_prefixes=True)),
    ):
        metrics = group.forward_backward(data.batch(), ALONE.spec(), cut)
        _verify_balance(subject, group, model, data, label, metrics)


@check("I18.aux-beside-loss", requires={Capability.AUX_LOSS}, families=ROUTED, each="layout")
def balance_comes_on_top(subject: EngineUnderTest) -> None:
    """With a loss, in one call or in two, the balance adds its own gradient, and no part of ``loss``.

    Why: a balance that is scaled with the loss changes with the number of trained tokens, and a balance
    inside the reported loss hides the loss.
    Look at: whether the balance goes through the same denominator as the loss; a balance of dummies.
    """
    model, data = subject.model(), subject.data()
    trained = sum(sum(row.mask[1:]) for row in data.rows)
    tokens = sum(data.lengths)
    loss = BalancedTokenMeanLoss(coef=COEF, tokens_per_trained=tokens / trained)
    expected = subject.gradients(model, data, loss)
    plain = subject.gradients(model, data, replace(loss, coef=0.0))
    group = subject.start(changes={"model": {"router_aux_coef": COEF}})
    metrics = group.forward_backward(data.batch(), loss.spec(), BUDGET)
    subject.verify_loss("the loss", metrics["loss"], plain)
    _verify_grads(subject, group, "gradients next to a loss", expected)
    evaluated = group.eval_batch(data.batch(), loss.spec(), BUDGET)["loss"]
    mistake = ("the balance is a part of it", expected.oracle)
    explain = partial(explain_loss, evaluated, plain.oracle.loss, plain.loss, lambda: iter([mistake]), None)
    subject.verify_loss("the loss of eval_batch()", evaluated, plain, explain=explain)
    for part in (range(0, len(data.rows), 3), [i for i in range(len(data.rows)) if i % 3]):
        batch = data.select(part).batch()
        group.forward_backward(batch, loss.spec(), ONE_PASS, total_weight=trained, total_tokens=tokens)
    _verify_grads(subject, group, "gradients of two calls", expected)


def _verify_grads(
    subject: EngineUnderTest, group: EngineGroup, label: str, expected: ExpectedGradients
) -> None:
    grads = group.named_tensors("grads")
    explain = partial(explain_named, grads, expected.tolerances, expected.mistakes, None, expected.shares)
    subject.verify_named(label, grads, expected.oracle.grads, expected.tolerances, explain=explain)
    group.optimizer_zero_grad()


@check("I17.routing-replay", requires={Capability.ROUTING_REPLAY}, families=ROUTED)
def routing_is_recorded_and_replayed(subject: EngineUnderTest) -> None:
    """``forward`` gives the experts that were chosen; a batch with ``routing`` is computed with those, and no other.

    Why: a replay that is bound to replaced routers has no effect and raises no error. Training then uses other
    experts than the rollout (verl #7340), or another token's, where sequences are of one length (miles #3146).
    Look at: that recorded choices reach the routers that compute, in every layer, in training as in
    ``forward()``, with gates of the present probabilities; that the next batch chooses for itself; and which
    token of a sequence a shared one stands for.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model)
    subject.verify_logprobs("before any replay", group, model, data, BUDGET)
    recorded = group.forward(data.batch(), BUDGET, ("routing",)).routing
    truth = torch.cat([o["routing"] for o in subject.expected.oracle(model).evaluate(data.for_oracle())])
    same = torch.equal(recorded.long().sort(-1).values, truth.sort(-1).values)
    subject.require(same, "the output 'routing' is not what the oracle's routers choose")
    subject.verify_logprobs("with the recorded routing", group, model, _routed(data, recorded), BUDGET)
    texts = [row for row in data.rows if row.images is None and len(row.ids) >= EQUAL]
    equal = Ragged(tuple(row.after(len(row.ids) - EQUAL) for row in texts))
    of_equal = group.forward(equal.batch(), ONE_PASS, ("routing",)).routing
    parts = [(" of equal lengths", equal, of_equal, ONE_PASS), ("", data, recorded, BUDGET)]
    if subject.spec.supports(Capability.SHARED_PREFIX) and model.family == MOE:
        trees = prefix_trees(model.vocab_size, subject.case.seed)
        of_trees = group.forward(trees.batch(), ONE_PASS, ("routing",)).routing
        parts.insert(0, (" of shared prefixes", trees, of_trees, replace(ONE_PASS, share_prefixes=True)))
    for end, part, chosen, cut in parts:
        second, label = _routed(part, _moved(part, chosen, model)), f"with another routing{end}"
        subject.verify_logprobs(label, group, model, second, cut)
        subject.verify_backward(label, group, model, second, LOSS, cut)
    subject.verify_logprobs("after a replay", group, model, data, BUDGET)
    plain = replace(model, plain_gates=True)
    if model.family == MOE and (second_group := subject.start_unless_refused(plain)) is not None:
        label = "with another routing, and gates that are not normalised"
        moved = _routed(data, _moved(data, recorded, model))
        subject.verify_logprobs(label, second_group, plain, moved, BUDGET)


def _routed(data: Ragged, routing: Tensor) -> Ragged:
    """The same sequences, with experts ``[T, layers, k]`` to choose."""
    parts = [
        tuple(tuple(map(tuple, token)) for token in part.tolist()) for part in routing.split(data.lengths)
    ]
    return Ragged(tuple(replace(row, routing=part) for row, part in zip(data.rows, parts, strict=True)))


def _moved(data: Ragged, routing: Tensor, model: TinyModel) -> Tensor:
    """Tokens take, in turns, their own experts, the next ones (other sets, still each once), and the first of all."""
    count = model.config().get_text_config().num_experts
    turn = torch.cat([torch.arange(length) % 4 for length in data.lengths])[:, None, None]
    first = torch.arange(routing.shape[-1], dtype=routing.dtype).expand_as(routing)
    return torch.where(turn == 2, first, torch.where(turn % 2 == 1, (routing + 1) % count, routing))
