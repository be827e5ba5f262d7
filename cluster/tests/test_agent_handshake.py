"""Agents and the driver: nothing of a connection counts before both have shown that they know the key."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core_rl.distributed.authentication import WrongKey, admit, present_key
from core_rl.distributed.channel import FRAME_HEADER, Channel, MessageTooLarge
from core_rl.errors import ClusterError, ConfigError
from core_rl.servers.process import bound
from core_rl_cluster import hello, network
from core_rl_cluster.agent import run_agent
from core_rl_cluster.attach import AttachHosts
from core_rl_cluster.environment import environment_of_ranks, shared_environment
from core_rl_cluster.hello import KEY_VARIABLE, MachineInfo, Versions, given_key, take_key
from core_rl_cluster.listener import AgentListener
from core_rl_cluster.network import (
    CONTROL_LIMIT_BYTES,
    ControlChannel,
    connect,
    interface_of,
    own_address,
    parse_endpoint,
)

KEY = bytes(range(32))
OTHER = bytes(reversed(range(32)))
LEASE_S = 30.0


def soon() -> float:
    return time.monotonic() + 20


@pytest.fixture
def listener() -> Iterator[AgentListener]:
    opened = AgentListener("127.0.0.1", 0, KEY, machines=2, lease_s=LEASE_S)
    yield opened
    opened.close()


def machine(number: int | None = None, versions: Versions | None = None) -> dict[str, Any]:
    info = replace(MachineInfo.here(number, "127.0.0.1"), versions=versions or Versions.here())
    return {"role": "machine", **info.message()}


def greet(
    listener: AgentListener, greeting: dict[str, Any], key: bytes = KEY
) -> tuple[Channel, dict[str, Any]]:
    channel = Channel(connect(*parse_endpoint(listener.endpoint), 20, LEASE_S), CONTROL_LIMIT_BYTES)
    present_key(channel, key, soon())
    hello.write(channel, greeting, soon())
    return channel, hello.read(channel, soon())


# ------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("ours", "theirs", "errors"),
    [
        (KEY, KEY, (None, None)),
        (KEY, OTHER, ("another key", "the driver has another key")),
    ],
)
def test_both_sides_know_the_key(ours: bytes, theirs: bytes, errors: tuple[str | None, str | None]) -> None:
    left, right = socket.socketpair()
    actual: list[str | None] = [None]

    def driver() -> None:
        try:
            admit(Channel(left), ours, soon())
        except WrongKey as error:
            actual[0] = str(error)

    thread = threading.Thread(target=driver)
    thread.start()
    try:
        present_key(Channel(right), theirs, soon())
        actual.append(None)
    except WrongKey as error:
        actual.append(str(error))
    thread.join()
    for text, expected in zip(actual, errors, strict=True):
        assert (text is None) == (expected is None)
        assert expected is None or expected in str(text)


def test_agents_refuse_drivers_without_the_key() -> None:
    """An impostor sends the machine's own challenge back, and a proof that it cannot make."""
    left, right = socket.socketpair()

    def impostor() -> None:
        channel = Channel(left)
        channel.send(bytes(32))
        answer = bytes(channel.receive(soon()))
        channel.send(answer[32:])

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(WrongKey, match="it is not the driver of this run"):
        present_key(Channel(right), KEY, soon())
    thread.join()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds a key of 0 bytes, and it needs 16 or more"),
        ("ab" * 15, "holds a key of 15 bytes"),
        ("not hexadecimal", "holds no hexadecimal digits"),
    ],
)
def test_invalid_keys_are_refused(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} {message}.*secrets.token_hex"):
        given_key(None)


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        given_key(file)
    file.write_text(KEY.hex() + "\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"open to others \(mode 640\).*chmod 600"):
        given_key(file)
    file.chmod(0o600)
    assert given_key(file) == KEY


def test_the_key_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    assert take_key(None) == KEY
    assert KEY_VARIABLE not in os.environ


# -------------------------------------------------------------------- listener


def test_machines_get_numbers_and_the_drivers_surroundings(listener: AgentListener) -> None:
    (_, first), (_, second) = greet(listener, machine()), greet(listener, machine())
    assert {first["machine"], second["machine"]} == {0, 1}
    assert first["lease_s"] == LEASE_S
    assert first["surroundings"]["directory"] == str(Path.cwd())
    assert listener.is_complete(20)


def other_versions() -> Versions:
    return replace(Versions.here(), torch="1.13.1")


REFUSALS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: machine(versions=other_versions()),
        r"it has torch 1\.13\.1 \(the driver: .*same versions on all",
    ),
    (lambda: machine(7), "calls itself machine 7, and there are 2, from 0 on"),
    (lambda: machine(0), "there is a machine 0 already"),
]


@pytest.mark.parametrize(("greeting", "message"), REFUSALS)
def test_unusable_machines_are_refused(
    listener: AgentListener, greeting: Callable[[], dict[str, Any]], message: str
) -> None:
    link, _ = greet(listener, machine(0))
    _, answer = greet(listener, greeting())
    assert re.search(message, answer["refused"])
    with pytest.raises(ClusterError, match=f"(?s)not all machines can be used.*{message}"):
        listener.is_complete(20)
    link.close()


def test_a_wrong_key_is_refused_and_remembered(listener: AgentListener) -> None:
    with pytest.raises(WrongKey):
        greet(listener, machine(), OTHER)
    greet(listener, machine())
    with pytest.raises(ClusterError, match="127.0.0.1: a machine connected with another key"):
        listener.is_complete(20)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
        FRAME_HEADER.pack(2**63) + b"x",
        FRAME_HEADER.pack(64) + bytes(64),
        os.urandom(4096),
    ],
)
def test_unknown_connections_are_ignored(listener: AgentListener, noise: bytes) -> None:
    with socket.create_connection(parse_endpoint(listener.endpoint), timeout=20) as stranger:
        stranger.sendall(noise)
    _, answer = greet(listener, machine(1))
    assert answer["machine"] == 1


@pytest.mark.parametrize("greeting", [{"role": "rank", "id": 3, "machine": 0}, {"role": "rank"}, {}])
def test_unexpected_ranks_are_refused(listener: AgentListener, greeting: dict[str, Any]) -> None:
    greet(listener, machine(0))
    with pytest.raises((EOFError, ConnectionResetError)):
        greet(listener, greeting)


def test_taken_ports_are_refused(listener: AgentListener) -> None:
    port = parse_endpoint(listener.endpoint)[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}.*choose another address"):
        AgentListener("127.0.0.1", port, KEY, machines=1, lease_s=LEASE_S)


def test_missing_machines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    hosts = AttachHosts(2, port=0, address="127.0.0.1", wait_s=0.3)
    with pytest.raises(
        ClusterError, match=r"0 of 2 machines came to 127.0.0.1:\d+ within 0.3 s; there: none"
    ):
        hosts.open()


def test_missing_drivers_are_reported() -> None:
    with bound("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ClusterError, match=f"no driver at 127.0.0.1, port {port} within 0.2 s"):
            run_agent(f"127.0.0.1:{port}", KEY, None, 0.2)


# --------------------------------------------------------------------- messages


def test_control_messages_have_a_limit() -> None:
    left, right = socket.socketpair()
    left.sendall(FRAME_HEADER.pack(CONTROL_LIMIT_BYTES + 1))
    with pytest.raises(MessageTooLarge, match="the limit is"):
        ControlChannel(right, LEASE_S).receive()


@pytest.mark.parametrize("parts", [FRAME_HEADER.pack(2**40), FRAME_HEADER.pack(1) + FRAME_HEADER.pack(1001)])
def test_messages_of_ranks_have_a_limit(parts: bytes) -> None:
    left, right = socket.socketpair()
    left.sendall(parts)
    with pytest.raises(MessageTooLarge, match="above the limit of"):
        Channel(right, limit_bytes=1000).receive_parts(soon())


def test_signs_of_life_are_no_messages() -> None:
    left, right = socket.socketpair()
    sender, receiver = ControlChannel(left, 0.5), ControlChannel(right, 0.5)
    time.sleep(1.0)  # twice the lease
    sender.send({"is": "started"})
    assert receiver.receive() == {"is": "started"}
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()


def test_silence_is_an_end() -> None:
    _, right = socket.socketpair()
    with pytest.raises(TimeoutError):
        ControlChannel(right, 0.2).receive()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", json.dumps("text").encode()])
def test_messages_must_be_objects(data: bytes) -> None:
    with pytest.raises(ClusterError, match="a message that is"):
        hello.parsed(data)


# ---------------------------------------------------------------------- network


def test_local_host_names_are_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's ``127.0.1.1 hostname``, on a machine without a way out."""
    monkeypatch.setattr("socket.gethostbyname", lambda _name: "127.0.1.1")
    monkeypatch.setattr(network, "SOMEWHERE", ("256.0.0.1", 9))
    with pytest.raises(
        ConfigError, match=r"means 127\.0\.1\.1, which other machines cannot reach.*set address"
    ):
        own_address("address")


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


@pytest.mark.parametrize("text", ["node1", "node1:", ":29400", "node1:http"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        parse_endpoint(text)


def test_ranks_get_the_environment_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    for name, value in {"OMP_NUM_THREADS": "3", "MY_FLAG": "yes", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    shared = shared_environment(["MY_FLAG", "NOT_SET"])
    assert shared.items() >= {"OMP_NUM_THREADS": "3", "MY_FLAG": "yes"}.items()
    assert "HF_TOKEN" not in shared
    monkeypatch.setenv("MY_FLAG", "no")
    actual = environment_of_ranks(shared, "127.0.0.1")
    assert (actual["MY_FLAG"], actual["GLOO_SOCKET_IFNAME"], actual["NCCL_SOCKET_IFNAME"]) == (
        "yes",
        "lo",
        "lo",
    )
    assert actual["PATH"] == os.environ["PATH"]
    assert not {"RANK", "WORLD_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & set(actual)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment_of_ranks({}, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "eth7"
