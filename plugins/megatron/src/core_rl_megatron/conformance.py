"""Layouts, dtypes and model families of the Megatron engine under the conformance suite."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import MOE, Profile, Setting

__all__ = ["PROFILE"]

LINEAR = ("qwen3", "llama", "qwen2")
SPREAD = {"options": {"distributed_optimizer": True}}
TP_SP = ParallelLayout(tp=2, sequence_parallel=True)

PROFILE = Profile(
    layouts=(
        ParallelLayout(dp=1),
        ParallelLayout(dp=2),
        TP_SP,
        ParallelLayout(cp=2),
        ParallelLayout(dp=2, tp=2, sequence_parallel=True),
        ParallelLayout(tp=2, cp=2, sequence_parallel=True),
    ),
    settings=(
        # Megatron asks for sequence parallelism where a mixture of experts meets tensor parallelism.
        Setting(layout=ParallelLayout(tp=2), families=LINEAR),
        Setting(layout=ParallelLayout(tp=2, pp=2), families=LINEAR, layer_multiple=2),
        Setting(layout=ParallelLayout(pp=2), families=LINEAR, layer_multiple=2),
        Setting(
            name="interleaved",
            layout=ParallelLayout(pp=2),
            options={"options": {"virtual_stages": 2}},
            families=LINEAR,
            layer_multiple=4,
        ),
        Setting(layout=ParallelLayout(dp=2, pp=2), families=LINEAR, layer_multiple=2),
        Setting(layout=ParallelLayout(pp=2, cp=2), families=LINEAR, layer_multiple=2),
        Setting(layout=ParallelLayout(dp=2, ep=2), families=(MOE,), expert_multiple=2),
        Setting(
            layout=ParallelLayout(tp=2, ep=2, sequence_parallel=True), families=(MOE,), expert_multiple=2
        ),
        Setting(name="distributed-optimizer", layout=ParallelLayout(dp=2), options=SPREAD),
        Setting(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2, pp=2),
            options=SPREAD,
            families=LINEAR,
            layer_multiple=2,
        ),
        Setting(
            name="distributed-optimizer",
            layout=ParallelLayout(dp=2, ep=2),
            options=SPREAD,
            families=(MOE,),
            expert_multiple=2,
        ),
        Setting(
            name="recompute",
            layout=ParallelLayout(tp=2),
            options={"options": {"recompute": "full"}},
            families=LINEAR,
        ),
    ),
    dtypes=("float32", "bfloat16"),
    families=(*LINEAR, MOE),
)
