"""verl's configs of an engine as the config of an engine of core-rl; what has no counterpart is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

from core_rl.config.base import parse_config
from core_rl.config.engine import TrainEngineConfig
from core_rl.errors import ConfigError, raise_all
from core_rl.registry.engines import load_config
from core_rl_conformance.profile import laid_over

PREFIX = "core_rl_"
"""Of a strategy: ``core_rl_fsdp`` is the engine ``fsdp``."""
DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
# Fields of verl with the values that an engine of core-rl computes; any other is an error. Fields that name kernels of
# verl's own head (chunks of the entropy, its torch.compile) have no effect on results and are not read.
ENGINE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "offload_policy": (False,),
    "forward_prefetch": (False,),
    "use_orig_params": (False,),
    "model_dtype": ("fp32", None),
    "pad_to_length": (False,),
    "full_determinism": (False,),
    "qat.enable": (False,),
    "router_replay.mode": ("disabled",),
}
MODEL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "use_liger": (False,),
    "use_fused_kernels": (False,),
    "mtp.enable": (False,),
    "target_parameters": (None,),
    "exclude_modules": (None,),
}
OPTIMIZER_VALUES: Mapping[str, tuple[Any, ...]] = {
    "optimizer": ("AdamW",),
    "optimizer_impl": ("torch.optim",),
    "num_cycles": (0.5,),
}


@dataclass
class CoreRLEngineConfig(FSDPEngineConfig):  # type: ignore[misc]  # verl is not installed where mypy runs
    """verl's config of an FSDP engine, with fields of the engine's own config.

    ``overrides`` replaces fields that were taken over from verl, such as ``layout.tp`` or ``options``.
    """

    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Takes any strategy: the registry of engines knows them."""


def train_config(
    model: HFModelConfig, engine: FSDPEngineConfig, optimizer: FSDPOptimizerConfig, world_size: int
) -> TrainEngineConfig:
    """The config of the engine that ``engine.strategy`` names, for ``world_size`` ranks.

    Raises one `ConfigError` with every field that cannot be taken over.
    """
    name = str(engine.strategy).removeprefix(PREFIX)
    kind: Any = load_config(name)
    problems = [*_refused("engine", engine, ENGINE_VALUES), *_refused("model", model, MODEL_VALUES)]
    problems += _model_problems(model)
    if not engine.forward_only:
        problems += _refused("optim", optimizer, OPTIMIZER_VALUES)
    raise_all(ConfigError, f"verl's config for the engine {name!r}", problems)
    overrides = dict(getattr(engine, "overrides", {}))
    fields = {
        "model": _model(model),
        "dtype": _dtype(engine),
        "seed": engine.seed,
        "layout": _layout(engine, overrides.get("layout", {}), world_size),
        "optimizer": None if engine.forward_only else _optimizer(optimizer),
        "offload_params": engine.param_offload,
        "offload_optimizer": engine.optimizer_offload and not engine.forward_only,
        "options": _options(kind, model, engine, world_size),
    }
    config: TrainEngineConfig = parse_config(
        kind, laid_over(fields, overrides), f"engine {name!r} inside verl"
    )
    return config


def first_lr_step(optimizer: FSDPOptimizerConfig) -> int:
    """The step of the schedule at which a run begins.

    verl's warm-up starts at a rate of 0, and core-rl's one step later; so does a schedule that counts from 1.
    """
    from_one = optimizer.lr_scheduler_type == "cosine" and not optimizer.zero_indexed_step
    return int(from_one) - int(_warmup_steps(optimizer) > 0)


def _refused(section: str, config: Any, values: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """A sentence for each field of ``config`` with a value that is not among ``values``."""
    for path, taken in values.items():
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part, taken[0])
        if value not in taken:
            yield f"{section}.{path} = {value!r} has no counterpart; set it to {taken[0]!r}"


def _model_problems(model: HFModelConfig) -> Iterator[str]:
    """A sentence for each nested field of verl's model config that has no counterpart."""
    overridden = sorted(set(model.override_config) - {"attn_implementation"})
    if overridden:
        yield f"model.override_config = {overridden} has no counterpart; write the fields into config.json"
    if model.tiled_mlp.get("enabled"):
        yield "model.tiled_mlp.enabled = True has no counterpart; set it to False"
    if model.lora_rank and not model.lora.get("merge", False):
        yield "model.lora.merge = False: rollouts get merged weights; set it to True"


def _model(model: HFModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "path": model.local_path,
        "head": "value" if model.model_type == "value_model" else "lm",
    }
    if model.lora_rank:
        modules = model.target_modules
        fields["lora"] = {
            "rank": model.lora_rank,
            "alpha": model.lora_alpha,
            "target_modules": modules if modules == "all-linear" else tuple(modules),
            "path": model.lora_adapter_path,
        }
    return fields


def _dtype(engine: FSDPEngineConfig) -> str:
    """The compute dtype; ``mixed_precision`` goes before ``dtype``, as in verl's FSDP engine."""
    name = str((engine.mixed_precision or {}).get("param_dtype", engine.dtype))
    if name not in DTYPES:
        raise ConfigError(f"engine.dtype = {name!r} has no counterpart; set it to 'bfloat16' or 'fp32'")
    return DTYPES[name]


def _layout(engine: FSDPEngineConfig, overrides: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Degrees of ``overrides``; the remaining ranks are data-parallel."""
    degrees = {"cp": engine.ulysses_sequence_parallel_size, **overrides}
    shards = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees["cp"]
    return {"dp": max(1, world_size // shards), **degrees}


def _optimizer(optimizer: FSDPOptimizerConfig) -> dict[str, Any]:
    """AdamW as verl has it: all parameters decay, norms and biases included."""
    given = dict(optimizer.override_optimizer_config or {})
    eps = given.pop("eps", 1e-8)
    if given:
        raise ConfigError(
            f"optim.override_optimizer_config = {sorted(given)} has no counterpart; leave 'eps' alone in it"
        )
    warmup = _warmup_steps(optimizer)
    schedule = {"type": optimizer.lr_scheduler_type, "warmup_steps": max(0, warmup - 1)}
    fields = {
        "lr": optimizer.lr,
        "betas": tuple(optimizer.betas),
        "eps": eps,
        "weight_decay": optimizer.weight_decay,
        "rules": [{"pattern": "*", "weight_decay": optimizer.weight_decay}],
        "max_grad_norm": optimizer.clip_grad,
        "schedule": schedule,
    }
    if optimizer.lr_scheduler_type == "cosine":
        schedule["min_lr_ratio"] = optimizer.min_lr_ratio or 0.0
        # The warm-up begins one step earlier (`first_lr_step`), and so does all that follows.
        fields["schedule_steps"] = optimizer.total_training_steps - int(warmup > 0)
    return fields


def _warmup_steps(optimizer: FSDPOptimizerConfig) -> int:
    steps = optimizer.lr_warmup_steps or 0
    return steps if steps > 0 else int(optimizer.lr_warmup_steps_ratio * optimizer.total_training_steps)


def _options(
    kind: type[TrainEngineConfig], model: HFModelConfig, engine: FSDPEngineConfig, world_size: int
) -> dict[str, Any]:
    """Options that the engine has; a field of verl that is on and has none is an error."""
    wanted = {
        "gradient_checkpointing": (
            model.enable_gradient_checkpointing,
            "model.enable_gradient_checkpointing",
        ),
        "activation_offload": (model.enable_activation_offload, "model.enable_activation_offload"),
    }
    options: Any = kind.model_fields["options"].annotation if "options" in kind.model_fields else None
    known = () if options is None else options.model_fields
    problems = [
        f"{path} = True has no counterpart; set it to False"
        for name, (value, path) in wanted.items()
        if value and name not in known
    ]
    raise_all(ConfigError, f"verl's config for {kind.__name__}", problems)
    fields = {name: value for name, (value, _) in wanted.items() if name in known}
    if "reshard_after_forward" in known:
        fields["reshard_after_forward"] = engine.reshard_after_forward
    if "reduce_scatter" in known:
        fields["reduce_scatter"] = "last" if engine.use_no_sync_for_gradient_accumulation else "each"
    if "replicas" in known and 0 < engine.fsdp_size < world_size:
        fields["replicas"] = world_size // engine.fsdp_size
    return fields
