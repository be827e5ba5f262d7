"""An engine without a model, and functions that ranks import: for the tests of `EngineGroup`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import FinetuneSpec, TensorKind
from core_rl.backend.metrics import Metric
from core_rl.backend.steps import AggregateFn, PostHook
from core_rl.backend.tensors import NamedTensors
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed.process_group import RankAddress
from core_rl.engine.guards import check_config
from core_rl.engine.train import TrainEngine
from core_rl.errors import BatchError, ConfigError
from core_rl.launch.group import EngineGroup
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class EchoEngine:
    """The methods of an engine that `EngineGroup` calls, to show the arguments of each rank."""

    def __init__(self, spec: EngineSpec, config: TrainEngineConfig) -> None:
        check_config(spec, config)
        self.config = config

    def initialize(self, addr: RankAddress, ft_spec: FinetuneSpec | None = None) -> None:
        assert addr.store is not None
        if self.config.seed == FAILING_SEED:
            raise RuntimeError("no memory for the model")
        self.addr, self.ft_spec = addr, ft_spec
        self.calls: list[str] = []

    def destroy(self) -> None:
        pass

    @property
    def data_parallel_rank(self) -> int:
        return self.addr.rank // self.config.layout.tp

    @property
    def data_parallel_size(self) -> int:
        return self.config.layout.dp

    @property
    def is_output_rank(self) -> bool:
        # The last tensor-parallel rank, so that taking rank 0's result would be wrong.
        return self.addr.rank % self.config.layout.tp == self.config.layout.tp - 1

    @property
    def is_writer(self) -> bool:
        return self.is_output_rank and self.data_parallel_rank == 0

    def train_batch(self, batch: SequenceBatch, loss: LossSpec, mb_spec: MicroBatchSpec) -> dict[str, float]:
        return {"tokens": batch.num_tokens, "rank": self.addr.rank}

    def forward(
        self,
        batch: SequenceBatch,
        mb_spec: MicroBatchSpec,
        outputs: tuple[OutputName, ...] = ("logprobs",),
        temperature: float = 1.0,
        output_seqlens: Sequence[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
    ) -> Any:
        self.fields = sorted([*batch.tokens, *batch.sequences, *batch.meta])
        if (batch.input_ids >= 1000).any():
            raise BatchError("token id 1000 is outside the vocabulary")
        output = ModelOutput(logprobs=batch.input_ids * temperature)
        if post_hook is None or not batch.num_sequences:
            return output
        assert aggregate_fn is not None
        rows = post_hook(output, batch).split(output_seqlens or batch.lengths)
        return aggregate_fn(list(rows))

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name in ("a", "b"):
            yield name, (torch.full((2,), float(self.addr.rank)) if self.is_output_rank else None)

    def onload(self) -> None:
        self.calls.append("onload")


def echo_engine(engine: object) -> EchoEngine:
    assert isinstance(engine, EchoEngine)
    return engine


def make_engine(spec: EngineSpec, config: TrainEngineConfig) -> TrainEngine:
    return cast("TrainEngine", EchoEngine(spec, config))


def make_after_import(spec: EngineSpec, config: TrainEngineConfig) -> TrainEngine:
    import slow_import  # noqa: F401

    if config.seed == FAILING_SEED:
        raise ConfigError("this seed is refused")
    return make_engine(spec, config)


def echo_group(*args: Any, **settings: Any) -> EngineGroup:
    """An `EngineGroup` whose ranks hold an `EchoEngine`."""
    return EngineGroup(*args, make_engine=make_engine, **settings)


SPEC = EngineSpec(
    name="echo",
    kind="train",
    protocol=PROTOCOL_VERSION,
    factory="group_support:EchoEngine",
    config="core_rl.config.engine:TrainEngineConfig",
    capabilities=frozenset({Capability.DATA_PARALLEL, Capability.TENSOR_PARALLEL, Capability.BFLOAT16}),
)
FAILING_SEED = 666


def config(seed: int = 0, **degrees: int) -> TrainEngineConfig:
    return TrainEngineConfig(
        model=ModelConfig(config={"model_type": "none"}), layout=ParallelLayout(**degrees), seed=seed
    )


# ------------------------------------------------------------------ functions for `run`


def rank_of(engine: TrainEngine) -> int:
    return echo_engine(engine).addr.rank


def whoami(engine: TrainEngine, *args: *Ts) -> tuple[int, *Ts]:
    return (rank_of(engine), *args)


def surroundings(rank: TrainEngine) -> dict[str, object]:
    engine = echo_engine(rank)
    return {
        "cwd": str(Path.cwd()),
        "variable": os.environ.get("CORE_RL_TEST"),
        "path": sys.path,
        "threads": torch.get_num_threads(),
        "ft_spec": engine.ft_spec,
        "world": (engine.addr.world_size, engine.addr.local_rank, engine.addr.timeout_s),
        "preloaded": "transformers.modeling_utils" in sys.modules,
        "sigint": signal.getsignal(signal.SIGINT),
    }


def fields(engine: TrainEngine) -> list[str]:
    """Fields of the batch of the last forward pass."""
    return echo_engine(engine).fields


def calls(engine: TrainEngine) -> list[str]:
    return echo_engine(engine).calls


def model_path(engine: TrainEngine) -> str | None:
    return engine.config.model.path


def say(engine: TrainEngine) -> None:
    sys.stdout.write(f"out of rank {rank_of(engine)}\n")
    sys.stderr.write(f"err of rank {rank_of(engine)}\n")


def echo(engine: TrainEngine, value: T) -> T:
    return value


def unpicklable(engine: TrainEngine) -> object:
    return threading.Lock()


def fail_beside_import(engine: TrainEngine) -> None:
    if rank_of(engine) == 0:
        raise BatchError("bad shard")
    import slow_import  # noqa: F401


class Poison:
    """Pickles, and cannot be restored in the driver."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["home"] != os.getpid():
            raise ValueError("restored away from home")


def poison(engine: TrainEngine) -> Poison:
    return Poison()


class OddError(Exception):
    """Pickles, and cannot be restored anywhere: it wants two arguments and passes on one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail(engine: TrainEngine, ranks: tuple[int, ...], error: BaseException) -> str:
    if rank_of(engine) in ranks:
        raise error
    return "fine"


def fail_oddly(engine: TrainEngine) -> None:
    raise OddError("od", "dity")


def fail_beside_hang(engine: TrainEngine, error: BaseException) -> None:
    """Rank 1 fails, and the others wait for it as in a collective."""
    if rank_of(engine) == 1:
        raise error
    time.sleep(300)


def fail_beside_death(engine: TrainEngine) -> None:
    """Rank 1 dies, and rank 0 notices before the driver does, as gloo would."""
    if rank_of(engine) == 1:
        time.sleep(0.2)
        os._exit(9)
    raise ConnectionError("peer is gone")


def hang(engine: TrainEngine, ranks: tuple[int, ...] = (0, 1)) -> None:
    if rank_of(engine) in ranks:
        time.sleep(300)


def parent_pid(engine: TrainEngine) -> int:
    return os.getppid()


def arrive_and_wait(engine: TrainEngine, folder: str) -> None:
    """Show in ``folder`` that the call runs, and return when `let_go` is called."""
    Path(folder, f"rank{rank_of(engine)}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)


def die(engine: TrainEngine, how: str) -> None:
    if rank_of(engine) != 1:
        time.sleep(300)
    if how == "_exit":
        os._exit(3)
    if how == "exit":
        sys.exit(4)
    if how == "with children":
        subprocess.Popen(["/bin/sleep", "300"], close_fds=False)
        os._exit(5)
    if how == "SIGHUP":  # which is ignored under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(300)


def start_child(engine: TrainEngine) -> int:
    return subprocess.Popen(["/bin/sleep", "300"], close_fds=False).pid


def multiply(left: int, right: int, into: SimpleQueue[int]) -> None:
    into.put(left * right)


def child_process(engine: TrainEngine) -> int:
    """Engines start processes of their own: Megatron's checkpoint writers do."""

    context = multiprocessing.get_context("fork")
    queue: SimpleQueue[int] = context.SimpleQueue()
    child = context.Process(target=multiply, args=(6, 7, queue))
    child.start()
    child.join()
    return queue.get()


def hold_interpreter_lock(engine: TrainEngine) -> None:
    """A regular expression of exponential time: no other thread of the process runs meanwhile."""
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


def stop_self(engine: TrainEngine) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def join_gloo(engine: TrainEngine) -> None:
    import torch.distributed as dist

    addr = echo_engine(engine).addr
    assert addr.store is not None
    server = TCPStore(addr.store.host, addr.store.port, None, False, wait_for_workers=False)
    store = PrefixStore(addr.store.name, server)
    dist.init_process_group("gloo", store=store, rank=addr.rank, world_size=addr.world_size)


def gloo_sum(engine: TrainEngine, broken_rank: int = -1) -> float:
    import torch.distributed as dist

    join_gloo(engine)
    if rank_of(engine) == broken_rank:
        raise BatchError("rank left the collective")
    total = torch.tensor([float(rank_of(engine) + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def gloo_wait(engine: TrainEngine) -> None:
    """Rank 0 waits for ever in a collective that rank 1 does not join."""
    import torch.distributed as dist

    join_gloo(engine)
    if rank_of(engine) == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(300)


# ------------------------------------------------------------------ losses, hooks and processes


def unused_loss(output: ModelOutput, batch: SequenceBatch) -> tuple[Tensor, Mapping[str, Metric]]:
    raise AssertionError("the engine of these tests computes no loss")


def double_tokens(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    return output["logprobs"] * 2


def last_two(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    """The last token of each sequence, twice if the sequence is long."""
    bounds = batch.cu_seqlens.tolist()
    rows = [
        output["logprobs"][end - min(2, end - start) : end]
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat(rows)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def survivors(pids: list[int], within_s: float = 60.0) -> list[int]:
    """The processes that are still there after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def eventually(condition: Callable[[], bool]) -> None:
    """Fail unless ``condition`` comes true within a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.005)


def await_arrival(folder: Path, ranks: int = 2) -> None:
    """Wait until all ranks are inside `arrive_and_wait`."""
    eventually(lambda: len(list(folder.glob("rank*"))) == ranks)


def let_go(folder: Path) -> None:
    """End `arrive_and_wait` on all ranks."""
    (folder / "go").touch()
