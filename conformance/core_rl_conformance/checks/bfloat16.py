"""Parts of a bfloat16 engine that are in float32, compared where bfloat16 itself rounds nothing, or always alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.hints.diagnose import compare_named, compare_tokens, explain_tokens
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import DEEP, FILE_SIZE, TinyModel, save_as
from core_rl_conformance.procedures.adapters import start
from core_rl_conformance.procedures.moving import load_weights, weights_of
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_conformance.profile import DENSE
from core_rl_conformance.reproduction import Weights, computation_of
from core_rl_oracle.oracle import AdamW
from core_rl_oracle.plain import EXACT_VARIANTS
from core_rl_oracle.tolerance import scalar_tolerance, tolerance, tolerances

RUNS: tuple[tuple[OutputName, float], ...] = (("logprobs", 1.0), ("logprobs", 0.3), ("entropy", 0.7))
ROTARY = ("qwen3", "llama", "qwen2")
"""Models with rotary positions whose scores are not capped."""
LENGTH = 9
DIFFERENT, COPIES = 2, 16
"""Sequences on each data-parallel rank, each in a micro-batch of its own."""
ORDERS = 5
ROUNDED = 2**-4
"""Sums in bfloat16 are off by less, in parts of the largest value."""
SMALL = AdamW(lr=2e-6, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=1.0)
"""No single update reaches the last place of a bfloat16 weight."""
UPDATES = 20


@check("I20.bfloat16-upcasts", each="layout", families=DENSE, dtype="bfloat16")
def norms_softmax_and_heads_are_in_float32(subject: EngineUnderTest) -> None:
    """In bfloat16, the norm, the temperature, the softmax and a scalar head compute in float32.

    Hidden states and logits of the model are bfloat16 numbers, so that nothing rounds where these steps are
    in float32: log-probs, entropy, logits, values and the loss of a training pass then have the accuracy of float32.

    Why: the usual tolerance of bfloat16 is some nats, and hides a temperature that divides bfloat16 logits (rms error
    6.6e-2 at 0.3), values that are bfloat16 numbers, or a norm that squares in bfloat16.
    Look at: the quantity that is off. At temperature 1: the final norm or the softmax. At another one alone: the
    division, which comes after the upcast. Values alone: the scalar head, whose weight is float32.
    """
    data = subject.data()
    model = replace(subject.model(), exact=True)
    group = subject.start(model)
    logits: list[tuple[OutputName, float]] = (
        [("logits", 0.3)] if subject.spec.supports(Capability.LOGITS) else []
    )
    for name, temperature in (*RUNS, *logits):
        _verify_exact(subject, group, model, data, name, temperature)
    _verify_trained(subject, group, model, subject.data(PROBE), TokenMeanLoss(temperature=0.3))
    if subject.spec.supports(Capability.VALUE_HEAD):
        model = replace(model, head="value")
        _verify_exact(subject, subject.start(model), model, data, "values", 1.0)


@check("I20.bfloat16-rotary", each="layout", families=ROTARY, dtype="bfloat16")
def rotary_positions_are_in_float32(subject: EngineUnderTest) -> None:
    """In bfloat16, rotary angles are products of float32: two positions next to each other have two, also behind 256.

    In the model of this check each token attends to itself, since no other has its position.

    Why: bfloat16 has no odd numbers above 256. Angles that are computed in it make neighbours one position, and only
    long sequences show it, within the usual tolerance of bfloat16 (SkyRL #1725: frequencies cast with the weights).
    Look at: the dtype of position ids and of ``inv_freq`` where they are multiplied, and casts of buffers.
    """
    model = replace(subject.model(), exact=True, focused=True, long=True).with_multiples(
        *subject.case.multiples
    )
    group = subject.start(model)
    _verify_exact(subject, group, model, subject.data((389, 2, 17), seed=9), "logprobs", 1.0)


def _verify_exact(
    subject: EngineUnderTest,
    group: EngineGroup,
    model: TinyModel,
    data: Ragged,
    name: OutputName,
    temperature: float,
) -> None:
    """Compare with the oracle, by the rule with the errors of the plain model in bfloat16 and a floor of float32."""
    sequences = data.for_oracle()
    truth = [outputs[name] for outputs in subject.expected.oracle(model).evaluate(sequences, temperature)]
    plain = subject.expected.plain(model, torch.bfloat16, subject.case.device)
    runs = [plain.outputs(variant, sequences, temperature) for variant in EXACT_VARIANTS]
    allowed = tolerance(
        [torch.cat([outputs[name] for outputs in run]) for run in runs], torch.cat(truth), torch.float32
    )
    got = per_sequence(group.forward(data.batch(), ONE_PASS, (name,), temperature), name, data)
    kind = "hardly rounds" if model.focused else "computes exactly"
    label = f"{name} at temperature {temperature:g} of a model that bfloat16 {kind}"

    def explain() -> str | None:
        mistakes = subject.outputs(model, data, name, temperature).mistakes
        return explain_tokens(got, truth, allowed, mistakes, None)

    subject.verify(compare_tokens(label, got, truth, allowed, subject.places(data), explain=explain))


def _verify_trained(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, data: Ragged, loss: TokenMeanLoss
) -> None:
    """Compare the loss of a training pass by the same rule."""
    sequences = data.for_oracle()
    truth = subject.expected.oracle(model).gradients(sequences, loss.of_sequence, loss.temperature).loss
    plain = subject.expected.plain(model, torch.bfloat16, subject.case.device)
    runs = [
        plain.gradients(variant, sequences, loss.of_sequence, loss.temperature)[0]
        for variant in EXACT_VARIANTS
    ]
    got = group.forward_backward(data.batch(), loss.spec(), ONE_PASS)["loss"]
    label = f"the loss of a training pass at temperature {loss.temperature:g} of a model that bfloat16 computes exactly"
    subject.verify_scalar(label, got, truth, scalar_tolerance(runs, truth, torch.float32))


@check("I20.bfloat16-sums", each="layout", dtype="bfloat16")
def gradients_are_added_up_in_float32(subject: EngineUnderTest) -> None:
    """In bfloat16, gradients of micro-batches are added up in float32, and over data-parallel ranks as well.

    Each sequence is a micro-batch of its own, so that its gradient rounds alike alone and among others. The gradient of
    many is compared with the float64 sum of each, exported in turn. So it is for the factors of an adapter, and a
    scalar head.

    With expert parallelism, gradients of experts are left out: one product adds up the tokens of several ranks.

    Why: sums in bfloat16 lose whatever is below the 8th bit: with 32 micro-batches some percent of the gradient, and
    the loss only falls a little slower.
    Look at: the dtype of ``grad`` between micro-batches, and the dtype of the reduction (``reduce_dtype``).
    """
    _verify_sums(subject, subject.start(), "", TokenMeanLoss())
    if subject.spec.supports(Capability.LORA):
        critic = subject.spec.supports(Capability.VALUE_HEAD)
        adapter = TinyAdapter(model=subject.model(head="value" if critic else "lm"))
        group = start(subject, adapter, given="given-adapter")
        loss = ValueLoss() if critic else TokenMeanLoss()
        _verify_sums(subject, group, f"of an adapter {'and a head ' * critic}", loss)


def _verify_sums(subject: EngineUnderTest, group: EngineGroup, of: str, of_tokens: CheckLoss) -> None:
    per_rank = DIFFERENT * COPIES
    data = subject.data(lengths=(LENGTH,) * (DIFFERENT * subject.layout.dp)).all_trained()
    loss = of_tokens.spec()
    total = COPIES * loss.weight(data.batch())
    parts = [_gradients(group, data.select([number]), loss, total) for number in range(len(data.rows))]
    if subject.layout.dp > 1:
        first = list(range(subject.layout.dp))
        got = _gradients(group, data.select(first), loss, total)
        label = f"{of}with one micro-batch on each data-parallel rank"
        _verify_sum(subject, label, got, parts[: len(first)], 1)
    got = _gradients(group, data.select([*range(len(data.rows))] * COPIES), loss, total, per_rank)
    label = f"{of}with {per_rank} micro-batches on each data-parallel rank"
    _verify_sum(subject, label, got, parts, COPIES)


def _gradients(
    group: EngineGroup, data: Ragged, loss: LossSpec, total_weight: float, count: int = 1
) -> dict[str, Tensor]:
    """The gradients of ``data``, as a part of a batch of ``total_weight``, in ``count`` micro-batches of each rank."""
    group.forward_backward(data.batch(), loss, MicroBatchSpec(count=count), total_weight=total_weight)
    grads = group.named_tensors("grads")
    group.optimizer_zero_grad()
    return grads


def _verify_sum(
    subject: EngineUnderTest,
    label: str,
    got: Mapping[str, Tensor],
    parts: list[dict[str, Tensor]],
    copies: int,
) -> None:
    """Compare with the sum of ``copies`` of each part: as float32 adds them up in several orders."""
    terms = [part for part in parts for _ in range(copies)]
    if subject.layout.ep > 1:
        # An expert has one product for the tokens of several ranks. It is rounded once, unlike their own products.
        got = {name: grad for name, grad in got.items() if ".experts." not in name}
    exact = {name: torch.stack([term[name].double() for term in terms]).sum(0) for name in got}
    runs = []
    for seed in range(ORDERS):
        order = torch.randperm(len(terms), generator=torch.Generator().manual_seed(seed)).tolist()
        runs.append({name: _added([terms[place][name] for place in order]) for name in got})
    allowed = tolerances(runs, exact, torch.float32)
    finding = compare_named(f"gradients {label}", got, exact, allowed)
    largest = max(float(grad.abs().max()) for grad in exact.values())
    if finding.problem is not None and finding.error < ROUNDED * largest:
        reason = (
            "\nthey are near the sum of what each sequence gives alone: it is added up in less than float32"
        )
        finding = replace(finding, problem=finding.problem + reason, names_cause=True)
    subject.verify(finding)


def _added(terms: list[Tensor]) -> Tensor:
    total = terms[0].float().clone()
    for term in terms[1:]:
        total += term
    return total


@check("I20.bfloat16-steps", each="layout", dtype="bfloat16")
def master_weights_stay_in_float32(subject: EngineUnderTest) -> None:
    """In bfloat16, master weights are the float32 numbers of the files, from the start and after a load.

    After 20 updates, each too small for a bfloat16 weight to change, weights and moments match a float64 AdamW; these
    begin from files in bfloat16.

    Why: masters that are made of bfloat16 weights begin somewhere else, and updates that are rounded away train
    nothing at the learning rates of post-training.
    Look at: which tensor is made of which when the engine is built, and in ``after_load``; the dtype of moments.
    """
    model = subject.model(layers=DEEP)
    truth = weights_of(subject, model)
    weights = computation_of(model, Weights())
    group = subject.start(model)
    subject.verify_same("master weights at the start", group.named_tensors("master"), truth, of=weights)
    path = subject.directory("bfloat16")
    save_as(model, torch.bfloat16, FILE_SIZE, path)
    group = subject.start(model, changes={"model": {"path": str(path)}}, optimizer=optimizer_config(SMALL))
    shadow = Shadow.of(group, SMALL)
    batches = [subject.data(PROBE[:3], seed).batch() for seed in range(UPDATES)]
    shadow.train(subject, group, batches, TokenMeanLoss().spec(), ONE_PASS)
    shadow.verify(subject, group, f"after {UPDATES} small updates")
    load_weights(subject, group, model)
    label = "master weights after a load of float32 files"
    subject.verify_same(label, group.named_tensors("master"), truth, of=weights)
