"""Models over ranks: replicated parameters, weights drawn from a seed, shared heads, and layers of other kinds.

Ranks that share a model hold some parameters in common (norms, scalar heads), and a single rank exports them. A copy on
another rank that is different shows in no export, and often in no output either; gradients through it are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.distributed.comm import Comm
from core_rl.engine.train import TrainEngine
from core_rl.errors import CoreRLError
from core_rl.launch.group import EngineGroup
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_state import HFShardedState
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import BUDGET, ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.data import ragged
from core_rl_conformance.inputs.losses import CheckLoss, TokenMeanLoss, ValueLoss
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS, TinyModel
from core_rl_conformance.procedures.moving import elsewhere, load_weights, meta
from core_rl_conformance.procedures.outputs import PROBE, verify_forward, verify_outputs
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, methods_of, sync_meta, tensors_of

OPTIMIZER = {"lr": 2e-2, "max_grad_norm": 1.0}
SEED = 13
HEADS_LOSS = TokenMeanLoss(temperature=0.8)


@check("I3.gradients-after-steps", each="layout", images=True)
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


@check("I3.value-gradients-after-steps", requires={Capability.VALUE_HEAD}, each="layout")
def value_gradients_after_steps_match_the_oracle(subject: EngineUnderTest) -> None:
    """The same for a new value head on a language model's weights: each rank draws, and trains, the same one.

    Why: outputs and exports come from one rank. A head that another rank drew for itself, or does not
    train, sends wrong gradients into that rank's shards, and nothing else shows it.
    Look at: the seed on each rank, and what fills and trains a parameter that no file gives.
    """
    model = subject.model(head="value")
    path = str(subject.expected.models.directory(subject.model()))
    group = subject.start(model, optimizer=OPTIMIZER, changes={"model": {"path": path}})
    _verify_after_steps(subject, group, model, ValueLoss())


@check("I3.value-gradients-after-load", requires={Capability.VALUE_HEAD}, each="layout")
def value_gradients_after_a_load_match_the_oracle(subject: EngineUnderTest) -> None:
    """``load(format="hf")`` sets a value model on every rank: values and gradients follow the new weights.

    Why: a rank with its old copy of the head answers like the others. It sends gradients of the old head into its
    shards (vllm #44371, for a train engine).
    Look at: ``ShardedState.local("master")`` on the ranks that do not export: a load writes into every replica.
    """
    model, data, loss = subject.model(head="value"), subject.data(), ValueLoss()
    source = elsewhere(model)
    group = subject.start(model)
    load_weights(subject, group, source)
    verify_outputs(subject, group, model, "after a load")
    subject.verify_backward("after a load", group, source, data, loss, MicroBatchSpec(count=2))


def _verify_after_steps(
    subject: EngineUnderTest, group: EngineGroup, model: TinyModel, loss: CheckLoss
) -> None:
    for seed in (4, 5):
        group.train_batch(subject.data(seed=seed).batch(), loss.spec(), ONE_PASS)
    now = subject.snapshot(group, model, "weights after 2 steps")
    subject.verify_backward("after 2 steps", group, now, subject.data(), loss, MicroBatchSpec(count=2))


@check("I3.seeded-draws", each="layout")
def new_weights_are_drawn_from_the_seed(subject: EngineUnderTest) -> None:
    """Weights from a config, new heads and new adapters are what ``build_model`` draws from the seed, on every rank.

    Bit for bit in float32; heads and adapters where they are declared.

    Why: engines that draw by themselves begin a comparison of two engines, or a move to another layout, from two
    models; a rank's number in the seed makes one model of several, of which one is exported.
    Look at: the seed that reaches ``build_model``, the order of draws, the dtype in which they are made, and ranks
    whose ``ShardedState.local`` differs from the exported tensors.
    """
    for label, section in _drawn_sections(subject).items():
        group = subject.start(subject.model(), changes={"model": section, "seed": SEED})
        built = build_model(ModelConfig(**section), seed=SEED, attn_implementation="eager")
        state = HFShardedState(built, None, {}, Comm())
        drawn = {part.name: part.tensor.clone() for part in state.local("master")}
        subject.verify_same(label, group.named_tensors("master"), drawn)
        for rank, names in enumerate(group.run(_different_slices, drawn)):
            problem = f"{label}: rank {rank} has other values than the exported ones: {', '.join(names[:6])}"
            subject.require(not names, problem)


def _drawn_sections(subject: EngineUnderTest) -> dict[str, dict[str, Any]]:
    """Sections ``model`` of a config whose weights are drawn: all of them, a head, or an adapter."""
    model, supports = subject.model(), subject.spec.supports
    path = str(subject.expected.models.directory(model))
    config = model.config().to_dict()
    sections: dict[str, dict[str, Any]] = {
        "weights drawn from a config": {"path": None, "config": config, "head": "lm"}
    }
    head = "value" if supports(Capability.VALUE_HEAD) else "lm"
    if head == "value":
        sections["a model with a new head"] = {"path": path, "head": head}
    if supports(Capability.REWARD_HEAD):
        sections["a model with a new reward head"] = {"path": path, "head": "reward"}
    if supports(Capability.LORA):
        lora = TinyAdapter(model=model).section()
        sections["a model with a new adapter"] = {"path": path, "head": head, "lora": lora}
    return sections


def _different_slices(engine: TrainEngine, expected: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose slices on this rank differ from ``expected``: masters, or compute copies."""
    engine.backend.synchronize()
    state, names = engine.backend.state(), []
    for kind in ("master", "params"):
        for part in state.local(kind):
            value = part.tensor.detach().cpu()
            if not value.equal(expected[part.name][part.region].to(value.dtype)):
                names.append(f"{part.name} ({kind})")
    return names


@check(
    "I3.few-kv-heads",
    requires={Capability.CONTEXT_PARALLEL},
    each="layout",
    min_cp=2,
    families=("qwen3", "llama", "qwen2", "gemma2"),
)
def few_key_value_heads_are_enough(subject: EngineUnderTest) -> None:
    """With fewer key/value heads than ranks share a sequence, log-probs and gradients are the oracle's.

    There is a single one, or with tensor parallelism one for each of its ranks.

    Why: an exchange of tokens for heads (Ulysses) copies key/value heads when there are fewer than ranks. Copies
    of the wrong head, and copies whose gradients are not added up, show in no model with many of them.
    Look at: which key/value head a rank's query heads belong to, and the backward pass of the copies.
    """
    heads = subject.case.layout.tp
    model = replace(subject.model(), kv_heads=heads)
    _verify_right(subject, subject.start(model), model, f"with {heads} key/value head{'s' * (heads > 1)}")


@check("contract.heads-over-tp", requires={Capability.TENSOR_PARALLEL}, each="engine")
def heads_that_tp_does_not_divide(subject: EngineUnderTest) -> None:
    """Heads that ``tp=2`` does not divide are refused by ``initialize()`` on every rank, or computed right.

    The refusal is a `LayoutError` or an `UnsupportedCapability`, and the group still works after it.

    Why: half a head on each rank fails in the middle of a run, or trains another model without an error; a single
    rank that refuses leaves the others waiting for it.
    Look at: where the layout is compared with the model's heads: before the first collective, on all ranks alike.
    """
    _verify_odd_heads(subject, ParallelLayout(tp=2))


@check("contract.heads-over-cp", requires={Capability.CONTEXT_PARALLEL}, each="engine")
def heads_that_cp_does_not_divide(subject: EngineUnderTest) -> None:
    """Heads that ``cp=2`` does not divide are refused by ``initialize()`` on every rank, or computed right.

    The refusal is a `LayoutError` or an `UnsupportedCapability`, and the group still works after it.

    Why: an exchange of tokens for heads (Ulysses) that rounds down loses the last head, and nothing fails.
    Look at: where the layout is compared with the model's heads: before the first collective, on all ranks alike.
    """
    _verify_odd_heads(subject, ParallelLayout(cp=2))


def _verify_odd_heads(subject: EngineUnderTest, layout: ParallelLayout) -> None:
    model = subject.model().with_odd_heads()
    label = f"of a model with {model.heads} heads at {layout}"
    group = subject.start_unless_refused(model, layout)
    if group is None:
        fields = subject.model()
        _verify_right(subject, subject.start(fields), fields, f"after the refusal {label}")
        return
    try:
        _verify_right(subject, group, model, label)
    except CoreRLError as error:
        reason = str(error).splitlines()[0]
        problem = (
            f"initialize() took a model with {model.heads} heads at {layout}, and then it failed: {reason}"
        )
        raise AssertionError(subject.failure_message(problem)) from error


def _verify_right(subject: EngineUnderTest, group: EngineGroup, model: TinyModel, label: str) -> None:
    data = subject.data()
    subject.verify_logprobs(label, group, model, data)
    subject.verify_backward(label, group, model, data, HEADS_LOSS)


@check("I6.layer-kinds", each="layout")
def other_layers_are_right_or_refused(subject: EngineUnderTest) -> None:
    """A hybrid of Gated DeltaNet, latent attention and attention sinks: each is the oracle's, or refused.

    A refusal is an `UnsupportedCapability` or a `LayoutError` when the engine is initialized. Families that the
    installed transformers lacks are left out. Buffers that files hold are loaded, and written to exports and
    checkpoints, bit for bit.

    Why: on packed sequences the state of a recurrence or a convolution crosses from one sequence to the next, and
    sinks that are left out change every log-prob; nothing fails (transformers #46093, verl #6660, slime #1686).
    Look at: the layers of the model that are not attention, with more than one sequence in a micro-batch, and whether
    the engine declares its models. If buffers are off: code that reads and writes parameters alone.
    """
    for family in (family for family in OTHER_LAYERS if family in CONFIG_MAPPING):
        model = TinyModel(family=family, seed=subject.case.seed).with_multiples(*subject.case.multiples)
        data = ragged(model.vocab_size, 1000 * subject.case.seed)
        group = subject.start_unless_refused(model)
        if group is None:
            continue
        verify_forward(subject, group, ("logprobs",), model, data, f"of {family}", cut=BUDGET)
        subject.verify_backward(f"of {family}", group, model, data, TokenMeanLoss(), BUDGET)
        _verify_buffers(subject, group, model)


def _verify_buffers(subject: EngineUnderTest, group: EngineGroup, model: TinyModel) -> None:
    """Require the buffers of the files that the engine has, then of others, and of a checkpoint, also in an export."""
    trained, files = group.tensor_shapes("master"), tensors_of(subject.expected.models.directory(model))
    if files.keys() <= trained.keys() or subject.case.dtype != "float32":
        return

    def untrained(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in trained}

    data = ragged(model.vocab_size, 1000 * subject.case.seed, PROBE)
    other, checkpoint = elsewhere(model), meta(subject.directory("sharded"), "sharded")
    turns: list[tuple[str, TinyModel, Sequence[Callable[[], object]]]] = [
        ("", model, ()),
        (" after a load", other, (partial(load_weights, subject, group, other),)),
    ]
    if subject.spec.supports(Capability.OFFLOAD):
        turns.append((" after offload() and onload()", other, (group.offload, group.onload)))
    if subject.spec.supports(Capability.SHARDED_CHECKPOINT):
        group.save(checkpoint)
        turns.append((" after a load of a sharded checkpoint", model, (partial(group.load, checkpoint),)))
    for number, (turn, source, calls) in enumerate(turns):
        for call in calls:
            call()
        path = subject.directory(f"export-{number}")
        sides = [
            subject.expected.models.directory(side) for side in (source, model if source is other else other)
        ]
        expected, before = (untrained(tensors_of(side)) for side in sides)
        label = f"of {model.family}{turn}"
        group.save(meta(path, "hf"))
        since = before if calls else None
        subject.verify_same(f"buffers {label}", group.named_tensors("buffers"), expected, since)
        subject.verify_same(f"buffers in an export {label}", untrained(tensors_of(path)), expected)
        for method in methods_of(subject):
            if method != "disk":  # which is an export
                sent = caught(group, sync_meta(subject, method, number + 1, LARGE_BUCKET)).tensors
                subject.verify_same(f"buffers sent by {method} {label}", untrained(sent), expected)
        verify_forward(subject, group, ("logprobs",), source, data, label)
