"""Conformance profile of the torchtitan engine."""

from __future__ import annotations

from functools import partial

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import MOE, Profile, Setting

DENSE = ("qwen3", "llama")

dense = partial(Setting, families=DENSE)
experts = partial(Setting, families=(MOE,), expert_multiple=2)

PROFILE = Profile(
    layouts=(ParallelLayout(dp=1), ParallelLayout(dp=2), ParallelLayout(cp=2)),
    settings=(
        dense(layout=ParallelLayout(tp=2)),
        dense(layout=ParallelLayout(tp=2, sequence_parallel=True)),
        dense(layout=ParallelLayout(dp=2, tp=2, sequence_parallel=True)),
        dense(layout=ParallelLayout(tp=2, cp=2, sequence_parallel=True)),
        experts(layout=ParallelLayout(dp=2, ep=2)),
        experts(layout=ParallelLayout(dp=4, ep=2)),
        Setting(
            name="hybrid",
            layout=ParallelLayout(dp=4),
            options={"options": {"replicas": 2, "fsdp_reshard_after_forward": "always"}},
        ),
    ),
    dtypes=("float32", "bfloat16"),
    families=(*DENSE, MOE),
)
