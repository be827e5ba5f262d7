"""Hidden states between the layers of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def recorded_layers(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that gets the states ``[B, L, H]`` before the first layer and after each, of one pass in the context."""
    states: list[Tensor] = []

    def enter(*call: Any) -> None:
        states.append(call[1][0].detach().clone())

    def leave(*call: Any) -> None:
        states.append((call[2] if isinstance(call[2], Tensor) else call[2][0]).detach().clone())

    count = model.config.get_text_config().num_hidden_layers
    lists = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    layers = next(part for part in lists if len(part) == count)
    with ExitStack() as stack:
        stack.callback(layers[0].register_forward_pre_hook(enter).remove)
        for layer in layers:
            stack.callback(layer.register_forward_hook(leave).remove)
        yield states
