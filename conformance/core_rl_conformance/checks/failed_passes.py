"""Passes that raise: nothing of them is left in an engine that is used again."""

from __future__ import annotations

from core_rl.backend.tensors import TensorDict
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import CoreRLError, EngineStateError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.inputs.losses import RaisingLoss, TokenMeanLoss
from core_rl_conformance.procedures.moving import elsewhere

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)


@check("I5.failed-pass", each="engine")
def a_failed_pass_leaves_nothing(subject: EngineUnderTest) -> None:
    """After a pass that raised, no gradients count twice, and later passes compute with the present weights.

    Or the engine has failed, and every later call fails with the reason. One rank alone is asked: with several, the
    engine has failed wherever a backend raises.
    Why: FSDP2 used the weights that a failed pass had gathered, after others were loaded (log-probs off by 0.28), and a
    repeated ``forward_backward`` added its gradients to the failed call's (1.24 times).
    Look at: ``TrainBackend.abort``: gathered weights, and gradients outside of the memory that ``zero_grad`` drops.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model, layout=ParallelLayout())
    group.forward_backward(data.batch(), LOSS.spec(), TWO)
    _raise_in_a_pass(subject, group)
    subject.require_error(
        EngineStateError,
        lambda: group.forward_backward(data.batch(), LOSS.spec(), TWO),
        "forward_backward() after a pass that raised was not refused, before optimizer_zero_grad()",
    )
    try:
        group.optimizer_zero_grad()
    except EngineStateError:
        return  # it has failed
    # Not asked for a second time, as `verify_backward` does: that would be a pass after a successful pass.
    metrics = group.forward_backward(data.batch(), LOSS.spec(), TWO)
    subject.verify_gradients("after a pass that raised", group, metrics, subject.gradients(model, data, LOSS))
    group.optimizer_zero_grad()
    _raise_in_a_pass(subject, group)
    group.optimizer_zero_grad()
    second = elsewhere(model)
    weights = {name: value.float() for name, value in subject.expected.oracle(second).parameters().items()}
    group.load_named_tensors("master", TensorDict(weights))
    subject.verify_logprobs("of weights that were loaded after a pass that raised", group, second, data)


def _raise_in_a_pass(subject: EngineUnderTest, group: EngineGroup) -> None:
    try:
        group.forward_backward(subject.data(seed=1).batch(), RaisingLoss().spec(), TWO)
    except CoreRLError:
        return
    subject.require(False, "an error in the backward pass of a micro-batch was swallowed")
