"""The specs of verl's FSDP engine with its losses, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Waiver
from core_rl_conformance.trainers.spec import Feature, TrainerSpec

FEATURES = frozenset(
    {
        Feature.GRADIENTS,
        Feature.TOKEN_BUDGET,
        Feature.SEQUENCE_COUNT,
        Feature.MASK_HOLES,
        Feature.CLIPPING,
        Feature.RESUME,
        Feature.LORA,
    }
)
# Of core_algos: log-ratios, and the whole of k3.
LOG_RATIO_CLAMP, KL_CLAMP = 20.0, 10.0
POLICY_FEATURES = FEATURES | {Feature.TOKEN_ADVANTAGES, Feature.ENTROPY, Feature.TEMPERATURE}
LAYOUTS = (ParallelLayout(), ParallelLayout(dp=2))
FAMILIES = ("qwen3", "llama", "qwen2", "gemma2")
known = partial(Waiver, owner="verl", raises=AssertionError)
FIRST_TOKENS = known(
    check="T4.first-token",
    reason="sft_loss rolls the mask over all packed rows, so that the last token of a sequence is trained to predict "
    "the first of the next (https://github.com/verl-project/verl/pull/5797, closed)",
    dtypes=("float32",),  # in bfloat16 the error is within the rounding of a tiny model
)
METRICS = known(
    check="T3.metrics",
    reason="pg_clipfrac and ppo_kl are means of micro-batches' means (no upstream report known)",
)
UNTRAINED = known(
    check="T4.untrained",
    reason="the 'seq-mean' modes divide by all sequences, also by sequences with an empty mask "
    "(https://github.com/verl-project/verl/pull/4510)",
)
PADDED_LENGTH = tuple(
    known(
        check=check,
        reason="with loss_scale_factor null, its default, 'seq-mean-token-sum-norm' divides by the padded length of "
        "each micro-batch (https://github.com/verl-project/verl/pull/5366)",
    )
    for check in (
        "T1.reinforce",
        "T1.aggregations",
        "T3.metrics",
        "T3.order",
        "T4.first-token",
        "T4.untrained",
        "T6.steps",
    )
)
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
    profile=replace(PROFILE, waivers=(FIRST_TOKENS,)),
    package="verl",
)
PPO = replace(
    SFT,
    name="verl-ppo",
    factory="core_rl_verl.cpu:PPOBlackBox",
    description="FSDPEngineWithLMHead (fsdp2) with ppo_loss, packed rows",
    objectives=frozenset({"reinforce", "clipped", "dual_clipped", "cispo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    advantages=frozenset({"grpo", "dr_grpo", "rloo"}),
    kl_estimators=frozenset({"k1", "k2", "k3"}),
    log_ratio_clamp=LOG_RATIO_CLAMP,
    kl_clamp=KL_CLAMP,
    features=POLICY_FEATURES,
    profile=replace(PROFILE, waivers=(METRICS, UNTRAINED)),
)
GSPO = TrainerSpec(
    name="verl-gspo",
    factory="core_rl_verl.cpu:PPOBlackBox",
    description="FSDPEngineWithLMHead (fsdp2) with ppo_loss and loss_mode 'gspo'",
    objectives=frozenset({"gspo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    features=frozenset({Feature.GRADIENTS, Feature.TOKEN_BUDGET, Feature.SEQUENCE_COUNT, Feature.MASK_HOLES}),
    processes="each rank",
    profile=replace(PROFILE, waivers=(METRICS, UNTRAINED)),
    package="verl",
)
PPO_DEFAULT = replace(
    GSPO,
    name="verl-ppo-default",
    description="ppo_loss, 'seq-mean-token-sum-norm' with loss_scale_factor at its default, null",
    objectives=frozenset({"reinforce"}),
    aggregations=frozenset({"fixed_length"}),
    features=GSPO.features - {Feature.MASK_HOLES},
    profile=Profile(
        layouts=LAYOUTS, families=FAMILIES, options={"default_scale_factor": True}, waivers=PADDED_LENGTH
    ),
)
OFFLOAD = replace(
    SFT,
    name="verl-offload",
    description="sft_loss with param_offload and optimizer_offload, whose moves on a CPU copy nothing",
    profile=replace(SFT.profile, families=("qwen3",), options={"offload": True}),
)
