"""Layout of rows that torchtitan's own adapter gives, against transformers' weights and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import titan_support as support
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.config.layout import ParallelLayout
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.dtensor import LocalPart
from core_rl_torchtitan.row_layout import RowLayout, probed_runs
from core_rl_torchtitan.translation import adapter_of, decoder_config

MODELS: dict[str, dict[str, Any]] = {
    "tied": support.TINY,
    "llama": support.LLAMA,
    "one pair": support.LLAMA | {"head_dim": 2},
    "mixture": support.MOE,
    "all heads": support.TINY | {"num_key_value_heads": 4},
}


def layout_of(fields: dict[str, Any]) -> tuple[Any, RowLayout, dict[str, tuple[int, ...]]]:
    """torchtitan's decoder with random weights, the layout of its rows, and the shapes of its parameters."""
    config = decoder_config(AutoConfig.for_model(**fields), ParallelLayout(), "lm")
    torch.manual_seed(0)
    decoder = config.build()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    return decoder, RowLayout(probed_runs(config)), shapes


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_adapter(name: str) -> None:
    """In three parts of every parameter, which need not end where a head ends."""
    decoder, layout, shapes = layout_of(MODELS[name])
    expected = adapter_of(decoder.config).to_hf(decoder.state_dict())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    assert layout.shapes(shapes) == {key: tuple(value.shape) for key, value in expected.items()}
    parameters = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert layout.shapes(shapes) == CheckpointLayout.of(model).shapes(parameters)
    actual = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
    for parameter, values in decoder.named_parameters():
        start = 0
        for rows in values.detach().chunk(3):
            part = LocalPart(rows, (start, *[0] * (values.dim() - 1)))
            start += len(rows)
            for written, offsets, view in layout.local(parameter, part, tuple(values.shape)):
                box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
                assert actual[written][box].isnan().all()
                actual[written][box] = view
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
