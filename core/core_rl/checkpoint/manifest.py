"""Manifest of a checkpoint directory: its kind and state, and the size and digest of every file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from core_rl.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from core_rl.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1
HASHING_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Expected size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``, which is written last and covers everything, itself included.

    A subdirectory with a manifest of its own is listed by that manifest alone.
    """

    kind: str
    """Kind of checkpoint, such as ``hf`` or ``run``."""
    state: Mapping[str, Any]
    """Small JSON values of the writer."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """Records by path relative to the directory, with ``/``."""
    core_rl: str = __version__
    """The version that wrote it."""

    @classmethod
    def of(cls, kind: str, state: Mapping[str, Any], records: Mapping[str, FileRecord]) -> Manifest:
        """The manifest of a directory with these ``records`` of all of its files."""
        return cls(kind=kind, state=state, files={name: records[name] for name in sorted(records)})

    def to_bytes(self) -> bytes:
        """The JSON document with its own digest."""
        body = {"format": FORMAT, **asdict(self)}
        return to_json(body | {"sha256": _digest_of(body)}, MANIFEST).encode()

    def nested(self) -> Iterator[str]:
        """The subdirectories that have a manifest of their own."""
        for name in self.files:
            if PurePosixPath(name).name == MANIFEST:
                yield str(PurePosixPath(name).parent)


def to_json(value: Any, subject: str) -> str:
    """``value`` as JSON text; `CheckpointError` for what JSON cannot give back."""
    try:
        _check_keys(value, subject)
        return json.dumps(value, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{subject} is not JSON: {error}; convert it to numbers, strings and lists"
        ) from error


def _check_keys(value: Any, subject: str) -> None:
    """Refuse keys that `json` would silently turn into strings."""
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise CheckpointError(
                f"{subject} has the key {wrong[0]!r}; keys must be strings to come back as they were"
            )
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            _check_keys(entry, subject)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_names(directory: Path) -> list[str]:
    """The files that the manifest of ``directory`` is to list, relative to it."""
    return [file.relative_to(directory).as_posix() for file in _own_files(directory)]


def records_of(
    directory: Path, names: Sequence[str], threads: int = HASHING_THREADS
) -> dict[str, FileRecord]:
    """Size and hash of each of the files ``names`` of ``directory``.

    With one thread, the caller's, none is started: a program that is ending starts no others.
    """
    files = [directory / name for name in names]
    if threads == 1:
        return dict(zip(names, map(_record, files), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(_record, files), strict=True))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the ``manifest`` of ``directory``, and flush it and its files to the disk."""
    (directory / MANIFEST).write_bytes(manifest.to_bytes())
    files = [directory / name for name in manifest.files]
    folders = {parent for file in files for parent in file.parents if parent.is_relative_to(directory)}
    for path in [*files, directory / MANIFEST, *folders, directory]:
        flush(path)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_files(directory: Path) -> Iterator[Path]:
    for entry in sorted(directory.iterdir()):
        if not entry.is_dir():
            yield entry
        elif (entry / MANIFEST).is_file():
            yield entry / MANIFEST
        else:
            yield from _own_files(entry)


def _record(file: Path) -> FileRecord:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(bytes=stream.tell(), sha256=digest)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of ``directory``; `CheckpointDamaged` if it is missing or changed."""
    try:
        return parse_manifest((directory / MANIFEST).read_bytes(), str(directory))
    except FileNotFoundError as error:
        raise CheckpointDamaged(
            f"{directory}: {MANIFEST} is missing: the save did not finish, or the file was removed"
        ) from error


def parse_manifest(text: bytes, place: str) -> Manifest:
    """Read what `Manifest.to_bytes` wrote; ``place`` names it in errors."""
    try:
        body = json.loads(text)
        claimed, version = body.pop("sha256"), body["format"]
        if claimed != _digest_of(body):
            raise CheckpointDamaged(f"{place}: {MANIFEST} was changed: its own digest differs")
        if version > FORMAT:
            raise CheckpointMismatch(
                f"{place} was written by core-rl {body['core_rl']} in format {version}; this is core-rl "
                f"{__version__}, which reads up to {FORMAT}. Upgrade core-rl"
            )
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"the file {name!r} lies outside of the directory")
        return Manifest(kind=body["kind"], state=body["state"], files=files, core_rl=body["core_rl"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointDamaged(f"{place}: {MANIFEST} cannot be read: {reason}") from error


def check_ours(text: bytes | None, place: str) -> None:
    """Raise `CheckpointError` unless ``text`` is a manifest, so that nothing else is ever replaced."""
    try:
        if text is None:
            raise CheckpointDamaged(f"it has no {MANIFEST}")
        parse_manifest(text, place)
    except CheckpointError as error:
        raise CheckpointError(
            f"{place} exists and is not a checkpoint of core-rl, so it is not replaced ({error}); "
            "choose another path, or remove it"
        ) from error


def all_files(directory: Path, manifest: Manifest) -> dict[str, FileRecord]:
    """Files of ``manifest`` and of all readable nested manifests."""
    files = dict(manifest.files)
    for name in manifest.nested():
        with suppress(CheckpointDamaged):  # as its own record says as well
            inner = all_files(directory / name, read_manifest(directory / name))
            files |= {f"{name}/{file}": record for file, record in inner.items()}
    return files


def find_damage(
    directory: Path,
    files: Mapping[str, FileRecord],
    measured: Collection[str] = (),
    threads: int = HASHING_THREADS,
) -> dict[str, str]:
    """Problems of missing and changed ``files``, by name; ``measured`` files are compared by size alone."""

    def difference(name: str) -> str | None:
        return _difference(directory, name, files[name], hashes=name not in measured)

    with ThreadPoolExecutor(threads) as pool:
        differences = pool.map(difference, files)
        return {
            name: problem for name, problem in zip(files, differences, strict=True) if problem is not None
        }


def _difference(directory: Path, name: str, record: FileRecord, *, hashes: bool) -> str | None:
    file = directory / name
    try:
        size = file.stat().st_size
        if size != record.bytes:
            return f"{name}: {size} bytes instead of {record.bytes}"
        actual = _record(file) if hashes else record
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    if actual != record:
        return f"{name}: its contents changed (sha256 {actual.sha256[:12]}…, not {record.sha256[:12]}…)"
    return None
