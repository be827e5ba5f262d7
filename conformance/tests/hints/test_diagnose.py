"""Messages point at the cause: the first difference, and the shape of the error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl_conformance.hints.diagnose import (
    Finding,
    compare_named,
    compare_scalar,
    compare_tokens,
    same_named,
)
from core_rl_conformance.hints.token_shapes import PLACES as PLACES_OF_ERRORS
from core_rl_conformance.hints.token_shapes import token_hints
from core_rl_conformance.hints.tokens import Places, Tokens, show_factor
from core_rl_conformance.inputs.data import ragged
from core_rl_oracle.tolerance import Tolerance

SMALL = Tolerance(baseline=1e-6, floor=1e-6)
VOCABULARY = 11
BATCH = ragged(VOCABULARY, seed=5, lengths=(7, 4, 9, 1, 12, 2, 15, 6, 11, 8)).batch()
PLACES = Places.of(BATCH, VOCABULARY, ParallelLayout(dp=2))
POSITIONS = BATCH.position_ids
FIRST = POSITIONS == 0
LAST = BATCH.cu_seqlens[1:].long() - 1
VALUES = torch.where(
    FIRST, 0.0, torch.randn(BATCH.num_tokens, generator=torch.Generator().manual_seed(0)) - 3
)
EXPECTED = list(VALUES.split(BATCH.lengths))
NOISE = torch.where(
    FIRST, 0.0, 0.3 + torch.rand(BATCH.num_tokens, generator=torch.Generator().manual_seed(1))
)


def _each(change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(value) for value in EXPECTED])


def _late(value: Tensor) -> Tensor:
    return torch.cat([value[:1], value[:-1]])


def _early(value: Tensor) -> Tensor:
    return torch.cat([value[1:], value[-1:]])


def _problem(finding: Finding) -> str:
    assert finding.problem is not None
    return finding.problem


def _at(where: Tensor) -> Tensor:
    """Unlike errors at the tokens ``where``."""
    return torch.where(where, VALUES + NOISE, VALUES)


def _marked(places: list[int] | Tensor) -> Tensor:
    marked = torch.zeros(BATCH.num_tokens, dtype=torch.bool)
    marked[places] = True
    return marked


def _trained(first: bool) -> Tensor:
    masks = BATCH.loss_mask.split(BATCH.lengths)
    starts = BATCH.cu_seqlens.tolist()
    order = 0 if first else -1
    return _marked(
        [starts[b] + int(mask.nonzero()[order]) for b, mask in enumerate(masks) if bool(mask.any())]
    )


def _after(token: int) -> Tensor:
    seen = [part.cumsum(0) - part.long() > 0 for part in (BATCH.input_ids == token).split(BATCH.lengths)]
    return torch.cat(seen)


def _other_order() -> Tensor:
    order = [*range(BATCH.num_sequences)][::-1]
    return VALUES[BATCH.token_index(order)]


SEQUENCE = torch.repeat_interleave(torch.arange(BATCH.num_sequences), torch.tensor(BATCH.lengths))
LENGTH = torch.tensor(BATCH.lengths)[SEQUENCE]
SHAPES = {
    "one position too late": _each(_late),
    "one position too early": _each(_early),
    r"multiplied by 0\.25 \(1/4\)": 0.25 * VALUES,
    "multiplied by -1": -VALUES,
    r"multiplied by 1\.41421 \(sqrt\(2\)\)": 2**0.5 * VALUES,
    r"multiplied by 1\.0003": 1.0003 * VALUES,
    r"off by \+0\.5": VALUES + 0.5 * ~FIRST,
    "not finite": torch.where(POSITIONS % 3 == 1, torch.nan, VALUES),
    "all zero": torch.zeros_like(VALUES),
    "belong to other sequences": _other_order(),
    "its own values, in another order": _each(lambda value: value.flip(0)),
    "only the first token of": _at(_marked(BATCH.cu_seqlens[:-1].long())) + 0.1 * FIRST,
    "only the last token of": _at(_marked(LAST)),
    "only tokens that are not trained": _at(~BATCH.loss_mask),
    "only trained tokens": _at(BATCH.loss_mask),
    "only the first trained token": _at(_trained(first=True)),
    "only the last trained token": _at(_trained(first=False)),
    r"with the id 10 \(the last of the vocabulary\)": _at(BATCH.input_ids == VOCABULARY - 1),
    "right after the id 3": _at(torch.roll(BATCH.input_ids, 1) == 3),
    "after one with the id 0": _at(_after(0)),
    "only position 3 of": _at(POSITIONS == 3),
    "only positions from 5 on": _at(POSITIONS >= 5),
    "position 1, which attends to one token alone": _at(POSITIONS >= 2),
    "only positions up to 2": _at(POSITIONS <= 2),
    "every 16th position of the packed tokens": _at(torch.arange(BATCH.num_tokens) % 16 == 15),
    "the 5 sequences of data-parallel rank 1": _at(PLACES.rank == 1),
    "only sequence 4": _at(SEQUENCE == 4),
    "sequences of 9 and more": _at(LENGTH >= 9),
    "sequences of at most 7": _at(LENGTH <= 7),
    "the first sequence is right": _at(SEQUENCE > 0),
    "errors grow with the position": VALUES + NOISE * POSITIONS / LENGTH,
    "errors are everywhere and small": VALUES + 1e-3 * NOISE,
}


def test_small_errors_are_no_factor() -> None:
    values = VALUES * (1 - 1e-4 * (3 - torch.arange(len(VALUES)) % 3 * 4))
    problem = _problem(compare_tokens("values", list(values.split(BATCH.lengths)), EXPECTED, SMALL, PLACES))
    assert "errors are everywhere and small" in problem and "multiplied" not in problem


@pytest.mark.parametrize("hint", SHAPES)
def test_only_known_token_error_shapes_are_named(hint: str) -> None:
    places = PLACES if "packed tokens" not in hint else Places.of(BATCH, VOCABULARY)
    finding = compare_tokens("values", list(SHAPES[hint].split(BATCH.lengths)), EXPECTED, SMALL, places)
    problem = _problem(finding)
    assert finding.error > SMALL.limit
    # Where a shift loses an end, and where a reversal moves the zeros, ends are wrong as well.
    assert [shape for shape in SHAPES if re.search(shape, problem)] == [hint], problem


@settings(derandomize=True)
@given(wrong=st.sets(st.sampled_from((~FIRST).nonzero()[:, 0].tolist()), min_size=1))
def test_token_set_matches_wrong_tokens_exactly(wrong: set[int]) -> None:
    got = list((VALUES + NOISE * _marked(sorted(wrong))).split(BATCH.lengths))
    tokens = Tokens.of(got, EXPECTED, SMALL, PLACES)
    hints = token_hints(tokens)
    matching = [part for shape in PLACES_OF_ERRORS for part in shape(tokens) if part[0] in hints]
    for sentence, inside in matching:
        assert not bool((tokens.wrong & ~inside).any()), sentence
        assert bool((~inside & ~FIRST).any()) and 2 * int(tokens.wrong.sum()) >= int((inside & ~FIRST).sum())


ENDS: dict[str, Callable[[Places], Tensor]] = {
    "only tokens from number 102 of a pass on": lambda places: places.order >= 102,
    "only sequences from number 35 of a pass on": lambda places: places.number >= 35,
    "only tokens after an id above 32,767": lambda places: (places.number % 2 == 1) & (places.order % 5 > 1),
}


@pytest.mark.parametrize("hint", ENDS)
def test_buffer_and_integer_limits_are_named(hint: str) -> None:
    ids = [[7, 8, 9, 10, 11], [7, 2**15, 9, 10, 11]] * 20
    mask = torch.ones(5, dtype=torch.bool)
    batch = SequenceBatch.from_sequences(ids, tokens={"loss_mask": [mask] * 40})
    places = Places.of(batch, 40_000)
    wrong = ENDS[hint](places) & batch.not_first
    values = torch.rand(200, generator=torch.Generator().manual_seed(1))
    off = torch.where(wrong, values + 1.0 + values**2, values)
    rows = off.split(batch.lengths), values.split(batch.lengths)
    assert hint in _problem(compare_tokens("values", *rows, SMALL, places))


def test_single_wrong_value_has_no_shape() -> None:
    got = list((VALUES + NOISE * _marked([5])).split(BATCH.lengths))
    assert len(_problem(compare_tokens("values", got, EXPECTED, SMALL, PLACES)).splitlines()) == 2


def test_first_difference_is_shown_with_its_place() -> None:
    got = [value.clone() for value in EXPECTED]
    got[1][2] += 0.5
    problem = _problem(compare_tokens("log-probs", got, EXPECTED, SMALL))
    assert "sequence 1, token 2 of 4" in problem
    assert f"expected {float(EXPECTED[1][2]):.7g}, got {float(got[1][2]):.7g}" in problem
    assert f"1 of {BATCH.num_tokens} values are off" in problem


def test_rows_are_shown_by_their_worst_entry() -> None:
    expected, got = [torch.zeros(3, 4), torch.zeros(1, 4)], [torch.zeros(3, 4), torch.zeros(1, 4)]
    got[0][2] = torch.tensor([0.1, 0.0, -0.5, 0.2])
    problem = _problem(compare_tokens("states", got, expected, SMALL))
    assert "sequence 0, token 2 of 3: expected 0, got -0.5 in entry 2 of 4; " in problem


def test_points_are_few_and_hold_the_worst() -> None:
    got = [value.clone() for value in EXPECTED * 3]
    got[1][2] += 0.5
    points = compare_tokens("log-probs", got, EXPECTED * 3, SMALL, keep_points=True).points
    assert 50 <= len(points) <= 100
    assert max(points, key=lambda pair: abs(pair[0] - pair[1])) == pytest.approx(
        (float(got[1][2]), float(EXPECTED[1][2]))
    )
    assert compare_tokens("log-probs", EXPECTED, EXPECTED, SMALL).points == ()
    assert (
        compare_tokens("log-probs", [torch.zeros(1)], [torch.zeros(1)], SMALL, keep_points=True).points == ()
    )


def test_ends_of_wrong_sequences_are_named() -> None:
    ids = BATCH.input_ids[PLACES.last]
    ends = ids == ids.mode().values
    right = list(1.0 + torch.arange(len(ids)).double())
    got = [value * ~end for value, end in zip(right, ends, strict=True)]
    problem = _problem(compare_tokens("scores", got, right, SMALL, PLACES))
    assert int(ends.sum()) > 1 and f"only sequences that end with the id {ids.mode().values}" in problem
    assert "they are all zero" in problem


def test_scalars_of_sequences_are_compared() -> None:
    expected = [torch.tensor(1.0), torch.tensor(2.0)]
    finding = compare_tokens("scores", [torch.tensor(1.0), torch.tensor(2.5)], expected, SMALL)
    assert "first at sequence 1: expected 2, got 2.5" in _problem(finding)


def test_shapes_are_compared_first() -> None:
    finding = compare_tokens("log-probs", [torch.zeros(3)], [torch.zeros(4)], SMALL)
    assert finding.error == math.inf
    assert finding.problem == "log-probs of sequence 0 has shape [3]; expected [4]"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_never_pass(bad: float) -> None:
    got = [value.clone() for value in EXPECTED]
    got[2][4] = bad
    finding = compare_tokens("log-probs", got, EXPECTED, Tolerance(baseline=1e30, floor=0.0))
    assert "sequence 2, token 4" in _problem(finding)
    assert compare_scalar("loss", bad, 1.0, SMALL).problem is not None


def test_equal_values_pass() -> None:
    assert compare_tokens("log-probs", EXPECTED, EXPECTED, SMALL).problem is None
    assert compare_scalar("loss", 1.0, 1.0 + 1e-7, SMALL).problem is None


# -------------------------------------------------------------- named tensors


def _tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 8)}
    for layer in range(3):
        start = f"model.layers.{layer}."
        shapes |= {
            f"{start}self_attn.q_proj.weight": (8, 8),
            f"{start}self_attn.q_proj.bias": (8,),
            f"{start}mlp.up_proj.weight": (12, 8),
            f"{start}mlp.down_proj.weight": (8, 12),
            f"{start}mlp.experts.0.up_proj.weight": (12, 8),
            f"{start}input_layernorm.weight": (8,),
        }
    shapes |= {"model.norm.weight": (8,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


TIED = _tensors()
NAMED = {**TIED, "lm_head.weight": torch.randn(11, 8, generator=torch.Generator().manual_seed(1))}
LIMITS = dict.fromkeys(NAMED, SMALL)


def _compare(got: dict[str, Tensor], expected: Mapping[str, Tensor] = NAMED) -> str:
    return _problem(compare_named("gradients", got, expected, LIMITS))


def _off(
    pattern: str, part: slice | int = slice(None), tensors: Mapping[str, Tensor] = NAMED
) -> dict[str, Tensor]:
    """``tensors``, with unlike errors in a part of the rows of those whose name holds ``pattern``."""
    got = {name: value.clone() for name, value in tensors.items()}
    for name, value in got.items():
        if re.search(pattern, name):
            value[part] += 1.0 + torch.rand(value[part].shape, generator=torch.Generator().manual_seed(2))
    return got


SETS = {
    "only biases are wrong": _off("bias"),
    "only norms are wrong": _off("norm"),
    "only vectors": _off("norm|bias"),
    "only matrices": _off("(proj|embed_tokens|lm_head).weight"),
    "only embeddings are": _off("embed"),
    "only the head is": _off("lm_head"),
    "only parameters of layer 1 are": _off("layers.1."),
    "only parameters of the layers are": _off("layers"),
    "only up_proj": _off("up_proj"),
    "only attention parameters": _off("attn"),
    "only experts are": _off("experts"),
    "all zero": {name: torch.zeros_like(value) for name, value in NAMED.items()},
    "not finite": {name: value * torch.nan for name, value in NAMED.items()},
    r"all of them are multiplied by 0\.5 \(1/2\)": {name: 0.5 * value for name, value in NAMED.items()},
    "embed_tokens.weight holds lm_head.weight": {
        **NAMED,
        "model.embed_tokens.weight": NAMED["lm_head.weight"],
    },
    "each is transposed": {
        name: value.T if "q_proj.weight" in name else value for name, value in NAMED.items()
    },
    r"only rows \[0\] of 11": _off("embed", 0),
    "only the last index of the first": _off("weight", -1),
    "part 1 .from 0. of 2 equal parts of the first": _off("proj.weight", slice(6, 8))
    | {name: value for name, value in _off("up_proj.weight", slice(6, 12)).items() if "up_proj" in name}
    | {name: value for name, value in _off("q_proj.weight", slice(4, 8)).items() if "q_proj.weight" in name},
    "next to the cuts into 2 shards of the first": _off("layers.*weight", slice(3, 5))
    | {name: value for name, value in _off("up_proj.weight", slice(5, 7)).items() if "up_proj" in name},
}


@pytest.mark.parametrize("hint", SETS)
def test_known_shapes_of_wrong_tensors_are_named(hint: str) -> None:
    problem = _compare(SETS[hint])
    assert re.search(hint, problem), problem


def test_missing_head_suspects_tied_embedding() -> None:
    problem = _compare(_off("embed", tensors=TIED), TIED)
    assert "tied to the head" in problem
    assert "tied to the head" not in _compare(_off("embed"))


def test_step_hints_describe_the_change() -> None:
    steps = {name: torch.randn(value.shape) * 0.01 for name, value in NAMED.items()}
    got = {name: value + 2 * steps[name] for name, value in NAMED.items()}
    expected = {name: value + steps[name] for name, value in NAMED.items()}
    assert "multiplied" not in _compare(got, expected)
    problem = _problem(compare_named("weights", got, expected, LIMITS, since=NAMED))
    assert "in the change, all of them are multiplied by 2" in problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_half_precision_are_recognized(dtype: torch.dtype) -> None:
    rounded = {name: value.to(dtype).float() for name, value in NAMED.items()}
    assert f"each number is one of {str(dtype)[6:]}" in str(same_named("weights", rounded, NAMED).problem)
    values = [value.flatten() for value in NAMED.values()]
    tokens = compare_tokens("logits", [value.to(dtype) for value in values], values, SMALL)
    assert f"each number is one of {str(dtype)[6:]}" in str(tokens.problem)
    others = {name: value + 1 for name, value in rounded.items()}
    assert "each number" not in str(same_named("weights", others, NAMED).problem)


def test_rows_behind_a_small_index_are_named() -> None:
    expected = {"lm_head.weight": torch.ones(33_000, 1), "norm.weight": torch.ones(3)}
    limits = dict.fromkeys(expected, SMALL)
    got = {**expected, "lm_head.weight": torch.arange(33_000)[:, None].lt(32_770).float()}
    problem = _problem(compare_named("gradients", got, expected, limits))
    assert "only rows from 32,768 on of lm_head.weight are wrong" in problem


def test_wrong_part_needs_right_part() -> None:
    head, zero = ({"score.weight": value} for value in (torch.ones(1, 8), torch.zeros(1, 8)))
    problem = _problem(compare_named("gradients", zero, head, {"score.weight": SMALL}))
    assert "all zero (1 of 1)" in problem and "only" not in problem


def test_some_wrong_tensors_are_listed() -> None:
    problem = _compare(_off("layers.1.*q_proj.weight|layers.2.*bias"))
    assert "2 of 21 tensors differ" in problem
    assert "wrong: model.layers.1.self_attn.q_proj.weight, model.layers.2.self_attn.q_proj.bias" in problem
    assert "only" not in problem


def test_names_and_shapes_are_compared_first() -> None:
    expected = {"matrix": torch.zeros(3, 4), "norm": torch.zeros(4), "other": torch.zeros(2)}
    problem = _compare(
        {"matrix": torch.zeros(4, 3), "norm": torch.zeros(4), "lm_head": torch.zeros(1)}, expected
    )
    assert "missing: other" in problem
    assert "lm_head" in problem and "tied" in problem
    assert "matrix is [4, 3]; expected [3, 4]" in problem


def test_bitwise_comparison_sees_last_unit_and_dtype() -> None:
    norm = NAMED["model.norm.weight"]
    assert same_named("weights", NAMED, NAMED).problem is None
    for changed in (torch.nextafter(norm, torch.tensor(math.inf)), norm.bfloat16().float()):
        assert same_named("weights", {**NAMED, "model.norm.weight": changed}, NAMED).problem is not None
    finding = same_named("weights", {**NAMED, "model.norm.weight": norm.double()}, NAMED)
    assert "float64; expected torch.float32" in _problem(finding)


def test_scalars_show_their_ratio() -> None:
    assert "2 times what is expected" in _problem(compare_scalar("the norm", 3.0, 1.5, SMALL))
    arbitrary = _problem(compare_scalar("the norm", 1.234567, 1.0, SMALL))
    assert "times" not in arbitrary and "1.234567" in arbitrary


def test_explanation_replaces_hints_for_wrong_values() -> None:
    finding = compare_tokens(
        "values", [0.5 * value for value in EXPECTED], EXPECTED, SMALL, explain=lambda: "a cause"
    )
    problem = _problem(finding)
    assert problem.endswith("\nit looks like: a cause") and "multiplied" not in problem
    named = compare_named("gradients", SETS["all zero"], NAMED, LIMITS, explain=lambda: "a cause")
    assert "zero" not in _problem(named)
    assert compare_tokens("values", EXPECTED, EXPECTED, SMALL, explain=_never).problem is None
    assert compare_scalar("loss", 1.0, 1.0, SMALL, explain=_never).problem is None


def _never() -> str | None:
    raise AssertionError


def test_named_causes_are_not_called_unknown() -> None:
    finding = compare_tokens("logprobs", [torch.zeros(3)], [torch.tensor([0.0, -1.0, -2.0])], SMALL)
    message = replace(finding, problem=f"a pair differs\n{finding.problem}", names_cause=False).message
    assert "they are all zero" in message and "no known cause" not in message


def test_values_without_cause_are_called_unknown() -> None:
    wide = Tolerance(baseline=0.0, floor=1.0)
    message = compare_scalar("loss", 3.7, 1.0, wide).message
    assert message.endswith("this is 2.7 times the limit\nno known cause fits these values")
    finding = compare_scalar("loss", 2.0, 1.0, Tolerance(baseline=0.0, floor=0.5))
    assert finding.names_cause and finding.message == finding.problem


@pytest.mark.parametrize(
    ("factor", "shown"),
    [
        (2.0, "2"),
        (0.5, "0.5 (1/2)"),
        (-1 / 3, "-0.333333 (-1/3)"),
        (math.sqrt(0.5), "0.707107 (sqrt(1/2))"),
        (3 / 16, "0.1875 (3/16)"),
        (38 / 35, "1.08571"),
        (math.sqrt(49 / 50), "0.989949"),
        (1.2345678, "1.23457"),
        (1e9, "1e+09"),
        (0.0, "0"),
    ],
)
def test_factors_are_shown_as_fraction_or_root(factor: float, shown: str) -> None:
    assert show_factor(factor) == shown
