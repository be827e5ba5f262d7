"""A scalar head in the adapter's files."""

from __future__ import annotations

from core_rl.backend.meta import SaveLoadMeta
from core_rl.config.capability import Capability
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import ONE_PASS, EngineUnderTest
from core_rl_conformance.inputs.losses import ValueLoss
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.procedures.adapters import load, outputs_of, start


@check("I11.adapter-head", requires=[Capability.LORA, Capability.VALUE_HEAD], each="layout")
def a_head_is_saved_with_its_adapter(subject: EngineUnderTest) -> None:
    """A value head that was trained with an adapter is in ``format="adapter"``, and is loaded bit for bit.

    Why: a critic of an adapter alone has the noise of a new head, or the head of the base, and nothing fails.
    Look at: ``named_tensors("adapter")``, which has the head under ``base_model.model.score.weight``, and what a
    load fills on every rank.
    """
    adapter, data = TinyAdapter(model=subject.model(head="value")), subject.data()
    group = start(subject, adapter, optimizer={"lr": 3e-3})
    load(subject, group, adapter)
    fresh = group.named_tensors("master")["score.weight"]
    group.train_batch(data.batch(), ValueLoss().spec(), ONE_PASS)
    held, values = group.named_tensors("adapter"), outputs_of(group, data, ("values",))
    trained = {"score.weight": group.named_tensors("master")["score.weight"]}
    subject.require(
        not trained["score.weight"].equal(fresh), "a step of the adapter leaves score.weight as it was"
    )
    path = str(subject.directory("saved"))
    group.save(SaveLoadMeta(path=path, format="adapter"))
    group = start(subject, adapter, seed=5)
    group.load(SaveLoadMeta(path=path, format="adapter"))
    found = {"score.weight": group.named_tensors("master")["score.weight"]}
    subject.verify_same("the head after a load of its adapter", found, trained)
    subject.verify_same("the adapter after a load", group.named_tensors("adapter"), held)
    found = outputs_of(group, data, ("values",))
    subject.verify_same("values after a load of the adapter", found, values)
