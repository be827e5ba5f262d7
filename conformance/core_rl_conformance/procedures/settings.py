"""Global settings of a rank's process, around public calls of an engine."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl.data.batch import SequenceBatch
from core_rl.engine.train import TrainEngine
from core_rl.errors import CoreRLError
from core_rl_conformance.engine_under_test import ONE_PASS
from core_rl_conformance.inputs.losses import RaisingLoss

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
    for name, call in _calls(engine, path, engine.shard_data(batch), loss):
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


def _calls(
    engine: TrainEngine, path: str, batch: SequenceBatch, loss: LossSpec
) -> Iterator[tuple[str, Callable[[], object]]]:
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
