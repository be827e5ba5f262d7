"""Data files as bytes: decompressed, and without a byte-order mark."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from core_rl.errors import ConfigError

__all__ = ["data_suffix", "open_data"]

OPENERS: Mapping[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMMANDS: Mapping[str, str] = {".zst": "zstd -d", ".zip": "unzip", ".lz4": "lz4 -d", ".7z": "7z x"}
"""By suffix: what decompresses a file that cannot be read here."""

MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some editors put in front of UTF-8."""
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")


def data_suffix(path: Path) -> str:
    """The suffix of the format, in lower case: ``.jsonl`` of ``train.JSONL.gz``."""
    compressed = path.suffix.lower() in OPENERS or path.suffix.lower() in COMMANDS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def open_data(path: Path) -> IO[bytes]:
    """``path`` for reading and seeking, after a byte-order mark; compressed files in a temporary copy.

    Raises `ConfigError` for a file that cannot be read or is not UTF-8 by its first bytes.
    """
    suffix = path.suffix.lower()
    if suffix in COMMANDS:
        raise ConfigError(
            f"{path}: {suffix} files are not read; decompress it (`{COMMANDS[suffix]} {path}`), or write .gz"
        )
    try:
        file = _decompressed(path) if suffix in OPENERS else path.open("rb")
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: cannot be decompressed: {error}; copy it again") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    head = file.read(4)
    if head.startswith(WIDE_MARKS):
        raise ConfigError(f"{path}: is UTF-16 or UTF-32; save it as UTF-8")
    file.seek(len(MARK) if head.startswith(MARK) else 0)
    return file


def _decompressed(path: Path) -> IO[bytes]:
    """A copy that has no name and ends with the process."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    with OPENERS[path.suffix.lower()](path) as packed:
        shutil.copyfileobj(packed, copy)
    copy.seek(0)
    return copy
