"""Model directories: written for transformers and servers, and read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from core_rl.backend.meta import SaveLoadMeta, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.errors import CoreRLError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest, per_sequence
from core_rl_conformance.expected_values import Snapshot
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.inputs.tiny_models import FILE_SIZE, TinyModel, save_as
from core_rl_conformance.procedures.moving import (
    elsewhere,
    load_weights,
    meta,
    portable_tensors,
    state,
    verify_loads,
    weights_of,
)
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.serving import verify_version
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sync_meta, tensors_of
from core_rl_conformance.procedures.training import Shadow, optimizer_config
from core_rl_conformance.reproduction import Weights, computation_of
from core_rl_oracle.experts import all_written, parameters_of
from core_rl_oracle.oracle import AdamW

LOSS = TokenMeanLoss(temperature=0.8)
SMALL = AdamW(lr=2e-5, betas=(0.8, 0.95), weight_decay=0.1)
"""Its steps are too small for most weights to move in half precision."""
STEPS = 3
FREE_FIELDS = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Fields of a config that an export writes anew."""
CARRIED = {
    "extra_tower.blocks.0.weight": torch.linspace(-3, 3, 35).reshape(7, 5).bfloat16(),
    "extra_head.steps": torch.tensor([7, 1 << 40]),
}
"""Tensors of a checkpoint that are in no module."""


@check("I10.export", images=True, any_model=True)
def export_loads_in_transformers(subject: EngineUnderTest) -> None:
    """An ``hf`` export after training loads in transformers: tensors bitwise, tied ones once, and the source's config.

    Its constants (rope theta and scaling, eps, end tokens) are unusual. The oracle computes the log-probs of the engine
    from the export.

    Why: an export that writes both copies of a tied weight comes back untied, without any copy, it comes
    back with a random head (verl #6334, Automodel #2511); a config with the defaults of its class is served as another
    model.
    Look at: the names of ``named_tensors("params")``, and ``hf_config()``: the config in ``model.path``.
    """
    group, model = subject.start_long(replace(subject.model(), eos=(3, 7)))
    for seed in range(2):
        group.train_batch(subject.data(seed=seed).batch(), LOSS.spec(), ONE_PASS)
    path = subject.directory("export")
    group.save(meta(path, "hf"))
    _verify_export(subject, group, model, path)
    data = subject.data(PROBE)
    logprobs = per_sequence(group.forward(data.batch(), ONE_PASS), "logprobs", data)
    expected = subject.outputs(Snapshot(path, vision=model.vision), data, "logprobs")
    subject.verify_tokens("log-probs of the engine, compared with its export", logprobs, expected)


@check("I10.export-value-head", requires={Capability.VALUE_HEAD}, each="layout")
def value_export_loads_in_transformers(subject: EngineUnderTest) -> None:
    """The export of a model with a value head is a ``...ForSequenceClassification`` with ``score.weight``.

    Why: a head under a private name is lost, and a critic starts again from noise.
    Look at: the name of the head, and ``num_labels`` in the written config.
    """
    model = subject.model(head="value")
    group = subject.start(model)
    path = subject.directory("export")
    group.save(meta(path, "hf"))
    _verify_export(subject, group, model, path)


@check("I12.disk", requires={Capability.SYNC_DISK}, each="layout", images=True, any_model=True)
def disk_sync_writes_the_present_weights(subject: EngineUnderTest) -> None:
    """``upload_weights`` by disk writes every parameter as it is after the last step or load, bit for bit.

    Why: weights of an earlier step, of one shard, or without buffers make the rollout server sample from
    another policy (verl #7014, #5801).
    Look at: ``named_tensors("params")`` and ``("buffers")``, and gathered copies that outlive a step.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    group.set_version(3)
    for seed, when in enumerate(("", "", " after a load")):
        before = state(group, ["master"])["master"]
        if when:
            load_weights(subject, group, elsewhere(model))
        else:
            group.train_batch(subject.data(seed=seed).batch(), LOSS.spec(), ONE_PASS)
        path = subject.directory(f"sync-{seed}")
        group.upload_weights(WeightUpdateMeta(version=4 + seed, path=str(path)))
        _verify_export(subject, group, model, path, when, before)
    verify_version(subject, group, 3, "after uploading weights")


def _verify_export(
    subject: EngineUnderTest,
    group: EngineGroup,
    source: TinyModel,
    path: Path,
    when: str = "",
    before: Mapping[str, Tensor] | None = None,
) -> None:
    _verify_config(subject, source, path)
    model = verify_loads(subject, source, path)
    loaded = {name: part.detach() for name, part in all_written(parameters_of(model)).items()}
    params = {
        name: value.to(_dtype(subject, name)).float() for name, value in group.named_tensors("master").items()
    }
    names = computation_of(source, Weights(shapes_only=True))
    subject.verify_same(f"parameters of the export{when}", loaded, params, before, of=names)
    tied = model.config.tie_word_embeddings and source.head == "lm"
    same = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    subject.require(same or not tied, "the config says tied, and the export does not load as tied")
    files = tensors_of(path)
    subject.require(
        files.keys() == loaded.keys(),
        f"the files hold other tensors than the model: {sorted(files.keys() ^ loaded.keys())}; a tied one is written "
        "once",
    )
    wrong = [
        f"{name} ({value.dtype})" for name, value in files.items() if value.dtype != _dtype(subject, name)
    ]
    subject.require(not wrong, f"the dtype of files is not the compute dtype: {', '.join(wrong[:6])}")


def _dtype(subject: EngineUnderTest, name: str) -> torch.dtype:
    """The dtype of an exported tensor: scalar heads stay in float32, whatever the compute dtype."""
    return torch.float32 if name == "score.weight" else subject.dtype


def _verify_config(subject: EngineUnderTest, source: TinyModel, path: Path) -> None:
    """Compare each field of the exported configs with ``source``'s; only the dtype and the class may be new."""
    free = FREE_FIELDS if source.head == "lm" else {*FREE_FIELDS, "pad_token_id"}
    directory = subject.expected.models.directory(source)
    written, expected = (AutoConfig.from_pretrained(place).to_dict() for place in (path, directory))
    names = sorted((written.keys() | expected.keys()) - free)
    wrong = [
        f"{name} is {written.get(name)!r}, not {expected.get(name)!r}"
        for name in names
        if written.get(name) != expected.get(name)
    ]
    subject.require(not wrong, f"config.json of the export: {'; '.join(wrong)}")
    dtype = str(subject.dtype).removeprefix("torch.")
    subject.require(
        str(written["dtype"]).removeprefix("torch.") == dtype,
        f"config.json of the export has dtype {written['dtype']}; its files have {dtype}",
    )
    if source.head == "lm":
        files = [place / "generation_config.json" for place in (path, directory)]
        got, original = (json.loads(file.read_text()) if file.is_file() else None for file in files)
        subject.require(got == original, f"generation_config.json of the export is {got}, not {original}")


@check("I10.carried", each="layout")
def tensors_that_nobody_knows_are_carried(subject: EngineUnderTest) -> None:
    """Tensors of the checkpoint that the module does not hold are in every export, bit for bit, or are refused by name.

    Why: the text of a vision-language checkpoint is trained, and its vision tower is missing from saved and
    served weights (TRL #6028).
    Look at: ``ShardedState.carried``. A backend that cannot give them raises when it is built, and names a tensor.
    """
    source = subject.directory("source")
    shutil.copytree(subject.expected.models.directory(subject.model()), source)
    save_file(tensors_of(source) | CARRIED, source / "model.safetensors", metadata={"format": "pt"})
    try:
        group = subject.start(changes={"model": {"path": str(source)}})
    except CoreRLError as error:
        subject.require(any(name in str(error) for name in CARRIED), f"the refusal names no tensor: {error}")
        return
    group.train_batch(subject.data().batch(), LOSS.spec(), ONE_PASS)
    path = subject.directory("export")
    group.save(meta(path, "hf"))
    _verify_carried(subject, "an 'hf' export", tensors_of(path))
    group.load(meta(path, "hf"))
    if subject.spec.supports(Capability.PORTABLE_CHECKPOINT):
        path = subject.directory("portable")
        group.save(SaveLoadMeta(path=str(path), format="portable", asynchronous=True))
        group.wait_for_saves()
        _verify_carried(subject, "a 'portable' checkpoint", portable_tensors(path)["master"])
        group.load(meta(path, "portable"))
    if subject.spec.supports(Capability.SYNC_TENSOR):
        update = sync_meta(subject, "tensor", 1, LARGE_BUCKET)
        _verify_carried(subject, "a weight sync by 'tensor'", caught(group, update).tensors)


def _verify_carried(subject: EngineUnderTest, label: str, carried: Mapping[str, Tensor]) -> None:
    subject.require(
        CARRIED.keys() <= carried.keys(),
        f"{label} lacks {sorted(CARRIED.keys() - carried.keys())} of the checkpoint",
    )
    mismatches = [
        name
        for name, value in CARRIED.items()
        if value.dtype != carried[name].dtype or not torch.equal(value, carried[name])
    ]
    subject.require(not mismatches, f"{label} has other values of {mismatches} than the checkpoint")


@check("I10.import", each="layout", images=True, any_model=True)
def engine_loads_an_export(subject: EngineUnderTest) -> None:
    """``load(format="hf")`` sets every parameter, on every rank, and the next outputs follow the new weights.

    So are the next gradients: a tied embedding still has the sum of both.

    Why: a reload that forgets master weights, the tie, or a gathered copy computes with a mixture (vllm #44371).
    Look at: ``TrainBackend.after_load``, and copies of the weights that are gathered or cached.
    """
    model = subject.model()
    source = elsewhere(model)
    data = subject.data(PROBE)
    group = subject.start(model)
    group.forward(data.batch(), ONE_PASS)
    before = state(group, ["master"])["master"]
    load_weights(subject, group, source)
    got, expected = group.named_tensors("master"), weights_of(subject, source)
    weights = computation_of(source, Weights())
    subject.verify_same("parameters after a load", got, expected, before, of=weights)
    subject.verify_logprobs("after a load", group, source, data)
    subject.verify_backward("after a load", group, source, data, LOSS)


@check("I10.files", each="layout")
def files_of_published_models_are_read(subject: EngineUnderTest) -> None:
    """Files in half precision and in float32, several of them: ``build`` and ``load(format="hf")`` take their values.

    The first of them have the names of a base model, without a prefix, as transformers reads them. Small steps after
    each load move the weights as AdamW does. Some parameters are frozen, where that is declared. In
    bfloat16, frozen weights may be rounded to it.

    Why: published models are in bfloat16, so master weights that are rounded to the dtype of the files never move; with
    several files, tensors outside the first one stay as they were drawn.
    Look at: the dtype of master weights and whatever writes to them after a step; the index next to the files.
    """
    model = subject.model()
    frozen = [subject.first_layer] if subject.spec.supports(Capability.FROZEN_PARAMETERS) else []
    path = subject.directory("bfloat16")
    expected = save_as(model, torch.bfloat16, FILE_SIZE, path, prefixed=False)
    changes = {"model": {"path": str(path)}}
    group = subject.start(model, changes=changes, optimizer=optimizer_config(SMALL), frozen=frozen)
    _verify_small_steps(subject, group, path, expected, "built from bfloat16 files")
    for dtype in (torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        path, model = subject.directory(name), elsewhere(model)
        expected = save_as(model, dtype, FILE_SIZE, path)
        group.load(meta(path, "hf"))
        _verify_small_steps(subject, group, path, expected, f"loaded from {name} files")


def _verify_small_steps(
    subject: EngineUnderTest, group: EngineGroup, path: Path, weights: Mapping[str, Tensor], label: str
) -> None:
    """Require these ``weights``, and AdamW's steps from there. Files are named that are not read, if others are."""
    got = group.named_tensors("master")
    frozen = got.keys() - group.named_tensors("exp_avg").keys()
    rounded = {name: weights[name].to(subject.dtype).float() for name in frozen & weights.keys()}
    same = {name: value for name, value in rounded.items() if torch.equal(got[name], value)}
    expected = {**weights, **same}
    wrong = {name for name, value in expected.items() if not torch.equal(got[name], value)}
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    unread = set(files.values()) - {file for name, file in files.items() if name not in wrong}
    subject.require(
        not wrong or wrong == frozen or wrong != {name for name, file in files.items() if file in unread},
        f"weights {label}: of {len(set(files.values()))} files, {', '.join(sorted(unread))} are not read",
    )
    subject.verify_same(f"weights {label}", got, expected)
    shadow = Shadow.of(group, SMALL, frozen=frozen)
    batches = [subject.data(PROBE, seed).batch() for seed in range(STEPS)]
    shadow.train(subject, group, batches, LOSS.spec(), ONE_PASS)
    shadow.verify(subject, group, f"after small steps {label}")
