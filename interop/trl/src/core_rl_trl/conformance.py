"""The specs of TRL's trainers on one rank, in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Waiver
from core_rl_conformance.trainers.spec import Feature, TrainerSpec

FEATURES = frozenset(
    {
        Feature.GRADIENTS,
        Feature.SEQUENCE_COUNT,
        Feature.MASK_HOLES,
        Feature.CLIPPING,
        Feature.RESUME,
        Feature.LORA,
        Feature.EPOCHS,
        Feature.RECIPES,
    }
)
OF_PAIRS = FEATURES - {Feature.MASK_HOLES, Feature.LORA, Feature.RECIPES}
PROFILE = Profile(layouts=(ParallelLayout(),))

known = partial(Waiver, owner="TRL", raises=AssertionError)
WAIVERS = (
    known(
        check="T2.entropy",
        reason="the entropy bonus is the mean over the tokens of each micro-batch, so that it depends on the cut "
        "(added by https://github.com/huggingface/trl/pull/6140)",
    ),
    known(
        check="T4.untrained",
        reason="loss types 'grpo' and 'dr_grpo' divide by all completions, also by completions with an empty mask "
        "(https://github.com/huggingface/trl/issues/6369 mended it for 'dapo')",
    ),
    known(
        check="T8.epochs",
        reason="RepeatSampler leaves out the prompts that do not fill a last generation batch, 1 of 25 in batches of 8 "
        "(https://github.com/huggingface/trl/pull/5652 tests it so)",
    ),
)

SHORT = known(
    check="T3.pairs",
    reason="the loss is a mean of micro-batch means, so that pairs of a shorter last micro-batch weigh more (no "
    "upstream report known; https://github.com/huggingface/trl/pull/2615 divides by the number of micro-batches)",
)
DPO_WAIVERS = (
    SHORT,
    known(
        check="T3.metrics",
        reason="entropy, mean logits and token accuracy are means over tokens of each micro-batch, averaged over "
        "micro-batches (no upstream report known; https://github.com/huggingface/trl/pull/5620 is about ranks)",
    ),
)
REWARD_WAIVERS = (
    SHORT,
    known(
        check="T3.metrics",
        reason="'min_reward' and 'max_reward' are means of the extremes of micro-batches (no upstream report known)",
    ),
    known(
        check="T4.last-token",
        reason="with EOS for padding, the score of a sequence that ends in EOS is read one token early "
        "(https://github.com/huggingface/transformers/issues/35352)",
    ),
)

trainer = partial(
    TrainerSpec, schedules=frozenset({"constant", "linear", "cosine"}), warmup_from_zero=True, package="trl"
)
SFT = trainer(
    name="trl-sft",
    factory="core_rl_trl.adapter:SFTBlackBox",
    description="SFTTrainer with loss_type='nll', padded rows",
    objectives=frozenset({"cross_entropy"}),
    aggregations=frozenset({"token_mean"}),
    features=FEATURES,
    profile=PROFILE,
)
GRPO = trainer(
    name="trl-grpo",
    factory="core_rl_trl.adapter:GRPOBlackBox",
    description="GRPOTrainer without generation: loss_type 'dapo', 'grpo' and 'dr_grpo'",
    objectives=frozenset({"clipped", "dual_clipped", "gspo"}),
    aggregations=frozenset({"token_mean", "sequence_mean", "fixed_length"}),
    kl_estimators=frozenset({"k3"}),
    features=FEATURES | {Feature.TOKEN_ADVANTAGES, Feature.ENTROPY, Feature.TEMPERATURE},
    profile=replace(PROFILE, waivers=WAIVERS),
)
DPO = trainer(
    name="trl-dpo",
    factory="core_rl_trl.pairs:DPOBlackBox",
    description="DPOTrainer with loss_type='sigmoid' and given log-probs of the reference",
    objectives=frozenset({"dpo"}),
    features=OF_PAIRS,
    profile=replace(PROFILE, waivers=DPO_WAIVERS),
)
REWARD = trainer(
    name="trl-reward",
    factory="core_rl_trl.pairs:RewardBlackBox",
    description="RewardTrainer, with EOS for padding",
    objectives=frozenset({"bradley_terry"}),
    features=OF_PAIRS,
    profile=replace(PROFILE, waivers=REWARD_WAIVERS),
)
