"""The trainer as the conformance suite judges it: ``pytest --trainer=core-rl --pyargs core_rl_conformance``."""

from __future__ import annotations

from typing import get_args

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile
from core_rl_conformance.trainers.spec import Feature, TrainerSpec
from core_rl_oracle.loss_names import AdvantageRule, Aggregation, KLEstimator, Objective

SPEC = TrainerSpec(
    name="core-rl",
    factory="core_rl_trainer.black_box:BlackBoxTrainer",
    description="Interfaces of core-rl-trainer over the engine fsdp",
    objectives=frozenset(get_args(Objective)),
    aggregations=frozenset(get_args(Aggregation)),
    advantages=frozenset(get_args(AdvantageRule)),
    kl_estimators=frozenset(get_args(KLEstimator)),
    log_ratio_clamp=20.0,  # MAX_LOG_RATIO of algorithms.kl
    schedules=frozenset({"constant", "linear", "cosine"}),
    features=frozenset(Feature) - {Feature.SGD},
    profile=Profile(
        layouts=(ParallelLayout(dp=1), ParallelLayout(dp=2)),
        dtypes=("float32", "bfloat16"),
        options={"engine": "fsdp"},
    ),
)
