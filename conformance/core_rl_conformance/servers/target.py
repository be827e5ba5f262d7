"""The target of a session that judges a server: capabilities by its routes, with a reason for each that is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import aiohttp

from core_rl.checkpoint.precisions import quantized_layers, shown_layers
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import ModelConfig
from core_rl.config.secret import SecretReference
from core_rl.engine.loading import load_backend, load_engine
from core_rl.errors import ConfigError, RolloutError, raise_all
from core_rl.registry.engines import get_spec
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec
from core_rl.servers.adapters import ServedModel
from core_rl.servers.api import Api, Refused
from core_rl.servers.facts import misfits
from core_rl_conformance.case import Target
from core_rl_conformance.inputs.tiny_models import OTHER_LAYERS, ModelStore, TinyModel
from core_rl_conformance.profile import FAMILIES, Profile, Waiver
from core_rl_conformance.servers.backend import ServerUnderTestConfig, server_of, wire_of
from core_rl_conformance.servers.options import WIRES, ServerArguments
from core_rl_conformance.servers.routes import (
    CHANGES,
    CONTROL,
    GENERATE,
    NEEDS,
    WHOLE,
    Routes,
    read_routes,
    scoring_problem,
    unreachable,
)

OWNER = "vLLM"
CUT = "processed_logprobs are of the distribution that top-k, top-p and min-p have cut: vLLM #22387, #42259"

KNOWN_FAILURES: Mapping[str, tuple[Waiver, ...]] = {
    "vLLM 0.32.0": (
        Waiver(check="I8.sampling-pairs", reason=CUT, owner=OWNER, raises=AssertionError),
        Waiver(check="I8.sampling-threes", reason=CUT, owner=OWNER, raises=AssertionError),
        Waiver(
            check="I8.sampling",
            reason="temperatures above 2 are refused: vLLM #44965",
            owner=OWNER,
            raises=Refused,
        ),
    )
}
"""Failures without a plugin on the server. They are strict: another version has to be judged anew."""


NAME = "server"
LENGTH = 80
"""Tokens that the tiny models of a command take: scoring a prompt draws a token after it, in some servers."""
HEAD_SIZE = 32
"""Numbers in their attention heads: kernels take few sizes."""
OPENAI = frozenset({Capability.SCORE, Capability.TOP_LOGPROBS, Capability.MIN_P, Capability.LOGIT_BIAS})
FIELDS: Mapping[Capability, str] = {
    Capability.SCORE: "prompt_logprobs",
    Capability.TOP_LOGPROBS: "prompt_logprobs",
    Capability.MIN_P: "min_p",
    Capability.LOGIT_BIAS: "logit_bias",
}
"""Fields of a completion request that capabilities of the wire ``openai`` need."""
OF_THE_DRIVER = frozenset(
    {
        Capability.DATA_PARALLEL,
        Capability.TENSOR_PARALLEL,
        Capability.LAUNCH_SERVER,
        Capability.CUDA,
        Capability.BFLOAT16,
        Capability.VISION,
    }
)
"""Capabilities that engines with servers of their own show, or that the arguments name; images have no common form."""
BACK_AFTER_S = 30.0
"""Seconds for a running server to respond again: somebody else may start it anew."""
SETS_VERSIONS = "contract.rollout-versions"
"""The check that changes a server without a capability."""
NO_TAKE_OVER = "it would change the server; give --take-over to allow it"
RAW = {"vLLM": "the server reports raw log-probs; start it with --logprobs-mode processed_logprobs"}
"""Advice where log-probs lack the temperature, by product."""


def load_server(arguments: ServerArguments) -> Target:
    """The server of ``arguments`` as an engine under test; a command starts one for its description alone.

    Raises `ConfigError` for arguments that are wrong and for a server that cannot be reached, and `EngineError` where
    the plugin of the wire is not installed.
    """
    arguments.require_valid()
    if not arguments.command:
        return _of_routes(arguments, arguments.address)
    model = TinyModel(family=FAMILIES[0], longest=LENGTH)
    with TemporaryDirectory(prefix="core-rl-server-") as directory:
        path = ModelStore(Path(directory)).directory(replace(model, head_size=HEAD_SIZE))
        with launched_server(arguments.command, path) as address:
            target = _of_routes(arguments, address)
    families = (*FAMILIES, *OTHER_LAYERS)
    profile = replace(target.profile, families=families, head_size=HEAD_SIZE, shared_servers=True)
    return replace(target, profile=profile, longest=LENGTH)


@contextmanager
def launched_server(command: str, path: Path, log_path: Path | None = None) -> Iterator[str]:
    """The address of a server of the model in ``path``, started by ``command``, which logs in ``log_path``.

    Raises `ConfigError` where it does not start.
    """
    spec = _spec(frozenset({Capability.LAUNCH_SERVER}), "")
    options = {"command": command, "log_path": None if log_path is None else str(log_path)}
    values = {"model": {"path": str(path)}, "options": options}
    engine = load_engine(spec, parse_config(ServerUnderTestConfig, values, "--server-command"))
    try:
        yield engine.launch_server()[0]
    except RolloutError as error:
        raise ConfigError(f"--server-command: {error}") from error
    finally:
        engine.destroy()


def _of_routes(arguments: ServerArguments, address: str) -> Target:
    variable = arguments.key_variable
    key = None if variable is None else SecretReference(variable).read()
    if arguments.wire in WIRES:
        routes = read_routes(address, key, arguments.wire)
    else:
        routes = asyncio.run(_of_engine(arguments, address, key))
    missing = dict(_missing(arguments.wire, routes))
    wire = wire_of(arguments.wire, routes.model)
    vocab_size = arguments.vocab_size if arguments.model_dir else TinyModel(family=FAMILIES[0]).vocab_size
    if problem := asyncio.run(scoring_problem(address, key, wire, vocab_size)):
        missing |= dict.fromkeys((Capability.SCORE, Capability.TOP_LOGPROBS), problem)
    launches, place = bool(arguments.command), arguments.command or f"http://{address}"
    changing = [name for name in (SETS_VERSIONS, *CHANGES) if name not in missing]
    withheld = dict.fromkeys([] if launches or arguments.take_over else changing, NO_TAKE_OVER)
    special = {Capability.BFLOAT16} if arguments.served_dtype == "bfloat16" else set()
    special |= {Capability.CUDA} if arguments.device == "cuda" else set()
    special |= {Capability.LAUNCH_SERVER, Capability.MOE} if launches else set()
    openai = arguments.wire == "openai"
    of_wire = OPENAI if openai else get_spec(arguments.wire).capabilities - OF_THE_DRIVER
    capabilities = frozenset((of_wire | special) - missing.keys() - withheld.keys())
    description = f"{routes.release} at {place} (wire {arguments.wire})"
    if layers := _quantized(routes.directory, arguments.model_dir):
        description += f"; layers in another precision than the trainer's {arguments.served_dtype}: {layers}"
    # Reports of servers of two products are of two targets.
    product = routes.product.lower()
    spec = _spec(capabilities, description, NAME if product == NAME else f"{product}-{NAME}")
    load_backend(spec)
    changes = SETS_VERSIONS not in missing.keys() | withheld.keys()
    if changes and not launches:
        asyncio.run(_require_fit(arguments, key))
    options = {
        "addresses": [] if launches else [address],
        "command": arguments.command,
        "wire": arguments.wire,
        "read_only": not changes,
        "take_over": changes,
        "served_name": "" if launches else routes.model,
        "product": routes.product,
        "api_key": None if variable is None else f"${{env:{variable}}}",
        **({} if launches else {"start_timeout_s": BACK_AFTER_S}),
    }
    families = () if launches else (arguments.model_type,)
    profile = Profile(
        families=families,
        dtypes=(arguments.served_dtype,),
        options={"options": options},
        waivers=KNOWN_FAILURES.get(routes.release, ()) if routes.stock else (),
    )
    return Target(
        spec=spec,
        profile=profile,
        model_dir=arguments.model_dir,
        version=routes.release,
        missing_routes=MappingProxyType(missing),
        withheld=MappingProxyType(withheld),
        raw_logprobs=RAW.get(routes.product, ""),
    )


async def _of_engine(arguments: ServerArguments, address: str, key: str | None) -> Routes:
    """The description of a server by the engine of its wire, which knows its routes; raises `ConfigError`."""
    async with aiohttp.ClientSession() as session:
        try:
            facts = await server_of(arguments.wire, Api(address, session, key, "the")).facts()
        except RolloutError as error:
            raise unreachable(error) from error
    return Routes(product=arguments.wire, version=facts.release or "unknown", directory=facts.path)


async def _require_fit(arguments: ServerArguments, key: str | None) -> None:
    """Raise one `ConfigError` for a server to which no check of the session could connect."""
    model = ServedModel.of(ModelConfig(path=arguments.model_dir), "server")
    async with aiohttp.ClientSession() as session:
        facts = await server_of(arguments.wire, Api(arguments.address, session, key, "the")).facts()
    problems = list(misfits(facts, model, arguments.served_dtype))
    prefix = f"--server={arguments.url} with --model-dir={arguments.model_dir}"
    raise_all(ConfigError, prefix, problems)


def _quantized(directory: str, model_dir: str) -> str:
    """The quantized layers of the server, by precision; empty where its directory is not on this machine."""
    config = Path(directory, "config.json")
    if not (model_dir and Path(directory).is_absolute() and config.is_file()):
        return ""
    quantization = json.loads(config.read_text(encoding="utf-8")).get("quantization_config")
    if not quantization:
        return ""
    files = TensorFiles(Path(model_dir), "model")
    return shown_layers(quantized_layers(quantization, {name: files.shape(name) for name in files.names()}))


def _spec(capabilities: frozenset[Capability], description: str, name: str = NAME) -> EngineSpec:
    return EngineSpec(
        name=name,
        kind="inference",
        protocol=PROTOCOL_VERSION,
        factory="core_rl_conformance.servers.backend:ServerUnderTest",
        config="core_rl_conformance.servers.backend:ServerUnderTestConfig",
        capabilities=capabilities,
        description=description,
    )


def _missing(wire: str, routes: Routes) -> Iterator[tuple[str, str]]:
    """Capabilities and checks that the server lacks routes for, each with the reason."""
    if wire == "openai":
        for capability, field in FIELDS.items():
            if routes.fields and field not in routes.fields:
                yield capability, f"{GENERATE[wire]} has no field {field}"
        for name in (SETS_VERSIONS, *CHANGES):
            yield name, "the wire openai has no route that changes a server"
    if not CONTROL.get(wire):
        return
    control = routes.missing(CONTROL[wire])
    if control:
        yield SETS_VERSIONS, control
    reasons = {
        capability: control or routes.missing(needed) or routes.disabled.get(capability, "")
        for capability, needed in NEEDS[wire].items()
    }
    if all(reasons[method] for method in WHOLE):
        reasons[Capability.SYNC_DELTA] = reasons[Capability.SYNC_DISK]
    yield from ((capability, reason) for capability, reason in reasons.items() if reason)
