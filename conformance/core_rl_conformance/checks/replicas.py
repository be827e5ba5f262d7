"""Replicated parameters, of which an export shows one copy, checked through gradients after steps.

Ranks that share a model hold some parameters in common (norms, scalar heads), and a single rank
exports them. A copy on another rank that is different shows in no export, and often in no output either; the
gradients that pass through it are wrong.
"""

from __future__ import annotations

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.moving import elsewhere
from core_rl_conformance.procedures.outputs import verify_outputs

OPTIMIZER = {"lr": 2e-2, "max_grad_norm": 1.0}


@check("I3.gradients-after-steps", each="layout")
def gradients_after_steps_match_the_oracle(subject: EngineUnderTest) -> None:
    """After several steps, the gradients match the oracle with the exported weights.

    Why: replicas that drift apart between ranks (Megatron-LM #1446), and copies of a backward pass from before the
    step, show in no export and in few outputs.
    Look at: gradients of replicated parameters, which must be equal on all ranks that hold them; weights
    that are transposed, cast or gathered once for the backward pass.
    """
    model, loss = subject.model(), TokenMeanLoss(temperature=0.8)
    group = subject.start(model, optimizer=OPTIMIZER)
    _verify_after_steps(subject, group, model, loss)


@check("I3.value-gradients-after-steps", requires=[Capability.VALUE_HEAD], each="layout")
def value_gradients_after_steps_match_the_oracle(subject: EngineUnderTest) -> None:
    """The same for a new value head on a language model's weights: each rank draws, and trains, the same one.

    Why: outputs and exports come from one rank. A head that another rank drew for itself, or does not
    train, sends wrong gradients into that rank's shards, and nothing else shows it.
    Look at: the seed on each rank, and what fills and trains a parameter that no file gives.
    """
    model = subject.model(head="value")
    path = str(subject.expected.models.directory(subject.model()))
    section = {"path": path, "head": "value"}
    group = subject.start(model, optimizer=OPTIMIZER, changes={"model": section})
    _verify_after_steps(subject, group, model, ValueLoss())


@check("I3.value-gradients-after-load", requires=[Capability.VALUE_HEAD], each="layout")
def value_gradients_after_a_load_match_the_oracle(subject: EngineUnderTest) -> None:
    """``load(format="hf")`` sets a value model on every rank: values and gradients follow the new weights.

    Why: a rank with its old copy of the head answers like the others. It sends gradients of the old head into its
    shards (vllm #44371, for a train engine).
    Look at: ``ShardedState.local("master")`` on the ranks that do not export: a load writes into every replica.
    """
    model, data, loss = subject.model(head="value"), subject.data(), ValueLoss()
    source = elsewhere(model)
    group = subject.start(model)
    group.load(SaveLoadMeta(path=str(subject.expected.models.directory(source)), format="hf"))
    verify_outputs(subject, group, model, "after a load")
    subject.verify_backward("after a load", group, source, data, loss, MicroBatchSpec(count=2))


def _verify_after_steps(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, loss: CheckLoss
) -> None:
    for seed in (4, 5):
        group.train_batch(subject.data(seed=seed).batch(), loss.spec(), ONE_PASS)
    now = subject.snapshot(group, model, "weights after 2 steps")
    subject.verify_backward("after 2 steps", group, now, subject.data(), loss, MicroBatchSpec(count=2))
