"""`PipelineBackend`: each rank computes some of the layers, and hands activations on (GPipe, arXiv:1811.06965).

A test double: families that are built like Llama. Every rank keeps all weights in memory and computes with
the weights of its stage; gradients are added over stages, so a tied embedding gets both of its parts.
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

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext, PassMode
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION, register_packed_attention
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.segments import Segments
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS


@dataclass
class Way:
    """One micro-batch on its way through a stage: what came in, and what went on."""

    received: Tensor | None
    """``[T, H]``; None on the first stage."""
    sent: Tensor
    """``[T, H]``, or the loss on the last stage."""


class PipelineBackend(HFBackend[TrainEngineConfig]):
    """``pp`` ranks share the layers of a model; ``dp`` groups of them see different sequences."""

    def groups(self, world: Comm, config: TrainEngineConfig) -> RankGroups:
        shape = (config.layout.dp, config.layout.pp)
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("dp", "pp"))
        self.stage_group: dist.ProcessGroup = mesh.get_group("pp")
        """The ranks that share the layers of one copy."""
        return RankGroups(
            data_parallel=Comm(mesh.get_group("dp"), world.device),
            model_parallel=Comm(self.stage_group, world.device),
            output_source=config.layout.pp - 1,
        )

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
        return self.stage == self.context.layout.pp - 1

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        register_packed_attention()
        model = build_model(context.config.model, seed=context.seed, attn_implementation=PACKED_ATTENTION)
        if model.config.model_type in OTHER_LAYERS:
            raise UnsupportedCapability(f"{model.config.model_type}: this engine knows plain attention alone")
        nn.Module.to(model, context.device)
        torch.manual_seed(context.seed + context.world.rank)
        self.adopt(model, context)

    # --------------------------------------------------------------- schedule

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        ways = [self.forward_stage(micro_batch, step) for micro_batch in micro_batches]
        if mode != "forward":
            for way in self.backward_order(ways):
                self.backward_stage(way)

    def backward_order(self, ways: list[Way]) -> list[Way]:
        """Micro-batches in the order in which they go backward; the same on all stages."""
        return ways

    def forward_stage(self, batch: SequenceBatch, step: MicroBatchStep) -> Way:
        """Run the layers of this stage on one micro-batch."""
        self.received = None if self.is_first else self.receive(batch)
        if self.is_last:
            return Way(self.received, step(self.outputs(batch, step), batch))
        hidden = self.layers(batch)
        dist.send(hidden.detach(), group=self.stage_group, group_dst=self.stage + 1)
        return Way(self.received, hidden)

    def receive(self, batch: SequenceBatch) -> Tensor:
        """The states ``[T, H]`` before this stage."""
        size = self.model.config.get_text_config().hidden_size
        received = torch.empty(batch.num_tokens, size, device=self.context.device)
        dist.recv(received, group=self.stage_group, group_src=self.stage - 1)
        return received.requires_grad_(torch.is_grad_enabled())

    def backward_stage(self, way: Way) -> None:
        """Run backward through this stage, and pass the gradient to the previous stage."""
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

    def layers(self, batch: SequenceBatch) -> Tensor:
        """The states ``[T, H]`` after this stage."""
        trunk: Any = self.model.base_model
        hidden = (trunk.embed_tokens(batch.input_ids) if self.received is None else self.received)[None]
        positions = self.positions(batch)[None]
        layers = trunk.layers
        share = -(-len(layers) // self.context.layout.pp)
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

    def positions(self, batch: SequenceBatch) -> Tensor:
        """The positions of tokens in their sequences ``[T]``."""
        return batch.position_ids

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        hidden = self.layers(micro_batch)
        later = torch.ones_like(micro_batch.input_ids, dtype=torch.bool)
        later[micro_batch.cu_seqlens[:-1].long()] = False
        if self.context.config.model.head == "lm":
            outputs = self._language_model(hidden.roll(1, 0), micro_batch.input_ids, step)
            places = {name: later if value.dim() == 1 else later[:, None] for name, value in outputs.items()}
            return ModelOutput(**{name: torch.where(places[name], outputs[name], 0.0) for name in outputs})
        states = F.linear(hidden, self.model.get_parameter("score.weight")).squeeze(-1)
        last = states[micro_batch.cu_seqlens[1:].long() - 1]
        if self.context.config.model.head == "reward":
            return ModelOutput(scores=last)
        return ModelOutput(values=torch.where(later, states.roll(1), 0.0), bootstrap=last)

    def _language_model(self, states: Tensor, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        logits = head(states) / step.temperature
        log_p = F.log_softmax(logits, dim=-1)
        outputs = {
            "logprobs": log_p.gather(1, ids[:, None]).squeeze(1),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "logits": logits,
        }
        return {name: value for name, value in outputs.items() if name in step.outputs}

    # -------------------------------------------------------------- gradients

    def reduce_grads(self) -> None:
        """A stage has the gradients of its own weights."""
        for name, grad in self.gradients():
            self.reduce(name, grad)

    def reduce(self, name: str, grad: Tensor) -> None:
        """Add up one gradient over stages and ranks."""
        dist.all_reduce(grad, group=self.stage_group)
        dist.all_reduce(grad, group=self.context.groups.data_parallel.group)
