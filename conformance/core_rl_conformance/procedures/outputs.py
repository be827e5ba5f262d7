"""Outputs of train engines: their form, their errors as a whole, and what all ranks compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from core_rl.config.engine import Head
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput, OutputName
from core_rl.launch.group import EngineGroup
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import ExpectedOutputs
from core_rl_conformance.hints.diagnose import compare_mean_square, compare_signed_mean
from core_rl_conformance.hints.tokens import Places
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures.adapters import snapshot_of

PROBE = (13, 2, 21, 1, 8, 17, 5, 11)
"""Lengths of a few sequences: enough to show the weights that the ranks compute with, and for one step."""
OUTPUT: Mapping[Head, OutputName] = {"lm": "logprobs", "value": "values", "reward": "scores"}
ENOUGH = 16
"""Count of numbers that are not all round by chance."""


def verify_outputs(
    subject: EngineUnderTest, group: EngineGroup, of: TinyModel | TinyAdapter, label: str
) -> None:
    """Compare log-probs, values or scores on all ranks with the oracle that has the engine's exported weights.

    With an adapter: the base's own weights and the exported adapter. Export alone cannot show that a rank
    computes with different weights: an old gathered copy, or a replica that has drifted away.
    """
    data = subject.data(lengths=PROBE)
    if isinstance(of, TinyModel):
        now = subject.snapshot(group, of, f"weights {label}")
    else:
        now = snapshot_of(subject, of, group)
    name = OUTPUT[now.head]
    places = None if name == "scores" else subject.places(data)
    expected = subject.outputs(now, data, name)

    def answer() -> list[Tensor]:
        return per_sequence(group.forward(data.batch(), ONE_PASS, (name,)), name, data)

    subject.verify_tokens(f"{name} {label}", answer(), expected, places, again=answer)


def verify_forward(
    subject: EngineUnderTest,
    group: EngineGroup,
    names: Sequence[OutputName],
    of: TinyModel | TinyAdapter,
    data: Ragged,
    label: str,
    *,
    cut: MicroBatchSpec = ONE_PASS,
    temperature: float = 1.0,
    overall: bool = False,
    plotted: bool = False,
) -> None:
    """Compare the form and all values of outputs of one pass with the oracle's; with values, bootstraps as well.

    Messages call each by its name and ``label``. With ``overall``, the errors of all tokens together are small, too.
    """
    answer = partial(group.forward, data.batch(), cut, tuple(names), temperature)
    output = answer()
    model = of if isinstance(of, TinyModel) else of.model
    places = Places.of(data.batch(), model.vocab_size, subject.layout, cut)
    for name in names:
        verify_form(subject, output, name, data)
    for part in (*names, *["bootstrap"] * ("values" in names)):
        expected, got = subject.outputs(of, data, part, temperature), per_sequence(output, part, data)
        again = partial(lambda name: per_sequence(answer(), name, data), part)
        subject.verify_tokens(f"{part} {label}", got, expected, places, plotted=plotted, again=again)
        if overall:
            verify_overall(subject, f"{part} {label}", got, expected)


def verify_form(subject: EngineUnderTest, output: object, name: OutputName, data: Ragged) -> None:
    """Require one float32 value (or row) for each token of ``data``, on the CPU, and 0 at first tokens.

    A score is for each sequence.
    """
    kind = type(output).__name__
    subject.require(isinstance(output, ModelOutput), f"forward() returned a {kind}, not a ModelOutput")
    value = getattr(output, name)
    subject.require(isinstance(value, Tensor), f"the output {name!r} is missing")
    count, places = (len(data.rows), "sequences") if name == "scores" else (sum(data.lengths), "tokens")
    form = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    subject.require(
        value.dtype == torch.float32 and value.shape[:1] == (count,) and value.device.type == "cpu",
        f"the output {name!r} is {form}; expected float32 [{count}, ...] on cpu",
    )
    broken = (~value.isfinite().reshape(count, -1).all(dim=1)).nonzero()[:, 0]
    subject.require(
        not len(broken),
        f"the output {name!r} is NaN or infinite at {len(broken)} of {count} {places} of the batch, "
        f"first at {broken[:6].tolist()}",
    )
    # float32 nearly always holds numbers outside of bfloat16; logits may come as the model has them.
    known = value[value != 0]
    rounded = known.numel() >= ENOUGH and torch.equal(known, known.bfloat16().float())
    subject.require(
        name == "logits" or not rounded,
        f"every value of the output {name!r} is a bfloat16 number: it was computed, or stored, in bfloat16; "
        "go over to float32 before the softmax, and before the scalar head",
    )
    firsts = value[:0] if name == "scores" else value[data.batch().cu_seqlens[:-1].long()]
    subject.require(not firsts.any(), f"the output {name!r} is not 0 at first tokens, which nothing predicts")


def verify_overall(
    subject: EngineUnderTest, label: str, got: Sequence[Tensor], expected: ExpectedOutputs
) -> None:
    """Require that the errors of all tokens together are small, and do not point one way."""
    subject.verify(compare_signed_mean(label, *expected.signed_mean(got)))
    subject.verify(compare_mean_square(label, *expected.mean_square(got)))
