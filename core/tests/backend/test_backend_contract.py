"""A backend that breaks the contract raises one error that names the tensor, the method or the class."""

from __future__ import annotations

from typing import Any

import backend_support as support
import engine_support
import pytest

from core_rl.backend.loss import LossSpec
from core_rl.cli import main
from core_rl.config.capability import Capability
from core_rl.engine.loading import load_backend, load_engine
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineContractError
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.engines import register_engine

NORM = r"'model\.norm\.weight'"


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (
            support.Overlapping,
            rf"{NORM} \[16\]: rank 0 has \[1\] at \[15\], which overlaps \[16\] at \[0\] of rank 0",
        ),
        (support.Gapped, rf"{NORM} \[16\]: 1 of 16 elements are on no rank"),
        (support.Outside, rf"{NORM}: \[16\] at \[1\] is not inside \[16\]"),
        (support.Renamed, r"'norm' is not in shapes\(\)"),
    ],
)
def test_slices_tile_each_tensor_once(backend: type[ReferenceBackend], says: str) -> None:
    engine = load_engine(support.spec(backend), engine_support.config())
    with pytest.raises(EngineContractError, match=says):
        engine.initialize()


@pytest.mark.parametrize(
    ("backend", "declared", "says"),
    [
        (
            support.NamesOffload,
            [],
            r"it names SupportsOwnOffload among its bases and does not declare 'offload'",
        ),
        (
            support.Bare,
            [Capability.OFFLOAD],
            r"it declares 'offload' and lacks SupportsOffload \(memory\(\)\) or SupportsOwnOffload \(offload\(\), onl",
        ),
        (
            support.Bare,
            [Capability.LORA],
            r"it declares 'lora' and lacks SupportsLora \(adapter_config\(\), low_rank\(\), set_adapter\(\)\)",
        ),
        (
            support.ExportsWithoutLoading,
            [],
            r"it names SupportsOwnExport among its bases and lacks import_tensors\(\)",
        ),
    ],
)
def test_declared_and_implemented_agree(backend: Any, declared: list[Capability], says: str) -> None:
    with pytest.raises(EngineContractError, match=rf"(?s){backend.__name__}.*{says}"):
        load_backend(support.spec(backend, *declared))


@pytest.mark.parametrize("declared", [[], [Capability.OFFLOAD], [Capability.LORA, Capability.OFFLOAD]])
def test_what_the_toolkit_brings_may_be_declared_or_not(declared: list[Capability]) -> None:
    assert load_backend(support.spec(ReferenceBackend, *declared)) is ReferenceBackend


@pytest.mark.parametrize(("backend", "norm"), [(support.HasHelpers, False), (support.HasItsOwnNorm, True)])
def test_method_of_unnamed_protocol_is_helper(backend: Any, norm: bool) -> None:
    engine = load_engine(support.spec(backend), engine_support.config())
    engine.initialize()
    loss = LossSpec(fn=engine_support.weighted_nll)
    metrics = engine.train_batch(engine_support.batch(), loss, support.ONE)
    assert (metrics["grad_norm"] == support.OWN_NORM) == norm
    engine.destroy()


def test_a_subclass_may_use_the_names_of_the_toolkits_private_attributes() -> None:
    """A plugin's names do not overwrite private names of the toolkit."""
    engine = load_engine(support.spec(support.KeepsAState), engine_support.config())
    engine.initialize()
    assert "model.norm.weight" in engine.tensor_shapes("params")
    engine.destroy()


def test_nobody_subclasses_the_engine() -> None:
    with pytest.raises(EngineContractError, match=r"Mine subclasses TrainEngine.*implement TrainBackend"):
        type("Mine", (TrainEngine,), {})


def test_show_compares_declared_and_implemented(capsys: pytest.CaptureFixture[str]) -> None:
    lacking: Any = support.Bare
    spec = support.spec(lacking, Capability.LORA)
    with register_engine(spec), pytest.raises(SystemExit) as caught:
        main(["engines", "show", spec.name])
    assert caught.value.code == 1
    assert "it declares 'lora' and lacks SupportsLora" in capsys.readouterr().err
