"""The key of a run: where the driver and the agents find it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from core_rl.errors import ConfigError

__all__ = ["KEY_VARIABLE", "given_key", "take_key"]

KEY_VARIABLE = "CORE_RL_CLUSTER_KEY"
"""The environment variable with the key as hexadecimal digits."""
SHORTEST_KEY_BYTES = 16
MAKE_KEY = "python -c 'import secrets; print(secrets.token_hex(32))' > KEYFILE && chmod 600 KEYFILE"


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
