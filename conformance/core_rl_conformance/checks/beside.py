"""Several engines in the same processes, as colocated roles are: none sees the other."""

from __future__ import annotations

from core_rl.config.capability import Capability
from core_rl.launch.group import EngineGroup
from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.procedures import moving
from core_rl_conformance.procedures.training import optimizer_config

STEPS = (0, 1)


@check("contract.beside", requires=[Capability.OFFLOAD], each="layout")
def engines_in_the_same_processes(subject: EngineUnderTest) -> None:
    """Two engines in the same rank processes, offloaded in turns, compute bitwise the same as alone.

    With dropout; and the first continues after the other was destroyed.
    Why: recipes with ``colocated`` have actor, critic and reference in the same processes. Process-wide state (host
    copies, step counts, random states, process groups) is shared by both engines. Roles then train on each other's
    state without an error.
    Look at: attributes of modules and classes; whether ``TrainBackend.teardown`` ends state of another engine.
    """
    models = [subject.model(dropout=0.1), moving.elsewhere(subject.model(dropout=0.1))]
    reports, states = [], []
    for model in models:
        group = moving.start(subject, model)
        reports.append(moving.train(group, subject, [*STEPS, 2]))
        states.append(moving.state(group))
    host = moving.start(subject, models[0])
    config = subject.config(models[1], optimizer=optimizer_config(moving.OPTIMIZER, moving.TOTAL_STEPS))
    with EngineGroup(subject.spec, config, timeout_s=host.timeout_s, colocate_with=host) as guest:
        groups = {"first": host, "second": guest}
        for step in STEPS:
            for (name, group), expected in zip(groups.items(), reports, strict=True):
                _verify_step(subject, group, step, expected[step], name)
                group.offload()
        _verify_step(subject, guest, 2, reports[1][2], "second")
        guest.onload()
        moving.verify_state(subject, "of the second of two engines in the same processes", guest, states[1])
    _verify_step(subject, host, 2, reports[0][2], "first")
    host.onload()
    moving.verify_state(subject, "of the first engine, which went on after the second", host, states[0])


def _verify_step(
    subject: EngineUnderTest, group: EngineGroup, step: int, expected: dict[str, float], which: str
) -> None:
    (step_metrics,) = moving.train(group, subject, [step])
    label = f"step {step} of the {which} of two engines in the same processes"
    moving.verify_report(subject, label, step_metrics, expected, "alone it reports")
