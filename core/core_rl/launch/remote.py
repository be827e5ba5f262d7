"""A rank's side of a group: `RankState` and the calls that it answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from core_rl.distributed.channel import Buffer, Channel
from core_rl.distributed.process_group import RankAddress
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineStateError
from core_rl.launch.messages import Failure, pack_reply, unpack_call
from core_rl.registry.spec import EngineSpec

MakeEngine = Callable[[EngineSpec, TrainEngineConfig], TrainEngine]


def answer_calls(channel: Channel) -> None:
    """Answer calls until the driver closes its end of ``channel``."""
    states: dict[int, RankState] = defaultdict(RankState)
    try:
        channel.send(pack_reply(None))
        while True:
            channel.send(answer(channel.receive(), states))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver closed the connection: the end of an orderly life


def answer(parts: Sequence[Buffer], states: Mapping[int, RankState]) -> list[Buffer]:
    """The reply to a call, with the state of the group that makes it."""
    try:
        call, first = unpack_call(parts)
        state = states[call.engine_id]
        receiver = state if hasattr(RankState, call.method) else state.present_engine()
        return pack_reply(getattr(receiver, call.method)(*first, *call.arguments))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the process boundary: the driver raises it
        return pack_reply(Failure.of(error))


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Coordinates of a rank in the layout, as its engine reports them."""

    data_parallel_rank: int
    data_parallel_size: int
    is_output_rank: bool


class RankState:
    """State of a rank between the calls of one group; each colocated group has its own.

    Its methods are calls of the group; all other methods belong to the engine.
    """

    def __init__(self) -> None:
        self._engine: TrainEngine | None = None
        self._next_engine: TrainEngine | None = None
        self._store: object = None
        """The rendezvous store, on the rank that serves it."""

    def present_engine(self) -> TrainEngine:
        """The engine; raises `EngineStateError` before `initialize`."""
        if self._engine is None:
            raise EngineStateError("the ranks have no engine; call initialize() first")
        return self._engine

    # ------------------------------------------------------------ life cycle

    def prepare(
        self, threads: int, make_engine: MakeEngine, spec: EngineSpec, config: TrainEngineConfig
    ) -> None:
        """Construct the next engine, which checks the config; the present one stays."""
        torch.set_num_threads(threads)
        self._next_engine = make_engine(spec, config)

    def open_store(self, host: str) -> int:
        """Open the store where ranks meet, in this process as long as it lives; its port."""
        store = self._store = process_group.open_store(host)
        port: int = store.port
        return port

    def initialize(self, addr: RankAddress, ft_spec: FinetuneSpec | None) -> RankInfo:
        """Initialize the prepared engine, which becomes the present one."""
        engine = self._next_engine
        assert engine is not None
        engine.initialize(addr, ft_spec)
        self._engine, self._next_engine = engine, None
        return RankInfo(
            data_parallel_rank=engine.data_parallel_rank,
            data_parallel_size=engine.data_parallel_size,
            is_output_rank=engine.is_output_rank,
        )

    def destroy(self) -> None:
        """Destroy and drop the engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.destroy()

    # ------------------------------------------------------------- functions

    def run(self, args: tuple[object, ...], fn: Callable[..., Any]) -> Any:
        """``fn(engine, *args)``."""
        return fn(self.present_engine(), *args)

    def run_alone(self, fn: Callable[..., Any], args: tuple[object, ...]) -> Any:
        """``fn(*args)``, which has no use for an engine."""
        return fn(*args)

    def forward(
        self,
        batch: SequenceBatch,
        output_seqlens: Sequence[int] | None,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...],
        temperature: float,
        post_hook: PostHook | None,
    ) -> ModelOutput | list[Tensor] | None:
        """The engine's ``forward``, or with ``post_hook`` the rows of each sequence; None except on output ranks."""
        engine = self.present_engine()
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
