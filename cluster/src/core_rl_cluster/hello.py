"""Key and handshake of an agent and the driver. The messages are JSON: nothing from an unknown peer is unpickled."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import importlib_metadata as metadata

from core_rl.distributed.channel import Channel
from core_rl.errors import ClusterError, ConfigError
from core_rl.machine import cpu_cores
from core_rl.version import __version__

__all__ = ["KEY_VARIABLE", "MachineInfo", "Versions", "given_key", "parsed", "read", "take_key", "write"]

KEY_VARIABLE = "CORE_RL_CLUSTER_KEY"
"""The environment variable with the key as hexadecimal digits."""
SHORTEST_KEY_BYTES = 16
MAKE_KEY = "python -c 'import secrets; print(secrets.token_hex(32))' > KEYFILE && chmod 600 KEYFILE"


def write(channel: Channel, message: Mapping[str, Any], deadline: float) -> None:
    """Send ``message``; as `Channel.send`."""
    channel.send(json.dumps(message).encode(), deadline)


def read(channel: Channel, deadline: float) -> dict[str, Any]:
    """The next message; as `Channel.receive`, and raises `ClusterError` unless it is an object of JSON."""
    return parsed(channel.receive(deadline))


def parsed(data: bytes | bytearray) -> dict[str, Any]:
    """The message in ``data``; raises `ClusterError`."""
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ClusterError(f"a message that is no JSON: {error}; is another program on this port?") from error
    if not isinstance(message, dict):
        raise ClusterError(f"a message that is a {type(message).__name__}, no object of JSON")
    return message


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that must be equal on all machines, for pickles and collectives."""

    python: str
    """Without the micro version."""
    torch: str
    core_rl: str

    @classmethod
    def here(cls) -> Self:
        """Return the versions of this process. Builds of torch for different accelerators are one version."""
        torch = metadata.version("torch").partition("+")[0]
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(python=python, torch=torch, core_rl=__version__)

    def differences(self, remote: Versions) -> list[str]:
        """A phrase for each version that ``remote`` has differently."""
        ours, theirs = asdict(self), asdict(remote)
        return [
            f"{name} {theirs[name]} (the driver: {value})"
            for name, value in ours.items()
            if value != theirs[name]
        ]


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """A machine as its agent describes it."""

    number: int | None
    """None: the driver chooses."""
    hostname: str
    address: str
    """Towards the driver."""
    cores: int
    pid: int
    versions: Versions

    @classmethod
    def here(cls, number: int | None, address: str) -> Self:
        """This machine, which has ``address`` on the connection to the driver."""
        return cls(
            number=number,
            hostname=socket.gethostname(),
            address=address,
            cores=cpu_cores(),
            pid=os.getpid(),
            versions=Versions.here(),
        )

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """The machine that wrote ``message``; raises `ClusterError` for an invalid one."""
        try:
            return cls(**{**message, "versions": Versions(**message["versions"])})
        except (KeyError, TypeError) as error:
            raise ClusterError(f"a machine that describes itself wrongly: {error}") from error

    def message(self) -> dict[str, Any]:
        """Return the message that `of` reads."""
        return asdict(self)

    def __str__(self) -> str:
        return f"machine {self.number} ({self.hostname}, {self.address})"


def given_key(file: Path | None) -> bytes:
    """The key in ``file``, or in the environment; raises `ConfigError` where there is none, or others may read it."""
    if file is None:
        return _parsed(os.environ.get(KEY_VARIABLE, ""), f"the environment variable {KEY_VARIABLE}")
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}; make one: {MAKE_KEY}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the key file {file} is open to others (mode {stat.S_IMODE(mode):o}); the key lets anyone run code on all "
            f"machines: chmod 600 {file}"
        )
    return _parsed(text, f"the key file {file}")


def take_key(file: Path | None) -> bytes:
    """As `given_key`; it leaves this process's environment, which other processes inherit."""
    key = given_key(file)
    os.environ.pop(KEY_VARIABLE, None)
    return key


def _parsed(text: str, origin: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError as error:
        raise ConfigError(f"{origin} holds no hexadecimal digits; make a key: {MAKE_KEY}") from error
    if len(key) < SHORTEST_KEY_BYTES:
        raise ConfigError(
            f"{origin} holds a key of {len(key)} bytes, and it needs {SHORTEST_KEY_BYTES} or more; the driver and all "
            f"machines have the same one. Make a key: {MAKE_KEY}"
        )
    return key
