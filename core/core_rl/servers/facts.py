"""What a server reports: its model and settings (`ServerFacts`), and the label of its weights.

Products keep one string for the version of their weights, and repeat it with each token. A label names the run that
steers the server, and the version that it gave to the weights: another run can tell that a server is in use, and a run
that its server was taken over.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from core_rl.backend.meta import SyncMethod
from core_rl.checkpoint.end_tokens import read_tokenizer
from core_rl.checkpoint.model_config import read_config
from core_rl.checkpoint.model_files import tokenizer_files
from core_rl.checkpoint.precisions import quantized_layers, shown_layers
from core_rl.config.engine import DType, ModelConfig
from core_rl.data.requests import SamplingParams
from core_rl.servers.adapters import ServedModel

logger = logging.getLogger(__name__)

METADATA = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "use_cache", "quantization_config"}
    | {f"{name}_token_id" for name in ("bos", "eos", "pad")}
)
"""Fields of a config that change no log-prob (requests name the tokens that end them), and the audited precision."""
FRESH = "default"
"""The label of a server that was given no weights since it started."""
UNLABELLED = -1
"""The version of tokens that carry `FRESH`."""
PREFIX = "core-rl:"
RUN = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:4]}"
"""This process, which owns the servers that it labels. Containers may share a host's name and process ids."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server; by default there are none."""

    temperatures: tuple[float, float] = (0.0, math.inf)
    """The lowest and the highest positive temperature."""
    full_distribution: bool = True
    """Whether log-probs describe the distribution before top-k, top-p and min-p cut it."""
    top_k_first: bool = True
    """Whether top-p counts only the tokens that top-k has left."""
    min_p_last: bool = True
    """Whether top-p counts also the tokens that min-p drops."""
    refused: Mapping[SyncMethod, str] = field(default_factory=dict)
    """Methods of weight sync that it lacks, with the reasons."""
    updates_tied_heads: bool = True
    """Whether new weights of the embedding by ``disk`` reach a head that shares them."""
    remedy: str = ""
    """The way to a server without these limits."""

    def sampling_problem(self, sampling: SamplingParams) -> str | None:
        """The reason for which the log-probs of ``sampling`` would be wrong; None where they are right."""
        lowest, highest = self.temperatures
        if sampling.greedy:
            return None
        if not lowest <= sampling.temperature <= highest:
            return (
                f"draws at temperatures from {lowest:g} to {highest:g}, and not at {sampling.temperature:g}"
            )
        if not self.full_distribution and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
            cuts = f"top_k = {sampling.top_k}, top_p = {sampling.top_p:g}, min_p = {sampling.min_p:g}"
            return f"reports log-probs of the distribution that these have cut: {cuts}"
        if not self.top_k_first and sampling.top_k not in (None, 1) and sampling.top_p < 1:
            return f"counts tokens that top_k = {sampling.top_k} drops for top_p = {sampling.top_p:g}; set one of them"
        if not self.min_p_last and sampling.min_p and sampling.top_p < 1:
            return f"cuts by min_p = {sampling.min_p:g} before top_p = {sampling.top_p:g}; set one of them"
        return None

    def update_problem(self, method: SyncMethod, *, tied: bool) -> str | None:
        """The reason for which an update by ``method`` would fail; ``tied`` is for a head with the embedding's weights.

        None where it would not.
        """
        if method in self.refused:
            return f"takes no weights by {method!r}: {self.refused[method]}"
        if method == "disk" and tied and not self.updates_tied_heads:
            return "would keep its old head: the model ties the head to the embedding, whose new weights it loads alone"
        return None


NO_LIMITS = ServerLimits()


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The answers of a server to GET requests; None where its product reports none."""

    path: str
    """The directory of its weights, or their name on the Hub."""
    label: str
    """The version of its weights, as `label_of` writes it."""
    ranks: int = 1
    """Tensor-parallel degree."""
    device: str
    """Device type: ``cpu`` or ``cuda``."""
    tokenizer_path: str | None = None
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    """The most tokens of prompt and response together."""
    dtype: str | None = None
    """The dtype that it computes in."""
    settings: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    """By argument of its command line: the present value, and the value that log-probs and requests need."""
    release: str | None = None
    """The version of the product."""
    limits: ServerLimits = NO_LIMITS
    """Requests and updates that it gets wrong."""


def is_directory(path: str, directory: str) -> bool:
    """Whether the ``path`` of a server is ``directory``, perhaps by a link."""
    absolute = Path(path).is_absolute()
    return path == directory or (absolute and Path(path).resolve() == Path(directory).resolve())


def misfits(facts: ServerFacts, model: ServedModel, dtype: DType) -> Iterator[str]:
    """The facts with which a server cannot serve ``model`` in ``dtype``.

    Configs and tokenizers are compared as files where the server's are on this machine.
    """
    if Path(facts.path).is_absolute() and Path(facts.path, "config.json").is_file():
        config = read_config(ModelConfig(path=facts.path)).to_dict()
        yield from _other_config(config, model.config.to_dict())
        if quantization := config.get("quantization_config"):
            layers = shown_layers(quantized_layers(quantization, model.shapes))
            yield f"it serves layers in another precision than the trainer has: {layers}"
        yield from _other_tokenizer(Path(facts.tokenizer_path or facts.path), model.path)
    else:
        yield from _other_numbers(facts, model)
    limit, needed = facts.context_length, model.limits.context_length
    if limit is not None and needed is not None and limit < needed:
        yield f"its context is {limit} tokens, and the model's {needed}"
    if facts.dtype is not None and facts.dtype != dtype:
        remedy = f"set dtype to its own, or start it with --dtype {dtype}"
        yield f"it computes in {facts.dtype}, and dtype is {dtype}; {remedy}"
    for argument, (value, required) in facts.settings.items():
        if value != required:
            yield f"it runs with {argument} {value}; start it with {required}"


def _other_numbers(facts: ServerFacts, model: ServedModel) -> Iterator[str]:
    config = model.config
    pairs = {
        "model_type": (facts.model_type, config.model_type),
        "architectures": (facts.architectures, tuple(config.architectures or ()) or None),
        "vocab_size": (facts.vocab_size, model.limits.vocab_size),
    }
    for name, (theirs, required) in pairs.items():
        if theirs is not None and required is not None and theirs != required:
            yield f"it serves {name} = {_shown(theirs)} (model.path: {_shown(required)})"


def _other_config(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in {*left, *right} - METADATA if left.get(name) != right.get(name)]
    names.sort(key=lambda name: (name != "model_type", name))
    if names:
        shown = [
            f"{name} = {_shown(left.get(name))} (model.path: {_shown(right.get(name))})" for name in names[:4]
        ]
        more = f" and {len(names) - 4} more fields" if len(names) > 4 else ""
        yield f"its config has {', '.join(shown)}{more}"


def _other_tokenizer(theirs: Path, required: Path) -> Iterator[str]:
    """Differences between the tokenizers of two directories, where both hold one."""
    if not (tokenizer_files(theirs) and tokenizer_files(required)):
        return
    left, right = read_tokenizer(theirs), read_tokenizer(required)
    if left.get_vocab() != right.get_vocab():
        yield f"its tokenizer in {str(theirs)!r} has other tokens"
    if left.chat_template != right.chat_template:
        yield f"its tokenizer in {str(theirs)!r} has another chat template"


def _shown(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.cache
def warn_if_untested(product: str, release: str, tested: frozenset[str]) -> None:
    """Log a warning, the first time, for a ``release`` of ``product`` that is not ``tested``."""
    if tested and release not in tested:
        logger.warning(
            "%s %s has not been tested with this version of core-rl; tested: %s",
            product,
            release,
            ", ".join(sorted(tested)),
        )


def label_of(version: int) -> str:
    """The label of weights of ``version`` that this process has loaded."""
    return f"{PREFIX}{RUN}:{version}"


def owner_of(label: str) -> str | None:
    """The `RUN` that wrote ``label``; None for a label that no run wrote."""
    return label.removeprefix(PREFIX).rpartition(":")[0] if label.startswith(PREFIX) else None


def version_in(label: str) -> int | None:
    """The version in a label of this process, `UNLABELLED` in `FRESH`; None for the label of others."""
    version = label.rpartition(":")[2]
    if owner_of(label) == RUN and version.isdecimal():
        return int(version)
    return UNLABELLED if label == FRESH else None
