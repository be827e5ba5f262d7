"""The common config of all engines. A plugin subclasses it and adds an ``options`` section of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from core_rl.config.base import Config
from core_rl.config.layout import ParallelLayout
from core_rl.config.paths import HubPath, ImportPath, LocalPath

UpdateType = Literal["adamw", "adamw_8bit", "muon"]
MOMENT_BYTES: Mapping[UpdateType, float] = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 4.0}
"""Bytes of the moments of one weight: both of AdamW in float32, or in 8 bits with a scale for each block of 256; and
Muon's momentum."""


class ParameterRule(Config):
    """Settings of the optimizer for the parameters that a pattern matches. Null leaves a setting as it is."""

    pattern: str = Field(min_length=1)
    """A glob pattern of checkpoint names, such as ``model.embed_tokens.*``."""
    lr_factor: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Multiplies the learning rate of every step."""
    weight_decay: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Replaces `OptimizerConfig.weight_decay`; of norms and biases, which otherwise do not decay, as well."""
    type: UpdateType | None = None
    """Replaces the choice of `OptimizerConfig.type`; ``muon`` is for matrices alone."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.lr_factor is None and self.weight_decay is None and self.type is None:
            raise ValueError("the rule sets nothing; give it lr_factor, weight_decay or type")
        return self


class MuonConfig(Config):
    """Muon (https://kellerjordan.github.io/posts/muon/), as `torch.optim.Muon` of torch 2.13 has it."""

    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Look one step of the momentum ahead."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations, which make the singular values of an update nearly equal."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """The factor of the learning rate of a matrix ``[A, B]``: ``sqrt(max(1, A / B))``, or
    ``0.2 * sqrt(max(A, B))`` (arXiv:2502.16982), with which rates and decay are as for AdamW."""


Head = Literal["lm", "value", "reward"]
DType = Literal["float32", "bfloat16"]


class LoraConfig(Config):
    """A low-rank adapter (LoRA, arXiv:2106.09685): ``scaling * B @ A`` is added to linear layers, whose weights stay.

    The fields follow ``peft``.
    """

    rank: int = Field(default=16, ge=1)
    """The inner size of ``B @ A``."""
    alpha: int = Field(default=32, ge=1)
    """The product is scaled by ``alpha / rank``."""
    rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` (arXiv:2312.03732)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """On the input of ``A``, in training."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names or last parts of names of linear layers, such as ``q_proj``; by default all of the trunk, and of the
    text model next to a vision tower. Names reach its tower as well, where layers are called so."""
    path: LocalPath | None = None
    """An adapter to start from, as ``peft`` or ``format="adapter"`` saved it; its rank, alpha and target
    modules equal the fields above. Without one, ``A`` is drawn from the seed and ``B`` is 0."""


class ModelConfig(Config):
    """A model and its head."""

    path: HubPath | None = None
    """A directory in Hugging Face format, or a model of the Hub as ``organization/name[@revision]``: its
    weights, config and tokenizer."""
    config: dict[str, Any] | None = None
    """A transformers config as a dictionary with ``model_type``; weights are drawn from the seed."""
    head: Head = "lm"
    """``lm``, or ``value``/``reward``: one float32 linear map to a scalar without bias."""
    vision: bool = False
    """Build the whole of a vision-language model, whose batches may have images. Otherwise the text model of such a
    checkpoint is trained, where transformers can build it alone, and its tower goes into exports as it is."""
    frozen: tuple[str, ...] = ()
    """Glob patterns of parameter names that are not trained, such as ``model.embed_tokens.*`` or ``model.visual.*``."""
    router_aux_coef: float = Field(default=0.0, ge=0.0)
    """Adds this times the load-balancing loss of the routers (mixture of experts) to every trained loss:
    that of each sequence, weighted by its tokens. It is reported as ``aux_loss``, and not part of ``loss``. Where
    ``routing`` is replayed, the replayed choices count."""
    lora: LoraConfig | None = None
    """Train an adapter (and the head of a value or reward model) instead of the weights."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "set exactly one of 'path' (a model directory) and 'config' (a transformers config)"
            )
        if self.vision and self.head != "lm":
            raise ValueError(
                f"'vision' is for language-model heads, and 'head' is {self.head!r}; set one of them"
            )
        return self


class ScheduleConfig(Config):
    """The learning rate as a factor of `OptimizerConfig.lr`, a pure function of the step count."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """The shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of a linear rise from 0."""
    total_steps: int | None = Field(default=None, ge=1)
    """The same as ``schedule_steps`` of the optimizer, which is the shorter name."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """The factor at and after the end of the decay."""
    function: ImportPath | None = None
    """``module:function`` or ``file.py:function``, which replaces all of the above. It takes the number of schedule
    steps so far and the total number (None without one), and returns the factor. ``schedule: "module:function"`` is
    short for this."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _function_alone(self) -> Self:
        shape = {"type", "warmup_steps", "min_lr_ratio"} & self.model_fields_set
        set_ = sorted(name for name in shape if getattr(self, name) != type(self).model_fields[name].default)
        if self.function is not None and set_:
            raise ValueError(
                f"'function' replaces {', '.join(set_)}; remove these fields, or compute them in the function"
            )
        return self


class OptimizerConfig(Config):
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), or Muon for the matrices of layers
    and AdamW for all other parameters.
    """

    type: UpdateType = "adamw"
    """``muon`` updates the matrices inside of transformer layers by Muon: each matrix of the checkpoint (q, k and v,
    each expert) as a whole, at every layout. Embeddings, heads, norms and biases stay with AdamW.

    ``adamw_8bit`` keeps both moments in 8 bits (Dettmers et al., arXiv:2110.02861; torchao's, ``pip install
    "core-rl[torchao]"``), in blocks of 256 weights of this rank's part of a parameter. A part below 4,096 weights, or
    that is no multiple of 256, has float32 moments. A ``sharded`` checkpoint continues bit for bit at the same layout;
    elsewhere, and from ``portable``, moments are rounded anew."""
    lr: float = Field(default=1e-5, ge=0.0)
    """The highest learning rate, which the schedule scales."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second mean."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Applied to matrices only: the core decides which parameters decay."""
    rules: tuple[ParameterRule, ...] = ()
    """Other settings for some parameters. Where several rules match, the last rule with a field counts."""
    muon: MuonConfig = MuonConfig()
    """Fields of Muon alone."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Clip the global gradient norm to this; null turns clipping off."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the steps."""
    schedule_steps: int | None = Field(default=None, ge=1)
    """The last step of the schedule's decay; by default that of the run. ``linear`` and ``cosine`` need one."""

    @model_validator(mode="after")
    def _one_horizon(self) -> Self:
        longer = self.schedule.total_steps
        if None not in (self.schedule_steps, longer) and self.schedule_steps != longer:
            raise ValueError(
                f"schedule_steps = {self.schedule_steps} and schedule.total_steps = {longer} are the same thing; leave "
                "the latter out"
            )
        return self

    def uses(self, type_: UpdateType) -> bool:
        """Whether an optimizer is asked for, for some parameters at least."""
        return type_ in (self.type, *(rule.type for rule in self.rules))


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the state of a model on one rank."""

    weights: float
    """In float32, and in the compute dtype where the engine keeps a copy in it."""
    gradients: float
    moments: float
    """Bytes of the optimizer's moments."""


class EngineConfig(Config):
    """The common config of train and inference engines."""

    model: ModelConfig
    """The model and its head."""
    dtype: DType = "float32"
    """Compute dtype. Trained weights have float32 master weights and moments in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is CUDA if available, else the CPU."""
    seed: int = Field(default=0, ge=0)
    """Seeds weights that are drawn, dropout and sampling."""
    layout: ParallelLayout = ParallelLayout()
    """The parallel degrees."""


class TrainEngineConfig(EngineConfig):
    """The common config of a train engine."""

    optimizer: OptimizerConfig | None = OptimizerConfig()
    """Null builds an engine that only runs forward (a reference or reward model)."""
    offload_params: bool = False
    """Keep weights and gradients in host memory outside of `train_mode`, `eval_mode` and the calls that need them."""
    offload_optimizer: bool = False
    """Keep the moments in host memory outside of `optimizer_step` and checkpoints."""

    @property
    def moment_bytes(self) -> float:
        """Bytes of the moments of one trained weight, 0 without an optimizer.

        An estimate by the optimizer's type: rules and small parameters are not seen.
        """
        return 0.0 if self.optimizer is None else MOMENT_BYTES[self.optimizer.type]

    @property
    def holds_compute_dtype(self) -> bool:
        """Whether an engine may keep its weights in bfloat16 alone, which are not trained.

        An adapter is merged into float32 ones.
        """
        return self.optimizer is None and self.dtype == "bfloat16" and self.model.lora is None

    def state_bytes(self, parameters: int, trained: int) -> StateBytes:
        """The state on one rank of a model with ``parameters`` weights: an estimate, which an engine overrides.

        ``trained`` is the number of weights that the optimizer updates, 0 without one. Here tensor and
        pipeline parallel ranks share one copy, and each data parallel rank has one: 4 bytes for each weight, 2 more in
        bfloat16, 4 for a gradient of a trained weight, and its moments: 8 for AdamW.
        """
        ranks = self.layout.tp * self.layout.pp
        return StateBytes(
            weights=(6 if self.dtype == "bfloat16" else 4) * parameters / ranks,
            gradients=4 * trained / ranks,
            moments=self.moment_bytes * trained / ranks,
        )

    def gathered_bytes(self, parameters: int, outer: int, layers: int) -> float:
        """Bytes on one rank during a pass in addition to `state_bytes`: gathered weights and their gradients.

        ``outer`` of the ``parameters`` are embeddings and head, the others are in ``layers``. Here 0.
        """
        return 0.0

    @property
    def recomputes(self) -> bool:
        """True if the backward pass recomputes the activations of whole layers; an engine that can overrides it."""
        return False

    @property
    def expert_rows(self) -> int:
        """Rows of activations for a token and each expert that it chose: more than 1 in an engine that dispatches
        tokens with room for tokens of other ranks.
        """
        return 1


class InferenceEngineConfig(EngineConfig):
    """The common config of an inference engine."""

    max_head_offpolicyness: int = Field(default=0, ge=0)
    """The most versions by which a consumed sample may be older than the newest weights."""
    consumer_batch_size: int = Field(default=1, ge=1)
    """Samples that one optimizer step consumes; with the field above it bounds what runs ahead."""
    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Samples whose episodes run at one time."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The accelerators of this machine, one for each rank of ``layout``; by default from 0 on."""
    shares_devices: bool = False
    """Whether other engines work on these accelerators as well, so that this one must not fill their memory."""

    @property
    def own_devices(self) -> tuple[int, ...]:
        """``devices``, or all from 0 on."""
        return self.devices or tuple(range(self.layout.world_size))
