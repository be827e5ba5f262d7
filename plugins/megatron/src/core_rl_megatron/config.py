"""The config of the Megatron engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from core_rl.config.base import Config
from core_rl.config.engine import StateBytes, TrainEngineConfig


class MegatronOptions(Config):
    """Settings of Megatron's own."""

    virtual_stages: int = Field(default=1, ge=1)
    """Parts of the model on each pipeline rank: with 2 or more the schedule is interleaved (arXiv:2104.04473), with
    smaller gaps and more communication. They and ``pp`` together must divide the number of layers."""
    distributed_optimizer: bool = False
    """Spread the float32 weights and the moments over data parallel ranks (ZeRO-1, arXiv:1910.02054)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward pass: those inside the attention, or of whole layers."""
    overlap_grad_reduce: bool = True
    """Add up gradients over data parallel ranks, bucket by bucket, while a step's last micro-batch runs backward."""
    overlap_param_gather: bool = False
    """Gather weights that a step changed during the next forward pass, not at the end of the step. For the distributed
    optimizer. It gains nothing where weights are sent to servers after each step."""
    ddp_bucket_size: int | None = Field(default=None, ge=1)
    """Numbers in a bucket of ``overlap_grad_reduce``; None is Megatron's: 40 million, or a million for each data
    parallel rank."""
    moe_grouped_gemm: bool | None = None
    """All experts of a rank in one grouped matrix product of torch, and as one parameter for the optimizer and for
    ``model.frozen``. None is yes for a mixture whose sizes it takes: multiples of 8."""
    fusions: bool | None = None
    """SwiGLU that keeps its input alone, rotary embeddings, and torch's fused norm; the first two are compiled on CUDA
    (`torch.compile`), in the first steps. None is yes on CUDA, where there are triton and a C compiler."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of linear layers and norms: Megatron's, or TransformerEngine's, which must be installed; it needs
    CUDA. Attention, router and experts are the same with both. TransformerEngine's was never run by the
    tests of this plugin: certify it first (``pytest --engine=megatron conformance/``)."""


class MegatronConfig(TrainEngineConfig):
    """The common config and Megatron's own section."""

    options: MegatronOptions = MegatronOptions()

    def state_bytes(self, parameters: int, trained: int) -> StateBytes:
        """Weights and gradients on every data parallel rank; with the distributed optimizer, the rest is spread.

        In bfloat16 that is 2 bytes for a weight, and 4 for its float32 copy, which goes with the moments
        (ZeRO-1, arXiv:1910.02054, section 5.1). Every rank has the copies of all its frozen weights; an
        engine without an optimizer and an adapter has none.
        """
        model = self.layout.tp * self.layout.pp
        shared = self.layout.world_size if self.options.distributed_optimizer else model
        frozen = parameters - trained
        copied = self.dtype == "bfloat16" and not self.holds_compute_dtype
        copies = 4 * (trained / shared + frozen / model) if copied else 0.0
        return StateBytes(
            weights=(2 if self.dtype == "bfloat16" else 4) * parameters / model + copies,
            gradients=4 * trained / model,
            moments=self.moment_bytes * trained / shared,
        )

    @property
    def recomputes(self) -> bool:
        """Whether whole layers are computed again in the backward pass."""
        return self.options.recompute == "full"
