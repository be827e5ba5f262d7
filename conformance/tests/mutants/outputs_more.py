"""Logits and values in training, and outputs at the largest sizes: what few losses or only long batches show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput
from core_rl.reference.train import ReferenceBackend
from mutants.bases import Packed, Replicated
from mutants.zoo import DP2, Mutant


@Mutant(
    "I1.logits-gradients", "distillation that trains nothing", "gradients of a loss over logprobs and logits"
)
class DetachedLogits(ReferenceBackend):
    """Logits are right and have no graph."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {name: value.detach() if name == "logits" else value for name, value in outputs.items()}


@Mutant("I7.logits", "in-place temperature", "logits asked together")
class LogitsScaledInPlace(ReferenceBackend):
    """The log-probs' kernel divides by the temperature in place, and the logits are divided again."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        if {"logits", "logprobs"} <= outputs.keys():
            outputs["logits"] = outputs["logits"] / step.temperature
        return outputs


@Mutant("I1.combined-batches", "a detached output", "gradients of a batch with head: value")
class DetachedBootstrap(ReferenceBackend):
    """The value after the last token has no graph."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        return {name: value.detach() if name == "bootstrap" else value for name, value in outputs.items()}


@Mutant("I1.combined-batches", "I8", "of a batch with head: value")
class TrainedValuesOverTemperature(ReferenceBackend):
    """Values are divided by the temperature where they are trained."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = super().sequence(ids, step)
        scale = step.temperature if step.trained_only else 1.0
        return {n: v / scale if n == "values" else v for n, v in outputs.items()}


@Mutant("I7.values", "chunked kernels", "values of a long batch")
class ValuesLoseAChunkEdge(Packed):
    """The first row of each further chunk of values is lost."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.values is None:
            return output
        place = torch.arange(micro_batch.num_tokens)
        return replace(output, values=torch.where((place % 128 == 0) & (place > 0), 0.0, output.values))


@Mutant("I7.logits", "chunked kernels", "logits of a long batch")
class LogitsLoseAChunkEdge(Packed):
    """The same of logits."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logits is None:
            return output
        place = torch.arange(micro_batch.num_tokens)[:, None]
        return replace(output, logits=torch.where((place % 128 == 0) & (place > 0), 0.0, output.logits))


@Mutant("I7.scores", "the last row of a table", "scores of a long batch")
class ScoresBeforeTheLastPosition(ReferenceBackend):
    """A sequence of the largest length is read one token too early."""

    def sequence(self, ids: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        longest = (
            self.context.config.model.head == "reward"
            and len(ids) == self.model.config.max_position_embeddings
        )
        return super().sequence(ids[:-1] if longest else ids, step)


@Mutant("I7.long-batch", "a second chunk on one rank", "gradients of a long batch", layout=DP2)
class LongPassLosesGradients(Packed):
    """On the second rank, the log-probs behind the 200th token of a pass have no graph."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.logprobs is None or self.context.world.rank == 0:
            return output
        early = torch.arange(micro_batch.num_tokens) < 200
        return replace(output, logprobs=torch.where(early, output.logprobs, output.logprobs.detach()))


@Mutant("I7.long-batch", "kernels over blocks of the vocabulary", "logprobs of a long batch")
class SecondBlockOfTheVocabulary(ReferenceBackend):
    """A kernel that loops over blocks of 1,024 token ids leaves the second out of the softmax."""

    @staticmethod
    def language_model(ids: Tensor, logits: Tensor, step: MicroBatchStep) -> dict[str, Tensor]:
        outputs = ReferenceBackend.language_model(ids, logits, step)
        if "logprobs" in outputs:
            known = logits[:-1, :1024].logsumexp(-1)
            drawn = logits[:-1].gather(1, ids[1:, None]).squeeze(1)
            outputs["logprobs"] = F.pad(drawn - known, (1, 0))
        return outputs


@Mutant("I1.gradients", "padding of flat buffers", "gradients of TokenMeanLoss", layout=DP2, family="gpt2")
class OddTailOfABucket(Replicated):
    """Gradients are reduced in pairs of elements, and the last element of an odd number stays each rank's own."""

    def reduce_grads(self) -> None:
        for _, grad in self.gradients():
            flat = grad.contiguous().view(-1)
            dist.all_reduce(flat[: len(flat) // 2 * 2], group=self.context.world.group)
            grad.copy_(flat.view_as(grad))


@Mutant("I1.any-batch", "a view of sequences of one length", "log-probs of a drawn batch")
class EqualLengthsMixed(Packed):
    """Two sequences of one length are taken for the columns of their tokens, not for the rows."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        count = micro_batch.num_sequences
        if count == 1 or len(set(micro_batch.lengths)) > 1 or micro_batch.max_length < 3:
            return super().outputs(micro_batch, step)
        mixed = micro_batch.input_ids.view(-1, count).T.reshape(-1)
        return super().outputs(replace(micro_batch, input_ids=mixed), step)


@Mutant("I1.any-batch", "samples that are the same", "gradients of a drawn batch")
class ComputesTheSameOnce(ReferenceBackend):
    """A sequence whose ids came before in the micro-batch takes over their outputs, without a graph."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        known: dict[tuple[int, ...], dict[str, Tensor]] = {}
        rows = []
        for ids in micro_batch.input_ids.split(micro_batch.lengths):
            key = tuple(ids.tolist())
            outputs = known.get(key)
            rows.append({n: v.detach() for n, v in outputs.items()} if outputs else self.sequence(ids, step))
            known.setdefault(key, rows[-1])
        return ModelOutput(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})


@Mutant("I1.any-batch", "a fixed number of rows", "gradients of a drawn batch")
class AtMost24Sequences(ReferenceBackend):
    """Sequences behind the 24th of a micro-batch have no graph."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        rows = [self.sequence(ids, step) for ids in micro_batch.input_ids.split(micro_batch.lengths)]
        rows[24:] = [{name: value.detach() for name, value in row.items()} for row in rows[24:]]
        return ModelOutput(**{name: torch.cat([row[name] for row in rows]) for name in rows[0]})


@Mutant("I1.gradients", "a metric that becomes a loss", "(?s)gradients of OutputsLoss over entropy.*zero")
class EntropyAloneTrainsNothing(ReferenceBackend):
    """A loss that asks for nothing but the entropy has gradients of zero."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        if output.entropy is None or tuple(step.outputs) != ("entropy",):
            return output
        return replace(output, entropy=output.entropy.detach() + 0.0 * output.entropy)


@Mutant("I1.any-batch", "a schedule of fixed length", "gradients of a drawn batch")
class SkipsTheEighthMicroBatch(ReferenceBackend):
    """The eighth micro-batch of a pass has no backward pass."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for number, part in enumerate(micro_batches):
            loss = step(self.outputs(part, step), part)
            if mode != "forward" and number != 7:
                loss.backward()
