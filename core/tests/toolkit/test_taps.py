"""Hidden states between layers equal transformers', and are recorded on request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_support as support
import pytest
import torch
from tiny_families import tiny_model

from core_rl.backend.loss import LossSpec
from core_rl.config.capability import Capability
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.loading import load_engine
from core_rl.errors import ConfigError, CoreRLError, UnsupportedCapability
from core_rl.reference import SPEC
from core_rl.toolkit.taps import decoder_layers

CUT = MicroBatchSpec(max_tokens=12, share_prefixes=True)


def test_hidden_states_equal_transformers() -> None:
    engine, batch = support.engine(), support.batch()
    output = engine.forward(batch, CUT, ("logprobs", "hidden_states"))
    model: Any = vars(engine.backend)["model"]
    assert not any(layer._forward_hooks for layer in decoder_layers(model).values())
    expected = []
    with torch.no_grad():
        for ids in batch.input_ids.split(batch.lengths):
            states = model(ids[None], output_hidden_states=True).hidden_states
            expected.append(torch.stack(states, dim=2)[0])
    actual = torch.cat([output.hidden_states[:, :-1], model.model.norm(output.hidden_states[:, -1:])], dim=1)
    torch.testing.assert_close(actual, torch.cat(expected))
    assert output.logprobs is not None
    assert engine.forward(batch, CUT).hidden_states is None
    engine.destroy()


@pytest.mark.parametrize(
    ("method", "arguments", "error", "says"),
    [
        ("forward", {"post_hook": lambda output, batch: output}, ConfigError, "so that no hook sees it"),
        ("forward_backward", {}, ConfigError, r"not \['hidden_states'\]"),
    ],
)
def test_hidden_states_are_of_forward_alone(
    method: str, arguments: dict[str, Any], error: type[CoreRLError], says: str
) -> None:
    engine = support.engine()
    given: Any = LossSpec(fn=support.weighted_nll, outputs=("hidden_states",))
    positional = (CUT, ("hidden_states",)) if method == "forward" else (given, CUT)
    with pytest.raises(error, match=says):
        getattr(engine, method)(support.batch(), *positional, **arguments)
    engine.destroy()


def test_undeclared_taps_are_refused() -> None:
    engine = load_engine(replace(SPEC, capabilities=SPEC.capabilities - {Capability.TAPS}), support.config())
    engine.initialize()
    with pytest.raises(UnsupportedCapability, match="output 'hidden_states': .* does not declare 'taps'"):
        engine.forward(support.batch(), CUT, ("hidden_states",))
    engine.destroy()


def test_several_states_of_a_token_are_refused() -> None:
    with pytest.raises(UnsupportedCapability, match="'gemma3n_text' has no list of 4 layers with one state"):
        decoder_layers(tiny_model("gemma3n_text", "eager"))
