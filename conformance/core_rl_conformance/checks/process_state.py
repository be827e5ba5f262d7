"""The process of a rank: its global settings stay, its memory does not grow, and offloading frees some of it."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.engine.train import TrainEngine
from core_rl.errors import CoreRLError
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import RaisingLoss, TokenMeanLoss

USUAL = {
    "torch.get_default_dtype()": torch.float32,
    "torch.get_default_device()": torch.device("cpu"),
    "torch.is_grad_enabled()": True,
    "torch.is_inference_mode_enabled()": False,
    "torch.is_autocast_enabled('cpu')": False,
    "torch.is_autocast_enabled('cuda')": False,
    "torch.is_anomaly_enabled()": False,
    "torch.get_float32_matmul_precision()": "highest",
    "torch.backends.cuda.matmul.fp32_precision": "none",
    "torch.set_flush_denormal()": False,
}
"""Settings that torch begins with."""
SHORT = 40
"""Characters of a value that a message shows; longer values differ in a part of them."""
DENORMAL = 2.0**-140
"""A float32 that a processor may take for 0."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
WARM_UP = 3
"""Steps, and passes, after which caches are filled and moments exist."""
IDS = 128
"""Every tiny model has more ids of tokens."""
LOSS = TokenMeanLoss(temperature=0.8)
STEPS, ON_SEVERAL_RANKS = 50, 20
"""Repeated calls; on several ranks, which are slow on few cores, not so many."""
FEWER = 5
"""Number of new tensors that a later step may replace."""


def _settings() -> dict[str, object]:
    """Global settings of this process that a program around the engine relies on, by what Python calls them."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": _matmul_precision(),
        "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled(),
        "torch.backends.cuda.matmul.fp32_precision": _precision(torch.backends.cuda.matmul),
        "torch.backends.mkldnn.matmul.fp32_precision": _precision(
            getattr(torch.backends.mkldnn, "matmul", None)
        ),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.set_flush_denormal()": not bool(torch.tensor([DENORMAL]).mul(2).any()),
        "gc.isenabled()": gc.isenabled(),
    }


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision of one backend alone was set
        return "different in each backend"


def _precision(products: object) -> object:
    """The precision of float32 matrix products of one backend, where this version of torch has the setting."""
    return getattr(products, "fp32_precision", "none")


def _state() -> dict[str, object]:
    """The settings, and states that differ from process to process."""
    root = logging.getLogger()
    return {
        **_settings(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "the working directory": Path.cwd(),
        "sys.path": list(sys.path),
        "os.environ": dict(os.environ),
        "locale.setlocale(LC_ALL)": locale.setlocale(locale.LC_ALL),
        "warnings.filters": list(map(str, warnings.filters)),
        "numpy.geterr()": np.geterr(),
        "the root logger": f"level {root.level}, handlers {root.handlers}",
        "the handlers of signals": [str(signal.getsignal(number)) for number in SIGNALS],
        **_random_states(),
    }


def _random_states() -> dict[str, object]:
    twister = np.random.get_state(legacy=False)["state"]
    return {
        "torch.get_rng_state()": torch.get_rng_state().numpy().tobytes(),
        "random.getstate()": random.getstate(),
        "numpy.random.get_state()": (twister["key"].tobytes(), twister["pos"]),
    }


def unusual_settings(_engine: TrainEngine) -> list[str]:
    """Settings of this rank that torch does not begin with, and their values."""
    before = _settings()
    return [f"{name} is {before[name]}" for name, usual in USUAL.items() if before[name] != usual]


def state_and_draws(_engine: TrainEngine) -> dict[str, object]:
    """The state of this rank's process. After it, each global generator is asked for a number."""
    state = _state()
    random.random()
    np.random.random()
    torch.rand(1)
    return state


def initialized_settings(_engine: TrainEngine, before: dict[str, object]) -> list[str]:
    """Changes by an ``initialize()`` since ``before``, which an earlier one left, as `state_and_draws` noted it."""
    draws = _random_states()
    seeds = [f"seeds {label}" for label, value in draws.items() if value == before[label]]
    return [*seeds, *_differences(before, {**_state(), **{label: before[label] for label in draws}})]


def changed_settings(engine: TrainEngine, path: str, batch: SequenceBatch, loss: LossSpec) -> list[str]:
    """Settings of the process that a public call changed, and their new values; ``path`` is for a save. Collective."""
    changed = []
    for name, call in public_calls(engine, path, engine.shard_data(batch), loss):
        before = _state()
        call()
        changed += [f"{name} {difference}" for difference in _differences(before, _state())]
    return changed


def _differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The settings that differ, each with its value where that is short; a state of random numbers is not."""
    changed = {label: str(value) for label, value in after.items() if value != before[label]}
    return [
        f"left {label} another one" if len(value) > SHORT else f"left {label} = {value}"
        for label, value in changed.items()
    ]


def public_calls(
    engine: TrainEngine, path: str, batch: SequenceBatch, loss: LossSpec
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of ``engine`` with one batch object, by name; ``path`` is for a save. Collective."""
    saved = SaveLoadMeta(path=path, format="hf")
    yield "forward()", lambda: engine.forward(batch, ONE_PASS)
    yield "eval_batch()", lambda: engine.eval_batch(batch, loss, ONE_PASS)
    yield "train_batch()", lambda: engine.train_batch(batch, loss, ONE_PASS)
    yield "forward_backward()", lambda: engine.forward_backward(batch, loss, ONE_PASS)
    yield "optimizer_step()", engine.optimizer_step
    yield "lr_scheduler_step()", engine.lr_scheduler_step
    yield "optimizer_zero_grad()", engine.optimizer_zero_grad
    yield "train_mode()", partial(_enter, engine.train_mode())
    yield "eval_mode()", partial(_enter, engine.eval_mode())
    yield "named_tensors()", lambda: list(engine.named_tensors("params"))
    yield "save()", lambda: engine.save(saved)
    yield "load()", lambda: engine.load(saved)
    yield "set_version()", lambda: engine.set_version(1)
    if engine.spec.supports(Capability.OFFLOAD):
        yield "offload()", engine.offload
        yield "onload()", engine.onload
    if engine.config.layout.pp == 1:  # elsewhere one stage raises, and the others wait for its gradients
        # The last call, since an engine of several ranks has failed then.
        yield "forward_backward() that raised", partial(_raise_in_a_pass, engine, batch)


def _raise_in_a_pass(engine: TrainEngine, batch: SequenceBatch) -> None:
    with suppress(CoreRLError, RuntimeError):
        engine.forward_backward(batch, RaisingLoss().spec(), ONE_PASS)


def _enter(mode: AbstractContextManager[None]) -> None:
    with mode:
        pass


def grown(
    engine: TrainEngine, batch: SequenceBatch, loss: LossSpec, count: int
) -> dict[str, tuple[int, int]]:
    """Tensors of this rank that came in ``count`` training steps or forward passes, and stayed; and their bytes.

    After some of both, which fill caches. Collective. On CUDA, bytes are of the allocated memory.
    """
    batches = _endless(engine.shard_data(batch))
    calls: dict[str, Callable[[], object]] = {
        "train_batch()": lambda: engine.train_batch(next(batches), loss, ONE_PASS),
        "forward()": lambda: engine.forward(next(batches), ONE_PASS),
    }
    growths = {}
    with ExitStack() as stack:
        gc.freeze()  # leaves the many objects of imported modules out of each look at what lives
        stack.callback(gc.unfreeze)
        for call in calls.values():
            for _ in range(WARM_UP):
                call()
        for name, call in calls.items():
            call()  # may leave something until the next call, unlike the previous call
            live = [_live(engine.device)]
            for _ in range(2):
                for _ in range(count // 2):
                    call()
                live.append(_live(engine.device))
            # Growth is seen in each half. A message under way to another rank lives at one look alone.
            tensors, size = (2 * min(c - b, b - a) for a, b, c in zip(*live, strict=True))
            growths[name] = (tensors, size)
    return growths


def _endless(batch: SequenceBatch) -> Iterator[SequenceBatch]:
    """Batches of the size of ``batch``, each of other tokens: something may be kept for each different one."""
    for number in count():
        yield replace(batch, input_ids=(batch.input_ids + number) % IDS)


def _live(device: torch.device) -> tuple[int, int]:
    """The number of live tensors, and the bytes of their storages."""
    gc.collect()
    tensors = _live_tensors()
    if device.type == "cuda":
        return len(tensors), torch.cuda.memory_allocated(device)
    return len(tensors), sum(_live_storages(tensors).values())


def _live_tensors() -> list[Tensor]:
    return [tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, torch.nn.Parameter)]


def _live_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the storages behind ``tensors`` of floats; a host copy as plain bytes is none."""
    floats = [tensor.untyped_storage() for tensor in tensors if tensor.is_floating_point()]
    return {storage.data_ptr(): storage.nbytes() for storage in floats if storage.nbytes()}


def offloaded_bytes(engine: TrainEngine) -> tuple[int, int, int]:
    """Bytes of the memory of weights and moments: on the device, after ``offload()``, and after ``onload()``.

    After ``offload()``, the remaining bytes: a copy elsewhere does not count.
    """
    before = _memory(engine)
    engine.offload()
    left = sum(before[place] for place in before.keys() & _live_storages(_live_tensors()))
    engine.onload()
    return sum(before.values()), left, sum(_memory(engine).values())


def _memory(engine: TrainEngine) -> dict[int, int]:
    """The address and bytes of each storage of this rank's weights and moments. No collective."""
    state = engine.backend.state()
    return _live_storages(
        part.tensor for kind in ("master", *state.optimizer_kinds) for part in state.local(kind)
    )


def _few_tokens(subject: EngineUnderTest) -> SequenceBatch:
    """One short sequence for each data-parallel rank: calls are repeated."""
    return subject.data((3,) * subject.layout.dp).all_trained().batch()


@check("contract.global-state", each="layout")
def calls_leave_global_state(subject: EngineUnderTest) -> None:
    """No public call changes global settings of the process: dtype, device, modes, random states, threads, directory.

    Nor does a pass that raises. After ``initialize()``, dtype, device, modes, and the precision of matrix products have
    torch's defaults; another ``initialize()`` in the same process changes no setting and seeds no global generator.

    Why: a default dtype of bfloat16 that a build leaves behind halves the precision of whatever is computed next in the
    process, another engine's included; a seed that a load sets makes all draws around it the same.
    Look at: settings that are changed and not restored in a ``finally``; ``torch.set_default_dtype``,
    ``torch.manual_seed`` and ``set_grad_enabled`` outside of a context.
    """
    group = subject.start()
    for rank, changes in enumerate(group.run(unusual_settings)):
        subject.require(not changes, f"after initialize(), on rank {rank}: {', '.join(changes)}")
    states = group.run(state_and_draws)
    group = subject.start()
    for rank, changes in enumerate(group.run_each(initialized_settings, [(state,) for state in states])):
        subject.require(not changes, f"on rank {rank}: initialize() {', '.join(changes)}")
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
        for name, (tensors, size) in growths.items():
            subject.require(
                tensors <= FEWER and size <= FEWER * batch.input_ids.nbytes,
                f"{steps} calls of {name} left {tensors} more tensors and {size} more bytes on rank {rank}",
            )


@check("contract.offloaded-memory", requires={Capability.OFFLOAD}, each="layout")
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
