"""Experts of a mixture: the tensors that ``save_pretrained`` writes, and routers, recorded, replayed and balanced.

transformers 5 fuses experts in memory and writes each one; published files of Qwen3-VL-MoE have them fused as well,
and transposed. Written out for the layouts that the suite's mixtures have, and sharing nothing with the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Choice:
    """Logits and choices of one layer's router for ``T`` tokens."""

    logits: Tensor
    """``[T, E]``, with their graph."""
    experts: Tensor
    """``[T, k]``."""

    def rows(self, start: int, stop: int) -> Choice:
        """That of some of the tokens."""
        return Choice(self.logits[start:stop], self.experts[start:stop])


@contextmanager
def watched(model: nn.Module, replay: Tensor | None = None) -> Iterator[list[Choice]]:
    """A list that the routers of ``model`` fill, one entry for each layer that has one; none for other models.

    With ``replay [T, layers, k]`` they choose these experts, with gates of the present probabilities of them.
    """
    choices: list[Choice] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            inputs = None if replay is None else replay[:, layer]
            stack.callback(router.register_forward_hook(partial(_after, choices, inputs)).remove)
        yield choices


def _after(
    choices: list[Choice],
    replay: Tensor | None,
    router: nn.Module,
    args: tuple[Tensor, ...],  # noqa: ARG001  hooks get it by position
    output: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    logits, gates, experts = output
    if replay is not None:
        experts = replay.to(logits.device)
        probabilities = torch.softmax(logits.float(), -1)
        picked = torch.stack(
            [row[expert_ids] for row, expert_ids in zip(probabilities, experts, strict=True)]
        )
        if getattr(router, "norm_topk_prob", True):
            picked = picked / picked.sum(-1, keepdim=True)
        gates = picked.to(logits.dtype)
    choices.append(Choice(logits, experts))
    return logits, gates, experts


def balance(choices: Sequence[Choice], counted: Sequence[Choice] | None = None) -> Tensor:
    """The load-balancing loss of one sequence of ``L`` tokens, times ``L``: the layers' mean of ``E * sum_e f_e P_e``.

    ``f_e`` is the share of the choices that fell on expert ``e``, ``P_e`` the mean of its probabilities
    (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). With ``counted`` it is a share of these.
    """
    terms = []
    for choice, shared in zip(choices, counted or choices, strict=True):
        length, count = choice.logits.shape
        probabilities = torch.softmax(choice.logits.float(), -1)
        for expert in range(count):
            share = int((shared.experts == expert).sum()) / max(1, shared.experts.numel())
            terms.append(count * share * probabilities[:, expert].sum() / max(1, length))
    return torch.stack(terms).sum() * len(choices[0].logits) / len(choices)


def written(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Written names and views of the parameter-shaped ``value`` that a module holds under ``name``.

    Fused gates and ups are ``[experts, gates then ups, hidden]``, downs ``[experts, hidden, intermediate]``.
    """
    prefix, separator, part = name.partition(".experts.")
    if not separator:
        yield name, value
        return
    if ".language_model." in prefix:
        yield name, value.mT
        return
    for expert, matrix in enumerate(value):
        if part == "gate_up_proj":
            half = len(matrix) // 2
            yield f"{prefix}.experts.{expert}.gate_proj.weight", matrix[:half]
            yield f"{prefix}.experts.{expert}.up_proj.weight", matrix[half:]
        else:
            yield f"{prefix}.experts.{expert}.{part}.weight", matrix


def all_written(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of all ``values``, parameter-shaped and by the module's names, under the names of `written`."""
    return {
        written_name: part for name, value in values.items() for written_name, part in written(name, value)
    }


UNDER_A_TEXT_MODEL = [
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
]
OLD_NAMES: Mapping[str, Sequence[tuple[str, str]]] = {
    "qwen2_5_vl": [("model.visual.", "visual."), ("model.language_model.", "model.")],
    "gemma3": UNDER_A_TEXT_MODEL,
    "internvl": UNDER_A_TEXT_MODEL,
}
"""Prefixes of names in modules of transformers 5, and in files of the same models, by model type."""


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model``, a tied one once, by their names in files; experts are still fused."""
    kind = getattr(model.config, "model_type", "")
    return {name_in_files(kind, name): parameter for name, parameter in model.named_parameters()}


def name_in_files(model_type: str, name: str) -> str:
    """The name of the parameter ``name`` in files; factors of adapters are named after modules."""
    prefixes = () if ".lora_" in name else OLD_NAMES.get(model_type, ())
    changed = (new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))
    return next(changed, name)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """All gradients, by the names of `parameters_of`; 0 where there is none."""
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in parameters_of(model).items()
    }


def overwrite(local: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set the ``local`` tensors in place to ``values``, which have checkpoint names."""
    for name, tensor in local.items():
        for written_name, view in written(name, tensor):
            if written_name in values:
                view.copy_(values[written_name])
