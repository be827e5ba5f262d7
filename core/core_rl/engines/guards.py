"""The checks that public methods make once, so that no hook has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from core_rl.config.engine import OptimizerConfig, TrainEngineConfig
from core_rl.data.batch import SequenceBatch
from core_rl.engines.meta import StatePart, TensorKind, WeightUpdateMeta
from core_rl.engines.outputs import OutputName
from core_rl.engines.progress import Pending
from core_rl.engines.spec import Capability, EngineSpec
from core_rl.errors import (
    BatchError,
    ConfigError,
    EngineStateError,
    LayoutError,
    LossError,
    UnsupportedCapability,
    WeightsError,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_CAPABILITY = {"value": Capability.VALUE_HEAD, "reward": Capability.REWARD_HEAD}
HEAD_OUTPUTS: dict[str, frozenset[OutputName]] = {
    "lm": frozenset({"logprobs", "entropy", "logits"}),
    "value": frozenset({"values"}),
    "reward": frozenset({"scores"}),
}
SYNC_CAPABILITY = {
    "disk": Capability.SYNC_DISK,
    "tensor": Capability.SYNC_TENSOR,
    "distributed": Capability.SYNC_DISTRIBUTED,
    "lora": Capability.SYNC_LORA,
}


def check_config(spec: EngineSpec, config: TrainEngineConfig) -> None:
    """Raise `UnsupportedCapability` or `LayoutError` for what ``config`` asks and ``spec`` does not declare."""
    missing = config.layout.needed_capabilities() - spec.capabilities
    if missing:
        raise LayoutError(
            f"layout {config.layout} needs {', '.join(sorted(missing))}, which the engine {spec.name!r} does not "
            "declare; set these degrees to 1 or choose another engine"
        )
    wanted: list[Capability] = []
    if config.model.head in HEAD_CAPABILITY:
        wanted.append(HEAD_CAPABILITY[config.model.head])
    if config.dtype == "bfloat16":
        wanted.append(Capability.BFLOAT16)
    if config.model.frozen:
        wanted.append(Capability.FROZEN_PARAMETERS)
    if config.offload_params or config.offload_optimizer:
        wanted.append(Capability.OFFLOAD)
    for capability in wanted:
        require_capability(spec, capability, f"a config with {capability.value}")


def check_device(spec: EngineSpec, device: torch.device) -> None:
    """Raise `UnsupportedCapability` for CUDA on an engine without it."""
    if device.type == "cuda":
        require_capability(spec, Capability.CUDA, "device 'cuda'")


def require_capability(spec: EngineSpec, capability: Capability, what: str) -> None:
    """Raise `UnsupportedCapability` unless ``spec`` declares ``capability``."""
    if not spec.supports(capability):
        raise UnsupportedCapability(
            f"{what}: the engine {spec.name!r} does not declare {capability.value!r}; "
            f"it declares {', '.join(sorted(spec.capabilities)) or 'none'}"
        )


def require_state(state: str, needed: str, method: str) -> None:
    """Raise `EngineStateError` unless the engine is in the state that ``method`` needs."""
    if state != needed:
        hints = {
            "new": "call initialize() first",
            "ready": "destroy() it and build another",
            "destroyed": "build another",
        }
        raise EngineStateError(f"{method} on an engine that is {state!r}; {hints[state]}")


def require_optimizer(config: TrainEngineConfig) -> OptimizerConfig:
    """The optimizer config, or `EngineStateError` for a forward-only engine."""
    if config.optimizer is None:
        raise EngineStateError(
            "this engine has optimizer = null and only runs forward; configure an optimizer"
        )
    return config.optimizer


def require_trainable(config: TrainEngineConfig, mode: str | None, pending: Pending) -> None:
    """Raise `EngineStateError` where gradients may not accumulate."""
    require_optimizer(config)
    if mode == "eval":
        raise EngineStateError(
            "forward_backward() inside eval_mode(); leave the context, or pass forward_only=True"
        )
    if pending.reduced:
        raise EngineStateError(
            "the gradients were already reduced by an export; call optimizer_step() or optimizer_zero_grad() first"
        )


def require_kind(config: TrainEngineConfig, kind: TensorKind) -> None:
    """Raise for kinds that a forward-only engine lacks, and for unknown ones."""
    known = ("params", "master", "grads", "exp_avg", "exp_avg_sq", "buffers")
    if kind not in known:
        raise WeightsError(f"unknown kind {kind!r}; known kinds: {', '.join(known)}")
    if kind in ("grads", "exp_avg", "exp_avg_sq"):
        require_optimizer(config)


def part_of(kind: TensorKind) -> StatePart:
    """What must be on the device to read or set tensors of ``kind``."""
    return "optimizer" if kind in ("exp_avg", "exp_avg_sq") else "model"


def require_present(offloaded: frozenset[StatePart], kind: TensorKind) -> None:
    """Raise `EngineStateError` for tensors that are offloaded."""
    if part_of(kind) in offloaded:
        inside = ", or call it inside train_mode() or eval_mode()" if part_of(kind) == "model" else ""
        raise EngineStateError(
            f"named_tensors({kind!r}): the {part_of(kind)} state is offloaded; call onload() first{inside}"
        )


def require_loadable(kind: TensorKind) -> None:
    """Raise `WeightsError` for gradients, which only a backward pass makes."""
    if kind == "grads":
        raise WeightsError("gradients cannot be loaded; run forward_backward()")


def require_sync(spec: EngineSpec, meta: WeightUpdateMeta) -> None:
    """Raise `UnsupportedCapability` for a method that ``spec`` does not declare."""
    require_capability(spec, SYNC_CAPABILITY[meta.method], f"weight sync by {meta.method!r}")


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


def check_batch(batch: SequenceBatch, model: PretrainedConfig) -> None:
    """Raise `BatchError` for a token id or a length that the model cannot take."""
    if not batch.num_tokens:
        return
    text = model.get_text_config()
    highest = int(batch.input_ids.max())
    if highest >= text.vocab_size:
        position = int(batch.input_ids.argmax())
        sequence = int((batch.cu_seqlens <= position).sum()) - 1
        raise BatchError(
            f"sequence {sequence} holds the token id {highest} at position "
            f"{position - int(batch.cu_seqlens[sequence])}; the vocabulary has {text.vocab_size} entries"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and batch.max_length > limit:
        sequence = batch.lengths.index(batch.max_length)
        raise BatchError(
            f"sequence {sequence} has {batch.max_length} tokens; the model takes {limit} (max_position_embeddings)"
        )
