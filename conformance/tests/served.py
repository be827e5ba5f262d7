"""Mutants of engines behind a server, and runs of a check on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mutants import interruptions, rollout_details, rollout_draws, rollouts, route_orders, updates
from mutants.zoo import C, Mutant, mutants_of

from core_rl.backend.inference_backend import InferenceBackend
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CoreRLError
from core_rl_conformance.case import Case
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.profile import Setting
from core_rl_conformance.servers.options import ServerArguments
from core_rl_conformance.servers.target import load_server

CAPABILITIES = frozenset({C.SCORE, C.TOP_LOGPROBS, C.MIN_P, C.LOGIT_BIAS, C.SYNC_DISK, C.PAUSE})
"""Those of a server with vLLM's routes, besides adapters and buckets."""
OF_THE_CLIENT: Mapping[type, str] = {
    rollouts.ScoresWithoutTemperature: "servers score at temperature 1, and the client computes the rest",
    rollouts.TopWithoutTemperature: "the same",
    rollout_draws.KnowsNoEos: "requests name the end tokens",
    rollout_details.StopTokensReplaceEos: "the same",
    rollout_details.OneEos: "the same",
    rollout_draws.PadsTheVocabulary: "the client reads the vocabulary from the config",
    rollout_details.RemembersDirectories: "each update has a directory of another name",
    route_orders.SkipsTheUpdateAfterAFailure: "the client reads weights before any server does",
    updates.LabelsAFailedUpdate: "the same",
    updates.SwallowsFailures: "the same",
    updates.LeavesAMixture: "the same",
    updates.LabelsBeforeWeights: "a server is labelled by its client; 'labels of the moment' is this fault",
    updates.CancelAbortsAll: "aborts have a route; 'an abort ends all' is this fault",
    updates.PauseIsForgotten: "the gate of requests is the client's",
    updates.SharesRids: "the same",
    updates.ScoresWithoutDeclaring: "capabilities are read from the routes",
    route_orders.WakesWithTheUpdateBefore: "vLLM's routes have no sleep",
    interruptions.DrawsOn: "a pause has a route; 'a pause swallowed' is this fault",
    interruptions.LabelsAsItIsAsked: "a client pauses a server before it loads; 'labels of the moment' is this fault",
    interruptions.EndsAtThePause: "'answers end at a pause' is this fault",
}
"""Engines whose fault a server cannot have, or has in another form."""
SAYS: Mapping[type, str] = {
    rollout_draws.OneSeedForABatch: "draws; expected|share a seed",
    rollout_details.FirstStopToken: "with EOS on the way, decoding gave",
    updates.VersionStuckAtZero: "has weights of the version 'default'",
}
"""Messages that differ behind a server."""


def _served() -> list[Mutant]:
    modules = (rollouts, rollout_draws, rollout_details, route_orders, updates, interruptions)
    return [
        replace(mutant, says=SAYS.get(mutant.engine, mutant.says))
        for module in modules
        for mutant in mutants_of(module)
        if issubclass(mutant.engine, InferenceBackend)
        and mutant.engine not in OF_THE_CLIENT
        and mutant.dtype == "float32"
        and load_checks()[mutant.killed_by].requires <= CAPABILITIES
    ]


SERVED = _served()


def judge(expected: ExpectedValues, address: str, model_dir: str, check: str, directory: Path) -> str | None:
    """Run ``check`` on the server at ``address`` and return its failure message; None if it passes."""
    arguments = ServerArguments(
        url=address,
        command="",
        wire="vllm",
        model_dir=model_dir,
        take_over=True,
        key_variable=None,
        dtype="float32",
        device="cpu",
    )
    case = Case(
        check=load_checks()[check],
        target=load_server(arguments),
        setting=Setting(layout=ParallelLayout()),
        family=arguments.model_type,
        dtype="float32",
        seed=0,
        device="cpu",
    )
    directory.mkdir(parents=True, exist_ok=True)
    subject = EngineUnderTest(case, expected, directory)
    try:
        case.check.function(subject)
    except (AssertionError, CoreRLError) as error:
        return str(error)
    finally:
        expected.discard(case.target.spec.name)
    return None
