"""Proof, before anything else is read, that both ends of a connection know one key.

A challenge in both directions by HMAC-SHA256 (RFC 2104), so that the key itself is never sent. What follows on the
connection is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets

from core_rl.distributed.channel import Channel
from core_rl.errors import ClusterError

KEY_BYTES = 32
NONCE_BYTES = 32
REFUSED = b""
"""The answer to a wrong proof."""


class WrongKey(ClusterError):
    """The other end does not know the key."""


def new_key() -> bytes:
    """A key for one run."""
    return secrets.token_bytes(KEY_BYTES)


def admit(channel: Channel, key: bytes, deadline: float) -> None:
    """The driver's part: raise `WrongKey` unless the other end knows ``key``.

    Raises ``OSError``, ``TimeoutError`` or ``EOFError`` for a connection that breaks.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send([nonce], deadline)
    theirs, proof = _received(channel, 2, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"machine", nonce, theirs)):
        channel.send([REFUSED], deadline)
        raise WrongKey("a machine connected with another key")
    channel.send([_proof(key, b"driver", theirs, nonce)], deadline)


def present_key(channel: Channel, key: bytes, deadline: float) -> None:
    """The machine's part: raise `WrongKey` unless the driver knows ``key``, and takes it; else as `admit`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    (theirs,) = _received(channel, 1, deadline)
    channel.send([nonce, _proof(key, b"machine", theirs, nonce)], deadline)
    (answer,) = _received(channel, 1, deadline)
    if answer == REFUSED:
        raise WrongKey("the driver has another key; give this machine the key of the driver's run")
    if not hmac.compare_digest(answer, _proof(key, b"driver", nonce, theirs)):
        raise WrongKey("what listens there does not know the key; it is not the driver of this run")


def _received(channel: Channel, count: int, deadline: float) -> list[bytes]:
    parts = [bytes(part) for part in channel.receive(deadline)]
    if len(parts) != count:
        raise WrongKey("the other end does not speak this protocol")
    return parts


def _proof(key: bytes, role: bytes, *nonces: bytes) -> bytes:
    # The role keeps an answer from being sent back to its sender.
    return hmac.digest(key, b"core-rl " + role + b"".join(nonces), "sha256")
