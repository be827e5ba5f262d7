"""Refusals of models that a packed batch cannot be computed right for, by rules over their layers and heads.

`docs/model-families.md` lists what they say of each family in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.heads import LanguageModelHead
from core_rl.toolkit.sequence_layers import stateful_layers
from core_rl.toolkit.token_logprobs import HeadMap, token_logits

__all__ = ["check_head", "check_layers"]

LAYER_KINDS = frozenset(
    {
        *("full_attention", "sliding_attention", "attention", "hybrid"),
        *("linear_attention", "recurrent", "mamba", "conv"),
        *("mlp", "moe", "dense", "sparse"),
    }
)
"""Kinds of layers in configs that are computed right. Others choose their keys over the whole pack
(``indexed_attention``), or cut it into chunks that do not follow the sequences (``chunked_attention``)."""
ATTENTION = re.compile(r"Attention|MLA$")
"""Names of the classes of attention layers in transformers."""


def check_layers(model: PreTrainedModel) -> None:
    """Raise `UnsupportedCapability` for a model with layers that cannot be packed; needs no weights.

    The message names the model type and the layers.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {
        *(getattr(config, "layer_types", None) or ()),
        *(getattr(config, "layers_block_type", None) or ()),
    }
    if unknown := sorted(set(map(str, kinds)) - LAYER_KINDS):
        raise _refused(model, f"layers of the kind {', '.join(unknown)}")
    if model.base_model is model:
        raise _refused(model, f"no trunk under the name {model.base_model_prefix!r}")
    if config.is_encoder_decoder:
        raise _refused(model, "an encoder")
    stateful = stateful_layers(model.base_model)
    attention = sorted(
        {
            type(module).__name__
            for name, module in model.base_model.named_modules()
            if ATTENTION.search(type(module).__name__) and name not in stateful
        }
    )
    if not attention and not stateful:
        raise _refused(
            model, f"no layers that are known to mix tokens, only {sorted(model._no_split_modules or ())}"
        )
    # transformers' own test, of the model's code.
    if attention and not type(model)._can_set_attn_implementation():
        raise _refused(model, f"layers that ignore transformers' attention interface: {', '.join(attention)}")
    if attention and "position_ids" not in signature(type(model.get_decoder()).forward).parameters:
        raise _refused(
            model, f"positions that {type(model.get_decoder()).__name__} counts over the whole pack"
        )


def _refused(model: PreTrainedModel, what: str) -> UnsupportedCapability:
    return UnsupportedCapability(
        f"the model type {model.config.model_type!r} has {what}, so a packed batch cannot be computed right; choose "
        "another model, or the engine 'reference', which runs one sequence at a time"
    )


def check_head(model: PreTrainedModel, head: LanguageModelHead) -> None:
    """Raise `UnsupportedCapability` unless ``head`` makes of hidden states what the forward pass of ``model`` does.

    Both get the same few states and a small matrix in the place of the model's, so this needs no weights.
    """
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Module):
        raise _refused(model, "no output embeddings, which log-probs come from")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, model.config.get_text_config().hidden_size, generator=generator)
    weight = torch.randn(5, hidden.shape[2], generator=generator)
    ids = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad(), ExitStack() as stack:
        for trunk in {model.base_model, model.get_decoder()}:
            stack.enter_context(_answering(trunk, lambda *_, **__: _TrunkOutput(hidden)))
        stack.enter_context(_answering(output, lambda states: F.linear(states, weight)))
        try:
            found = model(input_ids=ids, use_cache=False).logits
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError) as error:
            raise _refused(model, f"a step between its trunk and its head ({error})") from error
    mapping = HeadMap(scale=head.scale, softcap=head.softcap, temperature=1.0)
    expected = token_logits(hidden[0], weight, bias=None, head=mapping)
    if found.shape != (1, *expected.shape) or not torch.allclose(
        found[0].float(), expected, rtol=1e-4, atol=1e-4
    ):
        raise _refused(
            model, "a head that does more than scale and cap its logits by known fields of the config"
        )


class _TrunkOutput(dict[str, Tensor]):
    """The output of a trunk that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getattr__(self, name: str) -> Tensor | None:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        return tuple(self.values())[key]


@contextmanager
def _answering(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module`` compute by ``forward`` inside the context."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
