"""`ServerUnderTest`: an inference backend over one server, with the wire and the calls of its kind."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from core_rl.backend.inference_backend import InferenceContext, ModelLimits
from core_rl.backend.meta import FinetuneSpec
from core_rl.data.requests import LLMRequest, LLMResponse, StopReason
from core_rl.errors import ConfigError, EngineBroken
from core_rl.registry.engines import get_spec, load_class
from core_rl.servers.adapters import ServedModel
from core_rl.servers.api import Api
from core_rl.servers.backend import ServerBackend
from core_rl.servers.config import ServerEngineConfig, ServerOptions
from core_rl.servers.facts import FRESH, NO_LIMITS, ServerFacts
from core_rl.servers.process import RunningServer, ServerProcess
from core_rl.servers.server import Server
from core_rl.servers.wire import Scores, Wire, readable

ID_PREFIX = "token_id:"
"""Prefix of a token that is written as its id."""
REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class OpenAIWire(Wire):
    """``POST /v1/completions``. All tokens have version 0: such responses name no weights."""

    path = "/v1/completions"
    rid = "request_id"

    def __init__(self, model: str) -> None:
        self._model = model
        """The name of the model on the server."""

    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        sampling = request.sampling
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.input_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            "ignore_eos": True,
            "stop_token_ids": sorted(stops),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        return body

    def adapter_fields(self, name: str | None) -> dict[str, str]:
        return {} if name is None else {"model": name}

    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        with readable(response, f"{server} sent a response to request {request.rid}"):
            (choice,) = response["choices"]
            ids = _token_ids(choice)
            logprobs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
            if len(logprobs) != len(ids):
                raise ValueError(f"it has {len(ids)} tokens and {len(logprobs)} log-probs")
            return LLMResponse(
                rid=request.rid,
                input_ids=request.input_ids,
                output_ids=ids,
                logprobs=logprobs,
                versions=(0,) * len(ids),
                stop_reason=REASONS[choice["finish_reason"]],
            )

    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
            "return_token_ids": True,
        }

    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        with readable(response, f"{server} gave scores"):
            (choice,) = response["choices"]
            return Scores.of_tokens(choice["prompt_logprobs"][1:], ids, k, server)


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the drawn tokens, from the field of servers that have one, or from tokens written as ids."""
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    return tuple(int(token.removeprefix(ID_PREFIX)) for token in choice["logprobs"]["tokens"])


KEEPER = Path(__file__).with_name("keeper.py")


class ServerUnderTestOptions(ServerOptions):
    """The interface of the server."""

    wire: str = "openai"
    """``openai``, or the engine whose wire and server class are used."""
    read_only: bool = True
    """Whether the server's weights, version and state stay as they are."""
    served_name: str = ""
    """The name of its model in requests."""
    product: str = "server"
    """Its name in messages."""
    command: str = ""
    """The command that starts it, with ``{model}`` and ``{port}``; empty for a server that runs."""


class ServerUnderTestConfig(ServerEngineConfig):
    """The common config, and the section of the server."""

    product = "server"
    module = "unused"
    python_variable = "UNUSED"

    options: ServerUnderTestOptions = ServerUnderTestOptions()


class ServerUnderTest(ServerBackend[ServerUnderTestConfig]):
    """Calls one server as the engine of its kind does, or reads only."""

    product = "server"

    def build(
        self,
        context: InferenceContext[ServerUnderTestConfig],
        addresses: tuple[str, ...],
        ft_spec: FinetuneSpec,
    ) -> ModelLimits:
        self._use(context.config)
        return super().build(context, addresses, ft_spec)

    def launch_server(self, context: InferenceContext[ServerUnderTestConfig], count: int) -> tuple[str, ...]:
        self._use(context.config)
        self.model = self.served_model(context.config)
        return super().launch_server(context, count)

    def _use(self, config: ServerUnderTestConfig) -> None:
        """Take the wire and the server class of ``config``."""
        options = config.options
        self.product = options.product
        self._of_kind = None if options.wire == "openai" else _backend_of(options.wire)
        self.wire = wire_of(options.wire, options.served_name or str(config.model.path))
        self.server_class = ReadOnlyServer
        if self._of_kind is not None and options.read_only:
            self.wire = _without_versions(self.wire)
        elif self._of_kind is not None:
            self.server_class = _without_limits(self._of_kind.server_class)

    def _server(
        self,
        address: str,
        options: ServerOptions,
        start: Callable[[], RunningServer] | None = None,
        *,
        steered: bool = True,
    ) -> Server:
        server = super()._server(address, options, start, steered=steered)
        if isinstance(server, ReadOnlyServer):
            server.path = str(self.model.path)
        return server

    def served_model(self, config: ServerUnderTestConfig) -> ServedModel:
        if self._of_kind is None or config.options.read_only:
            return ServedModel.of(config.model, "server")
        return self._of_kind.served_model(config)

    def start_server(
        self, config: ServerUnderTestConfig, model: ServedModel, port: int, key: str | None
    ) -> ServerProcess:
        words = shlex.split(config.options.command)
        arguments = [word.format(model=model.path, port=port) for word in words]
        return ServerProcess(config, port, key, script=KEEPER, arguments=arguments, environment={})

    def release_memory(self) -> None:
        """Free the accelerator's memory."""
        self.loop.wait(self.fleet.release_memory())

    def resume_memory(self) -> None:
        """Allocate it again, and load the weights."""
        self.loop.wait(self.fleet.resume_memory())


def wire_of(name: str, model: str) -> Wire:
    """The wire ``name`` for requests to ``model``; raises `EngineError` for an engine that is not installed."""
    return OpenAIWire(model) if name == "openai" else _backend_of(name).wire


def server_of(wire: str, api: Api) -> Server:
    """The server of ``api``, as the engine of its wire calls it; nothing of it changes."""
    return _backend_of(wire).server_class(api, ServerOptions().update_timeout_s, steered=False)


def _backend_of(engine: str) -> ServerBackend[Any]:
    """The backend of the installed engine; raises `EngineError`."""
    base: type[Any] = ServerBackend
    try:
        made: ServerBackend[Any] = load_class(get_spec(engine), "factory", base)()
    except EngineBroken as error:
        raise ConfigError(f"--wire={engine}: {error}; name an engine over servers") from error
    return made


def _without_limits(kind: type[Server]) -> type[Server]:
    """``kind``, asked for everything: an engine refuses what a stock server gets wrong, and a check has to see it."""

    class Unlimited(kind):  # type: ignore[misc, valid-type]
        async def facts(self) -> ServerFacts:
            facts: ServerFacts = await super().facts()
            return replace(facts, limits=NO_LIMITS)

    return Unlimited


class ReadOnlyServer(Server):
    """A server of which nothing is changed: it takes requests alone."""

    path = ""
    """The model directory that its user names."""

    async def facts(self) -> ServerFacts:
        return ServerFacts(path=self.path, label=FRESH, device="")

    async def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Leave the server as it is; it aborts a request with its connection."""

    set_label = _pause = _continue = abort = flush_cache = load_directory = load_adapter = _nothing


def _without_versions(wire: Wire) -> Wire:
    """A wire like ``wire`` that has no version for any token: labels of a server's other users mean nothing."""

    class Unversioned(type(wire)):  # type: ignore[misc]
        def response(
            self, request: LLMRequest, response: Any, eos: Collection[int], server: str
        ) -> LLMResponse:
            read: LLMResponse = super().response(request, _unversioned(response), eos, server)
            return read

    unversioned: Wire = Unversioned()
    return unversioned


def _unversioned(response: Any, name: str = "") -> Any:
    """``response`` without the labels of weights: texts in fields, such as ``name``, that are called after versions."""
    if isinstance(response, list):
        return [_unversioned(part, name) for part in response]
    if isinstance(response, dict):
        return {key: _unversioned(value, key) for key, value in response.items()}
    return FRESH if "version" in name and isinstance(response, str) else response
