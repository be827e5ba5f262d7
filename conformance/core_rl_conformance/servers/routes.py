"""The routes of a server, and the capabilities that need them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError, RolloutError
from core_rl.servers.api import DENIED, Api, Refused
from core_rl.servers.wire import Wire, readable

GENERATE = {"openai": "/v1/completions", "sglang": "/generate", "vllm": "/inference/v1/generate"}
"""The route of requests, by wire."""
HINTS = {
    "vllm": "start it with --enable-scale-out, or give --wire=openai",
    "sglang": "give --wire=openai for a server of another kind",
    "openai": "give the wire of its kind",
}
CONTROL: Mapping[str, tuple[str, ...]] = {
    "openai": (),
    "sglang": (
        "/model_info",
        "/server_info",
        "/update_weight_version",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
    ),
    "vllm": (
        "/weight_info",
        "/get_world_size",
        "/update_weight_version",
        "/pause",
        "/resume",
        "/reset_prefix_cache",
    ),
}
"""Routes that every change of a server needs, by wire."""
SGLANG_PARTS = ("/begin_weight_update", "/end_weight_update")
VLLM_PARTS = ("/start_weight_update", "/update_weights", "/finish_weight_update")
NEEDS: Mapping[str, Mapping[Capability, tuple[str, ...]]] = {
    "openai": {},
    "sglang": {
        Capability.PAUSE: (),
        Capability.RELEASE_MEMORY: ("/release_memory_occupation", "/resume_memory_occupation"),
        Capability.SYNC_DISK: ("/update_weights_from_disk",),
        Capability.SYNC_TENSOR: (*SGLANG_PARTS, "/update_weights_from_tensor"),
        Capability.SYNC_DISTRIBUTED: (
            *SGLANG_PARTS,
            "/update_weights_from_tensor",
            "/init_weights_update_group",
            "/update_weights_from_distributed",
            "/destroy_weights_update_group",
        ),
        Capability.SYNC_LORA: ("/load_lora_adapter", "/unload_lora_adapter"),
        Capability.SYNC_DELTA: (),
    },
    "vllm": {
        Capability.PAUSE: (),
        Capability.SYNC_DISK: ("/collective_rpc",),
        Capability.SYNC_TENSOR: VLLM_PARTS,
        Capability.SYNC_DISTRIBUTED: (
            *VLLM_PARTS,
            "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine",
        ),
        Capability.SYNC_LORA: ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        Capability.SYNC_DELTA: (),
    },
}
"""Capabilities that change a server, and their routes besides `CONTROL`, by wire."""
CHANGES = tuple(NEEDS["sglang"])
"""Capabilities that change a server, whatever its wire."""
WHOLE = (Capability.SYNC_DISK, Capability.SYNC_TENSOR, Capability.SYNC_DISTRIBUTED)
"""Weight sync by which a server loads whole weights. ``sync_delta`` needs one: the client adds the changes."""
PRODUCTS = (("SGLang", "/server_info"), ("vLLM", "/version"))
"""Products, and the route of each with its version."""
NO_LORA = "the server runs without --enable-lora"
NO_TRANSFER = "the server runs without the --weight-transfer-config of core-rl-vllm-server"
BUCKETS = (Capability.SYNC_TENSOR, Capability.SYNC_DISTRIBUTED)
"""Weight sync by buckets of core-rl."""
TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 120.0
"""Also for ``/server_info``: vLLM describes its environment there, by commands that it runs at the first request."""
LONGEST = 64
"""Tokens of the longest sequence that checks score."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The routes of one server, its product and its model."""

    paths: frozenset[str] = frozenset()
    product: str
    version: str
    model: str = ""
    """The name of its model in requests."""
    directory: str
    """The directory of its model, or the model's name on the Hub; empty where it does not tell."""
    fields: frozenset[str] = frozenset()
    """Fields of a completion request, where the server describes them."""
    disabled: Mapping[Capability, str] = field(default_factory=dict)
    """Capabilities that its own settings disable, each with the reason."""
    tokenizer: bool = True
    """Whether it has one, as far as it describes that."""

    @property
    def release(self) -> str:
        """Product and version."""
        return f"{self.product} {self.version}"

    @property
    def stock(self) -> bool:
        """Whether it is vLLM without core-rl-vllm-server."""
        return self.disabled.get(Capability.SYNC_TENSOR) == NO_TRANSFER

    def missing(self, routes: Iterable[str]) -> str:
        """The absent ``routes`` as a reason; empty where it has all."""
        absent = [route for route in routes if route not in self.paths]
        return f"no route {', '.join(absent)}" if absent else ""


def read_routes(address: str, key: str | None, wire: str) -> Routes:
    """Ask the server at ``address`` for its description; nothing of it changes.

    Raises `ConfigError` where it cannot be reached, and where it has no route for requests of ``wire``.
    """
    try:
        routes = asyncio.run(_read(address, key))
    except RolloutError as error:
        raise unreachable(error) from error
    if absent := routes.missing([GENERATE[wire]]):
        raise ConfigError(f"--wire={wire}: the {routes.product} at {address} has {absent}; {HINTS[wire]}")
    if wire == "openai" and not routes.tokenizer:
        raise ConfigError(
            f"--wire=openai: the {routes.product} at {address} runs with --skip-tokenizer-init, and its "
            f"{GENERATE[wire]} needs a tokenizer; start it without the flag, or give --wire=sglang"
        )
    return routes


def unreachable(error: RolloutError) -> ConfigError:
    """The ``error`` of a server's description, with its remedy."""
    denied = isinstance(error, Refused) and error.status in DENIED
    remedy = "--server-key names its variable" if denied else "start the server first, and give its address"
    return ConfigError(f"--server: {error}; {remedy}")


async def _read(address: str, key: str | None) -> Routes:
    async with aiohttp.ClientSession() as session:
        api = Api(address, session, key, "the")
        description = await api.get("/openapi.json", TIMEOUT_S)
        with readable(description, f"{address}/openapi.json is something"):
            paths = frozenset(description["paths"])
            schemas = description.get("components", {}).get("schemas", {})
            fields = frozenset(schemas.get("CompletionRequest", {}).get("properties", {}))
        product, about = await _product(api, paths)
        model, directory = await _model(api)
        if product == "SGLang":
            disabled = {} if about.get("enable_lora") else {Capability.SYNC_LORA: NO_LORA}
        else:
            disabled = await _disabled_in_vllm(api, paths)
        return Routes(
            paths=paths,
            product=product,
            version=str(about.get("version", "unknown")),
            model=model,
            directory=directory,
            fields=fields,
            disabled=disabled,
            tokenizer=not about.get("skip_tokenizer_init"),
        )


async def _product(api: Api, paths: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The product, and its description with the version. SGLang's has secrets, which nothing reads."""
    for product, path in PRODUCTS:
        if path not in paths:
            continue
        about = await api.get(path, REQUEST_TIMEOUT_S)
        if isinstance(about, dict) and "version" in about:
            return product, about
    return "server", {}


async def _disabled_in_vllm(api: Api, paths: Collection[str]) -> dict[Capability, str]:
    """Capabilities that the server's settings disable, each with the reason, where it describes them."""
    if "/server_info" not in paths:
        return {}
    with readable(None, f"{api.address}/server_info is something"):
        config = (await api.get("/server_info?config_format=json", REQUEST_TIMEOUT_S))["vllm_config"]
        transfer = config.get("weight_transfer_config") or {}
        disabled = {} if config.get("lora_config") else {Capability.SYNC_LORA: NO_LORA}
        return (
            disabled
            if transfer.get("backend") == "core_rl"
            else disabled | dict.fromkeys(BUCKETS, NO_TRANSFER)
        )


async def scoring_problem(address: str, key: str | None, wire: Wire, vocab_size: int) -> str:
    """The refusal of a request for log-probs of a whole prompt over the whole vocabulary; empty where it is served."""
    async with aiohttp.ClientSession() as session:
        api = Api(address, session, key, "the")
        body = {**wire.scoring([1] * LONGEST, vocab_size), wire.rid: f"core-rl-{LONGEST}"}
        try:
            await api.post(wire.scoring_path, body, REQUEST_TIMEOUT_S)
        except RolloutError as error:
            return str(error).removeprefix(f"{api.name}: ")
    return ""


async def _model(api: Api) -> tuple[str, str]:
    """Name and directory of its model; empty where it does not tell."""
    try:
        models = await api.get("/v1/models", TIMEOUT_S)
    except Refused:
        return "", ""
    with readable(models, f"{api.address}/v1/models is something"):
        model = models["data"][0]
        return str(model["id"]), str(model.get("root") or "")
