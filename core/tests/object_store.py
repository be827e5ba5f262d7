"""A directory that behaves like an object store: whole objects, and nothing is renamed, linked or appended to."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "objects"


class ObjectStore(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """``objects:///directory``. An object appears at once, as a whole."""

    protocol = (PROTOCOL,)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://")))

    def put_file(self, source: str, target: str, *args: Any, **options: Any) -> None:
        incoming = Path(target).with_name(f".incoming-{uuid.uuid4().hex}")
        shutil.copyfile(source, incoming)
        incoming.replace(target)

    def pipe_file(self, path: str, value: bytes, *args: Any, **options: Any) -> None:
        incoming = Path(path).with_name(f".incoming-{uuid.uuid4().hex}")
        incoming.write_bytes(value)
        incoming.replace(path)

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("an object store renames nothing")

    mv_file = rename = link = symlink = mv

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError(f"an object store opens nothing with mode {mode!r}")
        return super()._open(path, mode, *args, **options)


fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)
