"""The plan of a run: its steps, ranks and memory, before anything starts.

The memory of a rank is estimated in bytes. Micro-batches have ``T`` tokens; the model has ``L`` layers of width ``h``;
the compute dtype has ``b`` bytes:

=========== ============================================================================================
weights     what the engine's config says (`TrainEngineConfig.state_bytes`): as a rule 4 for each weight on
gradients   the ranks that share a copy, the same for a gradient, and 8 for AdamW's moments
moments
transient   one float32 gradient of the head or the embeddings before it is added to others, and what an engine
            gathers (`TrainEngineConfig.gathered_bytes`)
activations ``b T / cp * (6 h + (3 q + 2 k + 4 f) / tp)`` for each layer, with queries of width ``q``, keys and
            values of ``k`` and an MLP of ``f``: counted as Korthikanti et al. 2022 (arXiv:2205.05198, section 4)
            do, for RMSNorm, a gated MLP and no attention matrix, which is not kept; in bfloat16 ``8 h`` for
            ``6 h``, since norms keep float32. Norms of queries and keys add ``2 (q + k)``, in bfloat16 ``3 (q + k)``.
            Sequence parallelism spreads all of it over ``tp``. One layer where nothing is trained. Where layers are
            computed again, ``b h T`` for each and one layer in full. Under pipeline parallelism, ``pp``
            micro-batches on the first stage make up for its fewer layers (4.2.3).
logits      log-probs are computed in chunks of rows, in two float32 buffers; logits that fit into 128 MiB are
            kept besides (`core_rl.toolkit.token_logprobs`)
=========== ============================================================================================

It leaves out what frameworks and libraries take, buffers of communication, and fragmentation. Of expert parallelism it
knows what is gathered and kept of routed tokens (`TrainEngineConfig.expert_rows`), not that weights are shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from core_rl.config.engine import TrainEngineConfig
from core_rl.toolkit.footprint import Footprint, footprint_of
from core_rl.toolkit.token_logprobs import GROUP_ROWS, KEEP_BYTES, chunk_rows
from core_rl_trainer.data.statistics import DataStatistics
from core_rl_trainer.plan.run_plan import Placement, PreparedRun, Workload
from core_rl_trainer.recipe.placement import describe_slots
from core_rl_trainer.recipe.recipe import Recipe

__all__ = ["MemoryEstimate", "RankPlan", "RolePlan", "RunPlan", "plan_run"]

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank; see the module's docstring."""

    weights: float
    gradients: float = 0.0
    moments: float = 0.0
    transient: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """The most at one time: in a backward pass, or in the optimizer's step, which takes half the moments again."""
        state = self.weights + self.gradients + self.moments
        return state + max(self.transient + self.activations + self.logits, self.moments / 2)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank of a train engine."""

    rank: int
    coordinates: dict[str, int]
    """Its number along ``tp``, ``cp``, ``dp`` and ``pp``."""
    sequences: int
    """At most, of one pass over a step's sequences; ranks with the same ``dp`` see the same ones."""
    micro_batches: int
    """At most, for them."""


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The engine of one role."""

    role: str
    engine: str
    layout: str
    dtype: str
    device: str
    model: Footprint
    memory: MemoryEstimate
    ranks: tuple[RankPlan, ...]
    """None for an inference engine, which plans its own."""
    machines: tuple[int, ...] = ()
    """The number of each rank's machine."""
    devices: tuple[int, ...] = ()
    """The number of each rank's device there."""
    place: str = ""
    """Both in words."""
    colocated_with: str | None = None
    """The role in whose processes it lives; null where it has its own."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A whole run."""

    algorithm: str
    output_dir: str
    steps: int
    workload: Workload
    data: DataStatistics
    end_tokens: Mapping[int, str]
    """Texts of the tokens that end a sequence, by id."""
    passes: float
    """Over the examples to train on."""
    sequences_per_step: int
    tokens_per_step: int
    """At most."""
    micro_batch_tokens: int
    evaluations: int
    checkpoints: int
    off_policyness: int
    """The largest lag of a completion, in weight versions; 0 is a synchronous run."""
    colocated: bool
    """Whether roles on the same devices are offloaded while others work."""
    cluster: str
    """The machines, in words."""
    roles: tuple[RolePlan, ...]
    remarks: tuple[str, ...] = ()
    """Settings that are probably not meant."""


def plan_run(recipe: Recipe, prepared: PreparedRun, remarks: tuple[str, ...] = ()) -> RunPlan:
    """The plan of ``recipe``. Models are counted, not built; nothing is started."""
    workload, steps = prepared.workload, recipe.steps
    sequences = workload.examples_per_step * workload.sequences_per_example
    evaluations: set[int] = (
        set()
        if not recipe.data.has_evaluation
        else {0, steps, *range(recipe.eval_every or steps, steps + 1, recipe.eval_every or steps)}
    )
    checkpoints = {steps, *range(recipe.save_every, steps + 1, recipe.save_every)}
    return RunPlan(
        algorithm=recipe.algorithm.type_,
        output_dir=str(recipe.directory),
        steps=steps,
        workload=workload,
        data=prepared.data,
        end_tokens=prepared.end_tokens,
        passes=steps * workload.examples_per_step / workload.examples,
        sequences_per_step=sequences,
        tokens_per_step=sequences * workload.longest,
        micro_batch_tokens=recipe.micro_batch_tokens,
        evaluations=len(evaluations),
        checkpoints=len(checkpoints),
        off_policyness=recipe.rollout.max_head_offpolicyness,
        colocated=recipe.colocated,
        cluster=str(recipe.cluster),
        roles=tuple(_role(role, prepared, sequences, recipe.micro_batch_tokens) for role in prepared.roles),
        remarks=remarks,
    )


def _role(role: str, prepared: PreparedRun, sequences: int, limit: int) -> RolePlan:
    (spec, config), longest = prepared.roles[role], prepared.workload.longest
    placement = prepared.placements.get(role, Placement(slots=()))
    model = footprint_of(config.model)
    ranks: tuple[RankPlan, ...] = ()
    memory = MemoryEstimate(weights=BYTES[config.dtype] * model.parameters / config.layout.tp)
    if isinstance(config, TrainEngineConfig):
        ranks = tuple(_ranks(config, sequences, longest, limit))
        tokens = min(limit, max(rank.sequences for rank in ranks) * longest)
        memory = estimate_memory(config, model, tokens)
    return RolePlan(
        role=role,
        engine=spec.name,
        layout=str(config.layout),
        dtype=config.dtype,
        device=config.device,
        model=model,
        memory=memory,
        ranks=ranks,
        machines=tuple(slot.machine for slot in placement.slots),
        devices=tuple(slot.device for slot in placement.slots),
        place=describe_slots(placement.slots),
        colocated_with=placement.colocated_with,
    )


def _ranks(config: TrainEngineConfig, sequences: int, longest: int, limit: int) -> Iterator[RankPlan]:
    share = math.ceil(sequences / config.layout.dp)
    for rank in range(config.layout.world_size):
        coordinates = config.layout.coordinates(rank)
        each = max(1, limit // longest)  # sequences of a micro-batch, if all are as long as the longest
        yield RankPlan(
            rank=rank, coordinates=coordinates, sequences=share, micro_batches=math.ceil(share / each)
        )


def estimate_memory(config: TrainEngineConfig, model: Footprint, tokens: int) -> MemoryEstimate:
    """The memory of one rank for micro-batches of ``tokens``; see the module's docstring."""
    state = config.state_bytes(model.parameters, 0 if config.optimizer is None else model.trained)
    return MemoryEstimate(
        weights=state.weights,
        gradients=state.gradients,
        moments=state.moments,
        transient=_transient(config, model),
        activations=_activations(config, model, tokens),
        logits=_logits(config, model, tokens),
    )


def _transient(config: TrainEngineConfig, model: Footprint) -> float:
    gradient = 4 * model.largest / config.layout.tp if config.optimizer is not None else 0.0
    # A rank gathers its own experts alone.
    present = model.parameters - model.experts + model.experts // config.layout.ep
    return gradient + config.gathered_bytes(present, model.outer, model.layers)


def _activations(config: TrainEngineConfig, model: Footprint, tokens: int) -> float:
    layout, size = config.layout, BYTES[config.dtype] * tokens / config.layout.cp
    # What goes into a norm, in bfloat16 in float32 as well, and what comes out.
    norm = 4 if config.dtype == "bfloat16" else 3
    around = 2 * norm * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    inner = model.inner + (config.expert_rows - 1) * model.routed
    layer = size * (around + (inner + (norm - 1) * model.normed) / layout.tp)
    if config.optimizer is None:
        return layer
    if config.recomputes:
        return model.layers * size * model.hidden + layer
    return model.layers * layer


def _logits(config: TrainEngineConfig, model: Footprint, tokens: int) -> float:
    if config.model.head != "lm":
        return 0.0
    row = 4 * model.vocabulary / config.layout.tp
    own = tokens / config.layout.cp
    kept = own * row if own * row <= KEEP_BYTES and config.optimizer is not None else 0.0
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    rows = chunk_rows(row, on_cpu)
    rounded = min(own, max(rows, GROUP_ROWS)) * row / 2  # gradients, for one product
    return kept + 2 * min(own, rows) * row + (rounded if config.dtype == "bfloat16" else 0.0)
