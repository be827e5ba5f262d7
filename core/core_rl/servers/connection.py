"""Checks of servers when an engine connects to them, before anything is changed on one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from core_rl.backend.meta import SyncMethod
from core_rl.config.engine import DType
from core_rl.errors import ConfigError, RolloutError, raise_all
from core_rl.servers.adapters import ServedModel
from core_rl.servers.api import DENIED, Refused
from core_rl.servers.facts import ServerFacts, is_directory, misfits, warn_if_untested
from core_rl.servers.labels import FRESH, RUN, owner_of
from core_rl.servers.server import Server

__all__ = ["facts_of_running", "require_servers", "require_steered", "require_updatable"]

CONNECT_S = 5.0
"""Time limit for a connection to a server that is up."""


async def facts_of_running(servers: Sequence[Server]) -> dict[Server, ServerFacts]:
    """The facts of servers that have to be up, without a change to one.

    Raises one `ConfigError` for all servers that cannot be reached, or are none of their product.
    """
    answers = await asyncio.gather(*map(_facts_or_problem, servers))
    raise_all(ConfigError, "options.addresses", [answer for answer in answers if isinstance(answer, str)])
    return {
        server: answer for server, answer in zip(servers, answers, strict=True) if not isinstance(answer, str)
    }


async def _facts_or_problem(server: Server) -> ServerFacts | str:
    product = server.api.product
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(server.host, server.address.rpartition(":")[2])
    except OSError as error:
        reason = error.strerror or str(error) or f"no connection within {CONNECT_S:g} s"
        return f"nothing answers at {server.address} ({reason}); start a {product} server there, or correct the address"
    writer.close()
    try:
        return await server.facts()
    except ConfigError as error:
        return str(error)
    except RolloutError as error:
        denied = isinstance(error, Refused) and error.status in DENIED
        return str(error) if denied else f"{error}; name the address of a {product} server over HTTP"


def require_servers(
    facts: Mapping[Server, ServerFacts], model: ServedModel, dtype: DType, origin: str
) -> None:
    """Raise one `ConfigError` with every reason for which servers cannot serve ``model`` in ``dtype``.

    ``origin`` is the directory of weights that a server which this engine may not change has to serve. Logs one warning
    for each untested version of the product.
    """
    problems = {
        server.name: list(_problems(server, known, model, dtype, origin)) for server, known in facts.items()
    }
    raise_all(
        ConfigError,
        f"model.path = {str(model.path)!r} does not fit servers, on which nothing was changed",
        (f"{name}: {problem}" for name, listed in problems.items() for problem in listed),
    )
    for server, known in facts.items():
        if known.release is not None:
            warn_if_untested(server.api.product, known.release, server.tested)


def _problems(
    server: Server, facts: ServerFacts, model: ServedModel, dtype: DType, origin: str
) -> Iterator[str]:
    if server.start is None and (other := list(misfits(facts, model, dtype))):
        yield from other
        return
    connected, owner = server.version >= 0, owner_of(facts.label)
    by = f"the run {owner}" if owner is not None else f"a user that labels its weights {facts.label!r}"
    if server.steered:
        if connected and facts.label != FRESH and owner != RUN:
            yield f"{by} has taken it over since this engine connected to it"
        elif not is_directory(facts.path, origin) or (facts.label != FRESH and owner != RUN):
            problem = facts.limits.update_problem("disk", tied=_is_tied(model))
            if problem is not None:
                yield f"it {problem}; start it with model.path, or {facts.limits.remedy}"
    elif facts.label != FRESH:
        yield f"{by} steers it; name another server, or take it over by options.take_over = true"
    elif not is_directory(facts.path, origin):
        yield f"it serves {facts.path!r}; to load the weights of model.path into it, set options.take_over to true"


def require_steered(servers: Sequence[Server], purpose: str) -> None:
    """Raise `ConfigError` where ``purpose`` would change a server that this engine may not change."""
    others = [server.name for server in servers if not server.steered]
    if others:
        raise ConfigError(
            f"options.take_over = false: {purpose} would change {', '.join(others)}, which others started; set it to "
            "true where nobody else uses them"
        )


def require_updatable(servers: Sequence[Server], method: SyncMethod, model: ServedModel) -> None:
    """Raise one `ConfigError` with every server that would not have the weights of an update by ``method``."""
    tied = _is_tied(model)
    problems = [
        f"{server.name} {problem}; {server.limits.remedy}"
        for server in servers
        if (problem := server.limits.update_problem(method, tied=tied))
    ]
    raise_all(ConfigError, f"sync by {method!r}", problems)


def _is_tied(model: ServedModel) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))
