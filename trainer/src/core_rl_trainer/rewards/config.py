"""The section ``rewards`` of a recipe."""

from __future__ import annotations

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.paths import ImportPath

REWARD_MODEL = "reward_model"
"""The name of the metric of the reward model's scores, after ``reward/``."""
ENVIRONMENT = "environment"
"""The name of the metric of an environment's rewards, after ``reward/``."""


class RewardSection(Config):
    """One of several rewards, whose weighted sum is trained on."""

    function: ImportPath
    """``module:function``, ``file.py:function``, or the ``http://`` address of an endpoint."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The factor in the sum; 0 only logs it."""
    name: str | None = Field(default=None, min_length=1)
    """The metric is ``reward/NAME``; by default the name of the function, or of the endpoint's last part."""

    batched: bool = False
    """Call the function once for all completions of a prompt, with the list of their texts and the example. It returns
    a list with a number for each, as a judge model or a reward relative to the group needs."""

    @property
    def call(self) -> tuple[str, bool]:
        """The function and the form of its calls; sections that share both share its processes."""
        return self.function, self.batched

    @property
    def label(self) -> str:
        """The name of its metric, after ``reward/``."""
        if self.name is not None:
            return self.name
        return self.function.rstrip("/").replace("/", ":").rpartition(":")[2]
