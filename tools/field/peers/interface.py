"""Questions of a measurement to a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from core_rl.config.engine import DType
from core_rl_conformance.trainers.interface import TrainerSetup
from core_rl_oracle.oracle import AdamW, Schedule
from core_rl_oracle.policy_losses import PolicyLoss
from field.models import Pictured


class NotRun(Exception):
    """The framework has no such part; the message becomes the reason on the page."""


def setup_of(model_dir: str, dtype: DType) -> TrainerSetup:
    """The setup by which an adapter of the suite's configures its framework, for passes alone."""
    return TrainerSetup(
        model_dir=model_dir,
        optimizer=AdamW(lr=0.0),
        schedule=Schedule(),
        loss=PolicyLoss(),
        advantages=None,
        dtype=dtype,
        ranks=1,
        seed=0,
    )


class Peer(ABC):
    """One rank of a framework on the CPU."""

    @abstractmethod
    def open(self, model_dir: str, dtype: DType) -> None:
        """Load a language model, in float32 or for computing in bfloat16."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module that was opened."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[Tensor], temperature: float = 1.0) -> list[Tensor]:
        """Log-probs ``[L - 1]`` of each sequence's tokens but the first; all sequences in one forward pass."""

    def logits(self, sequence: Tensor) -> Tensor:
        """The framework's own logits ``[L, V]`` of a sequence that is alone, at temperature 1."""
        seen: list[Tensor] = []
        with Watch(self.model.get_submodule("lm_head"), seen.append):
            self.logprobs([sequence])
        return seen[-1].detach()[0, : len(sequence)]

    def critic(self, model_dir: str, sequences: Sequence[Tensor], disable_dropout: bool) -> Tensor:
        """Values ``[2, T]`` of two training passes of a critic, in float32; `NotRun` where there is none."""
        raise NotRun("has no critic")

    def image_logprobs(self, model_dir: str, sequences: Sequence[Pictured]) -> list[Tensor]:
        """Log-probs ``[L - 1]`` of each sequence's tokens but the first, by a vision-language model in float32.

        All sequences are in one packed row; `NotRun` where there is no such path.
        """
        raise NotRun("packs no images")


@dataclass
class Watch:
    """Hands the output of a module to a function while the context lasts."""

    module: nn.Module
    take: Callable[[Any], object]
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            self.take(output)

        self._handles.append(self.module.register_forward_hook(hook))

    def __exit__(self, *_: object) -> None:
        self._handles.pop().remove()
