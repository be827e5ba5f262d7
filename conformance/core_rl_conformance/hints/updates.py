"""Known mistakes of weight updates, by the weights before and afterwards, and by the versions of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from core_rl_conformance.hints.diagnose import EXPLAINED
from core_rl_oracle.float64 import float64_only
from core_rl_oracle.oracle import Oracle
from core_rl_oracle.tolerance import Tolerance, largest_difference

Values = list[Tensor]
"""Log-probs ``[n]`` of the generated tokens of each answer."""
Mistake = tuple[str, Values]
"""A sentence, and the log-probs that it gives."""
Prompted = Sequence[tuple[tuple[int, ...], int]]
"""The tokens of prompt and answer, and the length of the prompt."""
BLOCKS = (8, 16, 32, 64)
"""Tokens of a block in prefix caches."""
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
BEFORE = "log-probs of the weights before the update"
SAME_LABEL = "log-probs of earlier weights that had the same version"


def stale_answers(
    got: Values, right: Values, old: Values, tolerance: Tolerance, weights: str = BEFORE
) -> Iterator[Mistake]:
    """Whole answers by ``old`` weights; others may be right, such as answers that were never cached."""
    sides = list(enumerate(zip(got, right, old, strict=True)))
    numbers = [
        n for n, (a, new, before) in sides if _near(a, before, tolerance) and not _near(a, new, tolerance)
    ]
    label = f"{len(numbers)} of {len(got)} answers ({', '.join(map(str, numbers))}) have the {weights}"
    reason = (
        "others of the new ones: answers or keys and values that are kept, or a replica without the update"
    )
    values = [before if n in numbers else new for n, (_, new, before) in sides]
    yield weights if len(numbers) == len(got) else f"{label}, {reason}", values


def _near(got: Tensor, value: Tensor, tolerance: Tolerance) -> bool:
    return largest_difference(got, value) <= EXPLAINED * tolerance.limit


def explain_versions(
    got: Values, carried: Sequence[Sequence[int]], sides: Mapping[int, Values], tolerance: Tolerance
) -> str | None:
    """The mistake by which tokens carry other versions than those of the weights that drew them.

    None where no side explains some of the tokens.
    """
    wrong: list[tuple[int, set[int]]] = []
    uniform = True
    for number, (values, versions) in enumerate(zip(got, carried, strict=True)):
        drawn = [
            {version for version, side in sides.items() if _near(value, side[number][place], tolerance)}
            for place, value in enumerate(values)
        ]
        if not all(drawn):
            return None
        off = [pair for pair in zip(versions, drawn, strict=True) if pair[0] not in pair[1]]
        uniform &= not off or (len(set(versions)) == 1 and len(off) < len(versions))
        wrong += off
    if not wrong:
        return None
    if uniform:
        detail = "each of these answers has one version for all of its tokens"
    elif all(version > max(right) for version, right in wrong):
        detail = "they carry a later one: the label changes before the weights, or old weights stay in use"
    elif all(version < min(right) for version, right in wrong):
        detail = "they carry an earlier one: the label changes after the weights, or is that of the request's start"
    else:
        detail = "or an update was dropped"
    return (
        f"{len(wrong)} of {sum(map(len, got))} tokens were drawn by the weights of another version than they carry: "
        f"it is not read with the draw; {detail}"
    )


def mixed_weights(old: Oracle, new: Oracle) -> Iterator[str]:
    """Sentences about weights that an update leaves; ``new``, the caller's own, has these weights meanwhile."""
    before, after = old.parameters(), new.parameters()
    head, embedding = _head(new), new.model.get_input_embeddings()
    weight, tied = head.weight, head.weight is embedding.weight
    head.weight = torch.nn.Parameter(_head(old).weight.detach().clone())
    yield f"the body has the new weights, and the {'tied ' * tied}head those before the update"
    head.weight = weight
    if tied:
        head.weight = torch.nn.Parameter(weight.detach().clone())
    names = {id(value): name for name, value in new.model.named_parameters()}
    for part, stale in _parts(after, names.get(id(embedding.weight), "")).items():
        if stale and len(stale) < len(after):
            new.set_parameters({name: before[name] if name in stale else after[name] for name in after})
            yield f"{part} the weights before the update"
    new.set_parameters(after)
    buffers = list(zip(old.model.buffers(), new.model.buffers(), strict=True))
    if not all(torch.equal(*pair) for pair in buffers):
        for value, buffer in buffers:
            buffer.copy_(value)
        yield "buffers have the values before the update"


def _head(oracle: Oracle) -> torch.nn.Linear:
    head: object = oracle.model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    return head


def _parts(after: Mapping[str, Tensor], embedding: str) -> dict[str, set[str]]:
    """Names of the weights in each part that an update may leave out."""
    layers = {name: int(match[1]) for name in after if (match := LAYER.search(name))}
    vectors = {name for name, value in after.items() if value.dim() < 2}
    return {
        "the embedding has": {embedding} & after.keys(),
        "vectors (norms, biases) have": vectors,
        "biases have": {name for name in after if name.endswith("bias")},
        "matrices have": after.keys() - vectors,
        **{
            f"layer {layer} has": {name for name in layers if layers[name] == layer}
            for layer in sorted(set(layers.values()))
        },
        "all layers have": set(layers),
        "all parts but the layers have": after.keys() - layers,
    }


def stale_prefixes(old: Oracle, new: Oracle, answers: Prompted) -> Iterator[Mistake]:
    """Sentences about keys and values of ``old`` that outlive an update, and the log-probs that each gives."""
    columns = zip(*(ids[:size] for ids, size in answers), strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    prefixes: dict[str, Callable[[int], int]] = {
        "the prompt but its last token": lambda size: size - 1,
        "the prompt": lambda size: size,
        **{f"whole blocks of {block} tokens of the prompt": partial(_blocks, block) for block in BLOCKS},
        f"the {shared} tokens that prompts share": lambda size: min(shared, size - 1),
    }
    for part, length in prefixes.items():
        values = [_after_prefix(old, new, ids, size, length(size)) for ids, size in answers]
        yield (
            f"keys and values of the weights before the update stay in the cache of prefixes: of {part}",
            values,
        )


def _blocks(block: int, size: int) -> int:
    """Tokens of a prompt of ``size`` tokens in whole blocks, its last token left out."""
    return (size - 1) // block * block


def kept_in_flight(
    oracles: Mapping[int, Oracle], ids: tuple[int, ...], size: int, versions: Sequence[int]
) -> Tensor:
    """Log-probs ``[n]`` of an answer that went on with its cache when the weights changed, by its ``versions``."""
    change = next(number for number, version in enumerate(versions) if version != versions[0])
    old, new = oracles[versions[0]], oracles[versions[change]]
    return _after_prefix(old, new, ids, size, size + change - 1)


def _after_prefix(old: Oracle, new: Oracle, ids: tuple[int, ...], size: int, prefix: int) -> Tensor:
    """Log-probs ``[n]`` of the tokens behind ``size`` by ``new``, with the cache of ``old`` for ``prefix`` tokens."""
    row = torch.tensor([ids])
    with torch.no_grad(), float64_only(refuse=False):
        logits: list[Tensor] = []
        cache: Any = None  # hybrid models have a cache of their own
        if prefix > 0:
            before = old.model(input_ids=row[:, :prefix], use_cache=True)
            logits, cache = [before.logits[0]], before.past_key_values
        logits.append(new.model(input_ids=row[:, prefix:], past_key_values=cache, use_cache=True).logits[0])
        log_p = torch.cat(logits)[:-1].log_softmax(-1)
        return log_p.gather(-1, row[0, 1:, None])[size - 1 :, 0]
