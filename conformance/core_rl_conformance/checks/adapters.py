"""Adapters (LoRA): their outputs, their training, and the base model below them."""

from __future__ import annotations

import torch

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import DEEP
from core_rl_conformance.procedures.adapters import adapter_of, base_of, outputs_of, start, verify_trained
from core_rl_conformance.procedures.moving import state
from core_rl_conformance.procedures.outputs import verify_forward, verify_outputs
from core_rl_conformance.procedures.training import CLIPPED, Shadow, optimizer_config

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)


@check("I7.adapter-logprobs", requires={Capability.LORA}, any_model=True)
def adapted_logprobs_match_the_oracle(subject: EngineUnderTest) -> None:
    """Log-probs and entropy with an adapter are the oracle's, which computes ``W x + alpha / rank * B A x``.

    On all linear layers of the trunk, and on some of them with the scale ``alpha / sqrt(rank)``.
    Why: a scale that is forgotten, or that has rank and alpha the wrong way round, trains and serves two policies.
    Look at: the scale, which layers have an adapter, the dtype of its factors.
    """
    model, data = subject.model(), subject.data()
    for adapter in (TinyAdapter(model=model), TinyAdapter(model=model, rslora=True, some=True, seed=1)):
        group = start(subject, adapter, given=f"adapter-{adapter.seed}")
        verify_forward(
            subject,
            group,
            ("logprobs", "entropy"),
            adapter,
            data,
            f"with an adapter (rslora: {adapter.rslora})",
            cut=BUDGET,
            temperature=0.8,
            overall=True,
        )


@check("I20.adapter-gradients", requires={Capability.LORA}, images=True, any_model=True)
def gradients_of_the_adapter_match_the_oracle(subject: EngineUnderTest) -> None:
    """The gradients of ``A`` and ``B`` are the oracle's, with any cut; nothing below them has one.

    Why: the scale of the product that is left out of its gradient, activation checkpointing that finds no input
    with a gradient, and a base that is trained along.
    Look at: the scale, parameters with ``requires_grad``, and recomputation below a frozen embedding.
    """
    adapter, data = TinyAdapter(model=subject.model()), subject.data()
    group = start(subject, adapter, given="given-adapter")
    for cut in (ONE_PASS, BUDGET):
        loss = group.forward_backward(data.batch(), LOSS.spec(), cut)["loss"]
        expected, label = subject.gradients(adapter, data, LOSS), f"with an adapter and {cut}"
        subject.verify_loss(f"the loss {label}", loss, expected)
        grads = group.named_tensors("grads")
        frozen = sorted(base_of(grads))
        subject.require(
            not frozen, f"the base model has gradients next to an adapter: {', '.join(frozen[:6])}"
        )
        verify_trained(subject, label, grads, expected, lambda name: name.startswith(PREFIX))
        group.optimizer_zero_grad()


@check("I20.adapter-steps", requires={Capability.LORA}, each="layout", any_model=True)
def steps_of_a_new_adapter_are_adamws(subject: EngineUnderTest) -> None:
    """A new adapter is one adapter on all ranks; its steps are AdamW's, and the base stays bit for bit.

    ``A`` is drawn from the seed and ``B`` is 0.
    Why: ranks that draw their own ``A`` train several adapters at once, of which one is exported; a base weight
    that decays moves without a gradient.
    Look at: the seed on each rank, and which parameters reach the optimizer.
    """
    model = subject.model(layers=DEEP)
    adapter = TinyAdapter(model=model)
    first, second = (start(subject, adapter, seed=seed).named_tensors("master") for seed in (11, 12))
    group = start(subject, adapter, seed=11, optimizer=optimizer_config(CLIPPED))
    drawn = [adapter_of(tensors) for tensors in (first, second, group.named_tensors("master"))]
    subject.verify_same("adapters drawn from the same seed", drawn[2], drawn[0])
    for name, value in drawn[0].items():
        known = not value.any() if ".lora_B." in name else not torch.equal(value, drawn[1][name])
        subject.require(bool(known), f"{name} of a new adapter: A is drawn from the seed, and B is 0")
    base = base_of(subject.expected.oracle(model).parameters())
    shadow = Shadow.of(group, CLIPPED, frozen=list(base))
    subject.verify_same(
        "the base", dict(shadow.frozen), {name: value.float() for name, value in base.items()}
    )
    batches = [subject.data(seed=seed).batch() for seed in range(3)]
    shadow.train(subject, group, batches, LOSS.spec(), TWO)
    shadow.verify(subject, group, "with an adapter")
    verify_outputs(subject, group, adapter, "after steps of the adapter")


@check("I11.adapter-head", requires={Capability.LORA, Capability.VALUE_HEAD}, each="layout")
def a_head_is_saved_with_its_adapter(subject: EngineUnderTest) -> None:
    """A value head that was trained with an adapter is in ``format="adapter"``, and is loaded bit for bit.

    Why: a critic of an adapter alone has the noise of a new head, or the head of the base, and nothing fails.
    Look at: ``named_tensors("adapter")``, which has the head under ``base_model.model.score.weight``, and the
    tensors that a load fills on every rank.
    """
    adapter, data = TinyAdapter(model=subject.model(head="value")), subject.data()
    group = start(subject, adapter, optimizer={"lr": 3e-3}, given="given-adapter")
    fresh = group.named_tensors("master")["score.weight"]
    group.train_batch(data.batch(), ValueLoss().spec(), ONE_PASS)
    tensors, values = group.named_tensors("adapter"), outputs_of(group, data, ("values",))
    trained = {"score.weight": group.named_tensors("master")["score.weight"]}
    subject.require(
        not trained["score.weight"].equal(fresh), "a step of the adapter leaves score.weight as it was"
    )
    path = str(subject.directory("saved"))
    group.save(SaveLoadMeta(path=path, format="adapter"))
    group = start(subject, adapter, seed=5)
    before = state(group, ["master"])["master"]
    group.load(SaveLoadMeta(path=path, format="adapter"))
    exported = {"score.weight": group.named_tensors("master")["score.weight"]}
    subject.verify_same("the head after a load of its adapter", exported, trained, before)
    subject.verify_same("the adapter after a load", group.named_tensors("adapter"), tensors)
    exported = outputs_of(group, data, ("values",))
    subject.verify_same("values after a load of the adapter", exported, values)
