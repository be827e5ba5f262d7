"""Layouts, dtypes and model families of the Megatron engine under the conformance suite."""

from __future__ import annotations

from functools import partial

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import HYBRID, HYBRID_MOE, MOE, Profile, Setting
from core_rl_megatron.versions import packs_delta_net

LINEAR = ("qwen3", "llama", "qwen2")
HYBRIDS, MIXED = ((HYBRID, HYBRID_MOE), (MOE, HYBRID_MOE)) if packs_delta_net() else ((), (MOE,))
WITH_IMAGES = ("qwen3_vl", "qwen2_5_vl")
"""For layouts without sequence parallelism."""
SPREAD = {"options": {"distributed_optimizer": True, "overlap_param_gather": True, "ddp_bucket_size": 1000}}
"""With buckets that are small enough for tiny models to have several."""
TP_SP = ParallelLayout(tp=2, sequence_parallel=True)

text = partial(Setting, families=(*LINEAR, MOE, *HYBRIDS))
attention = partial(Setting, families=(*LINEAR, MOE, *WITH_IMAGES))
linear = partial(Setting, families=(*LINEAR, *WITH_IMAGES))
pipelined = partial(Setting, families=(*LINEAR, *HYBRIDS, *WITH_IMAGES), layer_multiple=2)
experts = partial(Setting, families=MIXED, expert_multiple=2)

PROFILE = Profile(
    layouts=(ParallelLayout(dp=1), ParallelLayout(dp=2)),
    settings=(
        text(layout=TP_SP),
        text(layout=ParallelLayout(dp=2, tp=2, sequence_parallel=True)),
        # The state of Gated DeltaNet runs over all tokens of a sequence.
        attention(layout=ParallelLayout(cp=2)),
        Setting(layout=ParallelLayout(tp=2, cp=2, sequence_parallel=True), families=(*LINEAR, MOE)),
        # Megatron asks for sequence parallelism where a mixture of experts meets tensor parallelism.
        linear(layout=ParallelLayout(tp=2)),
        Setting(layout=ParallelLayout(tp=2, pp=2), families=LINEAR, layer_multiple=2),
        pipelined(layout=ParallelLayout(pp=2)),
        pipelined(
            name="interleaved",
            layout=ParallelLayout(pp=2),
            options={"options": {"virtual_stages": 2}},
            layer_multiple=4,
        ),
        pipelined(layout=ParallelLayout(dp=2, pp=2)),
        Setting(layout=ParallelLayout(pp=2, cp=2), families=LINEAR, layer_multiple=2),
        experts(layout=ParallelLayout(dp=2, ep=2)),
        # Experts are grouped everywhere else.
        experts(
            name="apart",
            layout=ParallelLayout(tp=2, ep=2, sequence_parallel=True),
            options={"options": {"moe_grouped_gemm": False}},
        ),
        attention(name="distributed-optimizer", layout=ParallelLayout(dp=2), options=SPREAD),
        # Gradients are added up during the backward pass everywhere else.
        pipelined(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2, pp=2),
            options={"options": {"distributed_optimizer": True, "overlap_grad_reduce": False}},
        ),
        Setting(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2, ep=2),
            families=(MOE,),
            expert_multiple=2,
            options={"options": SPREAD["options"] | {"fusions": True}},
        ),
        linear(
            name="recompute",
            layout=ParallelLayout(tp=2),
            options={"options": {"recompute": "full", "fusions": True}},
        ),
    ),
    dtypes=("float32", "bfloat16"),
    families=(*LINEAR, MOE, *HYBRIDS, *WITH_IMAGES),
)
