"""The points in the order in which they run: what fails early explains what fails later."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["POINTS", "Point"]


@dataclass(frozen=True)
class Point:
    """A ``function``, ``module:name``, that takes a `Setting` and returns figures, or raises."""

    name: str
    function: str
    limit_s: float
    """Its time limit on a GPU and in a rehearsal."""
    about: str


_BASICS, _KERNELS, _SUITE, _TRAINING, _ROLLOUTS = (
    f"{__name__}.{module}" for module in ("basics", "kernels", "suite", "training", "rollouts")
)

POINTS = (
    Point(
        "machine", f"{_BASICS}:machine", 60, "Versions, shared memory, open files, the GPU and its kernels"
    ),
    Point("group", f"{_BASICS}:group", 120, "An EngineGroup of one rank starts, computes and ends"),
    Point(
        "process-groups", f"{_BASICS}:process_groups", 120, "gloo and NCCL in one group, twice in one process"
    ),
    Point("attention", f"{_KERNELS}:attention", 300, "Packed attention and its gradients against float64"),
    Point("suite-float32", f"{_SUITE}:float32", 900, "The suite on fsdp, float32"),
    Point(
        "suite-bfloat16", f"{_SUITE}:bfloat16", 900, "The suite on fsdp, bfloat16; bits of two equal steps"
    ),
    Point("syncs", f"{_TRAINING}:syncs", 300, "Waits for the GPU inside of a training step"),
    Point("logprobs", f"{_KERNELS}:logprobs", 300, "Log-probs over a real vocabulary: error, time, memory"),
    Point("experts", f"{_KERNELS}:experts", 300, "A block of a mixture, its experts grouped and one by one"),
    Point("utilisation", f"{_TRAINING}:utilisation", 900, "Model FLOPs utilisation of training steps"),
    Point("adamw", f"{_KERNELS}:adamw", 300, "AdamW fused and by operator"),
    Point("offload", f"{_TRAINING}:offload", 300, "Memory that offloading gives back, and bits afterwards"),
    Point("checkpoints", f"{_TRAINING}:checkpoints", 600, "Saving, loading, the next step, and an export"),
    Point("megatron", f"{_SUITE}:megatron", 900, "The suite on megatron, and memory while it saves"),
    Point("sglang", f"{_ROLLOUTS}:sglang", 900, "A server on the same GPU: requests, sync, mismatch, memory"),
)
