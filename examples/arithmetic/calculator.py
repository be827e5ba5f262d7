"""The calculator of ``examples/tool_arithmetic.yaml``: a tool that the model may ask before it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from core_rl_trainer.environments import ToolEnvironment


def calculator(answer: str, _sample: Mapping[str, Any]) -> str | None:
    """The reply to a question such as ``?23+45``, or None for an answer."""
    if not answer.startswith("?"):
        return None
    question = re.fullmatch(r"\?(\d{1,4})\+(\d{1,4})", answer)
    return f":{int(question[1]) + int(question[2]):03d}=" if question else ":="


def calculator_environment(tokenizer: PreTrainedTokenizerBase) -> ToolEnvironment:
    """The environment of one episode."""
    return ToolEnvironment(tokenizer, calculator)
