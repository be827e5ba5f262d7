"""``model.path`` as a directory or a Hub id, with a prepared cache and with a small server in place of the Hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

from core_rl.config.hub import hub_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not these weights",
    "onnx/model.safetensors": b"nor these",
}
WANTED = ["config.json", "model.safetensors", "tokenizer.json"]
NOWHERE = "http://127.0.0.1:9"
"""An endpoint that refuses connections."""

PATHS_OF = """
import sys
from core_rl.config.hub import local_model_path
from core_rl.errors import ConfigError
for path in sys.argv[1:]:
    try:
        print(local_model_path(path))
    except ConfigError as error:
        print("ConfigError:", error)
"""
PATHS_IN_RANKS = """
import sys
import group_support as support
if __name__ == "__main__":
    with support.echo_group(support.SPEC, model={"path": sys.argv[1]}, layout={"dp": 2}, seed=3) as group:
        print(*group.run(support.model_path), sep="\\n")
        print(group.config.seed)
"""


class FakeHub(ThreadingHTTPServer):
    """Serves one model, ``org/tiny`` with the revisions ``main`` and ``v1``, and counts its downloads."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.downloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/api/models/org/tiny/revision/"):
            known = path.rpartition("/")[2] in ("main", "v1", COMMIT)
            self._send(200, self._info()) if known else self._fail("RevisionNotFound")
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(entries).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
            if with_body:
                self.server.downloads.append(name)
            etag = {"ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, FILES[name], etag, with_body)
        else:
            self._fail("RepoNotFound")

    def _info(self) -> bytes:
        return json.dumps(
            {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
        ).encode()

    def _fail(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def prepared_cache(home: Path) -> Path:
    """A cache that has ``org/tiny`` in its revision ``main``; the directory of the model."""
    repository = home / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in WANTED:
        (snapshot / name).write_bytes(FILES[name])
    return snapshot


def lines_of(script: str, paths: list[str], home: Path, **variables: str) -> list[str]:
    """The lines that ``script`` prints for ``paths``, in a process whose environment names the Hub."""
    file = home / "script.py"
    file.write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run(
        [sys.executable, str(file), *paths],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()


def test_directories_need_no_hub(tmp_path: Path) -> None:
    for name in ("empty", "adapter", "trainer/checkpoint-9"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "trainer/checkpoint-9/config.json").touch()
    (tmp_path / "adapter/adapter_config.json").touch()
    snapshot = prepared_cache(tmp_path)
    found, *others = lines_of(
        PATHS_OF,
        [str(snapshot), *(str(tmp_path / name) for name in ("empty", "adapter", "nowhere", "trainer"))],
        tmp_path,
        HF_ENDPOINT=NOWHERE,
    )
    empty, adapter, missing, trainer = others
    assert found == str(snapshot)
    assert "adapter' holds an adapter alone; set model.lora.path to it" in adapter
    assert empty.endswith("empty' holds no config.json; name a Hugging Face model directory")
    assert trainer.endswith(f"holds no config.json; name {tmp_path / 'trainer/checkpoint-9'}")
    assert "nowhere': no such directory, and no Hub id of the form 'organization/name[@revision]'" in missing


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOWHERE}], ids=["offline", "no network"]
)
def test_the_cache_serves_without_network(tmp_path: Path, variables: dict[str, str]) -> None:
    snapshot = prepared_cache(tmp_path)
    paths = ["org/tiny", "org/tiny@main", "org/tiny@v1", "org/other"]
    *found, revision, model = lines_of(PATHS_OF, paths, tmp_path, **variables)
    assert found == [str(snapshot)] * 2
    for line, path, name in ((revision, "org/tiny@v1", "org/tiny"), (model, "org/other", "org/other")):
        assert line == (
            f"ConfigError: model.path = {path!r}: no such directory, and the local cache has no complete copy of "
            f"{name!r} and the Hub is not reached; connect to the network, unset HF_HUB_OFFLINE, or name a directory"
        )


def test_a_commit_in_the_cache_is_a_revision(tmp_path: Path) -> None:
    snapshot = prepared_cache(tmp_path)
    assert lines_of(PATHS_OF, [f"org/tiny@{COMMIT}"], tmp_path, HF_HUB_OFFLINE="1") == [str(snapshot)]


def test_the_hub_serves_weights_config_and_tokenizer(tmp_path: Path, hub: FakeHub) -> None:
    paths = ["org/tiny@v1", "org/tiny", "org/tiny@v2", "org/other"]
    first, again, revision, model = lines_of(PATHS_OF, paths, tmp_path, HF_ENDPOINT=hub.url)
    assert first == again
    assert sorted(entry.name for entry in Path(first).iterdir()) == WANTED
    assert (Path(first) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sorted(hub.downloads) == WANTED
    assert "the Hub has no revision 'v2' of 'org/tiny'; name a branch, a tag or a commit" in revision
    assert "the Hub has no model 'org/other' that you may read; check the name" in model


@pytest.mark.nightly
def test_the_driver_downloads_once_for_all_ranks(tmp_path: Path, hub: FakeHub) -> None:
    *paths, seed = lines_of(PATHS_IN_RANKS, ["org/tiny"], tmp_path, HF_ENDPOINT=hub.url)
    assert paths == [str(tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT)] * 2
    assert sorted(hub.downloads) == WANTED
    assert seed == "3"


@pytest.mark.parametrize(
    ("directory", "source"),
    [
        ("hub/models--acme--tiny/snapshots/abc", ("acme/tiny", "abc")),
        ("hub/models--acme--a.b_c-d/snapshots/abc/", ("acme/a.b_c-d", "abc")),
        ("hub/models--gpt2/snapshots/abc", ("gpt2", "abc")),
        ("link", ("acme/linked", "abc")),
        ("hub/models--acme--tiny/snapshots", (None, None)),
        ("hub/models--acme--tiny/snapshots/abc/onnx", (None, None)),
        ("models/acme/tiny", (None, None)),
        (None, (None, None)),
    ],
)
def test_cached_models_are_named_by_id(
    tmp_path: Path, directory: str | None, source: tuple[str | None, str | None]
) -> None:
    linked = tmp_path / "hub/models--acme--linked/snapshots/abc"
    linked.mkdir(parents=True)
    (tmp_path / "link").symlink_to(linked)
    assert hub_source(directory and f"{tmp_path}/{directory}") == source
