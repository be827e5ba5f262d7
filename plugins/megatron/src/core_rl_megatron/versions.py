"""Differences between the versions of megatron-core that the engine is tested with."""

from __future__ import annotations

import functools
import logging
from typing import Any

import importlib_metadata as metadata
from megatron.core.transformer import ModuleSpec, TransformerConfig
from packaging.version import Version

DEPRECATED = "GPTModel IS DEPRECATED"


def packs_delta_net() -> bool:
    """Whether Megatron's Gated DeltaNet takes packed sequences; before 0.18 it raises for them."""
    return Version(metadata.version("megatron-core")) >= Version("0.18")


def submodules_of(spec: ModuleSpec | functools.partial[Any]) -> Any:
    """The parts of a layer's MLP or attention; from 0.18 on its spec is a ``functools.partial``."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def no_cuda_graphs() -> dict[str, list[str]]:
    """The field of `TransformerConfig` for parts in CUDA graphs, which 0.18 renamed; its default warns of itself."""
    names = TransformerConfig.__dataclass_fields__
    return {"cuda_graph_modules" if "cuda_graph_modules" in names else "cuda_graph_scope": []}


def forget_reduction(bucket_group: Any) -> None:
    """Have the next pass reduce the gradients of ``bucket_group`` again, which 0.18 does only after they are zeroed."""
    bucket_group.grad_reduce_handle = None
    if hasattr(bucket_group, "grad_reduce_finished"):
        bucket_group.grad_reduce_finished = False


def hide_deprecations() -> None:
    """Drop the warning that 0.19 logs for each `GPTModel`, whose layers and embeddings the engine builds on."""
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_no_deprecation)


def _is_no_deprecation(record: logging.LogRecord) -> bool:
    return DEPRECATED not in record.getMessage()
