"""`TensorParallelBackend`: heads, MLP columns and vocabulary rows are spread over ranks, norms are replicated.

With sequence parallelism (arXiv:2205.05198), states between them are spread over ranks along the tokens.

A parameter is a `DTensor`, which knows its full shape and its placement; the model computes with the local
part. It is a test double: families that are built like Llama, and head counts that the degree divides. Adapters
have one factor on each side of the exchange: the one on the spread side is spread, the other is replicated.
"""

from __future__ import annotations

import re
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.func import functional_call
from toy_cp.collectives import gather_parts, gather_tokens
from transformers import PreTrainedModel

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.segments import Segments
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS
from toy_tp.collectives import add_up, enter, split_tokens
from toy_tp.vocabulary import Vocabulary

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose output features (or vocabulary rows) are spread: dimension 0 of weight and bias."""
ROW = ("o_proj", "down_proj")
"""Modules whose input features are spread: dimension 1 of the weight. Their outputs are parts of a sum."""
BEFORE_COLUMN = ("input_layernorm", "post_attention_layernorm")
"""Modules whose output goes into column-parallel ones, and nowhere else."""
BEFORE_COLUMN_OF_GEMMA = ("input_layernorm", "pre_feedforward_layernorm")
INSIDE = ("q_norm", "k_norm")
"""Replicated modules between column- and row-parallel ones: each rank applies them to its own heads."""


def _owner(name: str) -> str:
    """The module's own name in that of its parameter: ``q_proj`` in ``model.layers.0.self_attn.q_proj.weight``.

    Also with an adapter: in ``….q_proj.base_layer.weight``, and in ``….q_proj.lora_A.default.weight``, which is
    ``….q_proj.lora_A.weight`` in a checkpoint.
    """
    return re.sub(r"\.(base_layer|lora_[AB](\.default)?)\.", ".", name).rsplit(".", 2)[-2]


def _is_row_bias(name: str) -> bool:
    return _owner(name) in ROW and name.endswith(".bias")


def replicated_factor(name: str) -> bool:
    """Whether the parameter ``name`` is the replicated factor of an adapter.

    Each rank's gradient of it comes from its own output features, or of ``B`` of a row-parallel matrix, its own input
    features.
    """
    return (_owner(name) in COLUMN and ".lora_A." in name) or (_owner(name) in ROW and ".lora_B." in name)


def partial_gradient(name: str) -> bool:
    """Whether the parameter ``name`` is replicated, and each rank's gradient of it a part of a sum."""
    return _owner(name) in INSIDE or replicated_factor(name)


class TensorParallelBackend(HFBackend[TrainEngineConfig]):
    """``tp`` ranks share one copy of the model; ``dp`` copies see different sequences."""

    vocabulary_type: type[Vocabulary] = Vocabulary

    def groups(self, world: Comm, config: TrainEngineConfig) -> RankGroups:
        shape = (config.layout.dp, config.layout.tp)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("dp", "tp"))
        self._mesh = mesh["tp"]
        self.tensor_parallel_group: dist.ProcessGroup = mesh.get_group("tp")
        """The ranks that share one copy of the model."""
        return RankGroups(
            data_parallel=Comm(mesh.get_group("dp"), world.device),
            model_parallel=Comm(self.tensor_parallel_group, world.device),
        )

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's number in `tensor_parallel_group`."""
        return dist.get_rank(self.tensor_parallel_group)

    # ------------------------------------------------------------------ build

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        register_packed_attention()
        self.context = context
        model = build_model(context.config.model, seed=self.seed(), attn_implementation=PACKED_ATTENTION)
        if model.config.model_type in OTHER_LAYERS:
            raise UnsupportedCapability(f"{model.config.model_type}: this engine knows plain attention alone")
        self.check_heads(model)
        self.connect(model)
        self._shard(model)
        self._vocabulary = self.vocabulary_type(model.config.vocab_size, self.tensor_parallel_group)
        self.adopt(model, context)

    def seed(self) -> int:
        """The seed of weights that no file gives: the same on every rank."""
        return self.context.seed

    def check_heads(self, model: PreTrainedModel) -> None:
        """Shards of attention projections must be whole heads."""
        counts = model.config.num_attention_heads, model.config.num_key_value_heads
        if any(count % self.context.layout.tp for count in counts):
            raise LayoutError(
                f"tp={self.context.layout.tp} must divide the attention and key/value heads {counts}"
            )

    def connect(self, model: PreTrainedModel) -> None:
        """Let collectives run where replicated values enter shards, and where parts are summed."""
        sandwiched = any(name.endswith(BEFORE_COLUMN_OF_GEMMA[1]) for name, _ in model.named_modules())
        for name, module in model.named_modules():
            if name.endswith(BEFORE_COLUMN_OF_GEMMA if sandwiched else BEFORE_COLUMN):
                module.register_forward_hook(self.enter_shards)
            elif name.endswith(ROW):
                module.register_forward_hook(self.leave_shards)

    def enter_shards(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if self.context.layout.sequence_parallel:
            return gather_parts(output, self._tokens, output.dim() - 2, self.tensor_parallel_group)
        return enter(output, self.tensor_parallel_group)

    def leave_shards(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The sum over ranks, and a term added once."""
        total = self.own_tokens(add_up(output, self.tensor_parallel_group))
        bias = self.row_biases.get(module)
        return total if bias is None else total + bias.to_local()

    def own_tokens(self, value: Tensor) -> Tensor:
        """This rank's tokens of ``[..., T, H]``, between two parallel regions."""
        if not self.context.layout.sequence_parallel:
            return value
        return split_tokens(value, self._tokens, self.tensor_parallel_group)

    def _shard(self, model: PreTrainedModel) -> None:
        """Replace each parameter by this rank's part; a tied one stays one."""
        parts = {id(full): self._part(name, full) for name, full in model.named_parameters()}
        for module in model.modules():
            for name, full in list(module.named_parameters(recurse=False)):
                setattr(module, name, parts[id(full)])
        self.row_biases = {
            module: cast("DTensor", module.bias)
            for name, module in model.named_modules()
            if name.endswith(ROW) and module.bias is not None
        }

    def _part(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        place, local = self._placement(name), parameter.detach()
        if isinstance(place, Shard):
            local = local.chunk(self.context.layout.tp, place.dim)[self.tensor_parallel_rank]
        part = DTensor.from_local(
            local.to(self.context.device, copy=True, memory_format=torch.contiguous_format),
            self._mesh,
            [place],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def _placement(self, name: str) -> Placement:
        owner = _owner(name)
        if replicated_factor(name):
            return Replicate()
        if owner in COLUMN:
            return Shard(0)
        return Shard(1) if owner in ROW and name.endswith(".weight") else Replicate()

    # ---------------------------------------------------------------- compute

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        hidden = self._trunk(micro_batch)
        later = torch.ones_like(micro_batch.input_ids, dtype=torch.bool)
        later[micro_batch.cu_seqlens[:-1].long()] = False
        if self.context.config.model.head == "lm":
            outputs = self._language_model(hidden.roll(1, 0), micro_batch.input_ids, step)
            places = {name: later if value.dim() == 1 else later[:, None] for name, value in outputs.items()}
            return ModelOutput(**{name: torch.where(places[name], outputs[name], 0.0) for name in outputs})
        states = F.linear(hidden, _local(self.model.score)).squeeze(-1)
        last = states[micro_batch.cu_seqlens[1:].long() - 1]
        if self.context.config.model.head == "reward":
            return ModelOutput(scores=last)
        return ModelOutput(values=torch.where(later, states.roll(1), 0.0), bootstrap=last)

    def _trunk(self, batch: SequenceBatch) -> Tensor:
        """The last hidden state ``[T, H]``, equal on all ranks of a copy."""
        trunk, embedding = self.model.base_model, self.model.get_input_embeddings()
        full = self._vocabulary.embed(batch.input_ids, _local(embedding))
        if (padding := getattr(embedding, "padding_idx", None)) is not None:
            # The whole model's embedding gives this token no gradient.
            full = torch.where((batch.input_ids == padding)[:, None], full.detach(), full)
        self._tokens = tuple(len(part) for part in batch.input_ids.tensor_split(self.context.layout.tp))
        embedded = self.own_tokens(full * getattr(embedding, "scalar_embed_scale", 1.0))
        inputs = {
            "inputs_embeds": embedded[None],
            "position_ids": batch.position_ids[None],
            "attention_mask": None,
            "use_cache": False,
            # Of random numbers, attention alone draws others on each rank: they have different heads.
            "segments": Segments(tuple(batch.cu_seqlens.tolist()), tensor=self.context.groups.model_parallel),
        }
        local = {name: cast("DTensor", p).to_local() for name, p in trunk.named_parameters()}
        # Added after the sum over ranks.
        local |= {name: torch.zeros_like(value) for name, value in local.items() if _is_row_bias(name)}
        result: Tensor = functional_call(trunk, local, kwargs=inputs).last_hidden_state[0]
        if self.context.layout.sequence_parallel:
            return gather_tokens(result, self._tokens, self.tensor_parallel_group)
        return result

    def _language_model(self, states: Tensor, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """Outputs of the tokens ``ids [T]``, which the ``states [T, H]`` predict."""
        logits = self.columns(states)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        logits = (logits if cap is None else torch.tanh(logits / cap) * cap) / step.temperature
        outputs: dict[str, Tensor] = {}
        if "logprobs" in step.outputs or "entropy" in step.outputs:
            outputs["logprobs"], outputs["entropy"] = self._vocabulary.logprobs(logits, ids)
        if "logits" in step.outputs:
            outputs["logits"] = self._vocabulary.full(logits)
        return {name: value for name, value in outputs.items() if name in step.outputs}

    def columns(self, states: Tensor) -> Tensor:
        """This rank's logits ``[T, v]``."""
        return F.linear(enter(states, self.tensor_parallel_group), self.head_weight())

    def head_weight(self) -> Tensor:
        """This rank's rows of the language-model head, with their graph."""
        return _local(self.model.get_output_embeddings())

    def reduce_grads(self) -> None:
        for name, grad in self.gradients():
            self.reduce(name, grad)

    def is_partial(self, name: str) -> bool:
        """Whether this rank's gradient of ``name`` is that of its own heads, or of its own tokens."""
        own_tokens = self.context.layout.sequence_parallel and ("norm" in name or _is_row_bias(name))
        return own_tokens or partial_gradient(name)

    def reduce(self, name: str, grad: Tensor) -> None:
        """Add up one gradient over ranks."""
        if self.is_partial(name):
            dist.all_reduce(grad, group=self.tensor_parallel_group)
        dist.all_reduce(grad, group=self.context.groups.data_parallel.group)


def _local(module: nn.Module | Tensor | None) -> Tensor:
    """This rank's part of the weight of ``module``, with its graph."""
    assert isinstance(module, nn.Module)  # every family has embeddings and a head
    return cast("DTensor", module.weight).to_local()
