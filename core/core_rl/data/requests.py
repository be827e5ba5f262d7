"""Requests to inference engines and their responses: token ids, never text.

**The meaning of a log-prob.** ``log_softmax(logits / temperature)[token]`` in float32, of the full
distribution: before top-k, top-p and min-p cut it. Greedy decoding (temperature 0) reports it untempered,
as at temperature 1. A trainer that recomputes log-probs at `SamplingParams.logprob_temperature`
therefore gets the same numbers.

Penalties and ``logit_bias`` change the logits themselves, first the presence penalty, then the repetition penalty, then
the bias. The temperature divides them; top-k cuts, top-p cuts what top-k has left, and then min-p. Log-probs are of
the changed logits then, and a trainer's log-probs differ. `SamplingParams.off_distribution`
names every field that changes the distribution from the one a trainer recomputes.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError, EngineContractError, raise_all

if TYPE_CHECKING:
    from core_rl.data.media import Media

StopReason = Literal["stop", "length", "abort"]
STOP_REASONS: tuple[StopReason, ...] = ("stop", "length", "abort")
SEED_LIMIT = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling, the same for every engine; raises `ConfigError` for values out of range."""

    max_new_tokens: int = 16
    """The most tokens of the response, the stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int | None = None
    """Draw from the ``top_k`` most likely tokens; None keeps all. Applied before ``top_p``."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, besides the end tokens of the model."""
    ignore_eos: bool = False
    """Continue after the end tokens of the model's tokenizer and configs; ``stop_token_ids`` still stop."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is its last. For engines with ``stop_strings``."""
    min_p: float = 0.0
    """Draw from the tokens that are at least this fraction as likely as the most likely one; 0 keeps all. For
    engines with ``min_p``."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the response already has are divided by this where they are positive, and multiplied
    where they are negative; 1 is none. For engines with ``repetition_penalty``."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the response already has. For engines with ``presence_penalty``."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens, pairs of an id and a number; a mapping is taken too. For engines with
    ``logit_bias``."""
    seed: int | None = None
    """With a seed, an engine that can draws the same tokens again from the same weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))
        raise_all(ConfigError, "SamplingParams", self._violations())

    def _violations(self) -> Iterable[str]:
        if self.max_new_tokens < 1:
            yield f"max_new_tokens = {self.max_new_tokens}; it must be at least 1"
        if not 0 <= self.temperature < math.inf:
            yield f"temperature = {self.temperature}; it must be 0 (greedy) or positive, and finite"
        if not 0 < self.top_p <= 1:
            yield f"top_p = {self.top_p}; it must be above 0 and at most 1 (1 keeps all tokens)"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k = {self.top_k}; it must be at least 1, or None to keep all tokens"
        if any(token < 0 for token in self.stop_token_ids):
            yield f"stop_token_ids = {self.stop_token_ids}; ids are not negative"
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            yield f"seed = {self.seed}; it must be at least 0 and below 2**63"
        yield from self._optional_violations()

    def _optional_violations(self) -> Iterable[str]:
        if "" in self.stop:
            yield "stop has an empty text, which every response contains; remove it"
        if not 0 <= self.min_p < 1:
            yield f"min_p = {self.min_p}; it must be at least 0 (keeps all tokens) and below 1"
        if not 0 < self.repetition_penalty < math.inf:
            yield f"repetition_penalty = {self.repetition_penalty}; it must be positive (1 is none)"
        if not math.isfinite(self.presence_penalty):
            yield f"presence_penalty = {self.presence_penalty}; it must be finite (0 is none)"
        if any(token < 0 or not math.isfinite(bias) for token, bias in self.logit_bias):
            yield f"logit_bias = {dict(self.logit_bias)}; ids are not negative, and biases are finite"

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with a seed of `derive_seed`; `dataclasses.replace` would check all again, for each completion."""
        seeded = copy(self)
        object.__setattr__(seeded, "seed", seed)
        return seeded

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature == 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the reported log-probs: ``temperature``, and 1 for greedy decoding."""
        return self.temperature or 1.0

    @property
    def off_distribution(self) -> tuple[str, ...]:
        """Fields that change the distribution from ``softmax(logits / temperature)``, each with its value."""
        changed = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k is not None,
            "min_p": self.min_p > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "logit_bias": bool(self.logit_bias),
        }
        return tuple(f"{name} = {getattr(self, name)}" for name, is_set in changed.items() if is_set)

    @property
    def needed_capabilities(self) -> frozenset[Capability]:
        """Capabilities that an engine must declare to serve this."""
        needed = {
            Capability.STOP_STRINGS: bool(self.stop),
            Capability.MIN_P: self.min_p > 0,
            Capability.REPETITION_PENALTY: self.repetition_penalty != 1,
            Capability.PRESENCE_PENALTY: self.presence_penalty != 0,
            Capability.LOGIT_BIAS: bool(self.logit_bias),
        }
        return frozenset(capability for capability, is_set in needed.items() if is_set)

    @property
    def reads_the_response(self) -> bool:
        """True if a token depends on those drawn before it otherwise than through the model."""
        return bool(self.stop) or self.repetition_penalty != 1 or self.presence_penalty != 0


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """One prompt, to be continued once; a group of n samples is n requests."""

    input_ids: tuple[int, ...]
    """The prompt."""
    sampling: SamplingParams = SamplingParams()
    media: Media = field(default_factory=dict, compare=False)
    """The images of the prompt, whose placeholders are among ``input_ids``, one for each feature: see
    `core_rl.data.media`. Only for engines with ``Capability.VISION``."""
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names the request in errors and at the server; an engine refuses the id of another request in flight."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", tuple(self.input_ids))


@dataclass(frozen=True, kw_only=True)
class LLMResponse:
    """The response to one request. Raises `EngineContractError` when its parts do not agree."""

    rid: str
    """The request's."""
    input_ids: tuple[int, ...]
    """The prompt as it was given."""
    output_ids: tuple[int, ...]
    """The tokens drawn, the stop token included."""
    logprobs: tuple[float, ...]
    """One for each output token; the module's docstring defines them."""
    versions: tuple[int, ...]
    """The version of the weights that drew each output token."""
    stop_reason: StopReason
    """``stop``: the last token ends the response, also where it is the last one allowed; ``length``: the limit was
    reached without one; ``abort``: the engine ended it early."""
    latency_s: float = 0.0
    """Seconds from the call to the response; the core fills it in."""

    def __post_init__(self) -> None:
        for name in ("input_ids", "output_ids", "logprobs", "versions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        raise_all(EngineContractError, f"response to request {self.rid}", self._violations())

    def _violations(self) -> Iterable[str]:
        count = len(self.output_ids)
        for name, values in (("logprobs", self.logprobs), ("versions", self.versions)):
            if len(values) != count:
                yield f"{len(values)} {name} for {count} output tokens; there is one for each"
        if self.stop_reason not in STOP_REASONS:
            yield f"stop_reason = {self.stop_reason!r}; it is one of {', '.join(STOP_REASONS)}"
        elif not count and self.stop_reason != "abort":
            yield f"no output tokens, and stop_reason = {self.stop_reason!r}; only an aborted request has none"
