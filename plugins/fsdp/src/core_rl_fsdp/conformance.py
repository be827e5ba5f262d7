"""Conformance profiles of the FSDP engine."""

from __future__ import annotations

from functools import partial

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import DENSE, ROUTED, VISION, VISION_MOE, Profile, Setting

LINEAR = tuple(family for family in DENSE if family != "gpt2")
"""Models of plain linear layers, which tensor parallelism needs; experts are fused."""

WITH_IMAGES = (*LINEAR, *(family for family in VISION if family not in ("qwen3_5_vl", VISION_MOE)))
"""The same with images, which need whole hidden states; the plans of Gated DeltaNet and of experts are refused."""

experts = partial(Setting, families=ROUTED, expert_multiple=2)

PROFILE = Profile(
    layouts=(
        ParallelLayout(dp=1),
        ParallelLayout(dp=2),
        ParallelLayout(dp=4),
        ParallelLayout(cp=2),
        ParallelLayout(cp=4),
        ParallelLayout(dp=2, cp=2),
    ),
    settings=(
        Setting(layout=ParallelLayout(tp=2), families=WITH_IMAGES),
        Setting(layout=ParallelLayout(tp=2, sequence_parallel=True), families=LINEAR),
        Setting(layout=ParallelLayout(dp=2, tp=2), families=WITH_IMAGES),
        Setting(layout=ParallelLayout(tp=2, cp=2, sequence_parallel=True), families=LINEAR),
        experts(layout=ParallelLayout(dp=2, ep=2)),
        experts(layout=ParallelLayout(dp=4, ep=2)),
        Setting(
            name="hybrid",
            layout=ParallelLayout(dp=4),
            options={"options": {"replicas": 2, "gradient_checkpointing": True}},
        ),
        Setting(
            name="activation-offload",
            layout=ParallelLayout(dp=2),
            options={
                "options": {
                    "activation_offload": True,
                    "reshard_after_forward": False,
                    "reduce_scatter": "last",
                }
            },
        ),
    ),
    dtypes=("float32", "bfloat16"),
)
