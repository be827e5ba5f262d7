"""Known mistakes around optimizer steps, schedules and outputs, each computed from right values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.toolkit.attention import head_size
from core_rl_conformance.hints.diagnose import EXPLAINED, UNEXPLAINED, Finding, compare_named
from core_rl_conformance.hints.tensor_shapes import KINDS, LAYER, RANKS
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_oracle.oracle import AdamW, OptimizerState, OracleSequence, Schedule, ScheduleFromZero, grad_norm
from core_rl_oracle.tolerance import Tolerance, largest_difference

Grads = Mapping[str, Tensor]
Named = Mapping[str, Grads]
"""Tensors by name, of each kind: ``params``, ``exp_avg`` and ``exp_avg_sq``."""
StepRule = Callable[[AdamW, OptimizerState, Grads, float], object]
"""Updates a state in place with one step's gradients and learning rate."""
LEEWAY = 16.0
"""Leeway of a hint alone: other mistakes are off by thousands of tolerances."""
NEARER = 0.25
"""Part of the distance to the right values."""
LABELS = {"params": "weights", "exp_avg": "first moments", "exp_avg_sq": "second moments"}


class Optimizer(Protocol):
    """An optimizer of the oracle: `AdamW`, or Muon next to it."""

    def step(self, state: OptimizerState, grads: Grads, lr: float) -> float: ...


ConfigT = TypeVar("ConfigT", bound=Optimizer)


@dataclass(frozen=True, kw_only=True)
class Steps(Generic[ConfigT]):
    """Optimizer steps: the state before them, and the gradients and the learning rate of each."""

    config: ConfigT
    start: OptimizerState
    grads: Sequence[Grads]
    rates: Sequence[float]
    rule: Callable[[ConfigT, OptimizerState, Grads, float], object] | None = None
    """The step, where it is not that of ``config``."""

    def state(self) -> OptimizerState:
        """Weights and moments after the steps."""
        state = self.start.copy()
        step = self.config.step if self.rule is None else partial(self.rule, self.config)
        for grads, rate in zip(self.grads, self.rates, strict=True):
            step(state, grads, rate)
        return state


def compare_steps(
    label: str, got: Named, steps: Steps[AdamW], allowed: Mapping[str, Mapping[str, Tolerance]], ranks: int
) -> list[Finding]:
    """Compare weights, or weights and moments, after ``steps`` on ``ranks`` data-parallel ranks.

    If some are wrong, one finding reports all of them and names the known mistake.
    """
    right = steps.state()
    findings = {
        kind: compare_named(
            f"{LABELS[kind]} {label}",
            actual,
            getattr(right, kind),
            allowed[kind],
            since=steps.start.params if kind == "params" else None,
        )
        for kind, actual in got.items()
    }
    wrong = {kind: finding for kind, finding in findings.items() if finding.problem is not None}
    if not wrong:
        return list(findings.values())
    verdict = ", ".join(f"{LABELS[kind]} {'wrong' if kind in wrong else 'right'}" for kind in got)

    def fits(mistaken: OptimizerState) -> bool:
        return all(
            _near(actual, getattr(mistaken, kind), getattr(right, kind), allowed[kind])
            for kind, actual in got.items()
        )

    mistakes = (sentence for sentence, mistaken in _mistakes(steps, ranks) if fits(mistaken.state()))
    guess = next((LOOKS_LIKE + sentence for sentence in mistakes), None)
    problems = [str(finding.problem) for finding in wrong.values()]
    problem = "\n".join(filter(None, (f"{label}: {verdict}", *problems, guess)))
    known = guess is not None or any(finding.names_cause for finding in wrong.values())
    return [replace(next(iter(wrong.values())), problem=problem, names_cause=known)]


def _near(got: Grads, wrong: Grads, right: Grads, tolerances: Mapping[str, Tolerance]) -> bool:
    """Whether ``wrong`` explains what is not right of ``got``: tolerances are for ``right``, and grow with the values.

    `LEEWAY` covers the rounding of a mistake, as where a decay nearly cancels a gradient. Small steps are within it
    whatever they are: the mistake has to be much nearer than the right values.
    """
    overall = _growth(wrong.values(), right.values())
    if set(got) != set(wrong):
        return False
    for name, value in wrong.items():
        error = largest_difference(got[name], right[name])
        leeway = LEEWAY * max(1.0, overall, _growth([value], [right[name]])) * tolerances[name].limit
        off = largest_difference(got[name], value) > min(leeway, NEARER * error)
        if off and not tolerances[name].allows(error):
            return False
    return True


def _growth(wrong: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    largest, before = (max(float(value.abs().max()) for value in values) for values in (wrong, right))
    return largest / max(before, 1e-300)


def _mistakes(steps: Steps[AdamW], ranks: int) -> Iterator[tuple[str, Steps[AdamW]]]:
    config, rates = steps.config, list(steps.rates)
    for sentence, changed in (
        ("gradients are not clipped", replace(config, max_grad_norm=None)),
        ("the weights do not decay", replace(config, weight_decay=0.0)),
        *((f"eps is {eps:g}", replace(config, eps=eps)) for eps in (1e-8, 1e-6, 1e-5)),
    ):
        if changed != config:
            yield sentence, replace(steps, config=changed)
    if len(set(rates)) > 1:
        late = replace(steps, rates=[*rates[:1], *rates[:-1]])
        yield "each step has the learning rate of the step before", late
        constant = replace(steps, rates=[config.lr] * len(rates))
        yield "each step has the learning rate of the config, without its schedule", constant
    for number in range(len(rates)):
        resting = replace(steps, rates=[*rates[:number], 0.0, *rates[number + 1 :]])
        yield f"step {number} leaves the weights as they were", resting
    for factor in dict.fromkeys((2.0, 0.5, float(ranks), 1.0 / ranks)):
        if factor != 1.0:
            scaled = [{name: factor * value for name, value in grads.items()} for grads in steps.grads]
            sentence = f"the optimizer gets the exported gradients times {factor:g}"
            yield sentence, replace(steps, grads=scaled)
    for sentence, rule in RULES.items():
        yield sentence, replace(steps, rule=rule)


def _step_with_coupled_decay(config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    clip = config.clip_scale(grad_norm(grads))
    values = {
        name: clip * value.double() + config.weight_decay * (value.dim() >= 2) * state.params[name]
        for name, value in grads.items()
    }
    replace(config, weight_decay=0.0, max_grad_norm=None).step(state, values, rate)


def _step_with_decay_of_vectors(config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    for name, value in grads.items():
        if value.dim() < 2:
            state.params[name].mul_(1 - rate * config.weight_decay)
    config.step(state, grads, rate)


def _step_with_decay_of_the_config(config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    for name, value in grads.items():
        if value.dim() >= 2:
            state.params[name].mul_((1 - config.lr * config.weight_decay) / (1 - rate * config.weight_decay))
    config.step(state, grads, rate)


def _step_up_to(last: int, config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    state.count = min(state.count, last - 1)
    config.step(state, grads, rate)


def _step_modulo(size: int, config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    counted = max(1, (state.count + 1) % size)
    config.step(replace(state, count=counted - 1), grads, rate)
    state.count += 1


def _step_at_a_rate(config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    if rate:
        config.step(state, grads, rate)
    else:
        state.count += 1


def _step_with_gradients(config: AdamW, state: OptimizerState, grads: Grads, rate: float) -> None:
    if any(bool(grad.any()) for grad in grads.values()):
        config.step(state, grads, rate)
    else:
        state.count += 1


Denominator = Callable[[Tensor, float, float], Tensor]
"""Of an update, from the second moment, its correction ``1 - beta2**step``, and eps."""


def _step_over(
    denominator: Denominator, config: AdamW, state: OptimizerState, grads: Grads, rate: float
) -> None:
    before = {name: state.params[name].clone() for name in grads}
    config.step(state, grads, rate)
    corrections = [1 - beta**state.count for beta in config.betas]
    for name, start in before.items():
        decay = rate * config.weight_decay * (start.dim() >= 2)
        update = state.exp_avg[name] / corrections[0]
        update /= denominator(state.exp_avg_sq[name], corrections[1], config.eps)
        state.params[name].copy_(start * (1 - decay) - rate * update)


DENOMINATORS: Mapping[str, Denominator] = {
    "eps is added before the bias correction": lambda v, c, eps: (v.sqrt() + eps) / c**0.5,
    "eps is added inside of the root": lambda v, c, eps: (v / c + eps).sqrt(),
    "eps is added inside of the root, before the bias correction": lambda v, c, eps: ((v + eps) / c).sqrt(),
    "the second moments have no bias correction": lambda v, c, eps: v.sqrt() + eps,
}
RULES: Mapping[str, StepRule] = {
    "the decay goes through the moments (Adam, not AdamW)": _step_with_coupled_decay,
    "norms and biases decay as well": _step_with_decay_of_vectors,
    "the decay has the rate of the config, without its schedule": _step_with_decay_of_the_config,
    "a step at a rate of 0 leaves the moments as they are": _step_at_a_rate,
    "a step whose gradients are all 0 is left out": _step_with_gradients,
    **{f"the bias correction stays at step {last}": partial(_step_up_to, last) for last in range(1, 8)},
    **{sentence: partial(_step_over, denominator) for sentence, denominator in DENOMINATORS.items()},
    **{f"the step count wraps around at {size}": partial(_step_modulo, size) for size in (2**8, 2**16)},
}


Factor = Callable[[Schedule, int], float]
"""The factor of the learning rate, from a schedule and the number of a step."""


def _late_warmup(schedule: Schedule, step: int) -> float:
    warm = step < schedule.warmup_steps
    return step / (schedule.warmup_steps + 1) if warm else schedule.factor(step)


def _zero_behind_the_end(schedule: Schedule, step: int) -> float:
    ended = schedule.total_steps is not None and step > schedule.total_steps
    return 0.0 if ended else schedule.factor(step)


def _of_type(schedule: Schedule, step: int) -> float:
    other = replace(schedule, type="linear" if schedule.type == "cosine" else "cosine")
    return schedule.factor(step) if schedule.total_steps is None else other.factor(step)


RATES: Mapping[str, Factor] = {
    "the warm-up is late by one step, and begins with 0": _late_warmup,
    "the warm-up begins with 0, and rises by step / warmup_steps": lambda schedule, step: ScheduleFromZero(
        **vars(schedule)
    ).factor(step),
    "there is no warm-up": lambda schedule, step: replace(schedule, warmup_steps=0).factor(step),
    "each step has the rate of the step before": lambda schedule, step: schedule.factor(max(0, step - 1)),
    "each step has the rate of the step after": lambda schedule, step: schedule.factor(step + 1),
    "the rate is 0 behind the end, and not the smallest": _zero_behind_the_end,
    "min_lr_ratio is not used": lambda schedule, step: replace(schedule, min_lr_ratio=0.0).factor(step),
    "a cosine decays as a line, or a line as a cosine": _of_type,
    "the rate never decays": lambda schedule, step: replace(schedule, type="constant").factor(step),
}


def explain_rates(
    got: Sequence[float], steps: Sequence[int], schedule: Schedule, lr: float, limit: float
) -> str | None:
    """The mistake that gives the rates ``got`` of all ``steps``, each within ``limit``."""
    return next(
        (
            sentence
            for sentence, factor in RATES.items()
            if all(
                abs(rate - lr * factor(schedule, step)) <= limit
                for rate, step in zip(got, steps, strict=True)
            )
        ),
        None,
    )


ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
OPTIONS: Mapping[str, Callable[[Any, Any], Sequence[Any]]] = {
    "norm_topk_prob": lambda value, _config: [not value],
    "num_experts_per_tok": lambda value, _config: [value - 1] * (value > 1),
    "routed_scaling_factor": lambda _value, _config: [1.0],
    "hidden_act": lambda _value, _config: ACTIVATIONS,
    "hidden_activation": lambda _value, _config: ACTIVATIONS,
    "activation_function": lambda _value, _config: ACTIVATIONS,
    "rms_norm_eps": lambda _value, _config: (1e-6, 1e-5),
    "layer_norm_epsilon": lambda _value, _config: (1e-6, 1e-5),
    "sliding_window": lambda value, _config: (2**20, value - 1, value + 1),
    "layer_types": lambda value, _config: (
        (value[::-1], ["full_attention"] * len(value)) if "sliding_attention" in value else ()
    ),
    "attn_logit_softcapping": lambda _value, _config: [None],
    "final_logit_softcapping": lambda _value, _config: [None],
    "query_pre_attn_scalar": lambda _value, config: [head_size(config)],
    "attention_multiplier": lambda _value, config: [head_size(config) ** -0.5],
    "residual_multiplier": lambda _value, _config: [1.0],
    "embedding_multiplier": lambda _value, _config: [1.0],
    "logits_scaling": lambda _value, _config: [1.0],
}
"""What engines take for an option of a config that they do not read, by its value and the config."""
ROTARY: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "rotary positions are not scaled as in the config": lambda value: {
        "rope_type": "default",
        **{name: value[name] for name in ("rope_theta", "partial_rotary_factor") if name in value},
    },
    "rope_theta is 10,000, and not as in the config": lambda value: {**value, "rope_theta": 10_000.0},
}
"""The same for the parameters of rotary positions, of all layers or of each kind."""


def misread_options(config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Sentences about options of ``config`` that engines misread, and the values that they take."""
    for name, choices in OPTIONS.items():
        value = getattr(config, name, None)
        for misread in choices(value, config) if value is not None else ():
            if misread != value:
                yield f"{name} is {misread}, and not {value} as in the config", {name: misread}
    rotary = getattr(config, "rope_parameters", None) or {}
    for sentence, change in ROTARY.items():
        kinds = {name: change(part) for name, part in rotary.items() if isinstance(part, dict)}
        if rotary and (misread := kinds or change(rotary)) != rotary:
            yield sentence, {"rope_parameters": misread}


MODULE, EXPERT = re.compile(r"([^.]+)\.[^.]+$"), re.compile(r"\.experts\.(\d+)\.")
OF_NORM = 1e-5
"""Of the norm, that an explanation may leave: hundreds of parts are tried."""


def explain_norm(got: float, grads: Mapping[str, Tensor], tolerance: Tolerance) -> str | None:
    """The part of ``grads`` that a wrong norm of them leaves out, or counts several times."""
    squares = {name: float(grad.double().square().sum()) for name, grad in grads.items()}
    total = math.fsum(squares.values())
    error = abs(got - math.sqrt(total))
    near = min(EXPLAINED * tolerance.limit, UNEXPLAINED * error, OF_NORM * math.sqrt(total))
    for label, names in _groups(list(squares)):
        share = math.fsum(squares[name] for name in names)
        for count in (0, *RANKS):
            if share and abs(math.sqrt(max(0.0, total + (count - 1) * share)) - got) <= near:
                return f"the norm counts {label} {count} times"
    return None


def _groups(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for label, pattern in KINDS.items():
        yield label.rpartition(" ")[0], [name for name in names if pattern.search(name)]
    for pattern, noun in ((LAYER, "layer"), (MODULE, "modules called"), (EXPERT, "experts")):
        parts: dict[str, list[str]] = {}
        for name in names:
            if match := pattern.search(name):
                parts.setdefault(match[1], []).append(name)
        yield from ((f"{noun} {part}", members) for part, members in parts.items())
        for count in RANKS:
            size = -(-len(parts) // count)
            for first in range(0, len(parts), size or 1):
                some = list(parts)[first : first + size]
                yield f"{noun} {', '.join(some)}", [name for part in some for name in parts[part]]
    yield from ((name, [name]) for name in names)


Outputs = Mapping[str, Tensor]
Mistake = Callable[[Outputs, Tensor], dict[str, Tensor]]
"""Wrong outputs, from all right ones and the token ids ``[L]``; ``logits [L, V]`` is among them."""
COLUMNS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
MULTIPLES = (64, 128, 256)


def _roll(shift: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    log_p = outputs["logits"].log_softmax(-1)
    drawn = log_p.gather(-1, ids.roll(-shift)[:, None])[:, 0]
    return {"logprobs": torch.cat([torch.zeros_like(drawn[:1]), drawn[1:]])}


def _add_columns(count: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    """The softmax with ``count`` more logits of 0."""
    logits = outputs["logits"]
    total = torch.logaddexp(logits.logsumexp(-1), logits.new_tensor(math.log(count)))
    drawn = logits.gather(-1, ids[:, None])[:, 0] - total
    entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
    later = torch.arange(len(ids)) > 0
    return {"logprobs": drawn * later, "entropy": entropy * later}


def _pad(multiple: int, outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    return _add_columns(-outputs["logits"].shape[-1] % multiple or multiple, outputs, ids)


def _round(outputs: Outputs, ids: Tensor) -> dict[str, Tensor]:
    log_p = outputs["logits"].bfloat16().double().log_softmax(-1)
    later = torch.arange(len(ids)) > 0
    drawn, entropy = log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return {"logprobs": drawn * later, "entropy": entropy * later}


ROUTINGS: Mapping[str, Callable[[Tensor], Tensor] | None] = {
    "recorded routing is not replayed: the routers choose": None,
    "all layers replay the routing of the first": lambda routing: routing[:, :1].expand_as(routing),
    "layers replay the routing of each other, the last that of the first": lambda routing: routing.flip(1),
    "a token replays the routing of the token before it": lambda routing: routing.roll(1, 0),
    "a token replays the routing of the token after it": lambda routing: routing.roll(-1, 0),
}
"""The routing ``[L, layers, k]`` of a sequence that a mistake replays; None: it replays none."""


def misrouted(sequences: Sequence[OracleSequence]) -> Iterator[tuple[str, list[OracleSequence]]]:
    """Sentences about mistakes in the replay of routing, and the ``sequences`` with the routing of each."""
    if not any("routing" in sequence.fields for sequence in sequences):
        return
    for sentence, change in ROUTINGS.items():
        parts = []
        for sequence in sequences:
            fields = dict(sequence.fields)
            routing = fields.pop("routing", None)
            if routing is not None and change is not None:
                fields["routing"] = change(routing)
            parts.append(replace(sequence, fields=fields))
        yield sentence, parts


OUTPUTS: Mapping[str, Mistake] = {
    "logits are rounded to bfloat16": _round,
    "labels are rolled one token too far: a position is compared with the token after its own": partial(
        _roll, 1
    ),
    "labels are not rolled: a position is compared with the token before its own": partial(_roll, -1),
    **{
        f"the softmax counts {count} more columns than the vocabulary has, with logits of 0": partial(
            _add_columns, count
        )
        for count in COLUMNS
    },
    **{
        f"the softmax counts the columns that pad the vocabulary to a multiple of {multiple}": partial(
            _pad, multiple
        )
        for multiple in MULTIPLES
    },
}
