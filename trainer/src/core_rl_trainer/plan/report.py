"""The report of a plan: steps, tokens, and the memory of each role, for ``core-rl train --dry-run``.

Memory is an estimate for a rank, in bytes. Micro-batches have ``T`` tokens; the model has ``L`` layers of width ``h``;
the compute dtype has ``b`` bytes:

=========== ============================================================================================
weights     the engine config's `TrainEngineConfig.state_bytes`: as a rule 4 for each weight on
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
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from core_rl.config.engine import EngineConfig, TrainEngineConfig
from core_rl.toolkit.footprint import Footprint, footprint_of
from core_rl.toolkit.token_logprobs import GROUP_ROWS, KEEP_BYTES, chunk_rows
from core_rl_trainer.data.training_data import DataSummary
from core_rl_trainer.plan.run_plan import EnginePlan, RunPlan, Workload
from core_rl_trainer.plan.slots import describe_slots

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
class RoleReport:
    """The engine of one role, with the memory of each rank."""

    role: str
    engine: str
    layout: str
    dtype: str
    device: str
    model: Footprint
    memory: MemoryEstimate
    ranks: int
    """Ranks of a train engine; 0 for an inference engine, which plans its own work."""
    sequences: int
    """Upper bound of a rank for one pass over a step's sequences; ranks with the same ``dp`` see the same ones."""
    micro_batches: int
    """Upper bound for these sequences."""
    machines: tuple[int, ...] = ()
    """The number of each rank's machine."""
    devices: tuple[int, ...] = ()
    """The number of each rank's device there."""
    place: str = ""
    """Machines and devices in words."""
    colocated_with: str | None = None
    """The role in whose processes the engine lives; null where it has its own."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A whole run."""

    algorithm: str
    output_dir: str
    steps: int
    workload: Workload
    data: DataSummary
    end_tokens: Mapping[int, str]
    """Texts of the tokens that end a sequence, by id."""
    passes: float
    """Over the examples to train on."""
    sequences_per_step: int
    tokens_per_step: int
    """Upper bound."""
    micro_batch_tokens: int
    evaluations: int
    checkpoints: int
    off_policyness: int
    """The largest lag of a completion, in weight versions; 0 is a synchronous run."""
    colocated: bool
    """Whether roles on the same devices are offloaded while others work."""
    cluster: str
    """The machines, in words."""
    roles: tuple[RoleReport, ...]
    remarks: tuple[str, ...] = ()
    """Settings that are probably not meant."""


def report_plan(plan: RunPlan) -> PlanReport:
    """The report of ``plan``. Models are counted, not built; nothing is started."""
    recipe, workload, schedule = plan.recipe, plan.workload, plan.schedule
    steps, every = schedule.steps, schedule.eval_every or schedule.steps
    sequences = workload.examples_per_step * workload.sequences_per_example
    return PlanReport(
        algorithm=plan.algorithm.type,
        output_dir=str(plan.files.directory),
        steps=steps,
        workload=workload,
        data=plan.data_summary,
        end_tokens=plan.end_tokens,
        passes=steps * workload.examples_per_step / workload.examples,
        sequences_per_step=sequences,
        tokens_per_step=sequences * workload.longest,
        micro_batch_tokens=recipe.micro_batch_tokens,
        evaluations=(
            len({steps, *range(every, steps + 1, every)}) + schedule.evaluates_first
            if workload.held_out
            else 0
        ),
        checkpoints=len({steps, *range(schedule.save_every, steps + 1, schedule.save_every)}),
        off_policyness=recipe.rollout.max_head_offpolicyness,
        colocated=recipe.colocated,
        cluster=str(plan.cluster),
        roles=tuple(
            _role(name, engine, sequences, workload.longest, recipe.micro_batch_tokens)
            for name, engine in plan.engines.items()
        ),
        remarks=plan.remarks,
    )


def _role(
    name: str, engine: EnginePlan[EngineConfig], sequences: int, longest: int, budget: int
) -> RoleReport:
    config = engine.config
    model = footprint_of(config.model)
    ranks = share = micro_batches = 0
    memory = MemoryEstimate(weights=BYTES[config.dtype] * model.parameters / config.layout.tp)
    if isinstance(config, TrainEngineConfig):
        ranks, share = config.layout.world_size, math.ceil(sequences / config.layout.dp)
        micro_batches = math.ceil(share / max(1, budget // longest))  # if all are as long as the longest
        memory = estimate_memory(config, model, min(budget, share * longest))
    return RoleReport(
        role=name,
        engine=engine.spec.name,
        layout=str(config.layout),
        dtype=config.dtype,
        device=config.device,
        model=model,
        memory=memory,
        ranks=ranks,
        sequences=share,
        micro_batches=micro_batches,
        machines=tuple(slot.machine for slot in engine.slots),
        devices=tuple(slot.device for slot in engine.slots),
        place=describe_slots(engine.slots),
        colocated_with=engine.colocated_with,
    )


def estimate_memory(config: TrainEngineConfig, model: Footprint, tokens: int) -> MemoryEstimate:
    """The memory of one rank for micro-batches of ``tokens``; see the module's docstring."""
    state = config.state_bytes(model.parameters, 0 if config.optimizer is None else model.trained)
    gradient = 4 * model.largest / config.layout.tp if config.optimizer is not None else 0.0
    # A rank gathers its own experts alone.
    present = model.parameters - model.experts + model.experts // config.layout.ep
    return MemoryEstimate(
        weights=state.weights,
        gradients=state.gradients,
        moments=state.moments,
        transient=gradient + config.gathered_bytes(present, model.outer, model.layers),
        activations=_activations(config, model, tokens),
        logits=_logits(config, model, tokens),
    )


def _activations(config: TrainEngineConfig, model: Footprint, tokens: int) -> float:
    layout, size = config.layout, BYTES[config.dtype] * tokens / config.layout.cp
    # Input and output of a norm, in bfloat16 with a float32 copy of the input.
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
    local_tokens = tokens / config.layout.cp
    stored = local_tokens * row if local_tokens * row <= KEEP_BYTES and config.optimizer is not None else 0.0
    on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    rows = chunk_rows(row, on_cpu)
    rounded = min(local_tokens, max(rows, GROUP_ROWS)) * row / 2  # gradients, for one product
    return stored + 2 * min(local_tokens, rows) * row + (rounded if config.dtype == "bfloat16" else 0.0)
