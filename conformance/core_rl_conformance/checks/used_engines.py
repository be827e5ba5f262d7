"""Engines that have computed, moved or failed before, or share processes: later calls see nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from core_rl.backend.meta import CheckpointFormat, WeightUpdateMeta
from core_rl.backend.tensors import TensorDict
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.errors import CoreRLError, EngineStateError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import RaisingLoss, TokenMeanLoss
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.moving import elsewhere
from core_rl_conformance.procedures.outputs import PROBE, verify_outputs
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sync_meta
from core_rl_conformance.procedures.training import Shadow

LOSS = TokenMeanLoss(temperature=0.8)
TWO = MicroBatchSpec(count=2)
LENGTHS, OTHER_LENGTHS = (3, 9, 5, 7), (9, 3, 7, 5)
"""The same numbers of sequences and tokens, cut at other places."""
EQUAL = (6, 6, 6, 6)
"""Sequences of each data-parallel rank, each in a micro-batch of its own."""
COLOCATED_STEPS = (0, 1)
Change = tuple[str, Callable[[], object]]
"""A call that leaves weights and moments as they are, and its name."""


@check("I13.hidden-caches", each="layout")
def batches_of_one_size_are_told_apart(subject: EngineUnderTest) -> None:
    """Outputs and gradients belong to the batch at hand after others of the same size, tokens or boundaries.

    In turn: the same tokens cut elsewhere, other tokens, another temperature, other masks; and the first ones again.
    Training passes too. Of micro-batches of one size, each has its own log-probs.

    Why: masks, positions and hidden states that are cached by the number of tokens, or by the tokens alone, are those
    of the batch before; an output in a buffer for each size is overwritten by the next one.
    Look at: the keys of caches; everything that a value depends on must be in them: ids, ``cu_seqlens``,
    ``loss_mask``, temperature, and the weights. Outputs are tensors of their own.
    """
    model, first = subject.model(), subject.data(LENGTHS)
    elsewhere = first.cut_at(OTHER_LENGTHS)
    turns = {
        "of a first batch": (first, 1.0),
        "of the same tokens, cut elsewhere": (elsewhere, 1.0),
        "of other tokens, cut as the first": (subject.data(LENGTHS, seed=1), 1.0),
        "of the first batch again": (first, 1.0),
        "of the first batch at another temperature": (first, 0.7),
    }
    group = subject.start(model)
    for label, (data, temperature) in turns.items():
        output = group.forward(data.batch(), ONE_PASS, ("logprobs",), temperature)
        expected = subject.outputs(model, data, "logprobs", temperature)
        got = list(output["logprobs"].split(data.lengths))
        subject.verify_tokens(f"log-probs {label}", got, expected, subject.places(data))
    for label, data in (
        ("of the first batch", first),
        ("of the same tokens, cut elsewhere,", elsewhere),
        ("of the first batch with all tokens trained", first.all_trained()),
    ):
        subject.verify_backward(label, group, model, data, LOSS)
    equal = subject.data(EQUAL * subject.layout.dp)
    subject.verify_logprobs("of micro-batches of one size", group, model, equal, MicroBatchSpec(count=4))


@check("I11.load-after-use", each="layout")
def used_engines_load_every_format(subject: EngineUnderTest) -> None:
    """An engine that has answered and trained loads each format, and answers with the loaded weights.

    Weights, and with ``sharded`` and ``portable`` moments and progress, equal the file's. With ``hf`` the
    moments stay. The next step is AdamW's, whose count may fall. The batch that it answered before gives other
    log-probs.

    Why: answers and gathered weights that are kept by the batch outlive the weights (vllm #44371); float32 masters that
    a load of weights leaves behind undo it with the next step (NeMo-RL #2372).
    Look at: ``TrainBackend.after_load``: copies on both sides of the optimizer, caches of outputs, step counts.
    """
    model = subject.model()
    forms: list[CheckpointFormat] = ["hf", *moving.formats(subject)]
    group = moving.start(subject, moving.elsewhere(model))
    moving.train(group, subject, [0, 1])
    for form in forms:
        group.save(moving.meta(subject.directory(form), form))
    saved, progress = moving.state(group), group.progress
    group = moving.start(subject, model)
    batch = subject.data(PROBE).batch()
    exact: Tensor | None = None
    for form in forms:
        _use(subject, group)
        state, own_progress = moving.state(group), group.progress
        group.load(moving.meta(subject.directory(form), form))
        label = f"after {form!r} was loaded"
        if form == "hf":
            half = {name: value.to(subject.dtype).float() for name, value in saved["master"].items()}
            moving.verify_state(subject, label, group, {**state, "master": half}, own_progress)
        else:
            moving.verify_state(subject, label, group, saved, progress)
        if exact is None:
            verify_outputs(subject, group, model, label)
        if form != "hf":
            answer = group.forward(batch, ONE_PASS)["logprobs"]
            same = exact is None or torch.equal(answer, exact)
            subject.require(
                same, f"logprobs {label} are others than after {forms[1]!r}, with the same weights"
            )
            exact = answer
        shadow = Shadow.of(group, moving.OPTIMIZER, moving.SCHEDULE)
        shadow.train(subject, group, [subject.data(seed=2).batch()], LOSS.spec(), TWO)
        shadow.verify(subject, group, f"a step {label}")


def _use(subject: EngineUnderTest, group: EngineGroup) -> None:
    """Answer the batch that `verify_outputs` asks for, before and after a step."""
    batch = subject.data(PROBE).batch()
    group.forward(batch, ONE_PASS)
    moving.train(group, subject, [5])
    group.forward(batch, ONE_PASS)
    group.eval_batch(batch, LOSS.spec(), ONE_PASS)


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
    group.load_named_tensors("master", TensorDict(moving.weights_of(subject, second)))
    subject.verify_logprobs("of weights that were loaded after a pass that raised", group, second, data)


def _raise_in_a_pass(subject: EngineUnderTest, group: EngineGroup) -> None:
    try:
        group.forward_backward(subject.data(seed=1).batch(), RaisingLoss().spec(), TWO)
    except CoreRLError:
        return
    subject.require(False, "an error in the backward pass of a micro-batch was swallowed")


@check("contract.beside", requires={Capability.OFFLOAD}, each="layout")
def engines_in_the_same_processes(subject: EngineUnderTest) -> None:
    """Two engines in the same rank processes, offloaded in turns, compute bitwise the same as alone.

    With dropout, where it is declared; and the first continues after the other was destroyed.
    Why: recipes with ``colocated`` have actor, critic and reference in the same processes. Process-wide state (host
    copies, step counts, random states, process groups) is shared by both engines. Roles then train on each other's
    state without an error.
    Look at: attributes of modules and classes; whether ``TrainBackend.teardown`` ends state of another engine.
    """
    models = [subject.model(dropout=0.1), moving.elsewhere(subject.model(dropout=0.1))]
    reports, states, configs = [], [], []
    for model in models:
        group = moving.start(subject, model)
        configs.append(group.run(attrgetter("config"))[0])
        reports.append(moving.train(group, subject, [*COLOCATED_STEPS, 2]))
        states.append(moving.state(group))
    host = moving.start(subject, models[0])
    with EngineGroup(subject.spec, configs[1], timeout_s=host.timeout_s, colocate_with=host) as guest:
        groups = {"first": host, "second": guest}
        for step in COLOCATED_STEPS:
            for (name, group), expected in zip(groups.items(), reports, strict=True):
                _verify_step(subject, group, step, expected[step], name)
                group.offload()
        _verify_step(subject, guest, 2, reports[1][2], "second")
        guest.onload()
        moving.verify_state(subject, "of the second of two engines in the same processes", guest, states[1])
    _verify_step(subject, host, 2, reports[0][2], "first")
    host.onload()
    moving.verify_state(subject, "of the first engine, which went on after the second", host, states[0])


def _verify_step(
    subject: EngineUnderTest, group: EngineGroup, step: int, expected: dict[str, float], which: str
) -> None:
    (step_metrics,) = moving.train(group, subject, [step])
    label = f"step {step} of the {which} of two engines in the same processes"
    moving.verify_report(subject, label, step_metrics, expected, "alone it reports")


@check("I20.mode-changes", each="layout")
def steps_after_mode_changes_are_adamws(subject: EngineUnderTest) -> None:
    """No pass, move, save or sync changes weights or moments, a load sets all weights, and the next step is AdamW's.

    Some parameters are frozen, where that is declared: a load sets them, and a step does not.

    Why: a load that skips frozen parameters leaves layers of two models; a save or a sync that unfreezes parameters,
    or moves the memory that the optimizer works on, shows only in the step after it (vllm #44371, NeMo-RL #2372).
    Look at: the calls that the message names, and what they leave changed: ``requires_grad``, the memory of weights
    and moments, compute copies.
    """
    model = subject.model()
    frozen = [subject.first_layer] if subject.spec.supports(Capability.FROZEN_PARAMETERS) else []
    group = moving.start(subject, model, frozen=frozen)
    names = group.named_tensors("master").keys() - group.named_tensors("exp_avg").keys()
    _step(subject, group, names, "of the first step")
    for changes in (_passes(subject, group), _saves(subject, group), _syncs(subject, group)):
        if labels := [_unchanged(subject, group, label, change) for label, change in changes]:
            _step(subject, group, names, f"of a step after {', '.join(labels)}")
    source, before = elsewhere(model), moving.state(group)
    moving.load_weights(subject, group, source)
    expected = before | {"master": moving.weights_of(subject, source)}
    label = "after load(format='hf')" + f", with {', '.join(frozen)} frozen" * bool(frozen)
    moving.verify_state(subject, label, group, expected, since=before)
    _step(subject, group, names, "of a step after load(format='hf')")


def _step(subject: EngineUnderTest, group: EngineGroup, frozen: Collection[str], label: str) -> None:
    """One step of the engine and of a float64 AdamW from the same state."""
    shadow = Shadow.of(group, moving.OPTIMIZER, moving.SCHEDULE, frozen)
    group.optimizer_zero_grad()
    group.forward_backward(subject.data(PROBE).batch(), LOSS.spec(), moving.TWO)
    shadow.step(subject, group, label)
    shadow.verify(subject, group, label)


def _unchanged(subject: EngineUnderTest, group: EngineGroup, label: str, change: Callable[[], object]) -> str:
    """Make a change, and require that weights and moments stay; its label."""
    expected = moving.state(group)
    change()
    moving.verify_state(subject, f"after {label}", group, expected)
    return label


def _passes(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    data = subject.data(PROBE).batch()
    yield "forward()", lambda: group.forward(data, ONE_PASS)
    yield "eval_batch()", lambda: group.eval_batch(data, LOSS.spec(), ONE_PASS)
    yield "save(format='hf')", partial(group.save, moving.meta(subject.directory("hf"), "hf"))
    if subject.spec.supports(Capability.OFFLOAD):
        yield "offload() and onload()", lambda: moving.offload_and_onload(subject, group)


def _saves(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    for name in moving.formats(subject):
        meta = moving.meta(subject.directory(name), name)
        yield f"save(format={name!r})", partial(group.save, meta)
        for turn in ("", " the second time"):
            yield f"load(format={name!r}){turn}", partial(group.load, meta)


def _syncs(subject: EngineUnderTest, group: EngineGroup) -> Iterator[Change]:
    if subject.spec.supports(Capability.SYNC_DISK):
        update = WeightUpdateMeta(version=1, path=str(subject.directory("sync")))
        yield "a sync by disk", partial(group.upload_weights, update)
    if subject.spec.supports(Capability.SYNC_TENSOR):
        yield "a sync by tensor", partial(caught, group, sync_meta(subject, "tensor", 1, LARGE_BUCKET))
