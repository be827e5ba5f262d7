"""Where each tensor that transformers writes lies in Megatron's parameters.

Megatron keeps queries, keys and values of a layer in one matrix, group by group (attention.py:
``[q of the group | k | v]`` for each key/value head), and gate and up projection in another (mlp.py:
``[gate | up]`` on each tensor parallel rank). A `Slot` is what one written tensor has there.

mbridge has the same names, and imports vision models and ``einops``, which it does not require, to say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from core_rl.errors import EngineContractError
from core_rl_megatron.modules import PackedGPT

__all__ = ["Placement", "Slot", "placements"]


@dataclass(frozen=True)
class Slot:
    """Rows ``start .. stop - 1`` of each of ``groups`` equal parts of a parameter: this rank's part of ``name``."""

    name: str
    """As transformers writes it."""
    groups: int
    start: int
    stop: int
    offsets: tuple[int, ...]
    """Where this rank's part begins in the whole tensor."""

    def of(self, parameter: Tensor) -> Tensor:
        """The part, ``[rows, ...]``; a view of ``parameter`` where it lies in one piece."""
        part = self._view(parameter)
        return part.reshape(-1, *parameter.shape[1:])

    def write(self, parameter: Tensor, part: Tensor) -> None:
        """Set the part in ``parameter``."""
        view = self._view(parameter)
        view.copy_(part.reshape(view.shape))

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the part."""
        return (self.groups * (self.stop - self.start), *parameter.shape[1:])

    def _view(self, parameter: Tensor) -> Tensor:
        grouped = parameter.detach().view(self.groups, len(parameter) // self.groups, *parameter.shape[1:])
        return grouped[:, self.start : self.stop]


@dataclass(frozen=True, eq=False)
class Placement:
    """One parameter of this rank and what lies in it."""

    parameter: nn.Parameter
    slots: tuple[Slot, ...]


DIRECT = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
ROWWISE_IN_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def placements(chunk: PackedGPT, tensor_rank: int, expert_rank: int) -> Iterator[Placement]:
    """All parameters of ``chunk``, each once."""
    tool = _Namer(chunk, tensor_rank, expert_rank)
    for name, parameter in chunk.named_parameters():
        yield Placement(parameter, tuple(tool.slots(name, parameter)))


class _Namer:
    """Names the slots of one chunk's parameters."""

    def __init__(self, chunk: PackedGPT, tensor_rank: int, expert_rank: int) -> None:
        self._chunk = chunk
        self._config: TransformerConfig = chunk.config
        self._rank = tensor_rank
        self._expert_rank = expert_rank

    def slots(self, name: str, parameter: nn.Parameter) -> Iterator[Slot]:
        if name in DIRECT:
            yield (
                self._vocabulary(DIRECT[name], parameter)
                if "embed" in name
                else self._whole(DIRECT[name], parameter)
            )
        elif name == "output_layer.weight":
            yield from self._head(parameter)
        elif name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            layer = self._chunk.decoder.layers[int(number)].layer_number - 1
            yield from self._layer(f"model.layers.{layer}", rest, parameter)
        else:
            raise EngineContractError(f"Megatron's parameter {name!r} has no name in transformers")

    def _head(self, parameter: nn.Parameter) -> Iterator[Slot]:
        if len(parameter) == 1:
            yield self._whole("score.weight", parameter)
        elif self._chunk.share_embeddings_and_output_weights:
            # The copy of the embedding that the last stage has of its own.
            yield self._vocabulary("model.embed_tokens.weight", parameter)
        else:
            yield self._vocabulary("lm_head.weight", parameter)

    def _layer(self, prefix: str, rest: str, parameter: nn.Parameter) -> Iterator[Slot]:
        if rest in IN_LAYER:
            yield self._whole(f"{prefix}.{IN_LAYER[rest]}", parameter)
        elif rest in ROWWISE_IN_LAYER:
            yield self._columns(f"{prefix}.{ROWWISE_IN_LAYER[rest]}", parameter)
        elif rest.startswith("self_attention.linear_qkv."):
            yield from self._query_key_value(f"{prefix}.self_attn", rest.rpartition(".")[2], parameter)
        elif rest == "mlp.linear_fc1.weight":
            yield from self._gate_and_up(f"{prefix}.mlp", parameter, self._rank)
        elif rest.startswith("mlp.experts.local_experts."):
            number, _, kind = rest.removeprefix("mlp.experts.local_experts.").partition(".")
            here = (self._config.num_moe_experts or 0) // self._config.expert_model_parallel_size
            expert = f"{prefix}.mlp.experts.{self._expert_rank * here + int(number)}"
            if kind == "linear_fc1.weight":
                yield from self._gate_and_up(expert, parameter, 0)
            else:
                yield self._whole(f"{expert}.down_proj.weight", parameter)
        else:
            raise EngineContractError(
                f"Megatron's parameter {rest!r} of {prefix!r} has no name in transformers"
            )

    def _whole(self, name: str, parameter: nn.Parameter) -> Slot:
        return Slot(name, 1, 0, len(parameter), (0,) * parameter.dim())

    def _columns(self, name: str, parameter: nn.Parameter) -> Slot:
        """A matrix that sums over tensor parallel ranks: each has some of its columns."""
        return Slot(name, 1, 0, len(parameter), (0, self._rank * parameter.shape[1]))

    def _vocabulary(self, name: str, parameter: nn.Parameter) -> Slot:
        """Rows of the vocabulary; those beyond its end are padding, which nobody writes or reads."""
        first = self._rank * len(parameter)
        return Slot(name, 1, 0, min(len(parameter), self._chunk.true_vocab_size - first), (first, 0))

    def _query_key_value(self, prefix: str, kind: str, parameter: nn.Parameter) -> Iterator[Slot]:
        size, all_groups = self._config.kv_channels, self._config.num_query_groups
        assert size is not None and all_groups is not None  # `transformer_config` sets both
        groups = all_groups // self._config.tensor_model_parallel_size
        queries = self._config.num_attention_heads // all_groups * size
        bounds = {
            "q": (0, queries),
            "k": (queries, queries + size),
            "v": (queries + size, queries + 2 * size),
        }
        for letter, (start, stop) in bounds.items():
            offsets = (self._rank * groups * (stop - start), *[0] * (parameter.dim() - 1))
            yield Slot(f"{prefix}.{letter}_proj.{kind}", groups, start, stop, offsets)

    def _gate_and_up(self, prefix: str, parameter: nn.Parameter, rank: int) -> Iterator[Slot]:
        half = len(parameter) // 2
        yield Slot(f"{prefix}.gate_proj.weight", 1, 0, half, (rank * half, 0))
        yield Slot(f"{prefix}.up_proj.weight", 1, half, 2 * half, (rank * half, 0))
