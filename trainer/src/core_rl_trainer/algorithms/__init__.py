"""Algorithms: model interfaces over any engine, made of small tested functions.

Everything here uses public engine methods only and names no engine.
"""

from __future__ import annotations

from core_rl_trainer.algorithms.interface import (
    ModelInterface,
    ModelInterfaceAbstraction,
    RolloutEngineLike,
    TrainEngineLike,
    available_interfaces,
    make_interface,
    register_interface,
)
from core_rl_trainer.algorithms.ppo_actor import PPOActorConfig, PPOActorInterface
from core_rl_trainer.algorithms.ppo_critic import PPOCriticConfig, PPOCriticInterface
from core_rl_trainer.algorithms.preferences import (
    DPOConfig,
    DPOInterface,
    RewardModelConfig,
    RewardModelInterface,
)
from core_rl_trainer.algorithms.sft import SFTConfig, SFTInterface

__all__ = [
    "DPOConfig",
    "DPOInterface",
    "ModelInterface",
    "ModelInterfaceAbstraction",
    "PPOActorConfig",
    "PPOActorInterface",
    "PPOCriticConfig",
    "PPOCriticInterface",
    "RewardModelConfig",
    "RewardModelInterface",
    "RolloutEngineLike",
    "SFTConfig",
    "SFTInterface",
    "TrainEngineLike",
    "available_interfaces",
    "make_interface",
    "register_interface",
]
