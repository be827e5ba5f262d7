"""The specs of verl's FSDP engine with its losses: what they compute on one rank and on two."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile
from core_rl_conformance.trainers.spec import Feature, TrainerSpec

__all__ = ["GSPO", "PPO", "PPO_DEFAULT", "SFT"]

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
POLICY_FEATURES = FEATURES | {Feature.TOKEN_ADVANTAGES, Feature.ENTROPY, Feature.TEMPERATURE}
LAYOUTS = (ParallelLayout(), ParallelLayout(dp=2))
FAMILIES = ("qwen3", "llama", "qwen2", "gemma2")
PROFILE = Profile(layouts=LAYOUTS, families=FAMILIES, dtypes=("float32", "bfloat16"))

SFT = TrainerSpec(
    name="verl-sft",
    factory="core_rl_verl.cpu:SFTBlackBox",
    description="FSDPEngineWithLMHead (fsdp2) with sft_loss, packed rows",
    objectives=frozenset({"cross_entropy"}),
    aggregations=frozenset({"token_mean"}),
    schedules=frozenset({"constant", "cosine"}),
    warmup_from_zero=True,
    features=FEATURES,
    processes="each rank",
    profile=PROFILE,
    package="verl",
)
PPO = TrainerSpec(
    name="verl-ppo",
    factory="core_rl_verl.cpu:PPOBlackBox",
    description="FSDPEngineWithLMHead (fsdp2) with ppo_loss, packed rows",
    objectives=frozenset({"reinforce", "clipped", "dual_clipped", "cispo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    advantages=frozenset({"grpo", "dr_grpo", "rloo"}),
    kl_estimators=frozenset({"k1", "k2", "k3"}),
    schedules=frozenset({"constant", "cosine"}),
    warmup_from_zero=True,
    features=POLICY_FEATURES,
    processes="each rank",
    profile=PROFILE,
    package="verl",
)
GSPO = TrainerSpec(
    name="verl-gspo",
    factory="core_rl_verl.cpu:PPOBlackBox",
    description="FSDPEngineWithLMHead (fsdp2) with ppo_loss and loss_mode 'gspo'",
    objectives=frozenset({"gspo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    features=frozenset({Feature.GRADIENTS, Feature.TOKEN_BUDGET, Feature.SEQUENCE_COUNT, Feature.MASK_HOLES}),
    processes="each rank",
    profile=PROFILE,
    package="verl",
)
PPO_DEFAULT = TrainerSpec(
    name="verl-ppo-default",
    factory="core_rl_verl.cpu:PPOBlackBox",
    description="ppo_loss, 'seq-mean-token-sum-norm' with loss_scale_factor at its default, null",
    objectives=frozenset({"reinforce"}),
    aggregations=frozenset({"fixed_length"}),
    features=frozenset({Feature.GRADIENTS, Feature.TOKEN_BUDGET, Feature.SEQUENCE_COUNT}),
    processes="each rank",
    profile=Profile(layouts=LAYOUTS, families=FAMILIES, options={"default_scale_factor": True}),
    package="verl",
)
