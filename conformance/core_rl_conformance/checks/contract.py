"""Rules of the interface itself: undeclared options are refused, and the version belongs to the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import EngineStateError, UnsupportedCapability
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, REFUSALS, EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import build
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.serving import verify_version
from core_rl_conformance.procedures.training import disable_adapter
from core_rl_conformance.profile import MOE

C = Capability
LAYOUTS = {
    C.DATA_PARALLEL: ParallelLayout(dp=2),
    C.TENSOR_PARALLEL: ParallelLayout(tp=2),
    C.PIPELINE_PARALLEL: ParallelLayout(pp=2),
    C.CONTEXT_PARALLEL: ParallelLayout(cp=2),
}
SYNC = {
    C.SYNC_TENSOR: WeightUpdateMeta(method="tensor", version=1),
    C.SYNC_DISTRIBUTED: WeightUpdateMeta(method="distributed", version=1),
    C.SYNC_LORA: WeightUpdateMeta(method="lora", version=1),
}


@check("contract.undeclared", each="engine")
def undeclared_capabilities_refuse(subject: EngineUnderTest) -> None:
    """An undeclared option raises `UnsupportedCapability` (a layout `LayoutError`), and the engine still works.

    Why: an ignored option trains something else than was asked for, without an error.
    Look at: capabilities that work but are missing in the spec, and public methods that were overridden.
    """
    verify_undeclared(subject, _refusals(subject))
    data = subject.data()
    subject.verify_logprobs("after refusals", subject.start(), subject.model(), data)


def verify_undeclared(subject: EngineUnderTest, actions: Mapping[Capability, Callable[[], object]]) -> None:
    """Require that each of ``actions`` whose capability the engine does not declare raises the matching error."""
    for capability, act in actions.items():
        if capability not in subject.spec.capabilities:
            error = "a LayoutError" if capability in LAYOUTS else "an UnsupportedCapability"
            problem = f"{capability.value!r} is not declared, and asking for it did not raise {error}"
            subject.require_error(REFUSALS, act, problem)


def _refusals(subject: EngineUnderTest) -> dict[Capability, Callable[[], object]]:
    data = subject.data().batch()

    def sync(meta: WeightUpdateMeta) -> Callable[[], object]:
        return lambda: subject.start().upload_weights(meta)

    def save(format_: CheckpointFormat) -> Callable[[], object]:
        meta = SaveLoadMeta(path=str(subject.directory(format_)), format=format_)
        return lambda: subject.start().save(meta)

    def layout(asked: ParallelLayout) -> Callable[[], object]:
        return lambda: subject.start(layout=asked)

    actions: dict[Capability, Callable[[], object]] = {
        C.VALUE_HEAD: lambda: subject.start(subject.model(head="value")),
        C.REWARD_HEAD: lambda: subject.start(subject.model(head="reward")),
        C.LOGITS: lambda: subject.start().forward(data, ONE_PASS, ("logits",)),
        C.DROPOUT: lambda: subject.start(replace(subject.model(), dropout=0.1)),
        C.FROZEN_PARAMETERS: lambda: subject.start(frozen=[subject.first_layer]),
        C.OPTIMIZER_RULES: lambda: subject.start(
            optimizer={"rules": [{"pattern": subject.first_layer, "lr_factor": 0.5}]}
        ),
        C.MUON: lambda: subject.start(optimizer={"type": "muon"}),
        C.ROUTING_REPLAY: lambda: subject.start().forward(data, ONE_PASS, ("routing",)),
        C.MOE: lambda: subject.start(replace(subject.model(), family=MOE)),
        C.BFLOAT16: lambda: subject.start(changes={"dtype": "bfloat16"}),
        C.OFFLOAD: lambda: subject.start().offload(),
        C.TAPS: lambda: subject.start().forward(data, ONE_PASS, ("hidden_states",)),
        C.LORA: lambda: _ask_for_an_adapter(subject),
        C.AUX_LOSS: lambda: subject.start(
            replace(subject.model(), family=MOE), changes={"model": {"router_aux_coef": 0.1}}
        ),
        C.SHARDED_CHECKPOINT: save("sharded"),
        C.PORTABLE_CHECKPOINT: save("portable"),
        C.SYNC_DISK: sync(WeightUpdateMeta(version=1, path=str(subject.directory("sync")))),
    }
    if {C.SHARDED_CHECKPOINT, C.DATA_PARALLEL} <= subject.spec.capabilities:
        actions[C.RESHARDING] = lambda: _load_at_another_layout(subject)
    actions |= {capability: sync(meta) for capability, meta in SYNC.items()}
    return actions | {capability: layout(asked) for capability, asked in LAYOUTS.items()}


def _ask_for_an_adapter(subject: EngineUnderTest) -> None:
    """Options in both ways: by the method, and by the config, if the method refuses."""
    try:
        subject.start().run(disable_adapter)
    except UnsupportedCapability:
        subject.start(changes={"model": {"lora": {"rank": 2}}})


def _load_at_another_layout(subject: EngineUnderTest) -> None:
    meta = SaveLoadMeta(path=str(subject.directory("resharded")), format="sharded")
    subject.start(layout=ParallelLayout(dp=2)).save(meta)
    subject.start(layout=ParallelLayout()).load(meta)


@check("contract.version", each="layout")
def version_is_the_drivers(subject: EngineUnderTest) -> None:
    """The version equals the driver's last value; training does not raise it.

    Why: an engine that counts by itself publishes wrong staleness (AReaL #941, prime-rl #1901).
    Look at: nothing, unless ``set_version`` or ``get_version`` was overridden.
    """
    group = subject.start()
    group.set_version(41)
    group.train_batch(subject.data().batch(), TokenMeanLoss().spec(), ONE_PASS)
    verify_version(subject, group, 41, "after training")


@check("I3.from-config", each="layout")
def drawn_weights_are_one_model(subject: EngineUnderTest) -> None:
    """Weights that are drawn from the seed are the same on every rank and in every run, and buffers are right.

    Why: ranks that draw weights of their own train several models at once; a build on the meta device
    leaves rotary frequencies in a smaller dtype, or unset (SkyRL #1725).
    Look at: the seed on each rank, and what fills parameters and buffers after a build on ``meta``.
    """
    model = subject.model()
    section = {"path": None, "config": model.config().to_dict()}
    runs = []
    for seed in (11, 11, 12):
        group = subject.start(model, changes={"model": section, "seed": seed})
        runs.append(group.named_tensors("master"))
        if len(runs) != 2:
            verify_outputs(subject, group, model, f"drawn from seed {seed}")
    subject.verify_same("weights drawn from the same seed again", runs[1], runs[0])
    matrices = [name for name, value in runs[0].items() if value.dim() > 1]
    same = [name for name in matrices if torch.equal(runs[0][name], runs[2][name])]
    subject.require(not same, f"weights that do not depend on the seed: {', '.join(same[:6])}")


@check("I3.new-head", requires={Capability.VALUE_HEAD}, each="layout")
def a_new_head_is_one_head(subject: EngineUnderTest) -> None:
    """A value head on a language model's weights is new, the same on every rank, and the trunk stays as it was.

    Why: each rank draws a head of its own, or loading refuses or reshuffles the trunk.
    Look at: what fills a parameter that no file gives.
    """
    language, model = subject.model(), subject.model(head="value")
    path = str(subject.expected.models.directory(language))
    group = subject.start(model, changes={"model": {"path": path}})
    master = group.named_tensors("master")
    expected = subject.expected.oracle(language).parameters()
    trunk = {name: expected[name].float() for name in master if name != "score.weight"}
    subject.verify_same("the trunk", {name: master[name] for name in trunk}, trunk)
    subject.require(
        bool(master["score.weight"].any()), "the new head is zero, so no gradient reaches the trunk"
    )
    verify_outputs(subject, group, model, "with a new head")


@check("contract.forward-only", each="layout")
def an_engine_without_optimizer_only_runs_forward(subject: EngineUnderTest) -> None:
    """With ``optimizer = null`` an engine gives outputs and exports, and refuses to train. A scalar head is float32.

    Why: a reference policy that trains along is no reference, and a critic whose head is rounded no critic.
    Look at: whatever takes an optimizer for granted.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model, changes={"optimizer": None})
    before = group.named_tensors("master")
    verify_outputs(subject, group, model, "of an engine without an optimizer")
    loss = TokenMeanLoss().spec()
    group.eval_batch(data.batch(), loss, ONE_PASS)
    for name, action in {
        "train_batch()": lambda: group.train_batch(data.batch(), loss, ONE_PASS),
        "forward_backward()": lambda: group.forward_backward(data.batch(), loss, ONE_PASS),
        "named_tensors('exp_avg')": lambda: group.named_tensors("exp_avg"),
    }.items():
        subject.require_error(EngineStateError, action, f"{name} without an optimizer did not refuse")
    subject.verify_same("weights without an optimizer", group.named_tensors("master"), before)
    if subject.spec.supports(Capability.VALUE_HEAD):
        critic = subject.model(head="value")
        weights = subject.start(critic, changes={"optimizer": None}).named_tensors("master")
        head = {"score.weight": build(critic).get_parameter("score.weight").detach()}
        subject.verify_same("the head without an optimizer", {name: weights[name] for name in head}, head)


@check("contract.order", each="layout")
def outputs_come_in_the_callers_order(subject: EngineUnderTest) -> None:
    """Outputs are in the order of the batch, whatever micro-batches and ranks it went through.

    Why: rows that come back in the order of packing belong to other samples, and nothing fails.
    Look at: ``step(output, micro_batch)``, which must be called with the very micro-batch of that output.
    """
    model, data = subject.model(), subject.data()
    group = subject.start(model)
    for cut in (MicroBatchSpec(count=1), MicroBatchSpec(count=5), MicroBatchSpec(max_tokens=41)):
        subject.verify_logprobs(f"with {cut}", group, model, data, cut)
