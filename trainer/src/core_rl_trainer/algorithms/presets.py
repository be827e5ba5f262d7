"""The actor with the settings of a paper: each is `PPOActorInterface` with other defaults, and any can be changed.

KL coefficients are 0 until they are set, since a reference policy costs a second model.
"""

from __future__ import annotations

from typing import Literal

from core_rl_trainer.algorithms.aggregation import FixedLength
from core_rl_trainer.algorithms.estimators import GAE, RLOO, AdvantageConfig, DrGRPO, ReinforcePlusPlus, ReMax
from core_rl_trainer.algorithms.kl import KLEstimator
from core_rl_trainer.algorithms.objectives import (
    CISPO,
    GSPO,
    Clipped,
    ObjectiveConfig,
    Reinforce,
    SequenceClipped,
)
from core_rl_trainer.algorithms.ppo_actor import PPOActorConfig, PPOActorInterface

__all__ = [
    "CISPOInterface",
    "DAPOInterface",
    "DrGRPOInterface",
    "GRPOInterface",
    "GSPOInterface",
    "PPOInterface",
    "RLOOInterface",
    "ReMaxInterface",
    "ReinforcePlusPlusInterface",
]


class GRPOConfig(PPOActorConfig):
    """GRPO (DeepSeekMath, arXiv:2402.03300): each sequence counts the same. The paper has ``kl_coef`` 0.04."""

    loss: ObjectiveConfig = Clipped(aggregation="sequence_mean")


class DrGRPOConfig(PPOActorConfig):
    """Dr. GRPO (arXiv:2503.20783): no division by standard deviation or length.

    Set ``loss.aggregation.fixed_length`` to the most tokens of an answer.
    """

    advantage: AdvantageConfig = DrGRPO()
    loss: ObjectiveConfig = Clipped(aggregation=FixedLength(fixed_length=1024))


class DAPOConfig(PPOActorConfig):
    """DAPO (arXiv:2503.14476): clip-higher, token mean, no groups without signal; ``overlong`` as the answers need."""

    loss: ObjectiveConfig = Clipped(clip_high=0.28)
    drop_equal_groups: bool = True


class GSPOConfig(PPOActorConfig):
    """GSPO (arXiv:2507.18071): ratios and clipping for each sequence."""

    loss: ObjectiveConfig = GSPO()


class CISPOConfig(PPOActorConfig):
    """CISPO (MiniMax-M1, arXiv:2506.13585): clipped weights, and a gradient for every token."""

    loss: ObjectiveConfig = CISPO()


class _KLInReward(PPOActorConfig):
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"


class RLOOConfig(_KLInReward):
    """RLOO (arXiv:2402.14740): against the others of the group, an answer as one action, KL in the reward."""

    advantage: AdvantageConfig = RLOO()
    loss: ObjectiveConfig = SequenceClipped()


class ReinforcePlusPlusConfig(_KLInReward):
    """REINFORCE++ (arXiv:2501.03262): whitened over the batch, clipped, KL in the reward of each token."""

    advantage: AdvantageConfig = ReinforcePlusPlus()


class ReMaxConfig(_KLInReward):
    """ReMax (arXiv:2310.10505): REINFORCE against the greedy answer, KL in the reward."""

    advantage: AdvantageConfig = ReMax()
    loss: ObjectiveConfig = Reinforce()


class PPOConfig(_KLInReward):
    """PPO (arXiv:1707.06347) as in InstructGPT (arXiv:2203.02155): GAE with a critic, whitened, KL in the reward."""

    advantage: AdvantageConfig = GAE()
    whiten_advantages: bool = True


class GRPOInterface(PPOActorInterface):
    """See `GRPOConfig`."""

    config_class = GRPOConfig


class DrGRPOInterface(PPOActorInterface):
    """See `DrGRPOConfig`."""

    config_class = DrGRPOConfig


class DAPOInterface(PPOActorInterface):
    """See `DAPOConfig`."""

    config_class = DAPOConfig


class GSPOInterface(PPOActorInterface):
    """See `GSPOConfig`."""

    config_class = GSPOConfig


class CISPOInterface(PPOActorInterface):
    """See `CISPOConfig`."""

    config_class = CISPOConfig


class RLOOInterface(PPOActorInterface):
    """See `RLOOConfig`."""

    config_class = RLOOConfig


class ReinforcePlusPlusInterface(PPOActorInterface):
    """See `ReinforcePlusPlusConfig`."""

    config_class = ReinforcePlusPlusConfig


class ReMaxInterface(PPOActorInterface):
    """See `ReMaxConfig`."""

    config_class = ReMaxConfig


class PPOInterface(PPOActorInterface):
    """See `PPOConfig`."""

    config_class = PPOConfig
