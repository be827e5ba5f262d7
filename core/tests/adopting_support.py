"""A backend around another framework's sharded module and optimizer: nothing of the toolkit is copied."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.capability import Capability
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_backend import HFBackend

MOMENTUM = 0.9


class AdoptingBackend(HFBackend[TrainEngineConfig]):
    """``fully_shard``, and SGD with momentum over the sharded parameters, both made elsewhere."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        model = build_model(context.config.model, seed=context.seed, attn_implementation="eager")
        root = fully_shard(model, mesh=init_device_mesh("cpu", (context.world.size,)))
        root.set_force_sum_reduction_for_comms(True)
        root.set_gradient_divide_factor(1.0)
        self.adopt(model, context, optimizer=self.make_optimizer(model))

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)

    def reduce_grads(self) -> None:
        """``fully_shard`` adds up in each backward pass."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        rows = micro_batch.input_ids.split(micro_batch.lengths)
        length = max(micro_batch.lengths)
        padded = torch.stack([F.pad(row, (0, length - len(row))) for row in rows])
        logits = self.model(input_ids=padded, use_cache=False).logits / step.temperature
        log_p = F.log_softmax(logits[:, :-1], dim=-1).gather(2, padded[:, 1:, None]).squeeze(2)
        complete = F.pad(log_p, (1, 0))
        return ModelOutput(
            logprobs=torch.cat([local[: len(row)] for local, row in zip(complete, rows, strict=True)])
        )


class AdoptingAdamBackend(AdoptingBackend):
    """The same with AdamW."""

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)


class Zero(ZeroRedundancyOptimizer):
    """Torch's ZeRO-1, with the state of this rank's optimizer instead of the wrapper's empty one."""

    @property
    def state(self) -> Any:
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        """The wrapper keeps none."""


class AdoptingZeroBackend(AdoptingBackend):
    """Whole weights on every rank; each moment is on one rank."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        model = build_model(context.config.model, seed=context.seed, attn_implementation="eager")
        self.adopt(model, context, optimizer=self.make_optimizer(model))

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return Zero(model.parameters(), torch.optim.AdamW, lr=1.0, weight_decay=0.0)

    def reduce_grads(self) -> None:
        HFBackend.reduce_grads(self)


def spec(backend: type[AdoptingBackend]) -> EngineSpec:
    return EngineSpec(
        name="adopting",
        kind="train",
        protocol=PROTOCOL_VERSION,
        factory=f"adopting_support:{backend.__name__}",
        config="core_rl.config.engine:TrainEngineConfig",
        capabilities=frozenset(
            {Capability.DATA_PARALLEL, Capability.SHARDED_CHECKPOINT, Capability.PORTABLE_CHECKPOINT}
        ),
    )
