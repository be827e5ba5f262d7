"""A user's model cut to its first layers, so that its real widths fit a small machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transformers import AutoConfig

from core_rl.checkpoint.model_files import copy_model_files, copy_tokenizer
from core_rl.checkpoint.tensor_files import TensorFiles, write_tensors
from core_rl.errors import CheckpointError, ConfigError

LAYER = re.compile(r"\D*\.(\d+)\.")
OUTSIDE = -1
"""The layer of tensors that are in none."""


def truncate_layers(source: Path, count: int, directory: Path) -> str:
    """Write the model in ``source`` with its first ``count`` layers into ``directory``; a sentence on the cut.

    It keeps more layers where a kind of layer comes later: by the config's ``layer_types``, or by its tensors.
    Raises `ConfigError` for a model that has no more layers than ``count``, or cannot be read.
    """
    option = f"--truncate-layers={count}"
    try:
        config = AutoConfig.from_pretrained(source)
        files = TensorFiles(source, "model")
    except (OSError, ValueError, CheckpointError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{option}: the model in {source} cannot be read: {reason}") from error
    text = config.get_text_config()
    layers = text.num_hidden_layers
    lists = {
        name: value
        for name, value in text.to_dict().items()
        if isinstance(value, list) and len(value) == layers and not name.endswith("_token_id")
    }
    layer_of = {name: int(match[1]) if (match := LAYER.match(name)) else OUTSIDE for name in files.names()}
    types = [value for name, value in lists.items() if name.endswith("layer_types")]
    kinds = [_kind(layer, layer_of, types) for layer in range(layers)]
    size = max(count, *(kinds.index(kind) + 1 for kind in set(kinds)))
    if size >= layers:
        reason = f"it has {layers} layers" if count >= layers else f"only the last of {layers} has its kind"
        raise ConfigError(f"{option}: nothing can be cut from {source}: {reason}; leave the option out")
    text.num_hidden_layers = size
    for name, value in lists.items():
        setattr(text, name, value[:size])
    config.save_pretrained(directory)
    stream = ((name, files.read(name)) for name, layer in layer_of.items() if layer < size)
    write_tensors(directory, "model", stream, writes=True)
    copy_model_files(str(source), directory)
    copy_tokenizer(None, str(source), directory)
    more = f" ({count} would leave out a kind of layer)" if size > count else ""
    return f"layers {size} to {layers - 1} of {layers} are cut{more}"


def _kind(layer: int, layer_of: Mapping[str, int], types: Iterable[Sequence[object]]) -> tuple[object, ...]:
    """Its entry in each list of ``types``, and the names of its tensors."""
    names = (LAYER.sub("", name, count=1) for name, number in layer_of.items() if number == layer)
    return frozenset(names), *(entries[layer] for entries in types)
