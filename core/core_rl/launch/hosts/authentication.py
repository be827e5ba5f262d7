"""Proof, before anything else is read, that both ends of a connection know the key of the run.

A challenge in both directions by HMAC-SHA256 (RFC 2104), so that the key itself is never sent. What follows on the
connection is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from core_rl.distributed.channel import Channel
from core_rl.errors import ClusterError, ConfigError

__all__ = ["KEY_VARIABLE", "WrongKey", "admit", "given_key", "new_key", "present_key", "take_key"]

KEY_VARIABLE = "CORE_RL_CLUSTER_KEY"
"""The environment variable with the key as hexadecimal digits."""
KEY_BYTES = 32
SHORTEST_KEY_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
REFUSED = b""
"""The answer to a wrong proof."""
MAKE_KEY = "python -c 'import secrets; print(secrets.token_hex(32))' > KEYFILE && chmod 600 KEYFILE"


class WrongKey(ClusterError):
    """The other end does not know the key."""


def new_key() -> bytes:
    """A key for one run."""
    return secrets.token_bytes(KEY_BYTES)


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
            f"the key file {file} is open to others (mode {stat.S_IMODE(mode):o}); who has the key runs code on all "
            f"machines: chmod 600 {file}"
        )
    return _parsed(text, f"the key file {file}")


def take_key(file: Path | None) -> bytes:
    """As `given_key`; it leaves this process's environment, which other processes inherit."""
    key = given_key(file)
    os.environ.pop(KEY_VARIABLE, None)
    return key


def admit(channel: Channel, key: bytes, deadline: float) -> None:
    """The driver's part: raise `WrongKey` unless the other end knows ``key``.

    Raises ``OSError``, ``TimeoutError`` or ``EOFError`` for a connection that breaks.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(nonce, deadline)
    answer = bytes(channel.receive(deadline))
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"machine", nonce, theirs)):
        channel.send(REFUSED, deadline)
        raise WrongKey("a machine connected with another key")
    channel.send(_proof(key, b"driver", theirs, nonce), deadline)


def present_key(channel: Channel, key: bytes, deadline: float) -> None:
    """The machine's part: raise `WrongKey` unless the driver knows ``key``, and takes it; else as `admit`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    theirs = bytes(channel.receive(deadline))
    channel.send(nonce + _proof(key, b"machine", theirs, nonce), deadline)
    answer = bytes(channel.receive(deadline))
    if answer == REFUSED:
        raise WrongKey("the driver has another key; give this machine the key of the driver's run")
    if not hmac.compare_digest(answer, _proof(key, b"driver", nonce, theirs)):
        raise WrongKey("what listens there does not know the key; it is not the driver of this run")


def _proof(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    # The role keeps an answer from being sent back to who asked for it.
    return hmac.digest(key, b"core-rl " + role + b"".join(nonces), "sha256")


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
