"""State that is kept in host memory: nothing is lost on the way, and nothing reads absent state."""

from __future__ import annotations

import torch

from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineStateError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures import moving

TWO = MicroBatchSpec(count=2)
CONFIGURED = {"offload_params": True, "offload_optimizer": True}


@check("contract.offloaded-state", requires={Capability.OFFLOAD}, each="layout")
def offloaded_state_is_not_read(subject: EngineUnderTest) -> None:
    """While state is offloaded, reading it raises `EngineStateError`; after ``onload()`` it is unchanged.

    Why: an export of offloaded weights is memory of something else, and a server takes it for a policy.
    Look at: memory outside ``ShardedState.local``; the core moves the state, refuses to read in between, and runs
    forward passes as ever.
    """
    group, data = moving.start(subject, subject.model()), subject.data(seed=1).batch()
    moving.train(group, subject, [0])
    outputs = group.forward(data, ONE_PASS)["logprobs"]
    group.forward_backward(data, TokenMeanLoss().spec(), ONE_PASS)
    before = {**moving.state(group), "grads": group.named_tensors("grads")}
    group.offload()
    readable = [kind for kind, refused in group.run(_refused_kinds)[0].items() if not refused]
    subject.require(not readable, f"named_tensors gives {', '.join(readable)} while the engine is offloaded")
    logprobs = group.forward(data, ONE_PASS)["logprobs"]
    subject.require(
        torch.equal(logprobs, outputs),
        "log-probs of an engine that was offloaded before are others than without",
    )
    group.onload()
    for kind, tensors in before.items():
        subject.verify_same(f"{kind} after offload() and onload()", group.named_tensors(kind), tensors)


def _refused_kinds(engine: TrainEngine) -> dict[str, bool]:
    """Whether each kind of tensor is refused. Nothing is read where it is, so the ranks stay together."""
    refused = {}
    for kind in moving.KINDS:
        try:
            engine.named_tensors(kind)
            refused[str(kind)] = False
        except EngineStateError:
            refused[str(kind)] = True
    return refused


@check("I11.offload", requires={Capability.OFFLOAD}, each="layout", images=True)
def training_with_offloading_is_bitwise(subject: EngineUnderTest) -> None:
    """Training with ``offload()`` in between, or offloaded as configured, is bitwise the same as without.

    Why: moments that begin again, masters that come back old or as noise, gradients that are dropped between two
    passes (NeMo-RL #2372).
    Look at: what ``ShardedState.local`` yields, each time anew: weights, gradients that wait for a step, both
    moments; and whether the optimizer works on the returned memory.
    """
    model = subject.model()
    group = moving.start(subject, model)
    expected = _steps(group, subject, offload=False)
    reference = moving.state(group)
    for when, changes in (("with offload() in between", {}), ("offloaded as configured", CONFIGURED)):
        group = moving.start(subject, model, changes=changes)
        metrics = _steps(group, subject, offload=not changes)
        for number, (ours, plain) in enumerate(zip(metrics, expected, strict=True)):
            label = f"step {number} {when}"
            moving.verify_report(subject, label, ours, plain, "without offloading")
        group.onload()
        moving.verify_state(subject, f"after training {when}", group, reference)


def _steps(group: EngineGroup, subject: EngineUnderTest, offload: bool) -> list[dict[str, float]]:
    """Three updates, the second of them in two passes with the gradients waiting between."""
    loss, weight = TokenMeanLoss(temperature=0.8).spec(), 500.0
    reports = moving.train(group, subject, [0])
    if offload:
        group.offload()
    group.forward_backward(subject.data(seed=1).batch(), loss, TWO, total_weight=weight)
    report = group.forward_backward(subject.data(seed=2).batch(), loss, TWO, total_weight=weight)
    reports.append(report | group.optimizer_step())
    if offload:
        group.onload()
        group.offload()
    return reports + moving.train(group, subject, [3])


@check("I11.offload-checkpoint", requires={Capability.OFFLOAD, Capability.SHARDED_CHECKPOINT}, each="layout")
def checkpoints_of_an_offloaded_engine(subject: EngineUnderTest) -> None:
    """An offloaded engine saves its state, and continues bitwise after loading.

    Why: a save while offloaded crashes or writes freed memory (slime #1888), and a load while offloaded is undone
    when the old copies come back (NeMo-RL #2372).
    Look at: copies on the host that outlive their originals.
    """
    model = subject.model()
    group = moving.start(subject, model)
    moving.train(group, subject, [0, 1])
    state = moving.state(group)
    group.offload()
    group.save(moving.meta(subject.directory("checkpoint"), "sharded"))
    reports = moving.train(group, subject, [2])
    group.onload()
    expected = moving.state(group)
    group = moving.start(subject, moving.elsewhere(model), changes=CONFIGURED)
    moving.train(group, subject, [5])
    group.load(moving.meta(subject.directory("checkpoint"), "sharded"))
    group.onload()
    moving.verify_state(subject, "loaded into an offloaded engine", group, state)
    group.offload()
    moving.verify_steps(subject, 2, moving.train(group, subject, [2]), reports)
    group.onload()
    moving.verify_state(subject, "after resuming offloaded", group, expected)
