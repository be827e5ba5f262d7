"""Megatron's Gated DeltaNet (arXiv:2412.06464) over packed sequences, and stand-ins for its kernels without CUDA."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import pairwise
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from core_rl.errors import MissingPackage
from core_rl.toolkit.segments import Segments
from core_rl_megatron import cpu_shim

PACKAGE = "megatron.core.ssm.gated_delta_net"
MODULES = (PACKAGE, f"{PACKAGE}.common", f"{PACKAGE}.gdn")
"""0.18 has the first, 0.19 all of them."""
EPS = 1e-6
"""Of the norm of queries and keys, as in transformers and in flash-linear-attention."""
CHUNK = 64
"""Tokens that are computed by one matrix product, at most."""


class PackedDeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """Starts anew with each sequence of a batch. Megatron does so for the format ``thd`` alone, in silence."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            config, submodules, layer_number=layer_number, pg_collection=pg_collection, name=name
        )
        self.out_proj.register_forward_pre_hook(_in_new_strides)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **others: Any,  # of Megatron's layer, for attention
    ) -> tuple[Tensor, Tensor | None]:
        """``[L, 1, H]`` to ``[L, 1, H]``, and no bias."""
        segments = cast("Segments", cast("Any", packed_seq_params).segments)
        bounds = segments.starts(hidden_states.device)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        result: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, attention_mask, packed_seq_params=packed
        )
        return result


def _in_new_strides(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """``[L, 1, D]`` as rows: transposed from ``[1, L, D]``, torch multiplies them by a frozen weight one by one."""
    return (inputs[0].flatten(0, 1).unsqueeze(1),)


def delta_net_spec(norm: type[nn.Module]) -> ModuleSpec:
    """The layer, with ``norm`` for its output. On the CPU it runs with the stand-ins below.

    Raises `MissingPackage` on CUDA without flash-linear-attention.
    """
    if importlib.util.find_spec("fla") is None:
        if torch.cuda.is_available():
            raise MissingPackage(
                "Gated DeltaNet on CUDA needs kernels: pip install flash-linear-attention; or use the engine 'fsdp'"
            )
        _install_stand_ins()
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear)
    return ModuleSpec(module=PackedDeltaNet, submodules=parts)


def _install_stand_ins() -> None:
    """Give Megatron's modules the functions below in place of flash-linear-attention's, which need triton."""
    names: dict[str, Any] = {
        "HAVE_FLA": True,
        "l2norm": l2norm,
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": gated_delta_rule,
    }
    package = importlib.import_module(PACKAGE)
    inner = MODULES[1:] if hasattr(package, "__path__") else ()
    for module in [package, *map(importlib.import_module, inner)]:
        cpu_shim.use_cpu(module)
        for name, value in names.items():
            if hasattr(module, name):
                setattr(module, name, value)


def l2norm(values: Tensor) -> Tensor:
    """``values`` divided by their norms along the last dimension, computed in float32."""
    upcast = values.float()
    return (upcast * torch.rsqrt(upcast.square().sum(-1, keepdim=True) + EPS)).to(values.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: None,  # noqa: ARG001
    output_final_state: bool,  # noqa: ARG001
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """The convolution of ``x [1, T, C]`` with ``weight [C, W]``, of each sequence from its first token on."""
    assert activation in ("silu", "swish")  # of `PackedDeltaNet`, which passes neither state on
    lengths = cu_seqlens.diff().tolist()
    before = weight.shape[1] - 1
    parts = [
        F.conv1d(F.pad(part.T[None], (before, 0)), weight[:, None], bias, groups=len(weight))[0].T
        for part in x[0].split(lengths)
        if len(part)
    ]
    return F.silu(torch.cat(parts))[None], None


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None,  # noqa: ARG001
    output_final_state: bool,  # noqa: ARG001
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Megatron's rule in torch (``[1, T, heads, D]``, ``g`` and ``beta [1, T, heads]``), sequence by sequence."""
    assert not use_qk_l2norm_in_kernel  # `PackedDeltaNet` has done it
    rule = importlib.import_module(PACKAGE).torch_chunk_gated_delta_rule
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        part = [tensor[:, start:end] for tensor in (query, key, value, g, beta)]
        if end > start:
            parts.append(rule(*part, chunk_size=min(CHUNK, end - start))[0])
    return torch.cat(parts, 1), None
