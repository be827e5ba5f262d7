"""The specs of AReaL's FSDP engine on one rank and two."""

from __future__ import annotations

from dataclasses import replace

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Waiver
from core_rl_conformance.trainers.spec import Feature, TrainerSpec

__all__ = ["GSPO", "PPO", "SFT", "SFT_SDPA"]

FEATURES = frozenset(
    {
        Feature.GRADIENTS,
        Feature.TOKEN_BUDGET,
        Feature.SEQUENCE_COUNT,
        Feature.MASK_HOLES,
        Feature.CLIPPING,
        Feature.RESUME,
    }
)
PROFILE = Profile(
    layouts=(ParallelLayout(), ParallelLayout(dp=2)),
    families=("qwen3", "llama", "qwen2", "gpt2", "gemma2"),
)

SFT = TrainerSpec(
    name="areal-sft",
    factory="core_rl_areal.adapter:SFTBlackBox",
    description="FSDPLMEngine, with attention within each sequence",
    objectives=frozenset({"cross_entropy"}),
    aggregations=frozenset({"token_mean"}),
    schedules=frozenset({"constant", "linear", "cosine"}),
    warmup_from_zero=True,
    features=FEATURES,
    cut_metrics=frozenset({"sft/num_micro_batches"}),
    processes="each rank",
    profile=PROFILE,
    package="areal",
)
SFT_SDPA = replace(
    SFT,
    name="areal-sft-sdpa",
    description="FSDPLMEngine with the attention 'sdpa' of transformers, which AReaL accepts",
    profile=replace(PROFILE, families=("qwen3",), options={"attention": "sdpa"}),
)
PPO = replace(
    SFT,
    name="areal-ppo",
    factory="core_rl_areal.adapter:PPOBlackBox",
    description="FSDPPPOActor, with attention within each sequence",
    objectives=frozenset({"clipped", "dual_clipped"}),
    advantages=frozenset({"grpo", "dr_grpo", "rloo"}),
    features=FEATURES | {Feature.TOKEN_ADVANTAGES, Feature.TEMPERATURE},
    cut_metrics=frozenset({"ppo_actor/update/num_micro_batches"}),
)
GSPO = replace(
    PPO,
    name="areal-gspo",
    description="FSDPPPOActor with importance_sampling_level='sequence'",
    objectives=frozenset({"gspo"}),
    features=PPO.features - {Feature.TOKEN_ADVANTAGES},
)
