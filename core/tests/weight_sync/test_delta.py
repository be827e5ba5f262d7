"""Delta weight sync: changes since the previous update, and full updates where versions do not follow each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.engine.sync import sync_weights
from core_rl.errors import ConfigError, DeltaRefused, WeightsError
from core_rl.weight_sync.delta import BASE, DIGEST, GAPS, VALUES, DeltaDecoder, DeltaEncoder
from core_rl.weight_sync.update import weight_update

METHODS: tuple[SyncMethod, ...] = ("tensor", "distributed")
Items = list[tuple[str, Tensor]]


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(70, 16).bfloat16(),
        "layer": torch.randn(16, 16).bfloat16(),
        "norm": torch.randn(16),
        "scale": torch.tensor(1.5),
        "odd": torch.randn(7).bfloat16(),
        "steps": torch.tensor([3, 4]),
        "empty": torch.empty(0, 4),
    }


def encoded(encoder: DeltaEncoder, tensors: dict[str, Tensor], version: int = 1) -> Items:
    items = [(name, tensor.clone()) for name, tensor in encoder.encode(tensors.items()) if tensor is not None]
    encoder.commit(version)
    return items


def applied(decoder: DeltaDecoder, items: Items, version: int = 1) -> dict[str, Tensor]:
    result = decoder.decode(items)
    decoder.commit(result, version)
    return dict(result.tensors)


def require_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].view(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def changed_everywhere(tensors: dict[str, Tensor]) -> None:
    tensors["layer"] = tensors["layer"] + 1


def changed_at_the_ends(tensors: dict[str, Tensor]) -> None:
    tensors["embed"].view(-1)[[0, 255, 256, -1]] = 9


def changed_in_sign_of_zero(tensors: dict[str, Tensor]) -> None:
    tensors["norm"][3] = -0.0


def changed_to_nan(tensors: dict[str, Tensor]) -> None:
    tensors["embed"][5, 5] = torch.nan


def transposed(tensors: dict[str, Tensor]) -> None:
    tensors["layer"] = tensors["layer"].t()


def changed_at_odd_places(tensors: dict[str, Tensor]) -> None:
    tensors["odd"][[3, 6]] = 9


def moved_in_memory(tensors: dict[str, Tensor]) -> None:
    flat = torch.cat([torch.zeros(1).bfloat16(), tensors["embed"].view(-1)])
    tensors["embed"] = flat[1:].view(70, 16)
    tensors["embed"][7, 7] = 9


CHANGES: dict[Callable[[dict[str, Tensor]], None], list[str]] = {
    changed_everywhere: ["layer"],
    changed_at_the_ends: ["embed" + GAPS, "embed" + VALUES],
    changed_in_sign_of_zero: ["norm" + GAPS, "norm" + VALUES],
    changed_to_nan: ["embed" + GAPS, "embed" + VALUES],
    transposed: ["layer"],
    moved_in_memory: ["embed" + GAPS, "embed" + VALUES],
    lambda tensors: None: [],
    changed_at_odd_places: ["odd" + GAPS, "odd" + VALUES],
    lambda tensors: tensors.update(scale=torch.tensor(2.5)): ["scale"],
    lambda tensors: tensors.update(steps=torch.tensor([3, 5])): ["steps" + GAPS, "steps" + VALUES],
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_only_changed_values_are_sent(change: Callable[[dict[str, Tensor]], None]) -> None:
    encoder, decoder, tensors = DeltaEncoder(), DeltaDecoder(), weights()
    tensors["norm"][3] = 0.0
    full = encoded(encoder, tensors)
    assert [name for name, _ in full] == [*tensors, DIGEST]
    applied(decoder, full)
    change(tensors)
    items = encoded(encoder, tensors, 2)
    assert [name for name, _ in items] == [BASE, *CHANGES[change], DIGEST]
    require_same(applied(decoder, items, 2), tensors)
    assert encoder.base == decoder.base


@pytest.mark.parametrize(
    ("places", "nbytes"),
    [
        ([3], 1 + 2),
        ([3, 258], 2 * (1 + 2)),
        ([0, 256 * 2], 2 * (2 + 2)),
        ([*range(0, 300, 3), 1000], (101 + 2) * (1 + 2)),
        ([*range(0, 300, 3), 297 + 256, 297 + 3 * 256], (102 + 1) * (1 + 2)),
        ([5, 30_000], 2 * (2 + 2)),
        ([5, 99_999], 2 * (4 + 2)),
        ([40_000, 99_999], 2 * (4 + 2)),
        (list(range(7, 100_000, 33)), 3031 * (1 + 2)),
    ],
)
def test_indices_take_few_bytes(places: list[int], nbytes: int) -> None:
    encoder, decoder, tensors = DeltaEncoder(), DeltaDecoder(), {"t": torch.zeros(100_000).bfloat16()}
    applied(decoder, encoded(encoder, tensors))
    tensors["t"][places] = 1
    items = dict(encoded(encoder, tensors, 2))
    assert items["t" + GAPS].nbytes + items["t" + VALUES].nbytes == nbytes
    require_same(applied(decoder, list(items.items()), 2), tensors)


def test_changes_of_other_weights_are_refused() -> None:
    encoder, decoder, tensors = DeltaEncoder(), DeltaDecoder(), weights()
    first = encoded(encoder, tensors)
    changed_everywhere(tensors)
    second = encoded(encoder, tensors, 2)
    with pytest.raises(DeltaRefused, match="no weights of a delta update; send a full"):
        decoder.decode(second)
    applied(decoder, first)
    applied(decoder, second, 2)
    with pytest.raises(DeltaRefused, match=r"receiver has version 2 \(digest"):
        decoder.decode(second)
    require_same(dict(decoder.decode([]).tensors), {})


@pytest.mark.parametrize("spoiled", [GAPS, VALUES, DIGEST])
def test_spoiled_changes_are_refused(spoiled: str) -> None:
    encoder, decoder, tensors = DeltaEncoder(), DeltaDecoder(), weights()
    applied(decoder, encoded(encoder, tensors))
    before = decoder.base
    changed_at_the_ends(tensors)
    items = encoded(encoder, tensors, 2)
    for name, tensor in items:
        if name.endswith(spoiled):
            tensor.view(torch.uint8)[-1] ^= 1
    with pytest.raises(DeltaRefused, match="differ from the sender's|lie outside"):
        decoder.decode(items)
    assert decoder.base == before


class Sender:
    """Sends ``tensors`` as a `TrainEngine` does."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.changes = tensors, DeltaEncoder()
        self.sent: list[list[str]] = []

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.rebase:
            self.changes.forget()
        self.sent.append([])
        weight_update(meta, base=self.changes.base).send(self._observed())
        self.changes.commit(meta.version)

    def _observed(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in self.changes.encode(self.tensors.items()):
            self.sent[-1].append(name)
            yield name, tensor


class Receiver:
    """Receives as an `InferenceEngine` does; with ``fails`` it loses the next update before its installation."""

    def __init__(self) -> None:
        self.received, self.tensors = DeltaDecoder(), dict[str, Tensor]()
        self.fails = False
        self._pool = ThreadPoolExecutor(1)

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        return self._pool.submit(self._install, meta)

    def _install(self, meta: WeightUpdateMeta) -> None:
        with weight_update(meta, base=self.received.base).receive_copies(20) as buckets:
            result = self.received.decode(item for bucket in buckets for item in bucket)
            if self.fails:
                raise WeightsError("lost")
            self.received.commit(result, meta.version)
            self.tensors = dict(result.tensors)


def first_names(sender: Sender) -> list[str]:
    return [names[0] if names else "nothing" for names in sender.sent]


@pytest.mark.parametrize("method", METHODS)
def test_a_full_update_follows_a_refusal(tmp_path: Path, method: SyncMethod) -> None:
    sender, receiver = Sender(weights()), Receiver()
    meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "meet"), delta=True)
    sync_weights(sender, receiver, meta, 20)
    changed_everywhere(sender.tensors)
    receiver.received = DeltaDecoder()  # restarted
    sync_weights(sender, receiver, replace(meta, version=2), 20)
    require_same(receiver.tensors, sender.tensors)
    assert first_names(sender) == ["embed", "nothing", "embed"]
    changed_at_the_ends(sender.tensors)
    sync_weights(sender, receiver, replace(meta, version=3), 20)
    require_same(receiver.tensors, sender.tensors)
    assert sender.sent[-1] == [BASE, "embed" + GAPS, "embed" + VALUES, DIGEST]


@pytest.mark.parametrize("method", METHODS)
def test_a_full_update_follows_a_failure(tmp_path: Path, method: SyncMethod) -> None:
    sender, receiver = Sender(weights()), Receiver()
    meta = WeightUpdateMeta(method=method, version=1, path=str(tmp_path / "meet"), delta=True)
    sync_weights(sender, receiver, meta, 20)
    changed_everywhere(sender.tensors)
    receiver.fails = True
    with pytest.raises(WeightsError, match="lost"):
        sync_weights(sender, receiver, replace(meta, version=2), 20)
    receiver.fails = False
    sync_weights(sender, receiver, replace(meta, version=3), 20)
    require_same(receiver.tensors, sender.tensors)
    assert first_names(sender) == ["embed", BASE, "embed"]


def test_random_updates_with_losses_arrive(tmp_path: Path) -> None:
    draw = random.Random(0)
    sender, receiver = Sender(weights()), Receiver()
    other = Receiver()
    meta = WeightUpdateMeta(
        method="tensor", version=0, path=str(tmp_path / "meet"), delta=True, bucket_bytes=256
    )
    for version in range(1, 51):
        _step(sender.tensors, draw)
        event = draw.choice(("none", "none", "restart", "lost", "elsewhere", "same version"))
        update = replace(meta, version=version if event != "same version" else max(1, version - 1))
        if event == "restart":
            receiver.received = DeltaDecoder()
        if event == "elsewhere":  # the update goes to another receiver, and this one misses it
            sync_weights(sender, other, update, 20)
            require_same(other.tensors, sender.tensors)
            continue
        receiver.fails = event == "lost"
        if receiver.fails:
            with pytest.raises(WeightsError, match="lost"):
                sync_weights(sender, receiver, update, 20)
            continue
        sync_weights(sender, receiver, update, 20)
        require_same(receiver.tensors, sender.tensors)
    changes = sum(BASE in names for names in sender.sent)
    assert changes > 10 and len(sender.sent) - changes > 10, "both kinds of update took place"


def _step(tensors: dict[str, Tensor], draw: random.Random) -> None:
    for tensor in tensors.values():
        count = draw.choice((0, 1, 2, tensor.numel()))
        places: Sequence[int] = [
            draw.randrange(tensor.numel()) for _ in range(count if tensor.numel() else 0)
        ]
        tensor.view(-1)[torch.tensor(places, dtype=torch.int64)] = draw.choice((0, -1, 2, 7))


def test_an_adapter_is_sent_whole() -> None:
    with pytest.raises(ConfigError, match="an adapter is sent whole; set delta to False"):
        WeightUpdateMeta(method="lora", version=1, path="meet", delta=True)
