"""The reference train engine: the plain Hugging Face model, one sequence at a time.

It is the smallest example of an engine, and shares nothing with faster engines that could be wrong in
both: no packing, no chunked kernels, eager attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import NO_MEDIA, Media
from core_rl.data.outputs import ModelOutput
from core_rl.toolkit.build import build_model
from core_rl.toolkit.cuda import require_device_memory
from core_rl.toolkit.hf_backend import HFBackend
from core_rl.toolkit.positions import learned_positions, require_positions
from core_rl.toolkit.routers import Routers
from core_rl.toolkit.vision import sequence_arguments


class ReferenceBackend(HFBackend[TrainEngineConfig]):
    """One process, float32, eager."""

    def build(self, context: BuildContext[TrainEngineConfig]) -> None:
        model = build_model(context.config.model, seed=context.seed, attn_implementation="eager")
        require_device_memory(context, model)
        torch.nn.Module.to(model, context.device)
        self.routers = Routers(model)
        self.adopt(model, context)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        require_positions(self.model, learned_positions(self.model), max(micro_batch.lengths))
        rows = [
            self.routed(micro_batch.select([number]), step) for number in range(micro_batch.num_sequences)
        ]
        outputs = {name: [row[name] for row in rows] for name in rows[0]}
        sums = {name: torch.stack(outputs.pop(name)).sum() for name in ("aux_loss",) if name in outputs}
        return ModelOutput(**{name: torch.cat(values) for name, values in outputs.items()}, **sums)

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        """Outputs of one sequence, with router outputs if requested."""
        with self.routers.watch(row.tokens.get("routing")) as routings:
            if row.media:
                outputs = self.language_model_outputs(row.input_ids, row.media[0], step)
            else:
                outputs = self.sequence(row.input_ids, step)
        return {**outputs, **self.routers.outputs(routings, row.cu_seqlens, step.outputs)}

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """The outputs of one sequence ``[L]``."""
        if self.context.config.model.head == "lm":
            return self.language_model_outputs(ids, NO_MEDIA, step)
        hidden = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        states = F.linear(hidden.float(), self.model.score.weight).squeeze(-1)  # type: ignore[union-attr, arg-type]
        if self.context.config.model.head == "reward":
            return {"scores": states[-1:]}
        return {"values": F.pad(states[:-1], (1, 0)), "bootstrap": states[-1:]}

    def language_model_outputs(self, ids: Tensor, media: Media, step: MicroBatchStep) -> dict[str, Tensor]:
        """The outputs of the language-model head for one sequence ``[L]`` and its images."""
        images = sequence_arguments(self.model.base_model, ids[None], media)
        logits = self.model(input_ids=ids[None], use_cache=False, **images).logits[0].float()
        return self.language_model(ids, logits / step.temperature, step)

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        """Outputs at the tokens that ``logits [L, V]``, each at the token before, predict."""
        predicting = logits[:-1]
        log_p = F.log_softmax(predicting, dim=-1)
        outputs = {
            "logprobs": F.pad(log_p.gather(1, ids[1:, None]).squeeze(1), (1, 0)),
            "entropy": F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0)),
            "logits": F.pad(predicting, (0, 0, 1, 0)),
        }
        return {name: value for name, value in outputs.items() if name in step.outputs}
