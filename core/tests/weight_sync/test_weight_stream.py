"""Weights in buckets of shared memory between two processes, or two threads of one."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from checkpoint_support import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.config.engine import LoraConfig
from core_rl.distributed.channel import Channel
from core_rl.distributed.comm import Comm
from core_rl.engine import sync
from core_rl.engine.sync import sync_weights
from core_rl.errors import ConfigError, WeightsError
from core_rl.weight_sync import distributed, rendezvous
from core_rl.weight_sync import tensor as tensor_update
from core_rl.weight_sync.distributed import WeightGroup
from core_rl.weight_sync.messages import (
    AdapterMetadata,
    Bucket,
    Kind,
    ReceiverRanks,
    digest_of,
    pickled_by_name,
    receive_message,
    shared_by_name,
)
from core_rl.weight_sync.rendezvous import abandon
from core_rl.weight_sync.update import weight_update

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=3), st.sampled_from(DTYPES)), max_size=12)


def meta(directory: Path, **changes: Any) -> WeightUpdateMeta:
    return WeightUpdateMeta(**{"method": "tensor", "version": 3, "path": str(directory / "meet"), **changes})


def collect(subject: WeightUpdateMeta, timeout_s: float = 20) -> list[Bucket]:
    with weight_update(subject).receive(timeout_s) as received:
        return [[(name, tensor.clone()) for name, tensor in bucket] for bucket in received]


def passed(tensors: Iterable[tuple[str, Tensor]], subject: WeightUpdateMeta) -> list[Bucket]:
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect, subject)
        weight_update(subject).send(iter(tensors))
        return arrival.result(20)


@settings(max_examples=20)
@given(shapes=SHAPES, bucket_bytes=st.sampled_from([1, 100, 1000, 1 << 28]), verify=st.booleans())
def test_everything_arrives_once_and_in_order(
    shapes: list[tuple[list[int], torch.dtype]], bucket_bytes: int, verify: bool
) -> None:
    tensors = [(f"t{n}", torch.randn(shape).mul(9).to(dtype)) for n, (shape, dtype) in enumerate(shapes)]
    with TemporaryDirectory() as directory:
        subject = meta(Path(directory), bucket_bytes=bucket_bytes, verify=verify)
        buckets = passed(tensors, subject)
        assert not Path(subject.path or "").exists(), "the rendezvous file is removed"
    arrived = [item for bucket in buckets for item in bucket]
    assert [name for name, _ in arrived] == [name for name, _ in tensors]
    for (_, got), (_, sent) in zip(arrived, tensors, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= bucket_bytes


def test_strided_and_reused_tensors_arrive_as_they_are(tmp_path: Path) -> None:
    buffer, wide = torch.empty(6), torch.arange(12.0).view(3, 4)

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "transposed", wide.t()
        yield "column", wide[:, 1]
        for number in range(4):
            yield f"reused {number}", buffer.fill_(number)

    actual = dict(item for bucket in passed(stream(), meta(tmp_path)) for item in bucket)
    assert torch.equal(actual["transposed"], wide.t())
    assert torch.equal(actual["column"], wide[:, 1])
    assert [float(actual[f"reused {number}"][0]) for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("adapter", [AdapterMetadata(rank=2, alpha=4, rslora=False, base="abcd"), None])
def test_the_metadata_of_an_adapter_arrives(tmp_path: Path, adapter: AdapterMetadata | None) -> None:
    subject, lora = meta(tmp_path, method="lora"), LoraConfig(rank=2, alpha=4)

    def receive() -> None:
        with weight_update(subject).receive(20) as received:
            assert received.adapter == adapter
            assert adapter is not None
            adapter.require_fit(lora, lambda: "abcd")
            with pytest.raises(
                WeightsError, match=r"(?s)2 problems.*alpha is 4 at the sender and 8 here.*another base"
            ):
                adapter.require_fit(lora.model_copy(update={"alpha": 8}), lambda: "ef")
            assert [name for bucket in received for name, _ in bucket] == ["a"]

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        expected = (
            nullcontext() if adapter else pytest.raises(WeightsError, match="sent no metadata of its adapter")
        )
        with expected:
            weight_update(subject, adapter).send(iter([("a", torch.zeros(2))]))
        with expected:
            arrival.result(20)


@pytest.mark.parametrize(
    "remote", [{}, {"method": "distributed", "host": "127.0.0.1"}], ids=["here", "remote"]
)
def test_the_receivers_error_reaches_the_sender(tmp_path: Path, remote: dict[str, Any]) -> None:
    subject = meta(tmp_path, bucket_bytes=8, **remote)

    def refuse() -> None:
        with weight_update(subject).receive(20) as received:
            for _ in received:
                raise WeightsError("no room for them")

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(refuse)
        consumed = []

        def stream() -> Iterator[tuple[str, Tensor]]:
            for number in range(6):
                consumed.append(number)
                yield f"t{number}", torch.zeros(2)

        with pytest.raises(WeightsError, match="no room for them"):
            weight_update(subject).send(stream())
        assert consumed == list(range(6)), "other ranks are in the middle of the stream: it goes to its end"
        with pytest.raises(WeightsError, match="no room"):
            arrival.result(20)


def test_dead_receivers_error_reaches_sender(tmp_path: Path) -> None:
    """The receiver closes its end before the sender's next message."""
    subject = meta(tmp_path)

    def refuse() -> None:
        with weight_update(subject).receive(20):
            raise WeightsError("no room for them")

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(refuse)

        def stream() -> Iterator[tuple[str, Tensor]]:
            assert isinstance(arrival.exception(20), WeightsError)
            yield "a", torch.zeros(2)

        with pytest.raises(WeightsError, match="the receiver of the weights failed: no room for them"):
            weight_update(subject).send(stream())


def test_timed_out_receivers_error_reaches_late_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 5.0)
    with pytest.raises(WeightsError, match=r"within 0\.1 s"):
        collect(meta(tmp_path), 0.1)
    with pytest.raises(WeightsError, match=r"the receiver of the weights failed: .* within 0\.1 s"):
        weight_update(meta(tmp_path)).send(iter([("a", torch.zeros(1))]))


def test_the_exports_error_reaches_the_receiver(tmp_path: Path) -> None:
    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        raise ValueError("a shard is missing")

    subject = meta(tmp_path, bucket_bytes=1)
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect, subject)
        with pytest.raises(WeightsError, match="a shard is missing"):
            weight_update(subject).send(breaking())
        with pytest.raises(WeightsError, match="a shard is missing"):
            arrival.result(20)


def die_after_two(subject: WeightUpdateMeta) -> None:
    def dying() -> Iterator[tuple[str, Tensor]]:
        for number in range(9):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"t{number}", torch.zeros(4)

    weight_update(subject).send(dying())


def test_killed_sender_raises(tmp_path: Path) -> None:
    subject = meta(tmp_path, bucket_bytes=1)
    process = multiprocessing.get_context("spawn").Process(target=die_after_two, args=(subject,))
    process.start()
    with pytest.raises(WeightsError, match="the sender of the weights is gone"):
        collect(subject, 60)
    process.join()


def test_slow_receiver_opens_replaced_bucket(tmp_path: Path) -> None:
    subject, replaced = meta(tmp_path, bucket_bytes=1), threading.Event()

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((4,), 1.0)
        yield "b", torch.full((4,), 2.0)  # "a" is sent, and the sender keeps nothing of it
        replaced.set()
        yield "c", torch.full((4,), 3.0)

    def receive() -> list[float]:
        with weight_update(subject).receive(20) as received:
            assert replaced.wait(20)
            return [float(tensor[0]) for bucket in received for _, tensor in bucket]

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        weight_update(subject).send(stream())
        assert arrival.result(20) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("received", [True, False])
def test_ranks_stream_after_the_writer_connects(tmp_path: Path, received: bool) -> None:
    """On an accelerator, a rank that waits in the stream's collective would be taken for hanging."""
    subject, began, met = meta(tmp_path), list[bool](), threading.Event()

    def stream() -> Iterator[tuple[str, Tensor]]:
        began.append(met.is_set())
        yield "a", torch.ones(2)

    def receive() -> list[str]:
        time.sleep(0.3)
        met.set()
        with weight_update(subject).receive(20) as weights:
            return [name for bucket in weights for name, _ in bucket]

    def send(world: Comm) -> None:
        weight_update(subject).send(stream(), world, is_writer=world.rank == 1, device=torch.device("cpu"))

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patched:
        arrival = pool.submit(receive) if received else None
        patched.setattr(rendezvous, "CONNECT_S", 20.0 if received else 0.1)
        actual = on_ranks(2, send)
        assert arrival is None or arrival.result(20) == ["a"]
    assert began == ([True, True] if received else [])
    assert [type(error) for error in actual] == ([type(None)] * 2 if received else [WeightsError] * 2)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="only Linux has a limit of its own")
def test_missing_shared_memory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = meta(tmp_path)

    def receive() -> None:
        with weight_update(subject).receive(20) as received:
            list(received)

    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=3, f_blocks=16, f_frsize=2**20))
    stream = [
        ("small", torch.zeros(2**20, dtype=torch.uint8)),
        ("large", torch.zeros(2**22, dtype=torch.uint8)),
    ]
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        says = r"'large' needs 4 MiB of shared memory, and /dev/shm has 3 MiB free of 16 MiB; enlarge"
        with pytest.raises(WeightsError, match=says):
            weight_update(subject).send(stream)
        with pytest.raises(WeightsError, match=says):
            arrival.result(20)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="files of shared memory are listed on Linux alone")
def test_bucket_of_dead_sender_raises() -> None:
    """The manager of shared memory removes the segments of a dead process, perhaps before it is opened."""
    ours, theirs = socket.socketpair()
    with shared_by_name():
        storage: Any = torch.UntypedStorage._new_shared(64)
    Channel(ours).send([pickled_by_name((Kind.BUCKET, [("a", torch.empty(0).set_(storage))]))])
    _, name, _ = storage._share_filename_cpu_()
    Path(f"/dev/shm/{name.decode()}").unlink()
    del storage
    with pytest.raises(
        WeightsError, match="sender of the weights and its shared memory are gone: unable to open"
    ):
        receive_message(Channel(theirs), "sender")


def test_threads_leave_the_sharing_strategy_as_it_was() -> None:
    before, entered = get_sharing_strategy(), threading.Event()

    def share() -> None:
        with shared_by_name():
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with shared_by_name():
            call = pool.submit(share)
            assert not entered.wait(0.2), "it would take the strategy of this context for the one before"
        call.result(20)
    assert get_sharing_strategy() == before


def test_damaged_buckets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = digest_of

    def damaging(tensors: Bucket) -> str:
        digest = local(tensors)
        tensors[0][1].view(torch.uint8)[0] ^= 1
        return digest

    monkeypatch.setattr(tensor_update, "digest_of", damaging)
    with pytest.raises(WeightsError, match="2 tensors from 'a' on .* did not arrive as they were sent"):
        passed([("a", torch.ones(4)), ("b", torch.ones(4))], meta(tmp_path, verify=True))


def test_versions_must_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect, meta(tmp_path))
        with pytest.raises(WeightsError, match="weights of version 4; 3 was expected"):
            weight_update(meta(tmp_path, version=4)).send(iter([("a", torch.zeros(1))]))
        with pytest.raises(WeightsError, match="version 4"):
            arrival.result(20)


def test_waits_have_time_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.2)
    with pytest.raises(WeightsError, match="no train engine sent weights of version 3"):
        collect(meta(tmp_path), 0.2)
    (tmp_path / "meet").write_text("/nowhere/left-from-a-run-that-died")
    with pytest.raises(WeightsError, match="no inference engine waits for weights"):
        weight_update(meta(tmp_path)).send(iter([("a", torch.zeros(1))]))
    with pytest.raises(ConfigError, match="needs a path"):
        collect(meta(tmp_path, path=None))


def open_to_all(file: Path, patch: pytest.MonkeyPatch) -> None:
    file.chmod(0o666)


def of_another_user(file: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)


def linked(file: Path, patch: pytest.MonkeyPatch) -> None:
    file.symlink_to(file.rename(file.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (open_to_all, r"may be written by other users \(mode -rw-rw-rw-\).*could run code"),
        (of_another_user, r"belongs to the user \d+, and this process to \d+"),
        (linked, "cannot be read"),
    ],
)
def test_unsafe_rendezvous_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    says: str,
) -> None:
    (tmp_path / "meet").write_text(json.dumps({"version": 3, "socket": "/anywhere"}))
    change(tmp_path / "meet", monkeypatch)
    with pytest.raises(WeightsError, match=says):
        weight_update(meta(tmp_path)).send(iter([("a", torch.zeros(1))]))


def test_receiver_writes_a_private_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert passed([("a", torch.ones(2))], meta(tmp_path))
    finally:
        os.umask(before)


def test_foreign_users_messages_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of the process at the other end, whatever the file says."""
    unpickled: list[bytes] = []
    monkeypatch.setattr(pickle, "loads", unpickled.append)
    monkeypatch.setattr(rendezvous, "_require_private", lambda file, status: None)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect, meta(tmp_path))
        with pytest.raises(WeightsError, match=r"the receiver of the weights runs as the user \d+, and this"):
            weight_update(meta(tmp_path)).send(iter([("a", torch.zeros(1))]))
        with pytest.raises(WeightsError, match="the sender of the weights runs as the user"):
            arrival.result(20)
    assert not unpickled


def grouped(directory: Path, **changes: Any) -> WeightUpdateMeta:
    return meta(directory, method="distributed", bucket_bytes=1 << 20, **changes)


def collect_grouped(subject: WeightUpdateMeta, leave_after: int) -> tuple[list[Bucket], list[bool]]:
    """Buckets received by the group, or in memory once this rank has left it; and a flag for each: by broadcast?"""
    actual: list[Bucket] = []
    flags = []
    with weight_update(subject).receive(20, lambda: ReceiverRanks(count=1)) as received:
        assert received.group is not None
        group = WeightGroup.join(received.group, 1, torch.device("cpu"))
        for bucket in received:
            flags.append(received.broadcast)
            received.allow_broadcast()
            if len(actual) < leave_after:
                actual.append([(name, group.broadcast(torch.empty_like(tensor))) for name, tensor in bucket])
                continue
            if len(actual) == leave_after:
                group.close()
            actual.append([(name, tensor.clone()) for name, tensor in bucket])
    return actual, flags


@pytest.mark.parametrize("leave_after", [99, 2])
def test_broken_group_falls_back_to_memory(tmp_path: Path, leave_after: int) -> None:
    tensors = [(f"t{n}", torch.full((200_000,), float(n))) for n in range(12)]
    subject = grouped(tmp_path, verify=True)
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect_grouped, subject, leave_after)
        weight_update(subject).send(iter(tensors))
        buckets, flags = arrival.result(30)
    arrived = [item for bucket in buckets for item in bucket]
    assert [name for name, _ in arrived] == [name for name, _ in tensors]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(arrived, tensors, strict=True))
    assert flags[0]
    assert flags[-1] == (leave_after == 99)


def test_unjoined_group_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "JOIN_S", 0.5)

    def stay_away() -> list[tuple[int, bool]]:
        with weight_update(grouped(tmp_path)).receive(20, lambda: ReceiverRanks(count=1)) as received:
            return [(len(bucket), received.broadcast) for bucket in received]

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(stay_away)
        weight_update(grouped(tmp_path)).send(iter([("a", torch.ones(3)), ("b", torch.ones(2))]))
        assert arrival.result(20) == [(2, False)]


class Receiver:
    """The part of an inference engine that `sync_weights` uses."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.got: list[Bucket] = []

    def update_weights(self, subject: WeightUpdateMeta) -> Future[None]:
        return self.pool.submit(lambda: self.got.extend(collect(subject)))


class Sender:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def upload_weights(self, subject: WeightUpdateMeta) -> None:
        if self.error is not None:
            raise self.error
        weight_update(subject).send(iter([("a", torch.ones(3))]))


def test_sync_does_both_sides(tmp_path: Path) -> None:
    receiver: Any = Receiver()
    sync_weights(Sender(), receiver, meta(tmp_path), 20)
    assert [name for bucket in receiver.got for name, _ in bucket] == ["a"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("disk", ["upload", "pause", "update", "resume"]), ("tensor", ["pause", "update", "upload", "resume"])],
)
def test_files_are_written_before_the_receiver_pauses(
    tmp_path: Path, method: Literal["disk", "tensor"], expected: list[str]
) -> None:
    events: list[str] = []

    class Side:
        def upload_weights(self, subject: WeightUpdateMeta) -> None:
            events.append("upload")

        def update_weights(self, subject: WeightUpdateMeta) -> Future[None]:
            events.append("update")
            done: Future[None] = Future()
            done.set_result(None)
            return done

    @contextmanager
    def pause() -> Iterator[None]:
        events.append("pause")
        yield
        events.append("resume")

    receiver: Any = Side()
    update = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "weights"))
    sync_weights(Side(), receiver, update, 20, pause())
    assert events == expected


def test_missing_sender_leaves_no_receiver_waiting(tmp_path: Path) -> None:
    receiver: Any = Receiver()
    with pytest.raises(RuntimeError, match="out of memory"):
        sync_weights(Sender(RuntimeError("out of memory")), receiver, meta(tmp_path), 20)
    receiver.pool.shutdown()  # would wait for the receiver's 20 s
    abandon(meta(tmp_path))  # no receiver is there, and that is fine


def test_interrupted_sync_ignores_unresponsive_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "INTERRUPT_WAIT_S", 0.0)
    never: Future[None] = Future()
    receiver: Any = SimpleNamespace(update_weights=lambda subject: never)
    answer = threading.Timer(10, never.set_result, [None])
    answer.start()
    with pytest.raises(KeyboardInterrupt):
        sync_weights(Sender(KeyboardInterrupt()), receiver, meta(tmp_path), 20)
    answer.cancel()
    assert not never.done()


# ------------------------------------------------------------------ between machines


@pytest.mark.parametrize("method", ["distributed", "lora"])
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 28])
def test_remote_buckets_are_sent_over_tcp(tmp_path: Path, method: SyncMethod, bucket_bytes: int) -> None:
    tensors = [(f"t{n}", torch.randn(n, 5).mul(9).to(dtype)) for n, dtype in enumerate(DTYPES)]
    subject = meta(tmp_path, method=method, host="127.0.0.1", bucket_bytes=bucket_bytes, verify=True)
    adapter = AdapterMetadata(rank=1, alpha=1, rslora=False) if method == "lora" else None
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect_here, subject)
        weight_update(subject, adapter).send(iter(tensors))
        arrived = arrival.result(20)
    assert [name for name, _ in arrived] == [name for name, _ in tensors]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(arrived, tensors, strict=True))
    assert all(got.dtype == sent.dtype for (_, got), (_, sent) in zip(arrived, tensors, strict=True))
    assert not Path(subject.path or "").exists()


@pytest.mark.parametrize("method", ["tensor", "disk"])
def test_other_methods_take_no_host(tmp_path: Path, method: SyncMethod) -> None:
    with pytest.raises(ConfigError, match=f"method='{method}', host='10.0.0.1'.* choose 'distributed'"):
        meta(tmp_path, method=method, host="10.0.0.1")


def collect_here(subject: WeightUpdateMeta) -> Bucket:
    with weight_update(subject).receive_copies(20) as buckets:
        return [item for bucket in buckets for item in bucket]


def test_a_receiver_sends_strangers_away(tmp_path: Path) -> None:
    subject = meta(tmp_path, method="distributed", host="127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(collect, subject)
        while not (actual := read_record(tmp_path / "meet")).get("port"):
            time.sleep(0.01)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100)):
            with socket.create_connection(("127.0.0.1", actual["port"])) as stranger:
                stranger.sendall(data)
        weight_update(subject).send(iter([("a", torch.ones(2))]))
        ((name, _),) = arrival.result(20)[0]
    assert name == "a"


def read_record(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}
