"""The rendezvous of a receiver and a sender of weights: a file names the receiver's socket, or gives its error.

Messages on the socket are pickled. Both sides therefore refuse a file or a peer of another user. Between machines the
file names a port, and a key that both ends prove to know.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.distributed.agreement import describe
from core_rl.distributed.authentication import WrongKey, admit, new_key, present_key
from core_rl.distributed.channel import LIMIT_BYTES, Channel, set_lease
from core_rl.distributed.process_group import listen_on
from core_rl.distributed.sockets import socket_directory
from core_rl.errors import ConfigError, WeightsError
from core_rl.weight_sync.messages import RemoteChannel

logger = logging.getLogger(__name__)

CONNECT_S = 300.0
"""The longest wait for a receiver."""
FIRST_POLL_S, POLL_S = 0.001, 0.02
HANDSHAKE_S = 20.0
HANDSHAKE_BYTES = 4096
"""The largest message before the key is proven."""
LEASE_S = 30.0
"""After so many silent seconds, the machine at the other end is lost."""
PEER_CREDENTIALS = struct.Struct("3i")
"""Process, user and group: Linux' ``struct ucred``."""


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The content of the file: of a receiver that gets ready, that listens on ``socket``, or that has failed."""

    version: int
    socket: str | None = None
    port: int | None = None
    """Between machines, of ``WeightUpdateMeta.host``."""
    key: str | None = None
    """For that port, as hexadecimal digits."""
    error: str | None = None


# ------------------------------------------------------------------- the receiver


@contextmanager
def expecting(meta: WeightUpdateMeta) -> Iterator[None]:
    """Announce a receiver; where the context raises before a sender has connected, the sender finds the error."""
    file = _file(meta)
    _write(file, _Record(version=meta.version))
    try:
        yield
    except BaseException as error:
        if file.exists():
            reason = describe(error) if isinstance(error, Exception) else repr(error)
            _write(file, _Record(version=meta.version, error=reason))
        raise
    file.unlink(missing_ok=True)


@contextmanager
def accepted(meta: WeightUpdateMeta, timeout_s: float) -> Iterator[Channel]:
    """The connection of a sender; raises `WeightsError` when none connects within ``timeout_s``."""
    file, deadline = _file(meta), time.monotonic() + timeout_s
    with _listening(meta) as (listener, record):
        _write(file, record)
        try:
            channel = _accepted(listener, record, deadline)
        except TimeoutError as error:
            raise WeightsError(
                f"no train engine sent weights of version {meta.version} to {file} within {timeout_s:g} s; "
                "call its upload_weights() with the same meta"
            ) from error
        file.unlink(missing_ok=True)
    yield channel


@contextmanager
def _listening(meta: WeightUpdateMeta) -> Iterator[tuple[socket.socket, _Record]]:
    """A socket of the receiver, and the record that names it."""
    if meta.host is not None:
        with listen_on(meta.host) as listener:
            port, key = listener.getsockname()[1], new_key().hex()
            yield listener, _Record(version=meta.version, port=port, key=key)
        return
    with (
        tempfile.TemporaryDirectory(
            prefix="core-rl-", dir=socket_directory(), ignore_cleanup_errors=True
        ) as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        name = f"{directory}/weights"
        listener.bind(name)
        listener.listen(1)
        yield listener, _Record(version=meta.version, socket=name)


def _accepted(listener: socket.socket, record: _Record, deadline: float) -> Channel:
    """The sender's connection; raises ``TimeoutError`` at ``deadline``. Strangers are sent away."""
    while True:
        listener.settimeout(max(1e-3, deadline - time.monotonic()))
        connection, _ = listener.accept()
        if record.key is None:
            return _channel(connection, "sender")
        channel = _remote(connection)
        try:
            admit(channel, bytes.fromhex(record.key), time.monotonic() + HANDSHAKE_S)
        except (WrongKey, OSError, EOFError):
            channel.close()
        else:
            channel.limit_bytes = LIMIT_BYTES
            return channel


def forget_error(meta: WeightUpdateMeta) -> None:
    """Remove the error of an earlier update, which no sender has read."""
    file = _file(meta)
    record = _read(file)
    if record is not None and record.error is not None:
        file.unlink(missing_ok=True)


# --------------------------------------------------------------------- the sender


def connect(meta: WeightUpdateMeta) -> Channel:
    """A connection to the receiver with the same ``meta``.

    Raises `WeightsError` with the error of a receiver that has failed, and when none waits within five minutes.
    """
    file, deadline, pause_s = _file(meta), time.monotonic() + CONNECT_S, FIRST_POLL_S
    while time.monotonic() < deadline:
        record = _read(file)
        if record is not None and record.error is not None and record.version == meta.version:
            file.unlink(missing_ok=True)
            raise WeightsError(f"the receiver of the weights failed: {record.error}")
        if record is not None and (channel := _met(meta, record)) is not None:
            return channel
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
    raise WeightsError(
        f"no inference engine waits for weights at {file} after {CONNECT_S:g} s; call its update_weights() with the "
        "same meta first: it returns at once"
    )


def abandon(meta: WeightUpdateMeta) -> None:
    """Fail a receiver that waits with the same ``meta``: no sender will connect."""
    with suppress(WeightsError):  # a file that `connect` refuses
        record = _read(_file(meta))
        if record is not None and (channel := _met(meta, record)) is not None:
            channel.close()


def _met(meta: WeightUpdateMeta, record: _Record) -> Channel | None:
    """A connection to the receiver behind ``record``; None without a listener."""
    if record.socket is not None:
        connection = _connected(record.socket)
        return None if connection is None else _channel(connection, "receiver")
    if record.port is None or record.key is None or meta.host is None:
        return None
    try:
        connection = socket.create_connection((meta.host, record.port), timeout=HANDSHAKE_S)
    except OSError as error:
        logger.debug("the receiver at %s, port %d cannot be reached: %s", meta.host, record.port, error)
        return None
    channel = _remote(connection)
    try:
        present_key(channel, bytes.fromhex(record.key), time.monotonic() + HANDSHAKE_S)
    except (WrongKey, OSError, EOFError):  # another program on the port of a receiver that is gone
        channel.close()
        return None
    channel.limit_bytes = LIMIT_BYTES
    return channel


def _remote(connection: socket.socket) -> RemoteChannel:
    """A channel to a peer before it has proven the key."""
    set_lease(connection, LEASE_S)
    return RemoteChannel(connection, HANDSHAKE_BYTES)


def _connected(name: str) -> socket.socket | None:
    """A connection to the socket ``name``; None without a listener."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except OSError:
        connection.close()
        raise
    return connection


# ----------------------------------------------------------------------- the file


def _file(meta: WeightUpdateMeta) -> Path:
    if not meta.path:
        raise ConfigError(
            f"WeightUpdateMeta(method={meta.method!r}) needs a path: a file through which the sender finds the receiver"
        )
    return Path(meta.path)


def _write(file: Path, record: _Record) -> None:
    """Replace ``file`` atomically; only this user may read or write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(asdict(record), stream)
    Path(draft).replace(file)


def _read(file: Path) -> _Record | None:
    """The record in ``file``; None where there is none.

    Raises `WeightsError` for a file that belongs to another user, or that others may write.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"the rendezvous file {file} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        _require_private(file, os.fstat(descriptor))
        with suppress(ValueError, TypeError):  # left by something else
            return _Record(**json.load(stream))
    return None


def _require_private(file: Path, status: os.stat_result) -> None:
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a file"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to the user {status.st_uid}, and this process to {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"may be written by other users (mode {stat.filemode(status.st_mode)})"
    if problem is not None:
        raise WeightsError(
            f"the rendezvous file {file} {problem}: whoever writes it could run code here; set WeightUpdateMeta.path "
            "to a directory that belongs to the user of both engines, on a local disk"
        )


def _channel(connection: socket.socket, peer: str) -> Channel:
    """A channel to a process of the same user; raises `WeightsError` for another user's process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    _, user, _ = PEER_CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        connection.close()
        raise WeightsError(
            f"the {peer} of the weights runs as the user {user}, and this process as {os.geteuid()}: it could run "
            "code here; run both engines as the same user"
        )
    return Channel(connection)
