"""Handshake of an agent and the driver, as JSON: nothing from an unknown peer is unpickled."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import importlib_metadata as metadata

from core_rl.distributed.channel import Channel
from core_rl.errors import ClusterError
from core_rl.machine import cpu_cores
from core_rl.version import __version__

__all__ = ["MachineInfo", "Versions", "parsed", "read", "write"]


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
