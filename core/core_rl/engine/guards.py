"""Checks that public methods make once, so that no backend has to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from core_rl.backend.inference_backend import ModelLimits
from core_rl.backend.meta import StatePart, SyncMethod, TensorKind
from core_rl.config.capability import Capability
from core_rl.config.engine import EngineConfig, OptimizerConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.engine.placeholders import placeholder_violations
from core_rl.errors import (
    BatchError,
    ConfigError,
    EngineStateError,
    LayoutError,
    LossError,
    UnsupportedCapability,
    WeightsError,
    raise_all,
)
from core_rl.registry.spec import EngineSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HINTS = {
    "new": "call initialize() first",
    "ready": "destroy() it and build another",
    "destroyed": "build another",
}
MOMENTS = ("exp_avg", "exp_avg_sq")
HEAD_OUTPUTS: dict[str, frozenset[OutputName]] = {
    "lm": frozenset({"logprobs", "entropy", "logits", "routing"}),
    "value": frozenset({"values", "routing"}),
    "reward": frozenset({"scores", "routing"}),
}
ROUTING_DTYPES = (torch.int16, torch.uint8, torch.int32, torch.int64)
UNUSED_DROPOUT = re.compile(r"classifier_|summary_")
"""Dropout of heads that an engine does not have."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SYNC_CAPABILITY: dict[SyncMethod, Capability] = {
    "disk": Capability.SYNC_DISK,
    "tensor": Capability.SYNC_TENSOR,
    "distributed": Capability.SYNC_DISTRIBUTED,
    "lora": Capability.SYNC_LORA,
}


def check_config(spec: EngineSpec, config: TrainEngineConfig) -> None:
    """Raise `UnsupportedCapability` or `LayoutError` for what ``config`` asks and ``spec`` does not declare."""
    check_layout(spec, config.layout)
    requested = {
        Capability.VALUE_HEAD: config.model.head == "value",
        Capability.REWARD_HEAD: config.model.head == "reward",
        Capability.BFLOAT16: config.dtype == "bfloat16",
        Capability.DROPOUT: config.optimizer and config.model.lora and config.model.lora.dropout,
        Capability.FROZEN_PARAMETERS: config.model.frozen,
        Capability.OPTIMIZER_RULES: config.optimizer is not None and config.optimizer.rules,
        Capability.MUON: config.optimizer is not None and config.optimizer.uses("muon"),
        Capability.ADAMW_8BIT: config.optimizer is not None and config.optimizer.uses("adamw_8bit"),
        Capability.LORA: config.model.lora,
        Capability.VISION: config.model.vision,
        Capability.OFFLOAD: config.offload_params or config.offload_optimizer,
        Capability.AUX_LOSS: config.model.router_aux_coef,
    }
    for capability, requires in requested.items():
        if requires:
            require_capability(spec, capability, f"a config with {capability.value}")


def check_layout(spec: EngineSpec, layout: ParallelLayout) -> None:
    """Raise `LayoutError` for degrees that ``spec`` does not declare."""
    missing = layout.needed_capabilities() - spec.capabilities
    if missing:
        raise LayoutError(
            f"layout {layout} needs {', '.join(sorted(missing))}, which the engine {spec.name!r} does not "
            "declare; set these degrees to 1 or choose another engine"
        )


def check_model(spec: EngineSpec, config: TrainEngineConfig, model: PretrainedConfig) -> None:
    """Raise `UnsupportedCapability` for experts, or dropout in training, on an engine that does not declare it.

    And `ConfigError` where the routers of a model without any are to be balanced.
    """
    coefficient = config.model.router_aux_coef
    if _expert_count(model):
        require_capability(spec, Capability.MOE, f"{model.model_type!r}, a mixture of experts")
    elif coefficient:
        raise ConfigError(
            f"model.router_aux_coef = {coefficient}, and {model.model_type!r} routes nothing; set it to 0"
        )
    if config.optimizer is not None:
        for name, rate in dropout_rates(model).items():
            subject = f"training {model.model_type!r} with {name} = {rate} (0 in its config turns it off)"
            require_capability(spec, Capability.DROPOUT, subject)


def shares_prefixes(spec: EngineSpec, mb_spec: MicroBatchSpec | None) -> bool:
    """Whether the engine computes prefixes once: it can, and ``mb_spec`` has it do so."""
    return mb_spec is not None and mb_spec.share_prefixes and Capability.SHARED_PREFIX in spec.capabilities


def check_sharing(config: TrainEngineConfig, model: PretrainedConfig) -> None:
    """Raise `UnsupportedCapability` where each sequence draws a dropout of its own, also for tokens that it shares."""
    rates = dropout_rates(model)
    if config.model.lora is not None and config.model.lora.dropout:
        rates["model.lora.dropout"] = config.model.lora.dropout
    if rates and config.optimizer is not None:
        described = ", ".join(f"{name} = {rate}" for name, rate in rates.items())
        raise UnsupportedCapability(
            f"share_prefixes: {described}, and sequences would share its draws with their prefix; set share_prefixes "
            "to false, or the dropout to 0"
        )


def dropout_rates(model: PretrainedConfig) -> dict[str, float]:
    """Positive rates of dropout, and of noise in routers, by field of the config; names differ by family."""
    fields = vars(model.get_text_config())
    return {
        name: value
        for name, value in fields.items()
        if re.search("drop|jitter", name)
        and not UNUSED_DROPOUT.match(name)
        and isinstance(value, float)
        and value > 0
    }


def _expert_count(model: PretrainedConfig) -> int:
    """Experts of each router, 0 without routers; families of transformers have different names for it."""
    text = model.get_text_config()
    return next((count for name in EXPERT_COUNTS if (count := getattr(text, name, None))), 0)


def require_capability(spec: EngineSpec, capability: Capability, subject: str) -> None:
    """Raise `UnsupportedCapability` unless ``spec`` declares ``capability``."""
    if not spec.supports(capability):
        raise UnsupportedCapability(
            f"{subject}: the engine {spec.name!r} does not declare {capability.value!r}; "
            f"it declares {', '.join(sorted(spec.capabilities)) or 'none'}"
        )


def require_state(state: str, needed: str, method: str) -> None:
    """Raise `EngineStateError` unless the engine is in the state that ``method`` needs."""
    if state != needed:
        raise EngineStateError(f"{method} on an engine that is {state!r}; {HINTS[state]}")


def require_optimizer(config: TrainEngineConfig) -> OptimizerConfig:
    """The optimizer config, or `EngineStateError` for a forward-only engine."""
    if config.optimizer is None:
        raise EngineStateError(
            "this engine has optimizer = null and only runs forward; configure an optimizer"
        )
    return config.optimizer


def require_trainable(config: TrainEngineConfig, mode: str | None, adapter_off: bool) -> None:
    """Raise `EngineStateError` where gradients may not accumulate."""
    require_optimizer(config)
    require_adapter_on(adapter_off, "forward_backward()")
    if mode == "eval":
        raise EngineStateError(
            "forward_backward() inside eval_mode(); leave the context, or pass forward_only=True"
        )


def require_kind(config: TrainEngineConfig, kind: TensorKind, optimizer_kinds: Sequence[str]) -> None:
    """Raise for kinds that a forward-only engine lacks, and for unknown ones."""
    if kind == "grads" or (kind in MOMENTS and not optimizer_kinds):
        require_optimizer(config)
    if kind == "adapter":
        require_adapter(config, "the kind 'adapter'")
    known = ("params", "master", "grads", "buffers", "carried", "adapter", *optimizer_kinds)
    if kind not in known:
        hint = ": the optimizer's `state` has no moments" if kind in MOMENTS and not optimizer_kinds else ""
        raise WeightsError(f"unknown kind {kind!r}{hint}; known kinds: {', '.join(known)}")


def require_adapter(config: EngineConfig, subject: str) -> None:
    """Raise `EngineStateError` for an engine without an adapter."""
    if config.model.lora is None:
        raise EngineStateError(
            f"{subject}: this engine has no adapter; set model.lora, for example to {{rank: 16}}"
        )


def require_sendable_adapter(config: TrainEngineConfig) -> None:
    """Raise `EngineStateError` for an engine without an adapter, and `ConfigError` for one with a head as well."""
    require_adapter(config, "weight sync by 'lora'")
    if config.model.head != "lm":
        raise ConfigError(
            f"weight sync by 'lora' from an engine with head {config.model.head!r}: its head is trained with the "
            "adapter, and an inference engine has none; it is for models with head 'lm'"
        )


def require_adapter_on(adapter_off: bool, subject: str) -> None:
    """Raise `EngineStateError` inside ``disable_adapter()``, where ``subject`` would leave the adapter out."""
    if adapter_off:
        raise EngineStateError(
            f"{subject} inside disable_adapter(), where the adapter is off; leave the context"
        )


def part_of(kind: TensorKind) -> StatePart:
    """The part that must be on the device to read or set tensors of ``kind``."""
    return "model" if kind in ("params", "master", "grads", "buffers", "carried", "adapter") else "optimizer"


def require_present(offloaded: frozenset[StatePart], kind: TensorKind, part: StatePart) -> None:
    """Raise `EngineStateError` for tensors that are offloaded."""
    if part in offloaded:
        inside = ", or call it inside train_mode() or eval_mode()" if part == "model" else ""
        raise EngineStateError(
            f"named_tensors({kind!r}): the {part} state is offloaded; call onload() first{inside}"
        )


def require_loadable(config: TrainEngineConfig, kind: TensorKind) -> None:
    """Raise `WeightsError` for gradients, which only a backward pass makes, and for merged weights."""
    if kind == "grads":
        raise WeightsError("gradients cannot be loaded; run forward_backward()")
    if kind == "params" and config.model.lora is not None:
        raise WeightsError(
            "an engine with an adapter cannot load 'params' (or a checkpoint with format='hf'): weights with an "
            "adapter merged into them do not come apart; load the adapter (kind or format 'adapter'), or both "
            "(kind 'master', format 'portable'), or set model.path to a new base model"
        )


def require_sync(spec: EngineSpec, method: SyncMethod) -> None:
    """Raise `UnsupportedCapability` for a method that ``spec`` does not declare."""
    require_capability(spec, SYNC_CAPABILITY[method], f"weight sync by {method!r}")


def check_temperature(temperature: float) -> None:
    """Raise `LossError` unless the temperature is positive."""
    if not temperature > 0:
        raise LossError(f"temperature = {temperature}; it must be positive")


def check_outputs(spec: EngineSpec, config: TrainEngineConfig, outputs: Sequence[OutputName]) -> None:
    """Raise `ConfigError` for outputs that the head cannot give, and `UnsupportedCapability` for logits."""
    possible = HEAD_OUTPUTS[config.model.head]
    wrong = [name for name in outputs if name not in possible]
    if wrong:
        raise ConfigError(f"a model with head {config.model.head!r} gives {sorted(possible)}, not {wrong}")
    if "logits" in outputs:
        require_capability(spec, Capability.LOGITS, "output 'logits'")
    if "routing" in outputs:
        require_capability(spec, Capability.ROUTING_REPLAY, "output 'routing'")


def check_taps(spec: EngineSpec, post_hook: object) -> None:
    """Raise `UnsupportedCapability` or `ConfigError` where the output ``hidden_states`` is not to be had."""
    require_capability(spec, Capability.TAPS, "output 'hidden_states'")
    if post_hook is not None:
        raise ConfigError(
            "output 'hidden_states' with a post_hook: it is put together after the pass, so that no hook sees it; "
            "leave either out"
        )


def check_output_seqlens(output_seqlens: Sequence[int] | None, batch: SequenceBatch) -> None:
    """Raise `BatchError` unless there is one length for each sequence, where lengths are given."""
    if output_seqlens is not None and len(output_seqlens) != batch.num_sequences:
        raise BatchError(
            f"output_seqlens has {len(output_seqlens)} entries for {batch.num_sequences} sequences; "
            "give one length for each"
        )


def check_routing(spec: EngineSpec, batch: SequenceBatch, model: PretrainedConfig) -> None:
    """Raise for a token field ``routing`` that cannot be replayed.

    `UnsupportedCapability` where the engine does not declare it, `BatchError` for what is no choice of
    experts of this model.
    """
    if "routing" not in batch.tokens:
        return
    require_capability(spec, Capability.ROUTING_REPLAY, "a batch with the token field 'routing'")
    routing, count = batch["routing"], _expert_count(model)
    if not count:
        raise BatchError(
            f"the batch has a token field 'routing', and {model.model_type!r} routes nothing; drop it"
        )
    k = model.get_text_config().num_experts_per_tok
    if routing.dtype not in ROUTING_DTYPES or routing.dim() != 3 or routing.shape[2] != k:
        raise BatchError(
            f"token field 'routing' must be int16 (or uint8, int32, int64) [T, layers, {k}]; got {routing.dtype} "
            f"{list(routing.shape)}"
        )
    if routing.numel() and not 0 <= int(routing.min()) <= int(routing.max()) < count:
        raise BatchError(
            f"token field 'routing' holds {int(routing.min())} to {int(routing.max())}; experts are 0 to {count - 1}"
        )
    if (routing.sort(-1).values.diff(dim=-1) == 0).any():
        raise BatchError("token field 'routing' names an expert twice for one token and layer")


def check_batch(batch: SequenceBatch, model: PretrainedConfig, limits: ModelLimits) -> None:
    """Raise one `BatchError` that lists what the ``limits`` of ``model`` exclude: see `batch_violations`."""
    raise_all(BatchError, model.model_type, batch_violations(batch, limits))


def batch_violations(batch: SequenceBatch, limits: ModelLimits) -> Iterator[str]:
    """Token ids and lengths beyond ``limits``, and images that do not fit their placeholders."""
    rows = batch.input_ids.split(batch.lengths)
    yield from placeholder_violations(rows, batch.media, limits.image_model)
    fits = limits.context_length is None or batch.max_length <= limits.context_length
    if fits and not (batch.input_ids >= limits.vocab_size).any():
        return  # without a look at each sequence
    for index, ids in enumerate(rows):
        highest, position = (int(value) for value in ids.max(dim=0))
        if highest >= limits.vocab_size:
            yield (
                f"sequence {index} holds the token id {highest} at position {position}; "
                f"the vocabulary has {limits.vocab_size} entries"
            )
        if limits.context_length is not None and len(ids) > limits.context_length:
            yield f"sequence {index} has {len(ids)} tokens; the model takes {limits.context_length}"
