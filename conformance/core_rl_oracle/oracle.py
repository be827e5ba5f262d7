"""The float64 oracle: outputs of model and loss, computed as plainly as possible.

The plain Hugging Face model with eager attention, one unpacked sequence at a time, in true float64.
Nothing here imports pytest or core-rl: the code under test and its judge share no line.

Positions follow the contract: a value at position ``t`` belongs to token ``t``. The first token of a
sequence has log-prob, entropy and value 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from core_rl_oracle.experts import all_written, balance, gradients_of, overwrite, parameters_of, watched
from core_rl_oracle.float64 import float64_only
from core_rl_oracle.layers import recorded_layers
from core_rl_oracle.low_rank import LowRank
from core_rl_oracle.media import load_model, media_arguments
from core_rl_oracle.on_disk import copied, move_to_disk

KINDS = ("params", "momentum", "exp_avg", "exp_avg_sq")
"""The tensors of an `OptimizerState`."""
REFUSING = 2
"""Number of sequences of a call inspected for a smaller dtype; the others go through the same operations."""

Outputs = Mapping[str, Tensor]
OracleHead = Literal["lm", "value", "reward"]


@dataclass(frozen=True, kw_only=True)
class OracleSequence:
    """One sequence: ``L`` token ids, and the loss's inputs besides the model's outputs."""

    input_ids: list[int]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Token fields ``[L, ...]`` or values of the whole sequence; floats of any precision."""
    media: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of a vision-language model with the images of the sequence."""
    partner: OracleSequence | None = None
    """The rejected sequence of a pair, whose outputs the loss takes as well."""

    @property
    def parts(self) -> list[OracleSequence]:
        """The sequence, and its partner."""
        return [self] if self.partner is None else [self, self.partner]

    def in_dtype(self, dtype: torch.dtype) -> OracleSequence:
        """The same with all floats in ``dtype``."""
        fields = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self.fields.items()
        }
        partner = None if self.partner is None else self.partner.in_dtype(dtype)
        return replace(self, fields=fields, partner=partner)


SequenceLoss = Callable[[Outputs, OracleSequence], tuple[Tensor, float]]
"""``loss(outputs, sequence) -> (total, weight)``: the scalar sum over one sequence and how much it counts."""
PARTNER = "partner."
"""Before the names of a partner's outputs."""


def joined_outputs(parts: Sequence[Outputs]) -> dict[str, Tensor]:
    """The outputs of a sequence, and of its partner if there is a second part."""
    first, *partners = parts
    return {**first, **{PARTNER + name: value for partner in partners for name, value in partner.items()}}


def outputs_of_partner(outputs: Outputs) -> dict[str, Tensor]:
    """The partner's part of `joined_outputs`."""
    return {name.removeprefix(PARTNER): value for name, value in outputs.items() if name.startswith(PARTNER)}


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of (sum of totals) / (sum of weights), float64, by name; a tied parameter once."""

    loss: float
    weight: float
    grads: Mapping[str, Tensor]

    @property
    def norm(self) -> float:
        """The 2-norm over all parameters."""
        return grad_norm(self.grads)


class Oracle:
    """The model in ``directory`` (``save_pretrained`` format) with any of the three heads, or with its vision tower.

    The factors of an ``adapter`` are parameters like others, named after their layer. Large weights and gradients are
    in temporary files. ``options`` replace some of the config's.
    """

    def __init__(
        self,
        directory: Path,
        head: OracleHead = "lm",
        adapter: LowRank | None = None,
        vision: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        with float64_only():
            self.model = load_model(directory, head, vision, torch.float64, options)
            move_to_disk(self.model)
            if adapter is not None:
                adapter.attach(self.model)
        self.head = head
        # A vision tower has others.
        self._rotary = [part for part in self.model.modules() if hasattr(part, "original_max_seq_len")]

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, float64, by their written names, a tied one once."""
        parameters = all_written(parameters_of(self.model))
        return {name: copied(value) for name, value in parameters.items()}

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Replace the parameters named in ``values``."""
        overwrite({name: value.detach() for name, value in parameters_of(self.model).items()}, values)

    def outputs(
        self, sequence: OracleSequence, temperature: float = 1.0, *, refuse: bool = True
    ) -> dict[str, Tensor]:
        """All outputs of one sequence of ``L`` tokens and of its partner, with their graph.

        For ``lm``: ``logits [L, V]`` (that token ``t`` was drawn from, divided by the temperature),
        ``logprobs [L]`` and ``entropy [L]``; otherwise ``values [L]``, ``bootstrap`` and ``scores`` (scalars).
        With routers, their ``aux_loss`` (a scalar, times ``L``), ``routing [L, layers, k]`` and
        ``router_logits [L, layers, E]`` as well.
        ``refuse`` is that of `float64_only`.
        """
        return joined_outputs([self._alone(part, temperature, refuse) for part in sequence.parts])

    def _alone(self, sequence: OracleSequence, temperature: float, refuse: bool) -> dict[str, Tensor]:
        with float64_only(refuse=refuse), watched(self.model, sequence.fields.get("routing")) as choices:
            ids = torch.tensor([sequence.input_ids])
            # Undo the changes for a longer sequence, which the kind ``dynamic`` keeps.
            for module in self._rotary:
                buffers = module._buffers
                for name in [name for name in buffers if name.endswith("original_inv_freq")]:
                    prefix = name.removesuffix("original_inv_freq")
                    original = buffers[name]
                    assert original is not None
                    buffers[f"{prefix}inv_freq"] = original.clone()
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            outputs = self._outputs(ids, media_arguments(self.model, ids, sequence.media), temperature)
            if choices:
                outputs["aux_loss"] = balance(choices)
                outputs["routing"] = torch.stack([choice.experts for choice in choices], dim=1)
                outputs["router_logits"] = torch.stack([choice.logits for choice in choices], dim=1)
            return outputs

    def _outputs(self, ids: Tensor, media: Mapping[str, Tensor], temperature: float) -> dict[str, Tensor]:
        if self.head == "lm":
            logits = self.model(input_ids=ids, use_cache=False, **media).logits[0]
            scaled = logits / temperature
            log_p = scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)
            drawn = log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]  # row ``t - 1`` predicts token ``t``
            entropy = -(log_p.exp() * log_p).sum(-1)
            return {
                "logits": _one_later(scaled),
                "logprobs": torch.cat([torch.zeros(1), drawn]),
                "entropy": _one_later(entropy),
            }
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        assert callable(self.model.score)
        states = self.model.score(hidden)[:, 0]
        # The value *before* token ``t`` comes from token ``t - 1``.
        return {"values": _one_later(states), "bootstrap": states[-1], "scores": states[-1]}

    def evaluate(
        self, sequences: Sequence[OracleSequence], temperature: float = 1.0
    ) -> list[dict[str, Tensor]]:
        """`outputs` of each sequence without a graph."""
        with torch.no_grad():
            return [
                self.outputs(sequence, temperature, refuse=number < REFUSING)
                for number, sequence in enumerate(sequences)
            ]

    def hidden_states(self, sequences: Sequence[OracleSequence]) -> list[Tensor]:
        """``[L, layers + 1, H]`` of each sequence: before the first layer, and after each."""
        results = []
        for sequence in sequences:
            with recorded_layers(self.model) as states:
                self.evaluate([sequence])
            results.append(torch.stack(states, dim=2)[0])
        return results

    def gradients(
        self, sequences: Sequence[OracleSequence], loss: SequenceLoss, temperature: float = 1.0
    ) -> Gradients:
        """Loss and gradients over all ``sequences``; parameters that the loss does not reach have zeros.

        They come in the order of the backward pass: a comparison names the first wrong one, where an error begins.
        """
        self.model.zero_grad(set_to_none=True)
        total, weight = 0.0, 0.0
        reached: dict[str, None] = {}
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.setdefault(name))
            for name, parameter in parameters_of(self.model).items()
            if parameter.requires_grad
        ]
        for number, sequence in enumerate(sequences):
            refuse = number < REFUSING
            outputs = self.outputs(sequence, temperature, refuse=refuse)
            promoted = sequence.in_dtype(torch.float64)
            with float64_only(refuse=refuse):
                part, counted = loss(outputs, promoted)
                if part.requires_grad:
                    part.backward()
            total, weight = total + float(part.detach()), weight + counted
        for hook in hooks:
            hook.remove()
        grads = gradients_of(self.model)
        grads = all_written({name: grads[name] for name in dict.fromkeys((*reached, *grads))})
        means = {name: grad.div_(weight) for name, grad in grads.items()}
        self.model.zero_grad(set_to_none=True)
        return Gradients(loss=total / weight, weight=weight, grads=means)


def _one_later(values: Tensor) -> Tensor:
    """Each row of ``values [L, ...]`` at the next token; the first token has zeros."""
    return torch.cat([torch.zeros_like(values[:1]), values[:-1]])


def grad_norm(grads: Mapping[str, Tensor]) -> float:
    """The 2-norm over all tensors, in float64."""
    return math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads.values()))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factors of the learning rate: a linear warm-up, and then a decay to ``min_lr_ratio`` at ``total_steps``."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def factor(self, step: int) -> float:
        """The factor of step ``step`` (from 0)."""
        rise = self.rise(step)
        if rise < 1.0 or self.type == "constant":
            return min(1.0, rise)
        assert self.total_steps is not None
        left = max(0, self.total_steps - step) / (self.total_steps - self.warmup_steps)
        if self.type == "cosine":  # half a period, from the top to the bottom
            left = math.sin(math.pi / 2 * left) ** 2
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * left

    def rise(self, step: int) -> float:
        """The factor of the warm-up, at least 1 after it: W steps have 1 / (W + 1), 2 / (W + 1), ..."""
        return (step + 1) / (self.warmup_steps + 1)


@dataclass(frozen=True, kw_only=True)
class ScheduleFromZero(Schedule):
    """The same with a warm-up whose first step has the rate 0, as transformers' schedules have."""

    def rise(self, step: int) -> float:
        """W steps have 0, 1 / W, 2 / W, ..."""
        return step / self.warmup_steps if step < self.warmup_steps else 1.0


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), and gradient clipping.

    Matrices decay; norms and biases do not.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def clip_scale(self, norm: float) -> float:
        """The factor for gradients of this ``norm``; the 1e-6 is that of torch's ``clip_grad_norm_``."""
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))

    def step(self, state: OptimizerState, grads: Mapping[str, Tensor], lr: float | None = None) -> float:
        """Update ``state`` in place with float64 copies of ``grads``; returns their norm before clipping.

        Parameters without a gradient in ``grads`` are frozen.
        """
        rate = self.lr if lr is None else lr
        norm = grad_norm(grads)
        scale = self.clip_scale(norm)
        state.count += 1
        beta1, beta2 = self.betas
        for name, value in grads.items():
            grad = value.double() * scale
            parameter = state.params[name]
            first = state.exp_avg[name].mul_(beta1).add_(grad * (1 - beta1))
            second = state.exp_avg_sq[name].mul_(beta2).add_(grad * grad * (1 - beta2))
            if parameter.dim() >= 2:
                parameter.mul_(1 - rate * self.weight_decay)
            unbiased = (second / (1 - beta2**state.count)).sqrt()
            parameter.sub_(rate * (first / (1 - beta1**state.count)) / (unbiased + self.eps))
        return norm


@dataclass(kw_only=True)
class OptimizerState:
    """Weights and moments, and the number of steps taken."""

    params: dict[str, Tensor]
    momentum: dict[str, Tensor] = field(default_factory=dict)
    """Of parameters that Muon steps, in place of the moments of AdamW."""
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    @staticmethod
    def start(params: Mapping[str, Tensor], muon: Collection[str] = ()) -> OptimizerState:
        """Float64 copies of ``params`` and moments of zero; the parameters named in ``muon`` have a momentum."""
        zeros = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in params.items()}
        return OptimizerState(
            params={name: value.detach().double().clone() for name, value in params.items()},
            momentum={name: zero for name, zero in zeros.items() if name in muon},
            exp_avg={name: zero for name, zero in zeros.items() if name not in muon},
            exp_avg_sq={name: zero.clone() for name, zero in zeros.items() if name not in muon},
        )

    def copy(self, dtype: torch.dtype = torch.float64) -> OptimizerState:
        """A deep copy in ``dtype``."""
        copies = {
            kind: {name: value.to(dtype, copy=True) for name, value in getattr(self, kind).items()}
            for kind in KINDS
        }
        return OptimizerState(**copies, count=self.count)
