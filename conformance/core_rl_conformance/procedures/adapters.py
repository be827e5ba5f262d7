"""Engines with an adapter: their start, and their state in the oracle's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta, WeightUpdateMeta
from core_rl.data.outputs import OutputName
from core_rl.engine.inference import InferenceEngine
from core_rl.launch.group import EngineGroup
from core_rl.weight_sync.messages import AdapterMetadata
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.expected_values import ExpectedGradients, Snapshot
from core_rl_conformance.hints.diagnose import explain_named
from core_rl_conformance.inputs.data import Ragged
from core_rl_conformance.inputs.tiny_adapters import PREFIX, TinyAdapter
from core_rl_conformance.inputs.tiny_models import save_with
from core_rl_conformance.procedures.streaming import sent
from core_rl_conformance.profile import Setting
from core_rl_oracle.low_rank import LowRank
from core_rl_oracle.oracle import Gradients

ValueT = TypeVar("ValueT")


def start(
    subject: EngineUnderTest,
    adapter: TinyAdapter,
    *,
    optimizer: Mapping[str, Any] | None = None,
    layout: Setting | None = None,
    frozen: Sequence[str] = (),
    seed: int = 0,
    fields: Mapping[str, object] | None = None,
    given: str = "",
) -> EngineGroup:
    """The engine over ``adapter``'s model with a new adapter of its kind, drawn from ``seed``.

    ``fields`` replace some of ``model.lora``. Then ``adapter`` is loaded, where a directory for it is ``given``.
    """
    changes = {"model": {"lora": {**adapter.section(), **(fields or {})}}, "seed": seed}
    group = subject.start(adapter.model, optimizer=optimizer, layout=layout, frozen=frozen, changes=changes)
    if given:
        load(subject, group, adapter, given)
    return group


def load(subject: EngineUnderTest, group: EngineGroup, adapter: TinyAdapter, name: str) -> None:
    """Load ``adapter`` from a directory as ``peft`` writes it; ``name`` is that of the directory."""
    group.load(SaveLoadMeta(path=str(adapter.write(subject.directory(name))), format="adapter"))


def adapter_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of ``tensors`` that is the adapter's, with the names that it has in a file."""
    return {name: value for name, value in tensors.items() if name.startswith(PREFIX)}


def base_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of ``tensors`` that is below the adapter, without a scalar head."""
    return {name: value for name, value in tensors.items() if not name.startswith((PREFIX, "score."))}


def written(factors: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """``found``, where the factors are named after their layers, with the names that they have in a file."""
    return {PREFIX + name if ".lora_" in name else name: value for name, value in factors.items()}


def verify_trained(
    subject: EngineUnderTest,
    label: str,
    grads: Mapping[str, Tensor],
    expected: ExpectedGradients,
    trains: Callable[[str], bool],
) -> None:
    """Compare ``grads`` with the oracle's of the parameters that ``trains`` names; no others have a gradient."""

    def trained(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: grad for name, grad in written(values).items() if trains(name)}

    def mistakes() -> Iterator[tuple[str, Gradients]]:
        return ((sentence, replace(of, grads=trained(of.grads))) for sentence, of in expected.mistakes())

    def shares() -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        return ((label, trained(share)) for label, share in expected.shares())

    allowed, truth = written(expected.tolerances), trained(expected.oracle.grads)
    explain = partial(explain_named, grads, allowed, mistakes, None, shares)
    subject.verify_named(f"gradients {label}", grads, truth, allowed, explain=explain)


def low_rank_of(adapter: TinyAdapter, group: EngineGroup) -> LowRank:
    """The factors that the engine holds now."""
    factors = {
        name.removeprefix(PREFIX): value for name, value in adapter_of(group.named_tensors("master")).items()
    }
    like = adapter.low_rank()
    return replace(like, factors=factors)


def snapshot_of(subject: EngineUnderTest, adapter: TinyAdapter, group: EngineGroup) -> Snapshot:
    """The base model, and over it the factors and the scalar head that the engine holds now."""
    model = adapter.model
    path = subject.expected.models.directory(model)
    if model.head != "lm":
        path = subject.directory(f"head-{uuid4()}")
        base = subject.expected.oracle(model).parameters()
        save_with(model, {**base, "score.weight": group.named_tensors("master")["score.weight"]}, path)
    return Snapshot(path, model.head, low_rank_of(adapter, group))


def outputs_of(
    group: EngineGroup, data: Ragged, names: Sequence[OutputName] = ("logprobs",)
) -> dict[str, Tensor]:
    """The outputs ``names`` of the packed batch."""
    return dict(group.forward(data.batch(), ONE_PASS, tuple(names)).items())


def send_adapter(engine: InferenceEngine, meta: WeightUpdateMeta, adapter: TinyAdapter) -> None:
    """Update ``engine`` to ``adapter``; raises the error of the update."""
    sent(engine, meta, factors_of(adapter), metadata_of(adapter))


def factors_of(adapter: TinyAdapter) -> dict[str, Tensor]:
    """The factors with the names that they have in a file."""
    return written(adapter.low_rank().factors)


def metadata_of(adapter: TinyAdapter) -> AdapterMetadata:
    """The metadata that a sender of ``adapter`` reports, without the digest of its base."""
    return AdapterMetadata(rank=adapter.rank, alpha=adapter.alpha, rslora=adapter.rslora)
