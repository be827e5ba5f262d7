"""The target of a session that judges a server: capabilities by its routes, with a reason for each that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from core_rl.config.capability import Capability
from core_rl.config.secret import SecretReference
from core_rl.engine.loading import load_backend
from core_rl.registry.engines import get_spec
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl_conformance.case import Target
from core_rl_conformance.profile import Profile
from core_rl_conformance.servers.backend import wire_of
from core_rl_conformance.servers.options import ServerArguments
from core_rl_conformance.servers.routes import CONTROL, GENERATE, NEEDS, Routes, read_routes, scoring_problem

__all__ = ["load_server"]

NAME = "server"
OPENAI = frozenset({Capability.SCORE, Capability.TOP_LOGPROBS, Capability.MIN_P, Capability.LOGIT_BIAS})
FIELDS: Mapping[Capability, str] = {
    Capability.SCORE: "prompt_logprobs",
    Capability.TOP_LOGPROBS: "prompt_logprobs",
    Capability.MIN_P: "min_p",
    Capability.LOGIT_BIAS: "logit_bias",
}
"""Fields of a completion request that capabilities of the wire ``openai`` need."""
OF_THE_DRIVER = frozenset(
    {Capability.DATA_PARALLEL, Capability.TENSOR_PARALLEL, Capability.LAUNCH_SERVER, Capability.CUDA}
)
"""Capabilities that engines with servers of their own show."""
SETS_VERSIONS = "contract.rollout-versions"
"""The check that changes a server without a capability."""
NO_TAKE_OVER = "it would change the server; give --take-over to allow it"
RAW = {
    "vLLM": "the server reports raw log-probs; start it with --logprobs-mode processed_logprobs",
}
"""Advice where log-probs lack the temperature, by product."""


def load_server(arguments: ServerArguments) -> Target:
    """The server of ``arguments`` as an engine under test.

    Raises `ConfigError` for arguments that are wrong and for a server that cannot be reached, and `EngineError` where
    the plugin of the wire is not installed.
    """
    arguments.require_valid()
    variable = arguments.key_variable
    key = None if variable is None else SecretReference(variable).read()
    routes = read_routes(arguments.address, key, arguments.wire)
    missing = dict(_missing(arguments.wire, routes))
    wire, vocab_size = wire_of(arguments.wire, routes.model), arguments.vocab_size
    if problem := asyncio.run(scoring_problem(arguments.address, key, wire, vocab_size)):
        missing |= dict.fromkeys((Capability.SCORE, Capability.TOP_LOGPROBS), problem)
    withheld = {} if arguments.take_over else dict(_withheld(arguments.wire, missing))
    engine = _capabilities(arguments.wire)
    special = {Capability.BFLOAT16} if arguments.served_dtype == "bfloat16" else set()
    special |= {Capability.CUDA} if arguments.device == "cuda" else set()
    spec = EngineSpec(
        name=NAME,
        kind="inference",
        protocol=PROTOCOL_VERSION,
        factory="core_rl_conformance.servers.backend:ServerUnderTest",
        config="core_rl_conformance.servers.backend:ServerUnderTestConfig",
        capabilities=frozenset((engine | special) - missing.keys() - withheld.keys()),
        description=f"{routes.product} {routes.version} at http://{arguments.address} (wire {arguments.wire})",
    )
    load_backend(spec)
    changes = SETS_VERSIONS not in missing.keys() | withheld.keys()
    options = {
        "addresses": [arguments.address],
        "wire": arguments.wire,
        "read_only": not changes,
        "take_over": changes,
        "served_name": routes.model,
        "product": routes.product,
        "api_key": None if variable is None else f"${{env:{variable}}}",
    }
    return Target(
        spec=spec,
        profile=Profile(
            families=(arguments.model_type,), dtypes=(arguments.served_dtype,), options={"options": options}
        ),
        model_dir=arguments.model_dir,
        version=f"{routes.product} {routes.version}",
        missing_routes=MappingProxyType(missing),
        withheld=MappingProxyType(withheld),
        raw_logprobs=RAW.get(routes.product, ""),
    )


def _capabilities(wire: str) -> frozenset[Capability]:
    return OPENAI if wire == "openai" else get_spec(wire).capabilities - OF_THE_DRIVER


def _missing(wire: str, routes: Routes) -> Iterator[tuple[str, str]]:
    """Capabilities and checks that the server lacks routes for, each with the reason."""
    if wire == "openai":
        for capability, field in FIELDS.items():
            if routes.fields and field not in routes.fields:
                yield capability, f"{GENERATE[wire]} has no field {field}"
        for name in (SETS_VERSIONS, *NEEDS["sglang"]):
            yield name, "the wire openai has no route that changes a server"
        return
    control = routes.missing(CONTROL[wire])
    if control:
        yield SETS_VERSIONS, control
    for capability, needed in NEEDS[wire].items():
        if reason := control or routes.missing(needed) or routes.disabled.get(capability, ""):
            yield capability, reason


def _withheld(wire: str, missing: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Capabilities and checks that change the server, and that its routes would allow."""
    for name in (SETS_VERSIONS, *NEEDS[wire]):
        if name not in missing:
            yield name, NO_TAKE_OVER
