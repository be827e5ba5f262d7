"""`PipelineEngine`: each rank computes some of the layers, and hands activations on (GPipe, arXiv:1811.06965).

A test double: families that are built like Llama. Every rank keeps all weights in memory and computes with
those of its stage; gradients are added over stages, so a tied embedding gets both of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from core_rl.toolkit.attention import PACKED_ATTENTION, Segments, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine

__all__ = ["PipelineEngine", "Way"]


@dataclass
class Way:
    """One micro-batch on its way through a stage: what came in, and what went on."""

    received: Tensor | None
    """``[T, H]``; None on the first stage."""
    sent: Tensor
    """``[T, H]``, or the loss on the last stage."""


class PipelineEngine(HFTrainEngine):
    """``pp`` ranks share the layers of a model; ``dp`` groups of them see different sequences."""

    # ----------------------------------------------------------------- places

    def _groups(self, world: Comm) -> RankGroups:
        self._mesh = init_device_mesh(
            self.device.type, (self.layout.dp, self.layout.pp), mesh_dim_names=("dp", "pp")
        )
        return RankGroups(
            data_parallel=Comm(self._mesh.get_group("dp"), self.device),
            model_parallel=Comm(self._mesh.get_group("pp"), self.device),
            output_source=self.layout.pp - 1,
        )

    @property
    def stage_group(self) -> dist.ProcessGroup:
        """The ranks that share the layers of one copy."""
        return self._mesh.get_group("pp")

    @property
    def stage(self) -> int:
        """This rank's number in `stage_group`."""
        return dist.get_rank(self.stage_group)

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the final norm and the head."""
        return self.stage == self.layout.pp - 1

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        register_packed_attention()
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation=PACKED_ATTENTION)
        nn.Module.to(model, self.device)
        torch.manual_seed(self.config.seed + self.world.rank)
        self._adopt(model)

    # --------------------------------------------------------------- schedule

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        ways = [self._forward_stage(micro_batch, step) for micro_batch in micro_batches]
        if not forward_only:
            for way in self._backward_order(ways):
                self._backward_stage(way)

    def _backward_order(self, ways: list[Way]) -> list[Way]:
        """Micro-batches in the order in which they go backward; the same on all stages."""
        return ways

    def _forward_stage(self, batch: SequenceBatch, step: MicroBatchStep) -> Way:
        received = None if self.is_first else self._receive(batch)
        hidden = self._layers(batch, received)
        if self.is_last:
            return Way(received, self._scaled(step(self._outputs(hidden, batch, step), batch)))
        dist.send(hidden.detach(), group=self.stage_group, group_dst=self.stage + 1)
        return Way(received, hidden)

    def _receive(self, batch: SequenceBatch) -> Tensor:
        size = self.model.config.get_text_config().hidden_size
        received = torch.empty(batch.num_tokens, size, device=self.device)
        dist.recv(received, group=self.stage_group, group_src=self.stage - 1)
        return received.requires_grad_(torch.is_grad_enabled())

    def _scaled(self, loss: Tensor) -> Tensor:
        """What the schedule runs backward on."""
        return loss

    def _backward_stage(self, way: Way) -> None:
        if self.is_last:
            way.sent.backward()
        else:
            grad = torch.empty_like(way.sent)
            dist.recv(grad, group=self.stage_group, group_src=self.stage + 1)
            if way.sent.requires_grad:
                way.sent.backward(grad)
        if way.received is not None:
            grad = torch.zeros_like(way.received) if way.received.grad is None else way.received.grad
            dist.send(grad.contiguous(), group=self.stage_group, group_dst=self.stage - 1)

    # ---------------------------------------------------------------- compute

    def _layers(self, batch: SequenceBatch, received: Tensor | None) -> Tensor:
        """The states ``[T, H]`` after this stage."""
        trunk: Any = self.model.base_model
        hidden = (trunk.embed_tokens(batch.input_ids) if received is None else received)[None]
        positions = self._positions(batch)[None]
        layers = trunk.layers
        share = -(-len(layers) // self.layout.pp)
        for layer in layers[self.stage * share : (self.stage + 1) * share]:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=trunk.rotary_emb(hidden, position_ids=positions),
                segments=Segments(tuple(batch.cu_seqlens.tolist())),
            )
        result: Tensor = (trunk.norm(hidden) if self.is_last else hidden)[0]
        return result

    def _positions(self, batch: SequenceBatch) -> Tensor:
        return batch.position_ids

    def _outputs(self, hidden: Tensor, batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        later = torch.ones_like(batch.input_ids, dtype=torch.bool)
        later[batch.cu_seqlens[:-1].long()] = False
        if self.config.model.head == "lm":
            found = self._language_model(hidden.roll(1, 0), batch.input_ids, step)
            places = {name: later if value.dim() == 1 else later[:, None] for name, value in found.items()}
            return ModelOutput(**{name: torch.where(places[name], found[name], 0.0) for name in found})
        states = F.linear(hidden, self.model.get_parameter("score.weight")).squeeze(-1)
        last = states[batch.cu_seqlens[1:].long() - 1]
        if self.config.model.head == "reward":
            return ModelOutput(scores=last)
        return ModelOutput(values=torch.where(later, states.roll(1), 0.0), bootstrap=last)

    def _language_model(self, states: Tensor, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        logits = head(states) / step.temperature
        log_p = F.log_softmax(logits, dim=-1)
        found = {
            "logprobs": log_p.gather(1, ids[:, None]).squeeze(1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "logits": logits,
        }
        return {name: value for name, value in found.items() if name in step.outputs}

    # -------------------------------------------------------------- gradients

    def _reduce_grads(self) -> None:
        """A stage has the gradients of what it used."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._reduce(name, parameter.grad)

    def _reduce(self, name: str, grad: Tensor) -> None:
        dist.all_reduce(grad, group=self.stage_group)
        dist.all_reduce(grad, group=self.data_parallel_group.group)
