"""`ContextParallelBackend`: every rank holds the whole model, and computes a part of the tokens of each sequence.

A test double: families without sliding windows and soft caps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS
from toy_cp.shard import ATTENTION, TokenShard, register_attention


class ContextParallelBackend(HFBackend[TrainEngineConfig]):
    """``cp`` ranks share the tokens of each sequence; ``dp`` groups of them see different sequences."""

    shard_type: type[TokenShard] = TokenShard

    def groups(self, world: Comm, config: TrainEngineConfig) -> RankGroups:
        shape = (config.layout.dp, config.layout.cp)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("dp", "cp"))
        self.context_parallel_group: dist.ProcessGroup = mesh.get_group("cp")
        """The ranks that share the tokens of one batch."""
        return RankGroups(
            data_parallel=Comm(mesh.get_group("dp"), world.device),
            model_parallel=Comm(self.context_parallel_group, world.device),
        )

    @property
    def context_parallel_rank(self) -> int:
        """This rank's number in `context_parallel_group`."""
        return dist.get_rank(self.context_parallel_group)

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        register_attention()
        model = build_model(context.config.model, seed=context.seed, attn_implementation=ATTENTION)
        if model.config.model_type in OTHER_LAYERS:
            raise UnsupportedCapability(f"{model.config.model_type}: this engine knows plain attention alone")
        nn.Module.to(model, context.device)
        # Dropout differs from rank to rank: they hold different tokens.
        torch.manual_seed(context.seed + context.world.rank)
        self.adopt(model, context)

    # ---------------------------------------------------------------- compute

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        shard = self.shard_type(micro_batch, self.context_parallel_group)
        hidden = self.trunk(shard)
        later = torch.ones_like(micro_batch.input_ids, dtype=torch.bool)
        later[micro_batch.cu_seqlens[:-1].long()] = False
        if self.context.config.model.head == "lm":
            outputs = self._language_model(hidden, shard, step)
            after = {name: self.follows(shard.gathered(value), shard) for name, value in outputs.items()}
            places = {name: later if value.dim() == 1 else later[:, None] for name, value in after.items()}
            return ModelOutput(**{name: torch.where(places[name], after[name], 0.0) for name in after})
        weight = self.model.get_parameter("score.weight")
        states = shard.gathered(F.linear(hidden, weight).squeeze(-1))
        last = self.ends(states, micro_batch)
        if self.context.config.model.head == "reward":
            return ModelOutput(scores=last)
        return ModelOutput(values=torch.where(later, self.follows(states, shard), 0.0), bootstrap=last)

    def follows(self, states: Tensor, shard: TokenShard) -> Tensor:
        """Values at a token's state, ``[T, ...]``, moved to the token that it predicts."""
        return states.roll(1, 0)

    def ends(self, states: Tensor, batch: SequenceBatch) -> Tensor:
        """The values ``[B]`` after the last token of each sequence."""
        return states[batch.cu_seqlens[1:].long() - 1]

    def trunk(self, shard: TokenShard) -> Tensor:
        """The last hidden states of this rank's tokens ``[t, H]``."""
        hidden: Tensor = self.model.base_model(
            input_ids=shard.own(shard.input_ids)[None],
            position_ids=shard.position_ids()[None],
            attention_mask=None,
            use_cache=False,
            shard=shard,
        ).last_hidden_state[0]
        return hidden

    def _language_model(self, hidden: Tensor, shard: TokenShard, step: MicroBatchStep) -> dict[str, Tensor]:
        """Outputs at this rank's tokens, each about the next token."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        logits = head(hidden) / step.temperature
        log_p = F.log_softmax(logits, dim=-1)
        outputs = {
            "logprobs": log_p.gather(1, shard.next_ids()[:, None]).squeeze(1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "logits": logits,
        }
        return {name: value for name, value in outputs.items() if name in step.outputs}

    # -------------------------------------------------------------- gradients

    def reduce_grads(self) -> None:
        """Every rank has the gradient of its own tokens."""
        for name, grad in self.gradients():
            self.reduce(name, grad)

    def reduce(self, name: str, grad: Tensor) -> None:
        """Add up one gradient over ranks."""
        dist.all_reduce(grad, group=self.context_parallel_group)
        dist.all_reduce(grad, group=self.context.groups.data_parallel.group)
