"""Starting the servers of an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import aiohttp

from core_rl.distributed.process_group import pick_device
from core_rl.errors import ConfigError
from core_rl_sglang.api import Api
from core_rl_sglang.config import SglangConfig, SglangOptions
from core_rl_sglang.model import ServedModel
from core_rl_sglang.process import ServerProcess, arguments_of, free_port, require_free
from core_rl_sglang.server import Server

__all__ = ["api_of", "free_ports", "start_server"]


def free_ports(options: SglangOptions, count: int) -> tuple[int, ...]:
    """The ports of ``count`` servers; raises `ConfigError` for ``options.ports`` that do not suffice or are taken."""
    if not options.ports:
        return tuple(free_port(options.host) for _ in range(count))
    if len(options.ports) != count:
        raise ConfigError(f"options.ports = {options.ports} for {count} servers; give one for each, or none")
    for port in options.ports:
        require_free(options.host, port)
    return options.ports


def start_server(
    config: SglangConfig, model: ServedModel, port: int, session: aiohttp.ClientSession
) -> Server:
    """Start the process of a server of ``model``; it is not ready yet."""
    options = config.options
    device = pick_device(config.device, 0).type
    key = None if options.api_key is None else options.api_key.get_secret_value()
    log = None if options.log_path is None else Path(options.log_path) / f"sglang-{port}.log"
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    arguments = arguments_of(config, model, port, device)
    start = partial(ServerProcess, config.server_python, arguments, key, device, log, config.layout.tp)
    return Server(api_of(f"{options.host}:{port}", session, options), start, start())


def api_of(address: str, session: aiohttp.ClientSession, options: SglangOptions) -> Api:
    """The interface of the server at ``address``."""
    key = options.api_key
    return Api(address, session, None if key is None else key.get_secret_value())
