"""Adapters (LoRA) as files and exports: merged, alone, resumed, and of another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from core_rl.backend.meta import CheckpointFormat, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.errors import CheckpointMismatch, CoreRLError, EngineStateError, WeightsError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.hints.diagnose import explain_tensors
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.adapters import adapter_of, base_of, low_rank_of, outputs_of, start
from core_rl_conformance.procedures.outputs import verify_outputs
from core_rl_conformance.procedures.streaming import caught, tensors_of
from core_rl_conformance.procedures.training import optimizer_config
from core_rl_oracle.tolerance import tolerances

LOSS = TokenMeanLoss(temperature=0.8)
ROUNDED = 0.02
"""Part of merged weights that another order of the sum may round otherwise."""
MOVED: tuple[CheckpointFormat, ...] = ("sharded", "adapter")


@check("I12.adapter-merged", requires={Capability.LORA}, images=True, any_model=True)
def exports_are_merged(subject: EngineUnderTest) -> None:
    """``params``, an ``hf`` export and every sync hold ``W + alpha / rank * B A``; the engine's own base stays.

    With rank-stabilised adapters, the root of the rank. Weights without an adapter are the base's, bit for bit: a
    tied embedding too.
    Why: a server without LoRA that gets base weights samples from the policy before training (verl #7014: the stream
    was read after the merged context had closed; verl #7495: one way of syncing never merged); a merge in place that
    is undone rounds the base; one on a tied head changes the embedding (peft #2018); one with its own scale differs
    from the forward pass (TensorRT-LLM #1668).
    Look at: ``named_tensors("params")``: merged in float32 on a copy of each weight, as it is read, and rounded last.
    """
    model = subject.model()
    adapter = TinyAdapter(model=model)
    group = start(subject, adapter, optimizer={"lr": 3e-3}, given="given-adapter")
    group.train_batch(subject.data().batch(), LOSS.spec(), ONE_PASS)
    path = subject.directory("export")
    group.save(moving.meta(path, "hf"))
    params = _verify_merged(subject, group, adapter)
    subject.verify_same("parameters of the export", tensors_of(path), params)
    moving.verify_loads(subject, model, path)
    if subject.spec.supports(Capability.SYNC_DISK):
        group.train_batch(subject.data(seed=1).batch(), LOSS.spec(), ONE_PASS)
        path = subject.directory("sync")
        group.upload_weights(WeightUpdateMeta(version=1, path=str(path)))
        params = _verify_merged(subject, group, adapter)
        subject.verify_same("parameters of a sync", tensors_of(path), params)
    if subject.spec.supports(Capability.SYNC_TENSOR):
        point = str(subject.directory("meeting"))
        mismatch = caught(group, WeightUpdateMeta(method="tensor", version=2, path=point)).tensors
        sent = {name: value for name, value in mismatch.items() if name in params}
        subject.verify_same("parameters of a sync by tensor", sent, params)
    adapter = TinyAdapter(model=model, rslora=True, some=True, seed=1)
    group = start(subject, adapter, given="rank-stabilised")
    _verify_merged(subject, group, adapter)


def _verify_merged(subject: EngineUnderTest, group: EngineGroup, adapter: TinyAdapter) -> dict[str, Tensor]:
    """Compare ``params`` with the oracle's merge of the base's own weights and the engine's adapter; return them."""
    base = subject.expected.oracle(adapter.model).parameters()
    low_rank = low_rank_of(adapter, group)
    params = group.named_tensors("params")
    base_values = {name: value.float() for name, value in base.items()}
    subject.verify_same("the base below the adapter", base_of(group.named_tensors("master")), base_values)
    adapted = {low_rank.weight_of(name) for name in low_rank.layers}
    expected = {name: value for name, value in low_rank.merged(base).items() if name in adapted}
    orders: tuple[Literal[0, 1, 2], ...] = (0, 1, 2)
    merges = [low_rank.merged(base_values, order) for order in orders]
    variants = [{name: merge[name].to(subject.dtype) for name in expected} for merge in merges]
    allowed = tolerances(variants, expected, subject.dtype)
    adapted_params = {name: value for name, value in params.items() if name in adapted}

    def explain() -> str | None:
        merges = ((sentence, wrong.merged(base)) for sentence, wrong in low_rank.mistaken())
        wrong = ((sentence, {name: merge[name] for name in expected}) for sentence, merge in merges)
        return explain_tensors(adapted_params, allowed, wrong)

    label = f"merged weights (rslora: {adapter.rslora})"
    subject.verify_named(label, adapted_params, expected, allowed, explain=explain)
    if subject.dtype == torch.bfloat16:
        share = max(
            float((adapted_params[name] != value).float().mean()) for name, value in variants[0].items()
        )
        problem = f"{share:.0%} of the {label} are other bfloat16 numbers than those of the float32 sum"
        subject.require(share < ROUNDED, f"{problem}: is a part of it rounded before?")
    unadapted = {name: value.to(subject.dtype) for name, value in base.items() if name not in adapted}
    rest = {name: value for name, value in params.items() if name not in adapted}
    subject.verify_same("exported weights without an adapter", rest, unadapted)
    return params


@check("I11.adapter-alone", requires={Capability.LORA}, each="layout", any_model=True)
def an_adapter_is_saved_alone(subject: EngineUnderTest) -> None:
    """``format="adapter"`` writes what ``peft`` and servers read, float32 and nothing else; it comes back bit for bit.

    The adapter is a rank-stabilised one, as the saved config declares. An engine that has trained and answered loads
    it.
    Why: names or a scale that only the engine knows make a server load nothing, without an error; an adapter in
    the compute dtype loses what training moved.
    Look at: ``named_tensors("adapter")``, and the tensors that a load fills.
    """
    model = subject.model()
    adapter = TinyAdapter(model=model, rslora=True)
    group = start(subject, adapter, optimizer={"lr": 3e-3}, given="given-adapter")
    group.train_batch(subject.data().batch(), LOSS.spec(), ONE_PASS)
    path = subject.directory("saved")
    group.save(moving.meta(path, "adapter"))
    factors, outputs = adapter_of(group.named_tensors("master")), outputs_of(group, subject.data())
    subject.verify_same("the adapter's file", load_file(path / "adapter_model.safetensors"), factors)
    subject.verify_same("named_tensors('adapter')", group.named_tensors("adapter"), factors)
    _verify_config(subject, path, adapter)
    group = start(subject, adapter, optimizer={"lr": 3e-3}, seed=5)
    group.train_batch(subject.data(seed=1).batch(), LOSS.spec(), ONE_PASS)
    outputs_of(group, subject.data())
    group.load(moving.meta(path, "adapter"))
    subject.verify_same("the adapter after a load", group.named_tensors("adapter"), factors)
    subject.verify_same("outputs after a load", outputs_of(group, subject.data()), outputs)
    group = start(subject, adapter, seed=6, fields={"path": str(path)})
    subject.verify_same("outputs with model.lora.path", outputs_of(group, subject.data()), outputs)


def _verify_config(subject: EngineUnderTest, path: Path, adapter: TinyAdapter) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    kinds = sorted({name.rpartition(".")[2] for name in adapter.low_rank().layers})
    expected = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": kinds,
        "base_model_name_or_path": None,  # a model of the Hub by its id, and no directory of this machine
    }
    settings = {name: config.get(name) for name in expected}
    subject.require(settings == expected, f"adapter_config.json has {settings}; expected {expected}")


@check("I11.adapter-resume", requires={Capability.LORA, Capability.SHARDED_CHECKPOINT}, each="layout")
def training_of_an_adapter_resumes(subject: EngineUnderTest) -> None:
    """Steps, save, load into a fresh engine, as many steps again: bitwise what all of them give.

    With dropout, where it is declared. ``portable`` too: weights and moments are the same. Nor do these change on
    the way to the host and back, where ``offload`` is declared.
    Why: moments that are looked up by the names of the base are not there (AReaL #1468), and a checkpoint of what
    is trained alone continues from another base; so does offloaded state.
    Look at: the names of ``exp_avg`` and ``exp_avg_sq``, and whether base and adapter are both in the checkpoint,
    and in ``ShardedState.local``.
    """
    adapter, numbers = TinyAdapter(model=subject.model()), count()

    def start_with(model: TinyModel) -> EngineGroup:
        of_model = replace(adapter, model=model)
        return _start(subject, of_model, f"adapter-{next(numbers)}")

    forms, dropout = moving.formats(subject), subject.spec.supports(Capability.DROPOUT)
    saved = moving.verify_resume(subject, start_with, adapter.model, forms, [2], dropout=dropout)
    names = adapter_of(saved["master"]).keys()
    for kind in ("exp_avg", "exp_avg_sq"):
        odd = sorted(saved[kind].keys() ^ names)
        subject.require(not odd, f"{kind}: only one of it and the adapter has {', '.join(odd[:6])}")
        still = [name for name, value in saved[kind].items() if not value.any()]
        subject.require(not still, f"{kind} is zero after two steps: {', '.join(still[:6])}")


@check(
    "I11.adapter-other-layout",
    requires={
        Capability.LORA,
        Capability.SHARDED_CHECKPOINT,
        Capability.RESHARDING,
        Capability.DATA_PARALLEL,
    },
    each="layout",
    min_layouts=2,
)
def an_adapter_moves_to_another_layout(subject: EngineUnderTest) -> None:
    """A checkpoint of one layout loads on another: ``sharded`` with the moments, and the adapter alone.

    Why: factors are so thin that some ranks hold no row of them, and a digest of the base that depends on the
    layout refuses a correct base.
    Look at: offsets of empty shards, the digest of the base, and the loads of later ranks.
    """
    adapter = TinyAdapter(model=subject.model())
    setting = subject.case.other_setting
    assert setting is not None  # the check asks for a profile with two
    group = _start(subject, adapter, "given-adapter")
    moving.train(group, subject, [0, 1])
    for form in MOVED:
        group.save(moving.meta(subject.directory(form), form))
    saved = moving.state(group)
    alone: moving.State = {"master": saved["master"]}
    for form in MOVED:
        group = start(subject, adapter, layout=setting, seed=5)
        before = moving.state(group)
        group.load(moving.meta(subject.directory(form), form))
        label, loaded = f"{form!r} loaded on {setting}", alone if form == "adapter" else saved
        moving.verify_state(subject, label, group, loaded, since=before)
        verify_outputs(subject, group, adapter, label)


def _start(subject: EngineUnderTest, adapter: TinyAdapter, given: str) -> EngineGroup:
    optimizer = optimizer_config(moving.OPTIMIZER, moving.SCHEDULE)
    fields = {"dropout": 0.1} if subject.spec.supports(Capability.DROPOUT) else {}
    return start(subject, adapter, optimizer=optimizer, fields=fields, given=given)


@check("contract.adapter", requires={Capability.LORA}, each="layout")
def foreign_adapters_are_refused(subject: EngineUnderTest) -> None:
    """Another adapter, base or state raises the matching error, and the engine stays unchanged.

    Why: an adapter over another base, or at another scale, loads without complaint and gives noise.
    Look at: methods that were overridden; the checks are the core's.
    """
    adapter = TinyAdapter(model=subject.model())
    adapters = {
        "low": replace(adapter, rank=2),
        "scaled": replace(adapter, alpha=9),
        "some": replace(adapter, some=True),
    }
    paths = {
        name: foreign_adapter.write(subject.directory(name)) for name, foreign_adapter in adapters.items()
    }
    paths["elsewhere"] = subject.directory("elsewhere")
    elsewhere = replace(adapter, model=moving.elsewhere(adapter.model))
    start(subject, elsewhere).save(moving.meta(paths["elsewhere"], "adapter"))
    base = subject.expected.models.directory(adapter.model)
    group = start(subject, adapter)
    before = group.named_tensors("master")
    load_of = {name: partial(group.load, moving.meta(path, "adapter")) for name, path in paths.items()}
    refusals: Mapping[str, tuple[type[CoreRLError], Callable[[], object]]] = {
        "an adapter of another rank": (CheckpointMismatch, load_of["low"]),
        "an adapter of another alpha": (CheckpointMismatch, load_of["scaled"]),
        "an adapter of other layers": (WeightsError, load_of["some"]),
        "an adapter of another base model": (CheckpointMismatch, load_of["elsewhere"]),
        "merged weights": (WeightsError, lambda: group.load(moving.meta(base, "hf"))),
        "training inside disable_adapter()": (EngineStateError, lambda: _train_without(group, subject)),
    }
    for label, (kind, act) in refusals.items():
        subject.require_error(kind, act, f"{label} raised no {kind.__name__}")
    subject.verify_same("weights after refusals", group.named_tensors("master"), before)


def _train_without(group: EngineGroup, subject: EngineUnderTest) -> None:
    with group.disable_adapter():
        group.train_batch(subject.data().batch(), LOSS.spec(), ONE_PASS)
