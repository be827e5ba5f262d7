"""`TensorStore`: norm, export, load, digest and snapshots over the sharded state of a backend."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from core_rl.backend.protocols import LowRank, SupportsLora, SupportsOwnExport, SupportsOwnGradNorm
from core_rl.backend.tensors import LocalSlice, NamedTensors, TensorDict, TensorSource
from core_rl.backend.train_backend import AnyTrainBackend
from core_rl.distributed.agreement import on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import WeightsError, raise_all
from core_rl.state.gather import Gather
from core_rl.state.slices import Placements, Shard, gather_placements, writers

WEIGHTS = ("params", "master")
CHUNK = 2**20
"""Elements upcast at once: the float64 copy of a shard stays at 8 MiB."""


class TensorStore:
    """Named tensors of one backend over all ranks of ``world``.

    ``writer`` is the rank that receives full tensors. ``half`` is true for the compute dtype bfloat16. With ``lora``,
    exported ``params`` are the base weights with the adapter merged into them.
    """

    def __init__(
        self, backend: AnyTrainBackend, world: Comm, writer: int, *, half: bool = False, lora: bool = False
    ) -> None:
        self._backend = backend
        self.world = world
        """All ranks of the engine."""
        self._writer = writer
        self._half = half
        self._placements: dict[str, Placements] = {}
        self._products: Mapping[str, LowRank] = {}
        if lora and isinstance(backend, SupportsLora):
            self._products = backend.low_rank()

    # -------------------------------------------------------------- structure

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of ``kind``. No collective."""
        if kind == "carried":
            return {name: self.carried.shape(name) for name in self.carried.names()}
        return dict(self._backend.state().shapes(kind))

    @property
    def carried(self) -> TensorSource:
        """Tensors of the checkpoint in ``model.path`` that the module does not hold."""
        return self._backend.state().carried or TensorDict({})

    def check(self) -> None:
        """Raise one `EngineContractError` on all ranks for slices that overlap or leave gaps; collective."""
        kinds = ("params", "master", *self.optimizer_kinds, "buffers")
        for kind in (*kinds, "adapter") if self._products else kinds:
            self._placed(kind)

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """The kinds of the optimizer's moments."""
        return self._backend.state().optimizer_kinds

    def weight_kinds(self, kind: str) -> tuple[str, ...]:
        """``kind``, and the buffers where the model has some that a checkpoint holds."""
        return (kind, "buffers") if self.shapes("buffers") else (kind,)

    def export_kinds(self, kind: str) -> tuple[str, ...]:
        """All tensors of an exported model: the carried ones where there are some, and `weight_kinds`.

        Carried tensors come first, since a load compares them before it changes anything.
        """
        kinds = self.weight_kinds(kind)
        return ("carried", *kinds) if self.shapes("carried") else kinds

    def _placed(self, kind: str) -> Placements:
        if kind not in self._placements:
            self._placements[kind] = gather_placements(self._backend.state(), kind, self.world)
        return self._placements[kind]

    # ----------------------------------------------------------------- export

    def stream(self, kind: str) -> NamedTensors:
        """Stream full tensors of ``kind`` in export dtype: on the writer, and None on all other ranks. Collective."""
        if kind == "carried":
            yield from self._carried()
            return
        self._backend.synchronize()
        if isinstance(self._backend, SupportsOwnExport):
            for name, value in self._backend.export_tensors(kind):
                yield name, value if self.world.rank == self._writer else None
            return
        placed, slices, convert = self._exported(kind)
        gather = Gather(
            world=self.world, writer=self._writer, convert=convert, dtype_of=partial(self._dtype, kind)
        )
        yield from gather.stream(placed, slices)

    def _carried(self) -> NamedTensors:
        """The carried tensors as they are in their files, read one by one. No collective."""
        for name in self.carried.names():
            yield name, self.carried.read(name) if self.world.rank == self._writer else None

    def _exported(self, kind: str) -> tuple[Placements, Iterable[LocalSlice], Callable[[LocalSlice], Tensor]]:
        """Placements and slices to export, and the conversion of a slice to its exported values."""
        state = self._backend.state()
        if kind != "params" or not self._products:

            def cast(part: LocalSlice) -> Tensor:
                return part.tensor.detach().to(self._dtype(kind, part.name, part.tensor.dtype))

            return self._placed(kind), state.local(kind), cast
        factors = self._factors()

        def merge(part: LocalSlice) -> Tensor:
            weight, product = part.tensor.detach().float(), self._products.get(part.name)
            if product is not None:
                weight = product.added_to(weight, factors[product.a], factors[product.b], part.region)
            return weight.to(self._dtype(kind, part.name, weight.dtype))

        base = self._restricted(self.shapes("params"))
        return base, (part for part in state.local("master") if part.name in base.shapes), merge

    def _restricted(self, names: Iterable[str]) -> Placements:
        placed = self._placed("master")
        selected = list(names)
        return Placements(
            {n: placed.shapes[n] for n in selected}, {n: placed.boxes[n] for n in selected}, placed.copies
        )

    def _factors(self) -> dict[str, Tensor]:
        """Full factors of every product, on all ranks; collective."""
        names = [name for product in self._products.values() for name in (product.a, product.b)]
        placed = self._restricted(names)
        local_slices = (part for part in self._backend.state().local("master") if part.name in placed.shapes)
        gather = Gather(world=self.world, writer=self._writer, on_all_ranks=True)
        stream = gather.stream(placed, local_slices)
        return {name: full.detach().float().clone() for name, full in stream if full is not None}

    def _dtype(self, kind: str, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor is exported."""
        if kind == "buffers":
            return dtype
        half = kind == "params" and self._half and not is_float32_head(name)
        return torch.bfloat16 if half else torch.float32

    # ------------------------------------------------------------------- load

    @torch.no_grad()
    def load(self, kind: str, source: TensorSource) -> None:
        """Set the tensors of ``kind`` from ``source``, whose names and shapes are checked already; collective.

        ``params`` and ``master`` both set the master weights, and then the compute copies. ``carried`` sets nothing:
        `WeightsError` where its tensors are others than this model's.
        """
        if kind == "carried":
            on_all(self.world, lambda: self._require_carried(source), "cannot load 'carried'", WeightsError)
            return
        self._backend.synchronize()
        if isinstance(self._backend, SupportsOwnExport):
            self._backend.import_tensors(kind, source)
            return
        target, names = "master" if kind in WEIGHTS else kind, self.shapes(kind)

        def read() -> None:
            for part in self._backend.state().local(target):
                if part.name in names:
                    part.tensor.copy_(source.read(part.name, part.region))

        on_all(self.world, read, f"cannot load {kind!r}", WeightsError)
        self._backend.after_load(frozenset({target}))

    def _require_carried(self, source: TensorSource) -> None:
        """Compare on the writer, one tensor at a time."""
        carried = self._carried() if self.world.rank == self._writer else ()
        differing = [
            name for name, value in carried if value is None or not torch.equal(value, source.read(name))
        ]
        problems = [
            f"{name!r} differs from this model's, and is not trained; set model.path to the other checkpoint to get "
            "its tensors"
            for name in differing
        ]
        raise_all(WeightsError, "tensors that the module does not hold", problems)

    # ------------------------------------------------------- over local slices

    def grad_norm(self) -> float:
        """The 2-norm of all reduced gradients; collective."""
        if isinstance(self._backend, SupportsOwnGradNorm):
            return self._backend.grad_norm()
        self._placed("grads")  # once: gradients that tile wrongly give a wrong norm
        return global_grad_norm(self._backend.state().local("grads"), self.world)

    def base_digest(self) -> str:
        """A digest of the weights without the adapter, the same at every layout and on all ranks; collective.

        A value or reward head belongs to the adapter: it is trained and saved with it.
        """
        names = {name for name in self.shapes("params") if not is_float32_head(name)}
        slices = self._backend.state().local("master")
        parts = ((p.name, p.tensor) for p in slices if p.replica == 0 and p.name in names)
        return digest_of_parts(self.world, parts)

    def shards(self, kinds: Sequence[str]) -> Iterator[Shard]:
        """This rank's part of all tensors as shards ``KIND/NAME``, in export dtype; collective.

        Of a slice that several ranks hold, one writes it, such that all write about the same number of bytes.
        """
        self._backend.synchronize()
        written = [0] * self.world.size
        for kind in kinds:
            placed, slices, convert = self._exported(kind)
            # Buffers are of the rank with replica 0: running statistics may differ between ranks.
            writer_of = None if kind == "buffers" else writers(placed, written)
            for part in slices:
                key = (part.name, part.offsets, part.shape)
                writes = part.replica == 0 if writer_of is None else writer_of.get(key) == self.world.rank
                if writes:
                    yield Shard(f"{kind}/{part.name}", convert(part), placed.shapes[part.name], part.offsets)


def is_float32_head(name: str) -> bool:
    """Whether a tensor is a scalar head, which stays in float32 whatever the compute dtype."""
    return name == "score.weight"


def global_grad_norm(slices: Iterable[LocalSlice], world: Comm) -> float:
    """The 2-norm over all ranks' slices with replica 0, accumulated in float64; the same number on every rank.

    float64, because the float32 ``norm()`` of torch on the CPU is 1.6e-4 low on 2 million elements.
    """
    (total,) = world.sum([float(_square_sum([part.tensor for part in slices if part.replica == 0]))])
    return math.sqrt(total) if total >= 0 else math.nan


def _square_sum(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    if _on_cuda(grads):
        # One kernel for all; squares below 1e-38 are 0 in float32.
        return torch.stack(torch._foreach_norm(grads, dtype=torch.float64)).square().sum()
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in grads:
        for piece in grad.detach().reshape(-1).split(CHUNK):
            upcast = piece.double()
            total += torch.dot(upcast, upcast)
    return total


def _on_cuda(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def digest_of_parts(world: Comm, parts: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of float tensors, of which the ranks hold ``parts``, each element once; collective.

    It is made from the sum of each tensor's bits as integers, so nothing is gathered. It differs for
    trained weights; a permutation within a tensor keeps it.
    """
    local_sums: Counter[str] = Counter()
    for name, part in parts:
        bits = part.detach().float().contiguous().view(torch.int32)
        local_sums[name] += int(bits.sum(dtype=torch.int64))
    totals: Counter[str] = Counter()
    for sums in world.gather(local_sums):
        totals.update(sums)
    return hashlib.sha256(json.dumps(sorted(totals.items())).encode()).hexdigest()[:32]
