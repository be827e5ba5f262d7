"""Known mistakes around AdamW: steps that are made with one of them, to compare with a wrong engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core_rl_conformance.hints.diagnose import Finding, compare_named
from core_rl_conformance.truth.oracle import AdamW, AdamWState, grad_norm
from core_rl_conformance.truth.tolerance import Tolerance, largest_difference

__all__ = ["Steps", "compare_weights"]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps: where they began, the gradients and the learning rate of each."""

    config: AdamW
    start: AdamWState
    grads: Sequence[Mapping[str, Tensor]]
    rates: Sequence[float]
    coupled: bool = False
    """The decay is added to the gradients, as in Adam with L2 regularization."""
    vectors: bool = False
    """Norms and biases decay as well."""
    scale: float = 1.0
    """What the gradients are multiplied by."""

    def weights(self) -> dict[str, Tensor]:
        """The weights after them."""
        state, decay = self.start.copy(), self.config.weight_decay
        config = replace(self.config, weight_decay=0.0, max_grad_norm=None) if self.coupled else self.config
        for grads, rate in zip(self.grads, self.rates, strict=True):
            used = {name: self.scale * value.double() for name, value in grads.items()}
            if self.coupled:
                clip = self.config.clip_scale(grad_norm(used))
                for name, value in used.items():
                    used[name] = clip * value + decay * state.params[name] * (value.dim() >= 2)
            if self.vectors:
                for value in state.params.values():
                    value.mul_(1 - rate * decay * (value.dim() < 2))
            config.step(state, used, rate)
        return state.params


def compare_weights(
    what: str, got: Mapping[str, Tensor], steps: Steps, tolerances: Mapping[str, Tolerance], ranks: int
) -> Finding:
    """Compare the weights ``got`` after ``steps`` on ``ranks`` data-parallel ranks; name a known mistake."""
    finding = compare_named(what, got, steps.weights(), tolerances, since=steps.start.params)
    if finding.problem is None:
        return finding
    mistake = _guess(steps, got, tolerances, ranks)
    return replace(finding, problem="\n".join(filter(None, (finding.problem, mistake))))


def _guess(
    steps: Steps, got: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance], ranks: int
) -> str | None:
    if set(got) != set(steps.start.params):
        return None
    for sentence, wrong in _mistakes(steps, ranks):
        found = wrong.weights()
        if all(
            tolerances[name].allows(largest_difference(got[name], value)) for name, value in found.items()
        ):
            return f"it looks like: {sentence}"
    return None


def _mistakes(steps: Steps, ranks: int) -> Iterator[tuple[str, Steps]]:
    config, rates = steps.config, list(steps.rates)
    for sentence, changed in (
        ("gradients are not clipped", replace(config, max_grad_norm=None)),
        ("the weights do not decay", replace(config, weight_decay=0.0)),
        ("betas are (0.9, 0.999), torch's default", replace(config, betas=(0.9, 0.999))),
        ("betas are exchanged", replace(config, betas=config.betas[::-1])),
        *((f"eps is {eps:g}", replace(config, eps=eps)) for eps in (1e-8, 1e-6, 1e-5, 1e-12)),
    ):
        if changed != config:
            yield sentence, replace(steps, config=changed)
    if config.weight_decay:
        yield "the decay goes through the moments (Adam, not AdamW)", replace(steps, coupled=True)
        yield "norms and biases decay as well", replace(steps, vectors=True)
    if len(set(rates)) > 1:
        yield (
            "each step has the learning rate of the step before",
            replace(steps, rates=[*rates[:1], *rates[:-1]]),
        )
        yield "the learning rate stays what it was at first", replace(steps, rates=rates[:1] * len(rates))
    if steps.start.count:
        start = replace(steps.start.copy(), count=0)
        yield "the step count of the bias correction began again", replace(steps, start=start)
    for factor in dict.fromkeys((2.0, 0.5, float(ranks), 1.0 / ranks)):
        if factor != 1.0:
            sentence = f"the optimizer gets the exported gradients times {factor:g}"
            yield sentence, replace(steps, scale=factor)
