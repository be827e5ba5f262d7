"""A Hugging Face model over packed batches: one trunk pass, then the head on the positions that need it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.data.prefixes import PrefixTree
from core_rl.distributed.collectives import gather
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.dtensor import own_part
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.parallel_context import WHOLE, ModelShards, TokenSlice
from core_rl.toolkit.positions import RotaryEmbeddings, learned_positions, require_positions
from core_rl.toolkit.routers import Routers, Routing, own_routing
from core_rl.toolkit.sequence_layers import StatefulLayers, stateful_layers
from core_rl.toolkit.token_logprobs import HeadMap, token_logits
from core_rl.toolkit.vision import PackedVision, check_vision, has_tower

__all__ = ["PackedModel", "check_head", "check_layers"]

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
    if has_tower(model.config):
        check_vision(model.config)
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


def _refused(model: PreTrainedModel, feature: str) -> UnsupportedCapability:
    return UnsupportedCapability(
        f"the model type {model.config.model_type!r} has {feature}, so a packed batch cannot be computed right; choose "
        "another model, or the engine 'reference', which runs one sequence at a time"
    )


def check_head(model: PreTrainedModel, head: LanguageModelHead) -> None:
    """Raise `UnsupportedCapability` unless ``head`` maps hidden states as the forward pass of ``model`` does.

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
            logits = model(input_ids=ids, use_cache=False).logits
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError) as error:
            raise _refused(model, f"a step between its trunk and its head ({error})") from error
    mapping = HeadMap(scale=head.scale, softcap=head.softcap, temperature=1.0)
    expected = token_logits(hidden[0], weight, bias=None, head=mapping)
    if logits.shape != (1, *expected.shape) or not torch.allclose(
        logits[0].float(), expected, rtol=1e-4, atol=1e-4
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
    replaced = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced


class PackedModel(nn.Module):
    """Wraps a model that was built with `PACKED_ATTENTION`.

    The head runs inside ``forward``, so that wrappers which gather parameters around a module's
    forward (FSDP, DDP) see it. Parameter names are the wrapped model's behind the prefix ``model.``.

    Raises `UnsupportedCapability` for a model that cannot be packed right: see `check_layers` and `check_head`.
    """

    def __init__(self, model: PreTrainedModel, head: Head, shards: ModelShards = WHOLE) -> None:
        super().__init__()
        check_layers(model)
        self._language_model = LanguageModelHead.of(model.config)
        if head == "lm":
            check_head(model, self._language_model)
        self.model = model
        self.head = head
        self._positions = learned_positions(model)
        self.shards = shards
        self.routers = Routers(model)
        self.stateful = StatefulLayers(model.base_model)
        self.rotary = RotaryEmbeddings(model.base_model)
        self.vision = PackedVision(model) if has_tower(model.config) else None

    def forward(
        self,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float = 1.0,
        trained_only: bool = False,
        share_prefixes: bool = False,
    ) -> dict[str, Tensor]:
        """The fields of a `ModelOutput` for ``batch``; a dictionary, since wrappers look into those.

        With ``trained_only`` the language-model head runs on the positions of ``loss_mask`` alone and
        the other outputs are 0. With ``share_prefixes`` tokens that sequences share are computed once.
        """
        require_positions(self.model, self._positions, max(batch.lengths))
        tree = PrefixTree.of(batch) if share_prefixes else None
        tokens = self.shards.slice_of(batch, tree)
        segments = tokens.attention(self.shards.context, self.shards.tensor)
        if self.vision is not None:
            segments = self.vision.attention(segments, batch)
        segments.prepare(batch.device)
        self.stateful.begin(segments, batch.device)
        self.rotary.begin(tokens)
        with (
            self.routers.watch(own_routing(batch, tokens)) as routings,
            self._arguments(batch, tokens) as arguments,
        ):
            hidden = self.model.base_model(
                input_ids=tokens.input_ids[None],
                attention_mask=None,
                use_cache=False,
                segments=segments,
                **arguments,
            ).last_hidden_state[0]
        states = PackedStates(hidden, tokens, batch, self.shards)
        if self.head == "lm":
            computed = self._token_outputs(states, outputs, temperature, trained_only)
        else:
            score = self.model.score
            assert isinstance(score, nn.Module)  # every ...ForSequenceClassification has it
            computed = scalar_outputs(states, score, self.head)
        if "aux_loss" in outputs or "routing" in outputs:
            full_routings = [self._whole_routing(routing, tokens, batch.num_tokens) for routing in routings]
            computed |= self.routers.outputs(full_routings, batch.cu_seqlens, outputs)
        return computed

    def _arguments(
        self, batch: SequenceBatch, tokens: TokenSlice
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """The positions of ``tokens``, and the images of ``batch``."""
        if self.vision is None:
            return nullcontext({"position_ids": tokens.position_ids[None]})
        return self.vision.arguments(batch, tokens)

    def _whole_routing(self, routing: Routing, tokens: TokenSlice, length: int) -> Routing:
        """Routing of all ``length`` tokens, without padding, on every rank that sees some of them."""
        logits = gather(routing.logits, self.shards.context, 0, partial=False)
        experts = gather(routing.experts, self.shards.context, 0, partial=False)
        return Routing(tokens.in_batch(logits, length), tokens.in_batch(experts, length))

    def check_sharing(self) -> None:
        """Raise `UnsupportedCapability` for a model that cannot compute shared prefixes once."""
        reasons = {
            "layers that carry state from token to token": bool(self.stateful.layers),
            "rotary embeddings that depend on the length of a sequence": bool(self.rotary.modules),
            "images, which equal placeholders stand for": self.vision is not None,
        }
        if any(reasons.values()):
            raise UnsupportedCapability(
                f"share_prefixes: the model type {self.model.config.model_type!r} has "
                f"{' and '.join(reason for reason, holds in reasons.items() if holds)}; set share_prefixes to false"
            )

    def _token_outputs(
        self, states: PackedStates, names: Sequence[OutputName], temperature: float, trained_only: bool
    ) -> dict[str, Tensor]:
        """Outputs of the language-model head, computed inside its forward pass, for which a wrapper may gather it."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
            raise UnsupportedCapability(
                f"{type(self.model).__name__} has no output embeddings, so it gives no log-probs"
            )

        def outputs_of(hidden: Tensor) -> dict[str, Tensor]:
            head_states, rows = replace(states, hidden=hidden), _own_rows(head)
            return self._language_model.outputs(head_states, *rows, names, temperature, trained_only)

        with _answering(head, outputs_of):
            computed: dict[str, Tensor] = head(states.hidden)
        return computed


def _own_rows(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """This rank's part of the weight and of the bias, gathered or not."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)  # not always a parameter: functional_call() puts other tensors there
    return own_part(weight), None if bias is None else own_part(bias)
