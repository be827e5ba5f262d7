"""Expert parallelism: experts spread over ranks, each of which computes its own for the tokens of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_rl.distributed.collectives import gather, reduce_scatter
from core_rl.distributed.comm import Comm
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.toolkit.dtensor import own_part

__all__ = ["ExpertDispatch", "check_expert_parallel", "dispatch_experts", "expert_modules"]

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The weighted sum ``[N, H]`` over the experts of this rank, of hidden states ``[N, H]``, chosen experts ``[N, k]`` and
gates ``[N, k]``. Number ``count`` of ``count`` experts stands for an expert of another rank, which is not computed."""


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that hold the weights of experts, one fused tensor for all of them, by name."""
    # As transformers' own `use_experts_implementation` marks them.
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_concatenated")}


def check_expert_parallel(model: nn.Module, degree: int) -> None:
    """Raise `LayoutError` where ``degree`` does not divide the experts of ``model``, or it has none, and
    `UnsupportedCapability` for experts that cannot be spread. Needs no weights.
    """
    modules = expert_modules(model)
    if not modules:
        raise LayoutError(f"ep={degree} for {type(model).__name__}, which has no experts; set ep to 1")
    for name, module in modules.items():
        count = _count(module)
        if count % degree:
            raise LayoutError(
                f"ep={degree} does not divide the {count} experts of {name}; choose an ep that does"
            )
        if not hasattr(module, "_is_expert_parallel"):
            raise UnsupportedCapability(
                "this version of transformers cannot leave out experts of other ranks; install 5.23 or newer, or set "
                "ep to 1"
            )
        shared = [
            weight_name for weight_name, weight in module.named_parameters() if weight.shape[:1] != (count,)
        ]
        if shared:
            raise UnsupportedCapability(
                f"experts of {name} share {', '.join(shared)}, which ranks with different experts cannot; set ep to 1"
            )


def dispatch_experts(model: nn.Module, trunk: nn.Module, ranks: Comm) -> None:
    """Let the experts of ``model`` compute by an `ExpertDispatch` over ``ranks``, all with the same one.

    The fused weights of experts are `DTensor`s, of whose first dimension each rank has an equal part, in the order of
    ``ranks``. ``trunk`` is the part of the model that gets the tokens as ``input_ids [1, T]``: there ranks compare
    their numbers, once in a forward pass.
    """
    dispatch = ExpertDispatch(ranks)
    trunk.register_forward_pre_hook(partial(_compare_lengths, dispatch), with_kwargs=True)
    for module in expert_modules(model).values():
        compute = type(module).forward
        # Compiled blocks are cut here: grouped products and collectives gain nothing.
        module.forward = torch.compiler.disable(partial(_forward, module, compute, dispatch))


class ExpertDispatch:
    """Dispatch of tokens to experts over ``ranks``, each of which has an equal number of consecutive experts.

    Every rank gets the tokens of all, computes its own experts for them, and the results are added up on the rank that
    each token came from. No size depends on a router's choices, so the host never waits for a device to learn it, and
    kernels queue ahead. Of ``T`` tokens on each of ``ep`` ranks, ``ep T H`` numbers travel either way; an all-to-all
    exchange of the chosen ones sends ``k T H``, no less where ``ep <= k``. The cost is memory: there are
    ``ep T k`` rows for the tokens and their choices, of which products compute about ``T k``, and the rest are masked.
    """

    def __init__(self, ranks: Comm) -> None:
        self.ranks = ranks
        self._host = Comm(ranks.group, torch.device("cpu"), timeout_s=ranks.timeout_s)
        self._rows = 0

    def begin(self, tokens: int) -> None:
        """Before a forward pass over this many tokens of this rank. Collective, between hosts alone."""
        (longest,) = self._host.max([float(tokens)])
        self._rows = int(longest) + 1  # one for the row below

    def __call__(
        self, hidden: Tensor, experts: Tensor, gates: Tensor, count: int, compute: Compute
    ) -> Tensor:
        """The weighted sum ``[T, H]`` over the chosen experts of ``count``, which all ranks have together.

        ``hidden [T, H]``, ``chosen [T, k]`` and ``gates [T, k]`` are of this rank's tokens. Collective, as is the
        backward pass.
        """
        ranks, missing = self.ranks, self._rows - len(hidden)
        assert missing > 0  # `begin` came first
        padding = (0, 0, 0, missing)
        # Each rank finds a part of the gradient of a token and of its gates.
        tokens = gather(F.pad(hidden, padding), ranks, 0, partial=True)
        weights = gather(F.pad(gates, padding), ranks, 0, partial=True)
        numbers = gather(F.pad(experts, padding, value=count), ranks, 0, partial=False)
        local_count = count // ranks.size
        numbers = numbers - local_count * ranks.rank
        numbers = torch.where((numbers >= 0) & (numbers < local_count), numbers, local_count)
        # One row of padding, whose result is dropped, is computed. A rank whose experts nobody chose would otherwise
        # have no graph, and its collectives in the backward pass would be missing.
        numbers[-1, 0] = 0
        result = compute(tokens, numbers, weights)
        # No view: FSDP's hook on it would be lost where a model adds to it in place.
        return reduce_scatter(result, ranks, 0)[: len(hidden)].clone()


class _OwnExperts:
    """Stands in for an experts module in its own forward function: with this rank's weights alone, as plain tensors."""

    _is_expert_parallel = True
    """For transformers: the number `num_experts` stands for an expert that is not here."""

    def __init__(self, module: nn.Module, count: int) -> None:
        self._module = module
        self.num_experts = count
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, own_part(parameter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _count(module: nn.Module) -> int:
    count: Any = module.num_experts
    return int(count)


def _compare_lengths(
    dispatch: ExpertDispatch, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    dispatch.begin(kwargs["input_ids"].shape[-1])


def _forward(
    module: nn.Module,
    compute: Callable[..., Tensor],
    dispatch: ExpertDispatch,
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
) -> Tensor:
    count = _count(module)
    local = _OwnExperts(module, count // dispatch.ranks.size)
    return dispatch(hidden, experts, gates, count, partial(compute, local))
