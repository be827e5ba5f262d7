"""Executable that stands for the Python of servers: any script that it is given is a server with scripted responses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL = "the path of the model"
"""Stands for the value of the server's argument."""
LABEL = "the label of the weights"
"""Stands for the last ``new_version`` that the server was given."""
SERVER = """
import http.server, json, os, sys, threading
values = dict(zip(sys.argv[2::1], sys.argv[3::1]))
key, _ = sys.stdin.buffer.raw.readline(), sys.stdin.buffer.raw.readline()
label = ["default"]
def end():
    sys.stdin.buffer.raw.read()
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass
    def do_GET(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.headers.get("Authorization") != "Bearer " + key.decode().strip():
            return self.answer(401, {})
        label[0] = body.get("new_version", label[0])
        response = json.dumps(RESPONSES.get(self.path, {"success": True}))
        self.answer(200, json.loads(response.replace(MODEL, values[FLAG]).replace(LABEL, label[0])))
    do_POST = do_GET
    def answer(self, status, found):
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.ThreadingHTTPServer((values["--host"], int(values["--port"])), Handler).serve_forever()
"""


def scripted_server(directory: Path, responses: Mapping[str, Any], model_flag: str) -> str:
    """The path of the executable; ``responses`` by path and query, in which `MODEL` is the value of ``model_flag``."""
    constants = {"RESPONSES": responses, "MODEL": MODEL, "LABEL": LABEL, "FLAG": model_flag}
    file, code = directory / "server.sh", directory / "server.py"
    code.write_text("".join(f"{name} = {value!r}\n" for name, value in constants.items()) + SERVER)
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
    file.chmod(0o755)
    return str(file)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
