"""Model directories: written for transformers and servers, and read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from core_rl.backend.meta import SaveLoadMeta, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import Head
from core_rl.errors import CoreRLError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import TokenMeanLoss
from core_rl_conformance.procedures.moving import elsewhere
from core_rl_conformance.procedures.outputs import PROBE
from core_rl_conformance.procedures.serving import verify_version
from core_rl_conformance.procedures.streaming import LARGE_BUCKET, caught, sync_meta, tensors_of
from core_rl_oracle.experts import all_written

LOSS = TokenMeanLoss(temperature=0.8)
CARRIED = {
    "extra_tower.blocks.0.weight": torch.linspace(-3, 3, 35).reshape(7, 5).bfloat16(),
    "extra_head.steps": torch.tensor([7, 1 << 40]),
}
"""Tensors of a checkpoint that are in no module."""


@check("I10.export")
def export_loads_in_transformers(subject: EngineUnderTest) -> None:
    """An ``hf`` export after training loads in transformers: every tensor bitwise, tied weights written once.

    Why: an export that writes both copies of a tied weight comes back untied, without any copy, it comes
    back with a random head (verl #6334, Automodel #2511).
    Look at: the names of ``named_tensors("params")``, and ``tie_word_embeddings`` in the written config.
    """
    group = subject.start(optimizer={"lr": 3e-3, "weight_decay": 0.1})
    for seed in range(2):
        group.train_batch(subject.data(seed=seed).batch(), LOSS.spec(), ONE_PASS)
    path = subject.directory("export")
    group.save(SaveLoadMeta(path=str(path), format="hf"))
    _verify_export(subject, group, path, "lm")


@check("I10.export-value-head", requires=[Capability.VALUE_HEAD], each="layout")
def value_export_loads_in_transformers(subject: EngineUnderTest) -> None:
    """The export of a model with a value head is a ``...ForSequenceClassification`` with ``score.weight``.

    Why: a head under a private name is lost, and a critic starts again from noise.
    Look at: the name of the head, and ``num_labels`` in the written config.
    """
    group = subject.start(subject.model(head="value"))
    path = subject.directory("export")
    group.save(SaveLoadMeta(path=str(path), format="hf"))
    _verify_export(subject, group, path, "value")


@check("I12.disk", requires=[Capability.SYNC_DISK], each="layout")
def disk_sync_writes_the_present_weights(subject: EngineUnderTest) -> None:
    """``upload_weights`` by disk writes every parameter as it is after the last step or load, bit for bit.

    Why: weights of an earlier step, of one shard, or without buffers make the rollout server sample from
    another policy (verl #7014, #5801).
    Look at: ``named_tensors("params")`` and ``("buffers")``, and gathered copies that outlive a step.
    """
    model = subject.model()
    group = subject.start(model, optimizer={"lr": 1e-2})
    group.set_version(3)
    for seed in range(2):
        group.train_batch(subject.data(seed=seed).batch(), LOSS.spec(), ONE_PASS)
        path = subject.directory(f"sync-{seed}")
        group.upload_weights(WeightUpdateMeta(version=4 + seed, path=str(path)))
        _verify_export(subject, group, path, "lm")
    old_directory = subject.expected.models.directory(elsewhere(model))
    group.load(SaveLoadMeta(path=str(old_directory), format="hf"))
    path = subject.directory("sync-after-a-load")
    group.upload_weights(WeightUpdateMeta(version=6, path=str(path)))
    _verify_export(subject, group, path, "lm", " after a load")
    verify_version(subject, group, 3, "after uploading weights")


def _verify_export(
    subject: EngineUnderTest, group: EngineGroup, path: Path, head: Head, when: str = ""
) -> None:
    family = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    loading: tuple[PreTrainedModel, dict[str, object]] = family.from_pretrained(  # type: ignore[assignment]
        path, output_loading_info=True, local_files_only=True, dtype=torch.float32
    )
    model, report = loading
    problems = {name: str(mismatch) for name, mismatch in report.items() if mismatch}
    subject.require(not problems, f"transformers reports while loading the export: {problems}")
    loaded = {name: part.detach() for name, part in all_written(dict(model.named_parameters())).items()}
    # The scalar heads stay in float32, whatever the compute dtype.
    params = {
        name: value if name == "score.weight" else value.to(subject.dtype).float()
        for name, value in group.named_tensors("master").items()
    }
    subject.verify_same(f"parameters of the export{when}", loaded, params)
    tied = model.config.tie_word_embeddings and head == "lm"
    same = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    subject.require(same or not tied, "the config says tied, and the export does not load as tied")
    files = set(tensors_of(path))
    subject.require(
        files == set(loaded),
        f"the files hold other tensors than the model: {sorted(files ^ set(loaded))}; a tied one is written once",
    )


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
    group.save(SaveLoadMeta(path=str(path), format="hf"))
    _verify_carried(subject, "an 'hf' export", tensors_of(path))
    group.load(SaveLoadMeta(path=str(path), format="hf"))
    if subject.spec.supports(Capability.PORTABLE_CHECKPOINT):
        path = subject.directory("portable")
        group.save(SaveLoadMeta(path=str(path), format="portable", asynchronous=True))
        group.wait_for_saves()
        _verify_carried(subject, "a 'portable' checkpoint", tensors_of(path))
        group.load(SaveLoadMeta(path=str(path), format="portable"))
    if subject.spec.supports(Capability.SYNC_TENSOR):
        meta = sync_meta(subject, "tensor", 1, LARGE_BUCKET)
        _verify_carried(subject, "a weight sync by 'tensor'", caught(group, meta).tensors)


def _verify_carried(subject: EngineUnderTest, label: str, carried: Mapping[str, Tensor]) -> None:
    subject.require(
        CARRIED.keys() <= carried.keys(),
        f"{label} lacks {sorted(CARRIED.keys() - carried.keys())} of the checkpoint",
    )
    mismatches = [name for name, value in CARRIED.items() if not _identical(value, carried[name])]
    subject.require(not mismatches, f"{label} has other values of {mismatches} than the checkpoint")


def _identical(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


@check("I10.import", each="layout")
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
    group.load(SaveLoadMeta(path=str(subject.expected.models.directory(source)), format="hf"))
    values = subject.expected.oracle(source).parameters()
    expected = {name: value.float() for name, value in values.items()}
    subject.verify_same("parameters after a load", group.named_tensors("master"), expected)
    subject.verify_logprobs("after a load", group, source, data)
    subject.verify_backward("after a load", group, source, data, LOSS)
