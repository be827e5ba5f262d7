"""Recorded routing that misses its purpose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import PassMode
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.reference.train import ReferenceBackend
from core_rl.toolkit.routers import Routers, Routing
from core_rl_conformance.profile import MOE
from mutants.bases import Packed, TrainContext
from mutants.zoo import Mutant


@Mutant("I17.routing-replay", "verl #7340", "log-probs with another routing", family=MOE)
class ReplaysOnDiscardedRouters(ReferenceBackend):
    """Replay is bound to the routers of a model that was replaced since: it does nothing, without an error."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self._discarded = Routers(copy.deepcopy(self.model))

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        retained = {name: value for name, value in row.tokens.items() if name != "routing"}
        return super().routed(replace(row, tokens=retained), step)


@Mutant("I17.routing-replay", "a replay that training does not see (I17)", "with another routing", family=MOE)
class ReplaysInForwardOnly(ReferenceBackend):
    """Training chooses for itself."""

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        self._training = mode != "forward"
        super().run(micro_batches, step, mode)

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        if not self._training:
            return super().routed(row, step)
        retained = {name: value for name, value in row.tokens.items() if name != "routing"}
        return super().routed(replace(row, tokens=retained), step)


@Mutant(
    "I17.routing-replay",
    "layers of recorded routing (I17)",
    "log-probs with the recorded routing",
    family=MOE,
)
class ReplaysOneLayerForAll(ReferenceBackend):
    """Every layer replays the first layer's experts."""

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        if "routing" in row.tokens:
            row = row.with_tokens(routing=row["routing"][:, :1].expand_as(row["routing"]))
        return super().routed(row, step)


@Mutant("I17.routing-replay", "layers of recorded routing (I17)", "'routing' is not what", family=MOE)
class RecordsLayersBackwards(ReferenceBackend):
    """The last layer's choices come first."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        output = super().outputs(micro_batch, step)
        return output if output.routing is None else replace(output, routing=output.routing.flip(1))


@Mutant(
    "I17.routing-replay", "a replay that outlives its batch (I17)", "log-probs after a replay", family=MOE
)
class ReplayGoesOn(ReferenceBackend):
    """The routing of one sequence stays in force for the next batch that has none."""

    _last: Tensor | None = None

    def routed(self, row: SequenceBatch, step: MicroBatchStep) -> dict[str, Tensor]:
        self._last = row.tokens.get("routing", self._last)
        if self._last is not None and len(self._last) == row.num_tokens:
            row = row.with_tokens(routing=self._last)
        return super().routed(row, step)


@Mutant(
    "I17.routing-replay",
    "gates that do not follow the replay (I17)",
    "log-probs with another routing",
    family=MOE,
)
class GatesOfItsOwnChoice(ReferenceBackend):
    """Experts are replayed, and weighed with the gates of the router's present choice."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for name, router in self.model.named_modules():
            if name.endswith("mlp.gate"):
                router.register_forward_hook(_own_gates)


def _own_gates(
    router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    logits, gates, experts = output
    likeliest = logits.softmax(-1).topk(gates.shape[1]).values
    return logits, likeliest / likeliest.sum(-1, keepdim=True), experts


@Mutant("I17.routing-replay", "miles #3146", "another routing of equal lengths", family=MOE)
class ReplaysBatchFirst(Packed):
    """Experts of sequences of one length are read as if the first tokens of all of them came first."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        lengths, count = set(micro_batch.lengths), micro_batch.num_sequences
        if "routing" in micro_batch.tokens and len(lengths) == 1:
            routing = micro_batch["routing"]
            moved = routing.view(*lengths, count, *routing.shape[1:]).transpose(0, 1).reshape(routing.shape)
            micro_batch = micro_batch.with_tokens(routing=moved)
        return super().outputs(micro_batch, step)


class _WithRouters(ReferenceBackend):
    kind: type[Routers]

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for router in self.routers._routers:
            router._forward_hooks.clear()
        self.routers = self.kind(self.model)


class _FirstExpertsArePadding(Routers):
    def _after(
        self, layer: int, router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        replayed = self._replay
        if replayed is None:
            return super()._after(layer, router, args, output)
        padding = (replayed[:, layer] == torch.arange(replayed.shape[-1])).all(1, keepdim=True)
        self._replay = replayed.clone()
        self._replay[:, layer] = torch.where(padding, output[2], replayed[:, layer])
        try:
            return super()._after(layer, router, args, output)
        finally:
            self._replay = replayed


@Mutant("I17.routing-replay", "a filler value of recorded routing (I17)", "with another routing", family=MOE)
class TakesTheFirstExpertsForPadding(_WithRouters):
    """Tokens whose recorded experts are the first ones choose for themselves."""

    kind = _FirstExpertsArePadding


class _AlwaysNormalises(Routers):
    def _after(
        self, layer: int, router: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, gates, experts = super()._after(layer, router, args, output)
        return logits, gates if self._replay is None else gates / gates.sum(-1, keepdim=True), experts


@Mutant("I17.routing-replay", "gates of a replay (I17)", "and gates that are not normalised", family=MOE)
class ReplayNormalisesGates(_WithRouters):
    """Gates of replayed experts are divided by their sum, whatever the config has."""

    kind = _AlwaysNormalises


class _OwnShares(Routers):
    """Routers whose balance counts their own choice."""

    def outputs(
        self, routings: Sequence[Routing], cu_seqlens: Tensor, names: Sequence[OutputName]
    ) -> dict[str, Tensor]:
        if "aux_loss" not in names:
            return super().outputs(routings, cu_seqlens, names)
        count = routings[0].experts.shape[1]
        ours = [replace(one, experts=one.logits.topk(count).indices) for one in routings]
        balanced = super().outputs(ours, cu_seqlens, names)
        return {**super().outputs(routings, cu_seqlens, names), "aux_loss": balanced["aux_loss"]}


@Mutant("I18.aux-gradient", "the router's own choice in a balance", "and not the replayed ones", family=MOE)
class BalanceOfOwnChoice(ReferenceBackend):
    """The balance counts the choice of the routers, and not the replayed experts."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.routers = _OwnShares(self.model)
