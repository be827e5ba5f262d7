"""`TorchtitanBackend`: torchtitan's decoder, sharded by its own functions, behind the core's interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.decoder import Decoder
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext, PassMode
from core_rl.checkpoint.model_config import read_config
from core_rl.config.base import Config
from core_rl.config.engine import StateBytes, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.cuda import require_device_memory
from core_rl.toolkit.fully_sharded import add_up_gradients, check_copies, reset_pass, reshard
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.hf_state import checkpoint_layout, fill, planned_model
from core_rl.toolkit.parallel_context import ModelShards
from core_rl.toolkit.taps import tapped
from core_rl_torchtitan.modules import PackedDecoder
from core_rl_torchtitan.row_layout import RowLayout, Run, probed_runs
from core_rl_torchtitan.translation import check_model_layout, decoder_config


@contextmanager
def device_type(name: str) -> Iterator[None]:
    """Let torchtitan make meshes of the device type ``name`` inside the context.

    It decides at import (tools/utils.py), for "cuda" where there is no accelerator.
    """
    from torchtitan.distributed import parallel_dims

    decided = parallel_dims.device_type
    parallel_dims.device_type = name
    try:
        yield
    finally:
        parallel_dims.device_type = decided


@dataclass(frozen=True, eq=False)
class Meshes:
    """All meshes and groups of an engine."""

    dims: ParallelDims
    groups: RankGroups
    shards: ModelShards
    """Distribution of one copy of the model and of its tokens."""

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks with the same experts; None without expert parallelism."""
        names = ["dp_replicate", "efsdp"] if self.dims.dp_replicate_enabled else ["efsdp"]
        mesh: DeviceMesh | None = self.dims.get_optional_mesh(names)
        return mesh

    @staticmethod
    def join(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
        """Meshes of ``layout``, shared with the engines of this process that have equal ones; collective.

        They live as long as the world: DTensor caches meshes by value, and torchtitan gives its own no unique names.
        """
        check_copies(layout, replicas)
        key = (Meshes, layout, replicas, world.device)
        if key not in world.shared:
            world.shared[key] = _made(world, layout, replicas)
        meshes: Meshes = world.shared[key]
        return meshes


def _made(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
    dims = ParallelDims(
        dp_replicate=replicas,
        dp_shard=layout.dp // replicas,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        world_size=layout.world_size,
        spmd_backend="partial_dtensor",
    )
    with device_type(world.device.type):
        dims.build_mesh()

    def ranks(name: str) -> Comm:
        mesh = dims.get_optional_mesh(name)
        return Comm(None if mesh is None else mesh.get_group(), world.device)

    shards = ModelShards(context=ranks("cp"), tensor=ranks("tp"), sequence_parallel=layout.sequence_parallel)
    size = layout.cp * layout.tp
    if size == 1:
        return Meshes(dims, RankGroups(data_parallel=world), shards)
    mesh = init_device_mesh(world.device.type, (layout.dp, size), mesh_dim_names=("data", "model"))
    data, model = (Comm(mesh.get_group(name), world.device) for name in ("data", "model"))
    return Meshes(dims, RankGroups(data_parallel=data, model_parallel=model), shards)


class TorchtitanOptions(Config):
    """Settings of torchtitan's own."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the sharded weights among the data-parallel ranks (torchtitan's ``data_parallel_replicate_degree``)."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered weights after the forward pass and gather them again in the backward pass: of all modules, of none,
    or of all but the last, which the backward pass begins with."""


class TorchtitanConfig(TrainEngineConfig):
    """The common config and torchtitan's own section."""

    options: TorchtitanOptions = TorchtitanOptions()

    def state_bytes(self, parameters: int, trained: int) -> StateBytes:
        """In float32, spread over the ranks of one copy (ZeRO-3, arXiv:1910.02054, section 5.3)."""
        ranks = self.layout.world_size / self.options.replicas
        return StateBytes(
            weights=4 * parameters / ranks,
            gradients=4 * trained / ranks,
            moments=self.moment_bytes * trained / ranks,
        )

    def gathered_bytes(self, parameters: int, outer: int, layers: int) -> float:
        """In the compute dtype, embeddings and head, and two layers (with ``"never"`` all of them); while the gradients
        of one layer are on their way out.
        """
        layer = (parameters - outer) / layers
        gathered = layers if self.options.fsdp_reshard_after_forward == "never" else min(2, layers)
        leaving = 0.0 if self.optimizer is None else 4 * layer
        size = 2 if self.dtype == "bfloat16" else 4
        return (size * (outer + gathered * layer) + leaving) / self.layout.tp


class TorchtitanBackend(HFBackend[TorchtitanConfig]):
    """Weights, gradients and moments are sharded over data and context parallel ranks, and cut over tensor parallel
    ones.
    """

    packed: PackedDecoder
    meshes: Meshes

    def check_model(self, config: TorchtitanConfig) -> None:
        check_copies(config.layout, config.options.replicas)
        check_model_layout(read_config(config.model), config.layout)

    def groups(self, world: Comm, config: TorchtitanConfig) -> RankGroups:
        check_model_layout(read_config(config.model), config.layout)
        set_spmd_backend("partial_dtensor")
        self.meshes = Meshes.join(world, config.layout, config.options.replicas)
        return self.meshes.groups

    def build(self, context: BuildContext[TorchtitanConfig]) -> None:
        config = context.config
        planned, source = planned_model(config.model, context.seed)
        context.check_model(planned.config)
        require_device_memory(context, planned)
        decoder_of = decoder_config(planned.config, context.layout, config.model.head)
        runs = {f"decoder.{name}": parts for name, parts in probed_runs(decoder_of).items()}
        if config.model.head != "lm":
            del runs["decoder.lm_head.weight"]
            runs["score.weight"] = (Run("score.weight", None, 0, 1, 1, 0),)
        parameters = {name: tuple(parameter.shape) for name, parameter in planned.named_parameters()}
        expected = checkpoint_layout(planned).shapes(parameters).keys()
        written = {run.name for parts in runs.values() for run in parts}
        if written != set(expected):
            raise UnsupportedCapability(
                f"transformers writes {type(planned).__name__} with {sorted(set(expected) - written)[:3]}, and "
                f"torchtitan with {sorted(written - set(expected))[:3]}; use the engine 'fsdp'"
            )
        with torch.device("meta"):
            self.packed = PackedDecoder(decoder_of.build(), config.model.head, self.meshes.shards)
        _freeze(self.packed, runs, planned)
        self._shard(config)
        materialize(self.packed, context.device)
        self.packed.eval()
        self.planned, self.layout = planned, RowLayout(runs)
        self.adopt(cast("PreTrainedModel", self.packed), context)
        fill(self.state(), "master", source)

    def _shard(self, config: TorchtitanConfig) -> None:
        """Cut and shard the weights by torchtitan's own functions."""
        dims, decoder = self.meshes.dims, self.packed.decoder
        if dims.tp_enabled or dims.ep_enabled:
            decoder.parallelize(dims)
        tie(decoder)
        mesh = dims.get_mesh(["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"])
        if config.model.head != "lm":
            fully_shard(self.packed.score, mesh=mesh, reshard_after_forward=False)
        apply_fsdp_to_decoder(
            decoder,
            mesh,
            param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
            reshard_after_forward_policy=config.options.fsdp_reshard_after_forward,
            ep_degree=dims.ep,
            edp_mesh=self.meshes.experts,
        )
        add_up_gradients(self.packed, mesh.size())

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        super().run(micro_batches, step, mode)
        if mode == "forward":
            reshard(self.packed)

    def tap(
        self, micro_batches: Sequence[SequenceBatch]
    ) -> AbstractContextManager[Mapping[int, Sequence[Tensor]]]:
        layers = dict(enumerate(self.packed.decoder.layers.values(), start=1))
        return tapped(layers, micro_batches, self.meshes.shards)

    def reduce_grads(self) -> None:
        """FSDP adds up in each backward pass, and DTensor over tensor parallel ranks."""

    def abort(self) -> None:
        for root in (self.packed.decoder, getattr(self.packed, "score", None)):
            if isinstance(root, FSDPModule):
                reset_pass(root)


def tie(decoder: Decoder) -> None:
    """Tie the embedding to the head again, which `Module.parallelize` distributes one by one.

    Without this FSDP has two parameters, and an optimizer updates a single copy: an embedding that is tied no more.
    """
    if decoder.enable_weight_tying:
        decoder.tok_embeddings.weight = decoder.lm_head.weight


def materialize(packed: PackedDecoder, device: torch.device) -> None:
    """Memory on ``device`` for all weights, which are not initialized, and rotary embeddings, once for all layers."""
    decoder = packed.decoder
    packed.to_empty(device=device)
    tie(decoder)
    for buffer in decoder.buffers():  # numbers of tokens that each expert got, which nothing reads
        buffer.zero_()
    first, *others = [layer.attention.rope for layer in decoder.layers.values()]
    first.init_states(buffer_device=device)
    for rope in others:
        rope.register_buffer("cache", first.cache, persistent=False)


def _freeze(packed: PackedDecoder, runs: dict[str, tuple[Run, ...]], planned: PreTrainedModel) -> None:
    """Turn off gradients as in ``planned``; raises `ConfigError` for a part of a parameter."""
    layout = checkpoint_layout(planned)
    trained = {
        written
        for name, parameter in planned.named_parameters()
        if parameter.requires_grad
        for written in layout.names(name)
    }
    for name, parameter in packed.named_parameters():
        names = {run.name for run in runs[name]}
        if names & trained and names - trained:
            raise ConfigError(
                f"model.frozen matches {sorted(names - trained)[:3]}, a part of torchtitan's {name!r}; freeze "
                f"{sorted(names & trained)[:3]} as well, or neither"
            )
        parameter.requires_grad_(bool(names & trained))
