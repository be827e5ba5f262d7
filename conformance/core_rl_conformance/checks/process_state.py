"""The process of a rank: its global settings stay, its memory does not grow, and offloading frees some of it."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures.process_state import (
    changed_settings,
    grown,
    offloaded_bytes,
    unusual_settings,
)

LOSS = TokenMeanLoss(temperature=0.8)
STEPS, ON_SEVERAL_RANKS = 50, 20
"""Repeated calls; on several ranks, which are slow on few cores, not so many."""
FEWER = 5
"""Number of new tensors that a later step may replace."""


def _few_tokens(subject: EngineUnderTest) -> SequenceBatch:
    """One short sequence for each data-parallel rank: calls are repeated."""
    return subject.data((3,) * subject.layout.dp).all_trained().batch()


@check("contract.global-state", each="layout")
def calls_leave_global_state(subject: EngineUnderTest) -> None:
    """No public call changes global settings of the process: dtype, device, modes, random states, threads, directory.

    Nor does a pass that raises. After ``initialize()``, dtype, device and modes have torch's defaults.

    Why: a default dtype of bfloat16 that a build leaves behind halves the precision of whatever is computed next in the
    process, another engine's included; a seed that a load sets makes all draws around it the same.
    Look at: settings that are changed and not restored in a ``finally``; ``torch.set_default_dtype``,
    ``torch.manual_seed`` and ``set_grad_enabled`` outside of a context.
    """
    group = subject.start()
    for rank, changes in enumerate(group.run(unusual_settings)):
        subject.require(not changes, f"after initialize(), on rank {rank}: {', '.join(changes)}")
    path = str(subject.directory("saved"))
    for rank, changes in enumerate(group.run(changed_settings, path, _few_tokens(subject), LOSS.spec())):
        subject.require(not changes, f"on rank {rank}: {'; '.join(changes)}")


@check("contract.flat-memory", each="layout")
def memory_does_not_grow(subject: EngineUnderTest) -> None:
    """Over 50 training steps, and 50 forward passes, each on other tokens, no live tensors are added on any rank.

    On several ranks, over 20 of each.

    Why: one tensor that is kept in each step, with its graph or without, ends a run after some days.
    Look at: lists of losses or outputs that are not detached, hooks that are registered in each pass, caches by
    batch without a bound.
    """
    group, batch = subject.start(), _few_tokens(subject)
    steps = STEPS if subject.layout.world_size == 1 else ON_SEVERAL_RANKS
    for rank, growths in enumerate(group.run(grown, batch, LOSS.spec(), steps)):
        for growth in growths:
            subject.require(
                growth.tensors <= FEWER and growth.size <= FEWER * batch.input_ids.nbytes,
                f"{steps} calls of {growth.what} left {growth.tensors} more tensors and {growth.size} more bytes on "
                f"rank {rank}",
            )


@check("contract.offloaded-memory", requires=[Capability.OFFLOAD], each="layout")
def offloading_frees_memory(subject: EngineUnderTest) -> None:
    """``offload()`` frees the memory of weights and moments on each rank, and ``onload()`` brings as much back.

    On the CPU too: their storages have no bytes then.

    Why: an engine that only pretends to offload leaves no memory to the server that shares the device.
    Look at: what ``SupportsOffload.memory`` yields for each part, and references that keep a storage alive.
    """
    group = subject.start()
    group.train_batch(_few_tokens(subject), LOSS.spec(), ONE_PASS)
    for rank, (before, left, back) in enumerate(group.run(offloaded_bytes)):
        subject.require(before > 0, f"weights and moments have no memory on rank {rank}")
        subject.require(
            left == 0, f"offload() leaves {left} of the {before} bytes of weights and moments on rank {rank}"
        )
        subject.require(
            back == before,
            f"after onload() weights and moments have {back} bytes on rank {rank}, not {before}",
        )
