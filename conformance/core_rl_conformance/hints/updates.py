"""Known mistakes of weight updates, by the weights before and afterwards, and by the versions of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core_rl_oracle.float64 import float64_only
from core_rl_oracle.oracle import Oracle
from core_rl_oracle.tolerance import Tolerance, largest_difference

Values = list[Tensor]
"""Log-probs ``[n]`` of the generated tokens of each answer."""
Prompted = Sequence[tuple[tuple[int, ...], int]]
"""The tokens of prompt and answer, and the length of the prompt."""
BLOCKS = (8, 16, 32, 64)
"""Tokens of a block in prefix caches."""
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
NEAR = 4.0
"""Times the tolerance, around the values of a mistake."""


def explain_answers(
    got: Values, right: Values, old: Values, tolerance: Tolerance, wrong: Iterator[tuple[str, Values]]
) -> str | None:
    """The mistake of an update that gives ``got``: whole answers by ``old`` weights, or any of ``wrong``.

    Some answers may be right, such as answers that were never cached.
    """
    sides = [_near(got[number], right[number], tolerance) for number in range(len(got))]
    stale = [not ok and _near(got[number], old[number], tolerance) for number, ok in enumerate(sides)]
    if any(stale) and all(ok or late for ok, late in zip(sides, stale, strict=True)):
        numbers = ", ".join(str(number) for number, late in enumerate(stale) if late)
        return (
            f"{sum(stale)} of {len(got)} answers ({numbers}) have the log-probs of the weights before the update, "
            "the others of the new ones: answers or keys and values that are kept, or a replica without the update"
        )
    for sentence, values in wrong:
        fits = [_near(a, b, tolerance) for a, b in zip(got, values, strict=True)]
        alone = [fit and not ok for fit, ok in zip(fits, sides, strict=True)]
        if any(alone) and all(fit or ok for fit, ok in zip(fits, sides, strict=True)):
            return sentence
    return None


def _near(got: Tensor, value: Tensor, tolerance: Tolerance) -> bool:
    return largest_difference(got, value) <= NEAR * tolerance.limit


def explain_versions(
    got: Values, carried: Sequence[Sequence[int]], sides: Mapping[int, Values], tolerance: Tolerance
) -> str | None:
    """The mistake by which tokens carry other versions than those of the weights that drew them.

    None where no side explains some of the tokens.
    """
    early = late = total = 0
    uniform = True
    for number, values in enumerate(got):
        drawn = [
            {version for version, side in sides.items() if _near(value, side[number][place], tolerance)}
            for place, value in enumerate(values)
        ]
        if not all(drawn):
            return None
        pairs = list(zip(carried[number], drawn, strict=True))
        wrong = [(version, right) for version, right in pairs if version not in right]
        early += sum(version > max(right) for version, right in wrong)
        late += sum(version < min(right) for version, right in wrong)
        total += len(wrong)
        uniform &= not wrong or (len(set(carried[number])) == 1 and len(wrong) < len(pairs))
    if not total:
        return None
    if uniform:
        detail = "each of these answers has one version for all of its tokens"
    elif early == total:
        detail = "they carry a later one: the label changes before the weights, or old weights stay in use"
    elif late == total:
        detail = "they carry an earlier one: the label changes after the weights, or is that of the request's start"
    else:
        detail = "or an update was dropped"
    return (
        f"{total} of {sum(map(len, got))} tokens were drawn by the weights of another version than they carry: "
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
    for sentence, stays in _parts(after, names.get(id(embedding.weight), "")):
        stale = {name for name in after if stays(name)}
        if stale and len(stale) < len(after):
            new.set_parameters({name: before[name] if name in stale else after[name] for name in after})
            yield sentence
    new.set_parameters(after)


def _head(oracle: Oracle) -> torch.nn.Linear:
    head: object = oracle.model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    return head


def _parts(after: Mapping[str, Tensor], embedding: str) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Parts that an update may leave out."""
    yield "the embedding has the weights before the update", lambda name: name == embedding
    yield "vectors (norms, biases) have the weights before the update", lambda name: after[name].dim() < 2
    yield "biases have the weights before the update", lambda name: name.endswith("bias")
    yield "matrices have the weights before the update", lambda name: after[name].dim() >= 2
    layers = {layer for name in after if (layer := _layer(name))}
    for layer in sorted(layers, key=int):
        yield f"layer {layer} has the weights before the update", partial(_is_of, layer)
    yield "all layers have the weights before the update", lambda name: _layer(name) is not None
    yield "all but the layers has the weights before the update", lambda name: _layer(name) is None


def _is_of(layer: str, name: str) -> bool:
    return _layer(name) == layer


def _layer(name: str) -> str | None:
    match = LAYER.search(name)
    return None if match is None else match[1]


def stale_prefixes(old: Oracle, new: Oracle, answers: Prompted) -> Iterator[tuple[str, Values]]:
    """Sentences about keys and values of ``old`` that outlive an update, and the log-probs that each gives."""
    sentence = "keys and values of the weights before the update stay in the cache of prefixes"
    yield (
        f"{sentence}: those of the prompt but its last token",
        [_after_prefix(old, new, ids, size, size - 1) for ids, size in answers],
    )
    yield f"{sentence}: those of the prompt", [_after_prefix(old, new, *one, one[1]) for one in answers]
    for block in BLOCKS:
        values = [_after_prefix(old, new, ids, size, (size - 1) // block * block) for ids, size in answers]
        yield f"{sentence}: those of whole blocks of {block} tokens of the prompt", values
    shared = _shared([ids[:size] for ids, size in answers])
    values = [_after_prefix(old, new, ids, size, min(shared, size - 1)) for ids, size in answers]
    yield f"{sentence}: those of the {shared} tokens that prompts share", values


def kept_in_flight(
    oracles: Mapping[int, Oracle], ids: tuple[int, ...], size: int, versions: Sequence[int]
) -> Tensor:
    """Log-probs ``[n]`` of an answer that went on with its cache when the weights changed, by its ``versions``."""
    change = next(number for number, version in enumerate(versions) if version != versions[0])
    old, new = oracles[versions[0]], oracles[versions[change]]
    return _after_prefix(old, new, ids, size, size + change - 1)


def _shared(prompts: Sequence[tuple[int, ...]]) -> int:
    columns = zip(*prompts, strict=False)
    return next(
        (number for number, column in enumerate(columns) if len(set(column)) > 1), min(map(len, prompts))
    )


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
