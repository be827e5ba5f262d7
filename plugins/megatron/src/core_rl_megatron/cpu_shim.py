"""Megatron-Core on machines without CUDA: every replacement, with its upstream site.

Megatron-Core names CUDA in places where it means "the device of this rank". Without CUDA, its
modules see a `torch` that means the CPU there; all other code, and all of Megatron on a machine with
CUDA, is left alone. Each entry names its site, and can go when that site asks the tensors, or a
setting, for the device.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from core_rl.errors import ConfigError

CPU = torch.device("cpu")
SITES = (
    "distributed.param_and_grad_buffer",  # torch.cuda.current_device() for the buffers
    "optimizer.distrib_optimizer",  # torch.cuda.current_device()
    "optimizer.optimizer",  # device="cuda" of the loss scale
    "pipeline_parallel.p2p_communication",  # torch.cuda.current_device(), torch.cuda.synchronize()
    "pipeline_parallel.schedules",  # device="cuda" of the number of tokens
    "tensor_parallel.layers",  # torch.cuda.current_device()
    "tensor_parallel.mappings",  # torch.cuda.current_device()
    "tensor_parallel.random",  # torch.cuda.get_rng_state(), torch.cuda.manual_seed()
    "tensor_parallel.utils",  # torch.cuda.current_device()
    "utils",  # torch.cuda.current_device() of the global memory buffer
    "transformer.moe.router",  # torch.cuda.current_device()
    "transformer.moe.token_dispatcher",  # torch.cuda.current_device(), torch.cuda.Event and streams
)
"""Modules of megatron.core whose global name `torch` is replaced."""
FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
"""Functions of torch that these modules call with a device."""


def install(device: torch.device) -> None:
    """Let Megatron's modules take the CPU for the device; on a machine with CUDA nothing is changed.

    Raises `ConfigError` for the CPU of a machine with CUDA.
    """
    if torch.cuda.is_available():
        if device.type == "cpu":
            raise ConfigError(
                "device = 'cpu', and torch sees CUDA, where Megatron-Core puts its buffers; set device to 'cuda' or "
                "'auto', or hide the GPUs from the process: CUDA_VISIBLE_DEVICES=''"
            )
        return
    for name in SITES:
        use_cpu(importlib.import_module(f"megatron.core.{name}"))
    # It asks CUDA for its generators; `fork` warns where the CPU's state moves, which is what moves here.
    random = cast("Any", importlib.import_module("megatron.core.tensor_parallel.random"))
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(_is_no_move_of_the_cpu_state)
    _replace_splits()
    # Undo `jit_fuser` (fused_bias_swiglu.py), whose first call takes 12 s of a C++ compiler on the CPU.
    fusions = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    for name, function in list(vars(fusions).items()):
        fusions.__dict__[name] = getattr(function, "_torchdynamo_orig_callable", function)
    # It would advise an environment variable of CUDA, once on each rank.
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def use_cpu(module: ModuleType) -> None:
    """Let the global name `torch` of ``module`` mean the CPU where it names CUDA; called again it does nothing."""
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = _torch_on_cpu()


def building() -> AbstractContextManager[object]:
    """A context for the construction of model and optimizer, where CUDA is named in methods of tensors."""
    return nullcontext() if torch.cuda.is_available() else _CPUForCUDA()


class _Changed(ModuleType):
    """A module with other values for some of its names."""

    def __init__(self, module: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _torch_on_cpu() -> ModuleType:
    """The module `torch`, but for factories with ``device="cuda"`` and for what means "this rank's device"."""
    cuda = {
        "current_device": lambda: CPU,
        "synchronize": torch.cpu.synchronize,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "Stream": _Stream,
        "current_stream": torch.cpu.current_stream,
        "stream": torch.cpu.stream,
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _Changed(torch, {"cuda": _Changed(torch.cuda, cuda), **factories})


class _Stream(torch.cpu.Stream):
    """A stream of the CPU with an event to wait for, which torch's own lacks."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return made


class _CPUForCUDA(TorchFunctionMode):
    """``tensor.cuda()`` is the tensor (language_module.py, tied weights over stages), and ``tensor.type()`` says
    what optimizer.py and distrib_optimizer.py compare it with: the name of a type on CUDA.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_no_move_of_the_cpu_state(record: logging.LogRecord) -> bool:
    """A function of the module: a logger takes it once, however many engines are built."""
    return "CPU RNG state changed" not in record.getMessage()


def _replace_splits() -> None:
    """Numbers of tokens for the exchange between experts are numpy arrays (moe_utils.py:
    ``maybe_move_tensor_to_cpu``), which only tensors on CUDA become; torch.distributed takes no tensors there.
    """
    dispatcher = cast("Any", importlib.import_module("megatron.core.transformer.moe.token_dispatcher"))

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_cpu


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Without CUDA, `megatron.core.jit.jit_fuser` decorates nothing.

    It is ``torch.compile``, whose first call imports inductor: 1.4 s of each rank. No function that it compiles runs on
    the CPU (`cpu_shim`).
    """
    if torch.cuda.is_available():
        yield
        return
    compiled = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compiled


def _as_it_is(model: Callable[..., Any] | None = None, **_: object) -> Any:
    """``torch.compile`` as a decorator, with arguments or without, that changes nothing."""
    return _as_it_is if model is None else model


with warnings.catch_warnings(), _not_compiled():
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    for category in (DeprecationWarning, SyntaxWarning):  # of its own modules, from 0.17 on
        warnings.filterwarnings("ignore", category=category)
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
