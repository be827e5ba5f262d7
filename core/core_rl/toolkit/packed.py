"""A Hugging Face model over packed batches: one trunk pass, then the head on the positions that need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn
from transformers import PreTrainedModel

from core_rl.config.engine import Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.distributed.collectives import gather
from core_rl.errors import ConfigError
from core_rl.toolkit.attention import Segments
from core_rl.toolkit.dtensor import own_part
from core_rl.toolkit.families import check_head, check_layers
from core_rl.toolkit.heads import LanguageModelHead, PackedStates, scalar_outputs
from core_rl.toolkit.parallel_context import WHOLE, ModelShards
from core_rl.toolkit.positions import RotaryEmbeddings, require_positions
from core_rl.toolkit.routers import Routers, Routing, own_routing
from core_rl.toolkit.sequence_layers import StatefulLayers

__all__ = ["PackedModel"]


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
        self.shards = shards
        self.routers = Routers(model)
        self.stateful = StatefulLayers(model.base_model)
        self.rotary = RotaryEmbeddings(model.base_model)

    def forward(
        self,
        batch: SequenceBatch,
        outputs: Sequence[OutputName],
        temperature: float = 1.0,
        trained_only: bool = False,
    ) -> dict[str, Tensor]:
        """The fields of a `ModelOutput` for ``batch``; a dictionary, since wrappers look into those.

        With ``trained_only`` the language-model head runs on the positions of ``loss_mask`` alone and
        the other outputs are 0.
        """
        require_positions(self.model, max(batch.lengths))
        tokens = self.shards.slice_of(batch)
        segments = Segments(tokens.segments, self.shards.context, self.shards.tensor)
        segments.starts(batch.device)
        self.stateful.begin(segments, batch.device)
        self.rotary.begin(tokens)
        with self.routers.watch(own_routing(batch, tokens)) as routings:
            hidden = self.model.base_model(
                input_ids=tokens.input_ids[None],
                position_ids=tokens.position_ids[None],
                attention_mask=None,
                use_cache=False,
                segments=segments,
            ).last_hidden_state[0]
        states = PackedStates(hidden, tokens, batch, self.shards)
        if self.head == "lm":
            found = self._token_outputs(states, outputs, temperature, trained_only)
        else:
            score = self.model.score
            assert isinstance(score, nn.Module)  # every ...ForSequenceClassification has it
            found = scalar_outputs(states, score, self.head)
        if "aux_loss" in outputs or "routing" in outputs:
            whole = [self._whole_routing(routing, batch.num_tokens) for routing in routings]
            found |= self.routers.outputs(whole, batch.cu_seqlens, outputs)
        return found

    def _whole_routing(self, routing: Routing, length: int) -> Routing:
        """Of all ``length`` tokens, without padding, on every rank that sees some of them."""
        logits = gather(routing.logits, self.shards.context, 0, partial=False)
        experts = gather(routing.experts, self.shards.context, 0, partial=False)
        return Routing(logits[:length], experts[:length])

    def _token_outputs(
        self, states: PackedStates, asked: Sequence[OutputName], temperature: float, trained_only: bool
    ) -> dict[str, Tensor]:
        """What the language-model head gives, computed as its forward pass: a wrapper may gather it for that alone."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module) or not isinstance(head.weight, Tensor):
            raise ConfigError(
                f"{type(self.model).__name__} has no output embeddings, so it gives no log-probs"
            )

        def outputs_of(hidden: Tensor) -> dict[str, Tensor]:
            own, rows = replace(states, hidden=hidden), _own_rows(head)
            return self._language_model.outputs(own, *rows, asked, temperature, trained_only)

        return _called_as(head, outputs_of, states.hidden)


def _own_rows(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """This rank's part of the weight and of the bias, gathered or not."""
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)  # not always a parameter: functional_call() puts other tensors there
    return own_part(weight), None if bias is None else own_part(bias)


def _called_as(
    module: nn.Module, function: Callable[[Tensor], dict[str, Tensor]], value: Tensor
) -> dict[str, Tensor]:
    """``function(value)`` as the forward pass of ``module``, between its hooks."""
    module.forward = function
    try:
        found: dict[str, Tensor] = module(value)
    finally:
        del module.forward
    return found
