"""`HFBackend`: a train backend over one Hugging Face module and one torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from core_rl.backend.protocols import LowRank, MemoryPart, SupportsOpaqueState
from core_rl.backend.steps import MicroBatchStep
from core_rl.backend.train_backend import BuildContext, C, PassMode, TrainBackend
from core_rl.config.engine import DType, Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.distributed.collectives import add_up
from core_rl.errors import UnsupportedCapability
from core_rl.state.memory import own_memory
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import local_part
from core_rl.toolkit.eight_bit import is_eight_bit, memory_of
from core_rl.toolkit.hf_state import HFShardedState, checkpoint_layout
from core_rl.toolkit.lora import adapter_config, checkpoint_name, enable_adapter, low_rank_products
from core_rl.toolkit.model_files import carried_tensors, exported_config
from core_rl.toolkit.optimizer import (
    MOMENTUM,
    Muon,
    build_optimizer,
    create_moments,
    set_learning_rate,
    set_step_count,
)
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.parallel_context import WHOLE
from core_rl.toolkit.positions import rotary_modules
from core_rl.toolkit.taps import decoder_layers, tapped

__all__ = ["HFBackend"]


SHORT, LONG = 7, 12
"""Tokens of the two sequences that are compared."""
BETWEEN, WINDOW = 8, 4
"""Lengths while the probe runs: the long sequence alone exceeds the first, and both exceed the window."""
THRESHOLDS = {
    "original_max_position_embeddings": BETWEEN,
    "original_max_seq_len": BETWEEN,
    "sliding_window": WINDOW,
}
"""Attributes of layers and fields of configs."""
TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.05}
"""Allowed difference, relative to the largest value or 1. Equal rows of equal matrix products are equal: experts, whose
tokens are sorted, are all there is to tolerate (2e-6 in float32 on tiny mixtures of experts)."""

OUTPUT: dict[Head, OutputName] = {"lm": "logprobs", "value": "values", "reward": "scores"}


def check_packing(packed: PackedModel, dtype: DType) -> None:
    """Raise `UnsupportedCapability` where a sequence's outputs depend on its neighbours; collective.

    Two forward passes of 38 tokens without a graph. One has copies of a short sequence and three neighbours; the other
    copies of the short sequence and of a long one, which is longer than the model's `THRESHOLDS`, scaled down for the
    probe. All copies of a sequence get the same inputs, so they must get the same outputs.

    In bfloat16 a trained model makes nats of a last bit at some tokens: 3.8 at a token of SmolLM2 at tp3, where sums
    over ranks round by a token's place. There most tokens have to be the same at any place, and all of them at the
    same place next to other neighbours.

    Args:
        packed: the model in evaluation mode, with its weights.
        dtype: the dtype in which it computes.
    """
    output = OUTPUT[packed.head]
    with small_thresholds(packed.model):
        near, far = _among_neighbours(packed, output, 0), _next_to_long(packed, output)
        spreads = torch.cat([_spread([*near, *far[:2]]), _spread(far[2:])])
        error = float(spreads.max())
        allowed = TOLERANCE[dtype] * max(1.0, *(float(part.abs().max()) for part in far))
        if error > allowed and dtype == "bfloat16":
            others = _among_neighbours(packed, output, 5)
            changes = [float(_spread(pair).max()) for pair in zip(near, others, strict=True)]
            error = max(float(spreads.median()), *changes)
    # Never true of NaN, which random weights of a wrong scale give: that is no leak.
    if error > allowed:
        config = packed.model.config
        raise UnsupportedCapability(
            f"the model type {config.model_type!r} cannot be packed: {output} of a sequence change by {error:.2g} with "
            f"the sequences next to it (allowed: {allowed:.2g}), so a layer of {type(packed.model).__name__} carries "
            "state across their boundary, or takes a length from the whole pack; choose another "
            "model, or the engine 'reference'"
        )


def _spread(copies: Sequence[Tensor]) -> Tensor:
    """The largest difference between ``copies``, of each token."""
    low, high = torch.stack(list(copies)).aminmax(dim=0)
    return high - low


def _among_neighbours(packed: PackedModel, output: OutputName, shift: int) -> list[Tensor]:
    """The outputs of two copies of the short sequence, in float32; ``shift`` gives the neighbours other tokens."""
    near = [torch.arange(SHORT + 1) * 104729 + 17 * number + shift for number in (1, 2, 3)]
    short = torch.arange(SHORT) * 7919 + 3
    return _outputs(packed, output, [short, near[0], short, near[1], near[2]])[0:3:2]


def _next_to_long(packed: PackedModel, output: OutputName) -> list[Tensor]:
    """Of two copies of the short and two of the long sequence, of as many tokens.

    Matrix products of other shapes round otherwise.
    """
    short, long = (torch.arange(length) * 7919 + 3 for length in (SHORT, LONG))
    return _outputs(packed, output, [short, short, long, long])


def _known(packed: PackedModel, ids: Tensor) -> Tensor:
    """``ids`` as tokens of the vocabulary that are no placeholders of images."""
    config = packed.model.config
    tokens = torch.arange(int(config.get_text_config().vocab_size))
    names = ("image_token_id", "video_token_id")
    placeholders = [number for name in names if isinstance(number := getattr(config, name, None), int)]
    known = tokens[~torch.isin(tokens, torch.tensor(placeholders, dtype=torch.long))]
    return known[ids % len(known)]


def _outputs(packed: PackedModel, output: OutputName, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of each of ``sequences``, packed, whose numbers stand for tokens of the vocabulary."""
    known = [_known(packed, numbers) for numbers in sequences]
    batch = SequenceBatch.from_sequences(known).to(next(packed.parameters()).device)
    with torch.no_grad():
        values: Tensor = packed(batch, (output,))[output].float()
    return list(values.split(1 if output == "scores" else batch.lengths))


@contextmanager
def small_thresholds(model: nn.Module) -> Iterator[None]:
    """Lower the lengths at which ``model`` computes otherwise to `THRESHOLDS` inside the context."""
    owners = [(owner, THRESHOLDS) for module in model.modules() for owner in _length_owners(module)]
    # The length beyond which `dynamic` scales. Learned positions have it as their number.
    owners += [
        (vars(module.config), {"max_position_embeddings": BETWEEN}) for module in rotary_modules(model)
    ]
    saved = []
    for owner, limits in owners:
        for name, limit in limits.items():
            if type(value := owner.get(name)) is int and value > limit:
                saved.append((owner, name, value))
                owner[name] = limit
    try:
        yield
    finally:
        for owner, name, value in saved:
            owner[name] = value


def _length_owners(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of ``module`` and of its config, and the rotary parameters there, for each layer type."""
    yield vars(module)
    if isinstance(config := getattr(module, "config", None), PretrainedConfig):
        yield vars(config)
        parameters = getattr(config, "rope_parameters", None) or {}
        yield parameters
        yield from (value for value in parameters.values() if isinstance(value, dict))


class HFBackend(TrainBackend[C], SupportsOpaqueState):
    """Runs, steps and describes ``self.model`` and ``self.optimizer``, whose parameters may be DTensors.

    A subclass writes `build`, which sets ``self.packed`` and calls `adopt`. Where gradients need more than a sum over
    data-parallel ranks, it overrides `reduce_grads`, and for another forward pass `outputs`. The attributes below are
    this class's; a subclass reads them.
    """

    model: PreTrainedModel
    packed: Any
    """A `PackedModel`, or a wrapped or another module that takes its arguments; the subclass's."""
    optimizer: torch.optim.Optimizer | None
    muon: Muon | None = None
    """The update of the parameters that have Muon's momentum, if there are some."""
    owned: Mapping[str, nn.Parameter]
    """The parameters that the optimizer has, by checkpoint name: the module's, or this rank's parts of them."""
    context: BuildContext[C]
    planned: PreTrainedModel | None = None
    """Set before `adopt` for a module of another library: the model of transformers that it computes."""
    layout: CheckpointLayout | None = None
    """Set before `adopt` for such a module: the checkpoint layout of its parameters."""
    reduce_bytes: int = 32 * 2**20
    """`reduce_grads` adds gradients up over ranks together up to this size, in bytes."""

    def adopt(
        self, model: PreTrainedModel, context: BuildContext[C], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Take a model whose parameters are final (sharded, on their device); collective.

        Without an ``optimizer``, the config's is built over this rank's parts as plain tensors, whatever type
        the module's parameters have. A given one has the module's own parameters, the settings that
        ``context.parameter_rules`` has for them, and the moments in its ``state``, perhaps of some parameters only
        (ZeRO-1). A wrapper of another optimizer returns that one's ``state``. `step` sets the learning rate of its
        groups, times their ``lr_factor``.
        """
        self.model, self.context = model, context
        # Tensors of a mapped file are not aligned, and kernels round by alignment: offloading would change results.
        own_memory(parameter for parameter in model.parameters() if type(parameter) is nn.Parameter)
        parameters = {checkpoint_name(name): parameter for name, parameter in model.named_parameters()}
        self.__parameters = parameters
        planned = self.planned or model
        layout = self.layout or checkpoint_layout(model)
        if optimizer is None:
            self.owned = {name: _owned(parameter) for name, parameter in parameters.items()}
            optimizer = self._built_optimizer(parameters, layout)
        else:
            self.owned = parameters
            create_moments(optimizer)
        self.optimizer = optimizer
        self.__updates = 0
        self.__state = HFShardedState(model, optimizer, self.owned, context.world, layout)
        rules = context.parameter_rules
        self.muon = None
        if rules is not None and MOMENTUM in self.__state.optimizer_kinds:
            self.muon = Muon(self.__state, rules, context.world)
        written = {*self.__state.shapes("params"), *self.__state.shapes("buffers")}
        self.__state.carried = carried_tensors(planned, context.config.model, written)
        self.__exported_config = exported_config(planned, context.config.model, self.__state.carried)

    def _built_optimizer(
        self, parameters: Mapping[str, nn.Parameter], layout: CheckpointLayout
    ) -> torch.optim.Optimizer | None:
        """The config's optimizer over the trained part of `owned`; None without one, or without such parameters."""
        config, rules = self.context.config.optimizer, self.context.parameter_rules
        if config is None or rules is None:
            return None
        options = {
            self.owned[name]: rules.common(name, layout.shapes({name: tuple(parameter.shape)}))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }
        return build_optimizer(options, config) if options else None

    # ------------------------------------------------------------------ state

    def hf_config(self) -> PretrainedConfig:
        return self.__exported_config

    def state(self) -> HFShardedState:
        return self.__state

    def after_load(self, kinds: frozenset[str]) -> None:
        """Weights are computed from the master weights in each pass."""

    # --------------------------------------------------------------- training

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        """Forward pass of one micro-batch by `packed`: the outputs that ``step`` asks for."""
        outputs = self.packed(
            micro_batch, step.outputs, step.temperature, step.trained_only, step.share_prefixes
        )
        return ModelOutput(**outputs)

    def run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, mode: PassMode) -> None:
        for micro_batch in micro_batches:
            loss = step(self.outputs(micro_batch, step), micro_batch)
            if mode != "forward":
                loss.backward()

    def set_training(self, training: bool) -> None:
        self.model.train(training)

    def zero_grad(self) -> None:
        for parameter in (*self.__parameters.values(), *self.owned.values()):
            parameter.grad = None

    def reduce_grads(self) -> None:
        """Sum over data-parallel ranks, each of which has all of a gradient."""
        group = self.context.groups.data_parallel
        if group.size > 1:
            add_up([grad for _, grad in self.gradients()], group, self.reduce_bytes)

    def local_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names and this rank's parts of the gradients that exist."""
        for name, parameter in self.__parameters.items():
            if parameter.grad is not None:
                yield name, local_part(parameter.grad).tensor

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The same of all gradients, in the same order on every rank; missing ones become 0."""
        for parameter in self.__parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        yield from self.local_grads()

    def step(self, scale: float, lr: float, count: int) -> None:
        if self.optimizer is None:
            return
        grads = dict(self.gradients())  # parameters that no loss has reached decay as well
        if scale != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), scale)
        for name, parameter in self.owned.items():
            if not isinstance(parameter, DTensor):  # whose gradient is the module's own
                parameter.grad = grads.get(name)
        set_learning_rate(self.optimizer, lr)
        if count != self.__updates + 1:
            set_step_count(self.optimizer, count - 1)
        self.optimizer.step()
        if self.muon is not None:
            self.muon.step(lr)
        self.__updates = count

    def verify(self) -> None:
        """Probe each `PackedModel` among the attributes of this backend: see `check_packing`."""
        for model in self._packed_models():
            check_packing(model, self.context.config.dtype)

    def check_sharing(self) -> None:
        for model in self._packed_models():
            model.check_sharing()

    def tap(
        self, micro_batches: Sequence[SequenceBatch]
    ) -> AbstractContextManager[Mapping[int, Sequence[Tensor]]]:
        """Hidden states of the layers of ``model``; see `SupportsTaps`."""
        packed = next(self._packed_models(), None)
        return tapped(decoder_layers(self.model), micro_batches, WHOLE if packed is None else packed.shards)

    def _packed_models(self) -> Iterator[PackedModel]:
        modules = (value for value in vars(self).values() if isinstance(value, nn.Module))
        parts = (part for module in modules for part in module.modules())
        yield from dict.fromkeys(part for part in parts if isinstance(part, PackedModel))

    # ---------------------------------------------------------------- adapter

    def low_rank(self) -> Mapping[str, LowRank]:
        products = low_rank_products(self.model)
        return {
            written: product
            for memory_name, product in products.items()
            for written in self.__state.names(memory_name)
        }

    def adapter_config(self) -> dict[str, Any]:
        model_config = self.context.config.model
        assert model_config.lora is not None  # the core asks only then
        return adapter_config(self.model, model_config.lora, model_config.head, model_config.path)

    def set_adapter(self, enabled: bool) -> None:
        enable_adapter(self.model, enabled)

    # ---------------------------------------------------------------- offload

    def memory(self, part: MemoryPart) -> Iterable[Tensor]:
        if part == "weights":
            yield from (local_part(parameter).tensor for parameter in self.__parameters.values())
        elif part == "gradients":
            yield from (grad for _, grad in self.local_grads())
        elif self.optimizer is not None:
            states = self.optimizer.state.values()
            for moment in (value for state in states for kind, value in state.items() if kind != "step"):
                if is_eight_bit(moment):
                    yield from memory_of(moment).values()
                elif isinstance(moment, Tensor):
                    yield local_part(moment).tensor

    # ----------------------------------------------------------- 8-bit moments

    def opaque_state(self) -> Mapping[str, Tensor]:
        """Codes and scales of this rank's moments of 8 bits."""
        states = {} if self.optimizer is None else self.optimizer.state
        return {
            f"{name}/{kind}/{part}": tensor
            for name, parameter in self.owned.items()
            for kind, moment in states.get(parameter, {}).items()
            if is_eight_bit(moment)
            for part, tensor in memory_of(moment).items()
        }

    @torch.no_grad()
    def load_opaque_state(self, state: Mapping[str, Tensor]) -> None:
        """Set them. State of another sharding is ignored: moments stay as `ShardedState` has set them."""
        local = self.opaque_state()
        if {name: tensor.shape for name, tensor in local.items()} == {
            name: v.shape for name, v in state.items()
        }:
            for name, value in state.items():
                local[name].copy_(value)


def _owned(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part as a parameter for the optimizer, in the same memory."""
    part = local_part(parameter).tensor
    if part.shape == parameter.shape and type(parameter) is nn.Parameter:
        return parameter
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
