"""The reference train engine: the plain Hugging Face model, one sequence at a time.

It is the smallest example of an engine, and shares nothing with faster ones that could be wrong in
both: no packing, no chunked kernels, eager attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec
from core_rl.backend.steps import MicroBatchStep
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.distributed.process_group import RankAddress
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_engine import HFTrainEngine
from core_rl.toolkit.routers import Routers

__all__ = ["ReferenceEngine"]


class ReferenceEngine(HFTrainEngine):
    """One process, float32, eager."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        model = build_model(self.config.model, seed=self.config.seed, attn_implementation="eager")
        torch.nn.Module.to(model, self.device)
        self._routers = Routers(model)
        self._adopt(model)

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        for micro_batch in micro_batches:
            loss = step(self._forward(micro_batch, step), micro_batch)
            if not forward_only:
                loss.backward()

    def _reduce_grads(self) -> None:
        """One rank: its sum is the sum."""

    def _forward(self, batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        rows = [self._routed(batch.select([number]), step) for number in range(batch.num_sequences)]
        found = {name: [row[name] for row in rows] for name in rows[0]}
        sums = {name: torch.stack(found.pop(name)).sum() for name in ("aux_loss",) if name in found}
        return ModelOutput(**{name: torch.cat(values) for name, values in found.items()}, **sums)

    def _routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        """The outputs of one sequence, and what its routing gives where that is asked for."""
        with self._routers.watch(row.tokens.get("routing")) as routings:
            found = self._sequence(row.input_ids, step)
        return {**found, **self._routers.outputs(routings, row.cu_seqlens, step.outputs)}

    def _sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """The outputs of one sequence ``[L]``."""
        if self.config.model.head == "lm":
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
            return self._language_model(ids, logits / step.temperature, step)
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        states = F.linear(hidden.float(), self.model.score.weight).squeeze(-1)  # type: ignore[union-attr, arg-type]
        if self.config.model.head == "reward":
            return {"scores": states[-1:]}
        return {"values": F.pad(states[:-1], (1, 0)), "bootstrap": states[-1:]}

    @staticmethod
    def _language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """``logits [L, V]`` stand at the token that they follow; the outputs, at the token that they predict."""
        predicting = logits[:-1]
        log_p = F.log_softmax(predicting, dim=-1)
        outputs = {
            "logprobs": F.pad(log_p.gather(1, ids[1:, None]).squeeze(1), (1, 0)),
            "entropy": F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0)),
            "logits": F.pad(predicting, (0, 0, 1, 0)),
        }
        return {name: value for name, value in outputs.items() if name in step.outputs}
