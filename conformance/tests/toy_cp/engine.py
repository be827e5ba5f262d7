"""`ContextParallelEngine`: every rank holds the whole model, and computes a part of the tokens of each sequence.

A test double: families without sliding windows and soft caps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.distributed.process_group import RankAddress
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine
from toy_cp.shard import ATTENTION, TokenShard, register_attention

__all__ = ["ContextParallelEngine"]


class ContextParallelEngine(HFTrainEngine):
    """``cp`` ranks share the tokens of each sequence; ``dp`` groups of them see different sequences."""

    shard_type: type[TokenShard] = TokenShard

    def _groups(self, world: Comm) -> RankGroups:
        self._mesh = init_device_mesh(
            self.device.type, (self.layout.dp, self.layout.cp), mesh_dim_names=("dp", "cp")
        )
        return RankGroups(
            data_parallel=Comm(self._mesh.get_group("dp"), self.device),
            model_parallel=Comm(self._mesh.get_group("cp"), self.device),
        )

    @property
    def context_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share the tokens of one batch."""
        return self._mesh.get_group("cp")

    @property
    def context_parallel_rank(self) -> int:
        """This rank's number in `context_parallel_group`."""
        return dist.get_rank(self.context_parallel_group)

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_attention()
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=ATTENTION)
        nn.Module.to(model, self.device)
        # Dropout differs from rank to rank: they hold different tokens.
        torch.manual_seed(self.config.seed + self.world.rank)
        self._adopt(model)

    # ---------------------------------------------------------------- compute

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            loss = step(self._outputs(micro_batch, step), micro_batch)
            if not forward_only:
                loss.backward()

    def _outputs(self, batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        shard = self.shard_type(batch, self.context_parallel_group)
        hidden = self._trunk(shard)
        later = torch.ones_like(batch.input_ids, dtype=torch.bool)
        later[batch.cu_seqlens[:-1].long()] = False
        if self.config.model.head == "lm":
            found = self._language_model(hidden, shard, step)
            after = {name: self._follows(shard.gathered(value), shard) for name, value in found.items()}
            places = {name: later if value.dim() == 1 else later[:, None] for name, value in after.items()}
            return ModelOutput(**{name: torch.where(places[name], after[name], 0.0) for name in after})
        weight = self.model.get_parameter("score.weight")
        states = shard.gathered(F.linear(hidden, weight).squeeze(-1))
        last = self._ends(states, batch)
        if self.config.model.head == "reward":
            return ModelOutput(scores=last)
        return ModelOutput(values=torch.where(later, self._follows(states, shard), 0.0), bootstrap=last)

    def _follows(self, states: Tensor, shard: TokenShard) -> Tensor:
        """What stands at a token's state, ``[T, ...]``, moved to the token that it predicts."""
        return states.roll(1, 0)

    def _ends(self, states: Tensor, batch: SequenceBatch) -> Tensor:
        """The values ``[B]`` after the last token of each sequence."""
        return states[batch.cu_seqlens[1:].long() - 1]

    def _trunk(self, shard: TokenShard) -> Tensor:
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
        found = {
            "logprobs": log_p.gather(1, shard.next_ids()[:, None]).squeeze(1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "logits": logits,
        }
        return {name: value for name, value in found.items() if name in step.outputs}

    # -------------------------------------------------------------- gradients

    def _reduce_grads(self) -> None:
        """Every rank has the gradient of its own tokens."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._reduce(name, parameter.grad)

    def _reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad, group=self.context_parallel_group)
        dist.all_reduce(grad, group=self.data_parallel_group.group)
