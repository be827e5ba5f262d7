"""Functions that a group runs inside its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, TensorKind
from core_rl.backend.steps import PostHook
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed import process_group
from core_rl.distributed.process_group import RankAddress
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineStateError
from core_rl.launch.worker import RankState
from core_rl.registry.spec import EngineSpec

__all__ = [
    "RankInfo",
    "call_alone",
    "call_engine",
    "call_method",
    "destroy",
    "forward",
    "gather_tensors",
    "initialize",
    "open_store",
    "prepare",
]


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Coordinates of a rank in the layout, as its engine reports them."""

    data_parallel_rank: int
    data_parallel_size: int
    is_output_rank: bool


# ------------------------------------------------------ functions of a rank's state


MakeEngine = Callable[[EngineSpec, TrainEngineConfig], TrainEngine]


def prepare(
    state: RankState, make_engine: MakeEngine, spec: EngineSpec, config: TrainEngineConfig, threads: int
) -> None:
    """Construct the next engine, which checks the config; the present one stays."""
    torch.set_num_threads(threads)
    state.next_engine = make_engine(spec, config)


def open_store(state: RankState, host: str) -> int:
    """Open the store where ranks meet, in this process as long as it lives; its port."""
    state.store = process_group.open_store(host)
    port: int = state.store.port
    return port


def initialize(state: RankState, addr: RankAddress, ft_spec: FinetuneSpec | None) -> RankInfo:
    """Initialize the prepared engine, which becomes the present one."""
    engine: TrainEngine = state.next_engine
    engine.initialize(addr, ft_spec)
    state.engine, state.next_engine = engine, None
    return RankInfo(
        data_parallel_rank=engine.data_parallel_rank,
        data_parallel_size=engine.data_parallel_size,
        is_output_rank=engine.is_output_rank,
    )


def destroy(state: RankState) -> None:
    """Destroy and drop the engine, if there is one."""
    engine, state.engine = state.engine, None
    if engine is not None:
        engine.destroy()


def call_alone(fn: Callable[..., Any], _state: RankState, *args: Any) -> Any:
    """``fn(*args)``, which has no use for an engine."""
    return fn(*args)


def call_engine(fn: Callable[..., Any], state: RankState, *args: Any) -> Any:
    """``fn(engine, *args)``; raises `EngineStateError` before `initialize`."""
    if state.engine is None:
        raise EngineStateError("the ranks have no engine; call initialize() first")
    return fn(state.engine, *args)


# ------------------------------------------------------ functions of an engine


def call_method(name: str, args: Sequence[object], engine: TrainEngine, batch: SequenceBatch) -> Any:
    """``engine.name(batch, *args)``."""
    return getattr(engine, name)(batch, *args)


def forward(
    mb_spec: MicroBatchSpec,
    outputs: tuple[OutputName, ...],
    temperature: float,
    post_hook: PostHook | None,
    engine: TrainEngine,
    batch: SequenceBatch,
    output_seqlens: Sequence[int] | None,
) -> ModelOutput | list[Tensor] | None:
    """The engine's ``forward``, or with ``post_hook`` the rows of each sequence; None except on output ranks."""
    keep_rows = None if post_hook is None else list[Tensor]
    result: ModelOutput | list[Tensor]
    result = engine.forward(batch, mb_spec, outputs, temperature, output_seqlens, post_hook, keep_rows)
    return result if engine.is_output_rank else None


def gather_tensors(engine: TrainEngine, kind: TensorKind) -> dict[str, Tensor] | None:
    """All of ``named_tensors`` on the CPU; None on ranks that do not write."""
    gathered = {}
    for name, tensor in engine.named_tensors(kind):
        if engine.is_writer and tensor is not None:
            gathered[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return gathered if engine.is_writer else None
