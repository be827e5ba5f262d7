"""A user's model with fewer layers, experts and words, so that its real widths fit a small machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from core_rl.checkpoint.model_files import copy_model_files, copy_tokenizer
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.engine.guards import EXPERT_COUNTS
from core_rl.errors import CheckpointError, ConfigError

LAYER = re.compile(r"\D*\.(\d+)\.")
OUTSIDE = -1
"""The layer of tensors that are in none."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OVER_EXPERTS = re.compile(r"\.(experts|router|gate)\.|_correction_bias$")
"""Names of tensors with a row for each expert."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How many layers, experts of a layer, and words are left; None leaves all."""

    layers: int | None = None
    experts: int | None = None
    vocabulary: int | None = None

    def __bool__(self) -> bool:
        return self != Cuts()


def write_smaller_model(source: Path, cuts: Cuts, directory: Path) -> str:
    """Write the model in ``source`` with what ``cuts`` leaves of it into ``directory``; sentences on the cuts.

    Experts and words keep their first rows. A model with fewer words is written without its tokenizer.
    Raises `ConfigError` for a model that has no more than ``cuts`` leaves, or cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(source)
        files = TensorFiles(source, "model")
    except (OSError, ValueError, CheckpointError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model in {source} cannot be read: {reason}") from error
    text = config.get_text_config()
    rows = {name: files.shape(name)[0] if files.shape(name) else 1 for name in files.names()}
    sizes, sentences = dict(rows), []
    if cuts.layers is not None:
        sentences.append(_cut_layers(text, rows, cuts.layers))
    if cuts.experts is not None:
        sentences.append(_cut_experts(text, rows, cuts.experts))
    if cuts.vocabulary is not None:
        sentences.append(_cut_vocabulary(config, rows, cuts.vocabulary))
    config.save_pretrained(directory)
    stream = (
        (name, files.read(name) if count == sizes[name] else files.read(name)[:count].clone())
        for name, count in rows.items()
    )
    write_tensors(directory, "model", stream, writes=True)
    copy_model_files(str(source), directory)
    if cuts.vocabulary is None:
        copy_tokenizer(None, str(source), directory)
    return "; ".join(sentences)


def _cut_layers(text: PretrainedConfig, rows: dict[str, int], count: int) -> str:
    """Keep more layers where a kind of layer comes later: by the config's ``layer_types``, or by its tensors."""
    layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in text.to_dict().items()
        if isinstance(value, list) and len(value) == layers and not name.endswith("_token_id")
    }
    layer_of = {name: _layer(name) for name in rows}
    kinds = list(_kinds(layers, layer_of, lists))
    size = max(count, *(kinds.index(kind) + 1 for kind in set(kinds)))
    if size >= layers:
        reason = f"it has {layers} layers" if count >= layers else f"only the last of {layers} has its kind"
        raise _nothing_to_cut("--truncate-layers", count, reason)
    text.num_hidden_layers = size
    for name, value in lists.items():
        setattr(text, name, value[:size])
    for name, layer in layer_of.items():
        if layer >= size:
            del rows[name]
    more = f" ({count} would leave out a kind of layer)" if size > count else ""
    return f"layers {size} to {layers - 1} of {layers} are cut{more}"


def _layer(name: str) -> int:
    return int(match[1]) if (match := LAYER.match(name)) else OUTSIDE


def _kinds(
    layers: int, layer_of: Mapping[str, int], lists: Mapping[str, list[object]]
) -> Iterator[tuple[object, ...]]:
    """Of each layer its entry in each list of types, and the names of its tensors."""
    types = [value for name, value in lists.items() if name.endswith("layer_types")]
    for layer in range(layers):
        names = (LAYER.sub("", name, count=1) for name, number in layer_of.items() if number == layer)
        yield frozenset(names), *(entries[layer] for entries in types)


def _cut_experts(text: PretrainedConfig, rows: dict[str, int], count: int) -> str:
    field = next((name for name in EXPERT_COUNTS if getattr(text, name, None)), None)
    experts = int(getattr(text, field)) if field else 0
    if field is None or count >= experts:
        raise _nothing_to_cut("--keep-experts", count, f"it has {experts} experts in a layer")
    per_token, groups = text.to_dict().get("num_experts_per_tok") or 1, text.to_dict().get("n_group") or 1
    if count < per_token or count % groups:
        multiple = f", and a multiple of n_group={groups}" if groups > 1 else ""
        raise ConfigError(
            f"--keep-experts={count}: a token takes {per_token}; keep at least as many{multiple}"
        )
    setattr(text, field, count)
    for name, size in list(rows.items()):
        if match := EXPERT.search(name):
            if int(match[1]) >= count:
                del rows[name]
        elif size == experts and OVER_EXPERTS.search(name):
            rows[name] = count
    return f"experts {count} to {experts - 1} of each layer are cut"


def _cut_vocabulary(config: PretrainedConfig, rows: dict[str, int], count: int) -> str:
    """Special tokens beyond the cut are in no config any more."""
    text = config.get_text_config()
    words = text.vocab_size
    if count >= words:
        raise _nothing_to_cut("--vocab", count, f"it has {words} words")
    text.vocab_size = count
    for name, size in rows.items():
        if _layer(name) == OUTSIDE and size == words:
            rows[name] = count
    for part in (config, text):
        for name, value in part.to_dict().items():
            ids = value if isinstance(value, list) else [value]
            if name.endswith("_token_id") and any(word is not None and word >= count for word in ids):
                setattr(part, name, [word for word in ids if word < count] or None)
    return f"words {count} to {words - 1} of {words} are cut"


def _nothing_to_cut(option: str, count: int, reason: str) -> ConfigError:
    return ConfigError(f"{option}={count}: nothing can be cut: {reason}; leave the option out")
