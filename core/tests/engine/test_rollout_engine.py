"""`InferenceEngine`: the guards of its public methods, checked with a toy engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_support import (
    ALL,
    CONTEXT,
    VOCAB,
    GatedWorkflow,
    GroupWorkflow,
    ToyBackend,
    eventually,
    keys,
    refuse,
    toy_config,
    toy_engine,
    toy_spec,
)

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.backend.meta import WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine import sync
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import sync_weights
from core_rl.errors import (
    BatchError,
    ConfigError,
    CoreRLError,
    EngineContractError,
    EngineStateError,
    LayoutError,
    RolloutError,
    UnsupportedCapability,
    WeightsError,
)
from core_rl.weight_sync import rendezvous
from core_rl.weight_sync.update import weight_update

SHORT = SamplingParams(max_new_tokens=3)
REQUEST = LLMRequest(input_ids=(1, 2), sampling=SHORT)
UPDATE = WeightUpdateMeta(path="/nowhere", version=1)


@pytest.fixture
def backend() -> ToyBackend:
    return ToyBackend()


@pytest.fixture
def engine(backend: ToyBackend) -> Iterator[InferenceEngine]:
    made = toy_engine(backend)
    made.initialize()
    yield made
    made.destroy()


def ask(engine: InferenceEngine, request: LLMRequest = REQUEST) -> LLMResponse:
    return asyncio.run(engine.agenerate(request))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (toy_config(layout=ParallelLayout(tp=2)), LayoutError, "needs .*tensor_parallel"),
        (toy_config(dtype="bfloat16"), UnsupportedCapability, "bfloat16"),
        (toy_config(device="cuda"), UnsupportedCapability, "cuda"),
        (InferenceEngineConfig(model=ModelConfig(path="x", head="value")), ConfigError, "head = 'value'"),
    ],
)
def test_unservable_config_is_refused(
    config: InferenceEngineConfig, error: type[CoreRLError], message: str
) -> None:
    with pytest.raises(error, match=message):
        InferenceEngine(toy_spec(), config, ToyBackend())


def test_methods_need_an_initialized_engine(engine: InferenceEngine, backend: ToyBackend) -> None:
    with pytest.raises(EngineStateError, match="initialize"):
        engine.initialize()
    new = toy_engine()
    for call in (
        lambda: ask(new), lambda: new.update_weights(UPDATE), new.pause, new.resume, lambda: new.set_version(1),
        lambda: new.submit({}, GatedWorkflow()), new.release_memory, lambda: new.limits,
    ):  # fmt: skip
        with pytest.raises(EngineStateError, match="initialize"):
            call()
    engine.destroy()
    engine.destroy()
    assert backend.calls == ["teardown"]
    with pytest.raises(EngineStateError, match="destroyed"):
        ask(engine)


def test_addresses_are_string_or_list() -> None:
    for addr, expected in ((None, ()), ("a:1", ("a:1",)), (["a:1", "b:2"], ("a:1", "b:2"))):
        backend = ToyBackend()
        made = toy_engine(backend)
        made.initialize(addr)
        assert backend.addresses == expected
        made.destroy()


def test_an_answer_comes_back_with_its_latency(engine: InferenceEngine) -> None:
    response = ask(engine)
    assert response.output_ids == (3, 4, 5)
    assert response.versions == (0, 0, 0)
    assert response.latency_s > 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LLMRequest(input_ids=()), "the prompt is empty"),
        (LLMRequest(input_ids=(1, VOCAB)), f"prompt holds the token id {VOCAB}; the vocabulary has {VOCAB}"),
        (LLMRequest(input_ids=(-1,)), "prompt holds the token id -1"),
        (
            LLMRequest(input_ids=(1,), sampling=SamplingParams(stop_token_ids=(VOCAB + 3,))),
            f"stop_token_ids holds the token id {VOCAB + 3}",
        ),
        (
            LLMRequest(input_ids=(1,) * (CONTEXT - 2), sampling=SHORT),
            f"a prompt of {CONTEXT - 2} tokens and max_new_tokens = 3 exceed the context of {CONTEXT}",
        ),
    ],
)
def test_invalid_request_never_reaches_backend(
    engine: InferenceEngine, backend: ToyBackend, request_: LLMRequest, message: str
) -> None:
    backend.answer = lambda request, response: pytest.fail("it reached the engine")
    with pytest.raises(RolloutError, match=message):
        ask(engine, request_)


def test_longest_fitting_request_is_accepted(engine: InferenceEngine) -> None:
    assert len(ask(engine, LLMRequest(input_ids=(1,) * (CONTEXT - 3), sampling=SHORT)).output_ids) == 3


def shorter(response: LLMResponse) -> LLMResponse:
    return replace(response, output_ids=(3,), logprobs=(-0.5,), versions=(0,))


def longer(response: LLMResponse) -> LLMResponse:
    return replace(response, output_ids=(3,) * 4, logprobs=(-0.5,) * 4, versions=(0,) * 4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: None, r"agenerate\(\) returned a NoneType"),
        (lambda r: replace(r, rid="other"), "it repeats another request"),
        (lambda r: replace(r, input_ids=(1, 3)), "another prompt"),
        (longer, "4 tokens; max_new_tokens = 3"),
        (shorter, "stop_reason = 'length' after 1 of 3 tokens"),
        (
            lambda r: replace(r, output_ids=(3, 4, VOCAB)),
            f"the output token {VOCAB} is not in the vocabulary",
        ),
        (lambda r: replace(r, output_ids=(3, 4, 5.0)), "the output token 5.0"),
        (lambda r: replace(r, logprobs=(-0.5, float("nan"), -0.5)), "the log-prob nan"),
        (lambda r: replace(r, logprobs=(-0.5, 0.3, -0.5)), "the log-prob 0.3"),
        (lambda r: replace(r, logprobs=(torch.tensor(-1.0),) * 3), r"the log-prob tensor\(-1.\)"),
        (lambda r: replace(r, versions=(0, 0, 1)), r"versions \[0, 1\]; the weights had 0 to 0"),
        (lambda r: replace(r, versions=(None,) * 3), r"versions \[None\]"),
    ],
)
def test_invalid_response_is_refused(
    engine: InferenceEngine, backend: ToyBackend, spoil: Any, message: str
) -> None:
    backend.answer = lambda request, response: spoil(response)
    with pytest.raises(EngineContractError, match=message):
        ask(engine)


def test_versions_rise_along_a_response(engine: InferenceEngine, backend: ToyBackend) -> None:
    def update(response: LLMResponse, versions: tuple[int, ...]) -> LLMResponse:
        engine.update_weights(WeightUpdateMeta(path="/x", version=2)).result()
        return replace(response, versions=versions)

    backend.answer = lambda request, response: update(response, (0, 2, 2))
    assert ask(engine).versions == (0, 2, 2)
    engine.set_version(0)
    backend.answer = lambda request, response: update(response, (2, 0, 0))
    with pytest.raises(EngineContractError, match="versions fall along the response"):
        ask(engine)


def test_response_may_have_version_being_set(engine: InferenceEngine, backend: ToyBackend) -> None:
    def set_version(version: int) -> None:
        backend.served = version
        assert ask(engine).versions == (version,) * 3

    backend.set_version = set_version  # type: ignore[method-assign]
    engine.set_version(5)
    assert engine.get_version() == 5


def test_response_may_have_incoming_version(engine: InferenceEngine, backend: ToyBackend) -> None:
    installed, finish = threading.Event(), threading.Event()

    def update(meta: WeightUpdateMeta) -> None:
        backend.served = meta.version
        installed.set()
        assert finish.wait(60)

    backend.update = update
    future = engine.update_weights(UPDATE)
    assert installed.wait(60)
    assert engine.get_version() == 0
    assert ask(engine).versions == (1, 1, 1)
    finish.set()
    future.result(60)
    assert engine.get_version() == 1


def test_a_failed_update_keeps_the_version(engine: InferenceEngine, backend: ToyBackend) -> None:
    backend.update = refuse
    with pytest.raises(WeightsError, match="cannot read /nowhere"):
        engine.update_weights(UPDATE).result(60)
    assert engine.get_version() == 0
    assert ask(engine).versions == (0, 0, 0)


def test_unread_errors_of_updates_surface(
    engine: InferenceEngine, backend: ToyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    surfaced = "an update failed before this call: version 1: cannot read /nowhere; call result"
    for later in (lambda: engine.set_version(0), lambda: engine.update_weights(UPDATE)):
        backend.update = refuse
        wait([engine.update_weights(UPDATE)], 60)
        backend.update = lambda meta: None
        with pytest.raises(WeightsError, match=surfaced):
            later()
        later()  # once
    backend.update = refuse
    wait([engine.update_weights(UPDATE)], 60)
    engine.destroy()
    assert "an update of weights failed: version 1: cannot read /nowhere" in caplog.text


class Sender:
    """A train engine that sends one tensor."""

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        weight_update(meta).send(iter([("a", torch.ones(3))]))


def test_early_receiver_error_reaches_sender(
    backend: ToyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 5.0)
    engine = toy_engine(backend, spec=ADAPTED)
    engine.initialize()
    meta = WeightUpdateMeta(method="tensor", version=1, path=str(tmp_path / "rendezvous"))
    backend.update = refuse
    with pytest.raises(WeightsError, match="the receiver of the weights failed: cannot read"):
        sync_weights(Sender(), engine, meta, 20)
    assert not list(tmp_path.iterdir()), "the sender has removed the error"
    with pytest.raises(WeightsError, match="cannot read"):
        engine.update_weights(meta).result(60)

    def receive(meta: WeightUpdateMeta) -> None:
        with weight_update(meta).receive(20) as received:
            assert [name for bucket in received for name, _ in bucket] == ["a"]

    backend.update = receive
    sync_weights(Sender(), engine, meta, 20)  # the unread error is of another update
    assert engine.get_version() == 1
    engine.destroy()


@pytest.mark.parametrize(
    ("meta", "error", "message"),
    [
        (WeightUpdateMeta(path="/x", version=2), EngineStateError, "to version 2, and the engine has 3"),
        (WeightUpdateMeta(method="tensor", version=4), UnsupportedCapability, "weight sync by 'tensor'"),
    ],
)
def test_invalid_updates_are_refused_at_once(
    engine: InferenceEngine, meta: WeightUpdateMeta, error: type[CoreRLError], message: str
) -> None:
    engine.set_version(3)
    with pytest.raises(error, match=message):
        engine.update_weights(meta)
    assert engine.get_version() == 3


ADAPTED = toy_spec(ALL | {Capability.SYNC_LORA, Capability.SYNC_TENSOR})


def adapted(**lora: Any) -> InferenceEngine:
    model = {"config": {"model_type": "toy"}, "lora": {"rank": 2, **lora}}
    return InferenceEngine(ADAPTED, InferenceEngineConfig.model_validate({"model": model}), ToyBackend())


def test_adapter_engine_takes_only_adapters(tmp_path: Path) -> None:
    with_one, without = adapted(), toy_engine(spec=ADAPTED)
    file, methods = str(tmp_path / "rendezvous"), ("lora", "tensor")
    for engine, method in zip((with_one, without), methods, strict=True):
        engine.initialize()
        engine.update_weights(WeightUpdateMeta(method=method, version=1, path=file)).result(60)  # type: ignore[arg-type]
    with pytest.raises(EngineStateError, match="by 'tensor' on an engine with model.lora"):
        with_one.update_weights(WeightUpdateMeta(method="tensor", version=2, path="/x"))
    with pytest.raises(EngineStateError, match="by 'lora': this engine has no adapter"):
        without.update_weights(WeightUpdateMeta(method="lora", version=2, path="/x"))
    for engine in (with_one, without):
        engine.destroy()


def test_inference_adapters_are_declared_and_synced() -> None:
    model = adapted().config.model
    with pytest.raises(UnsupportedCapability, match="does not declare 'sync_lora'"):
        InferenceEngine(toy_spec(), InferenceEngineConfig(model=model), ToyBackend())
    with pytest.raises(ConfigError, match="its adapter comes by update_weights"):
        adapted(path="/an/adapter")


BATCH = SequenceBatch.from_sequences([[1, 2, 3], [4, 5]])


def test_scores_are_checked(engine: InferenceEngine) -> None:
    assert engine.score(BATCH, temperature=2.0).tolist() == [0, -2, -2, 0, -2]
    assert engine.top_logprobs(BATCH, 4).ids.shape == (5, 4)
    too_high = SequenceBatch.from_sequences([[1], [2, VOCAB]])
    with pytest.raises(BatchError, match=f"sequence 1 holds the token id {VOCAB}"):
        engine.score(too_high)
    with pytest.raises(BatchError, match=f"sequence 0 has {CONTEXT + 1} tokens"):
        engine.score(SequenceBatch.from_sequences([[1] * (CONTEXT + 1)]))
    with pytest.raises(BatchError, match="the batch is empty"):
        engine.score(SequenceBatch.from_sequences([]))
    with pytest.raises(CoreRLError, match="temperature = 0"):
        engine.score(BATCH, temperature=0.0)
    with pytest.raises(RolloutError, match="k is between 1"):
        engine.top_logprobs(BATCH, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(5, dtype=torch.float64), r"float64 \[5\]"),
        (torch.zeros(4), r"float32 \[4\]"),
        ([0.0] * 5, "list"),
        (torch.tensor([0, -1, -1, -1, -1.0]), "other than 0 for a first token"),
        (torch.tensor([0, float("nan"), -1, 0, -1.0]), "NaN"),
    ],
)
def test_invalid_scores_are_refused(
    engine: InferenceEngine, backend: ToyBackend, values: Any, message: str
) -> None:
    backend.score = lambda batch, temperature: values  # type: ignore[method-assign]
    with pytest.raises(EngineContractError, match=message):
        engine.score(BATCH)


def test_invalid_top_ids_are_refused(engine: InferenceEngine, backend: ToyBackend) -> None:
    top = TopLogprobs(ids=torch.zeros(5, 2), logprobs=torch.zeros(5, 2))
    backend.top_logprobs = lambda batch, k, temperature: top  # type: ignore[method-assign]
    with pytest.raises(EngineContractError, match=r"float32 \[5, 2\]"):
        engine.top_logprobs(BATCH, 2)


def test_undeclared_capabilities_refuse_cleanly(backend: ToyBackend) -> None:
    new = toy_engine(backend, toy_spec(frozenset()))
    with pytest.raises(UnsupportedCapability, match="launch_server"):
        new.launch_server()
    new.initialize()
    for call in (
        lambda: new.score(BATCH), lambda: new.top_logprobs(BATCH, 1), lambda: new.update_weights(UPDATE),
        new.release_memory, new.resume_memory,
    ):  # fmt: skip
        with pytest.raises(UnsupportedCapability):
            call()
    new.pause()  # the core's own gate needs no capability
    new.resume()
    assert backend.calls == []
    new.destroy()


def test_servers_are_launched_before_initialize(engine: InferenceEngine) -> None:
    assert toy_engine().launch_server(2) == ("127.0.0.1:9000", "127.0.0.1:9001")
    with pytest.raises(EngineStateError):
        engine.launch_server()


def test_cancelled_request_keeps_paused_requests_waiting(
    engine: InferenceEngine, backend: ToyBackend
) -> None:
    async def scene() -> LLMResponse:
        engine.pause()
        engine.pause()
        first, second = (
            asyncio.ensure_future(engine.agenerate(replace(REQUEST, rid=rid))) for rid in ("first", "second")
        )
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first], timeout=60)
        assert first.cancelled()
        assert not second.done()
        engine.resume()
        return await asyncio.wait_for(second, 60)

    assert asyncio.run(scene()).output_ids == (3, 4, 5)
    assert backend.calls == ["pause", "resume"]


def test_failed_pause_keeps_serving(engine: InferenceEngine, backend: ToyBackend) -> None:
    def pause() -> None:
        raise RolloutError("no server reacts")

    async def ask_once() -> LLMResponse:
        return await asyncio.wait_for(engine.agenerate(REQUEST), 10)

    backend.pause = pause  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="no server reacts"):
        engine.pause()
    assert asyncio.run(ask_once()).output_ids == (3, 4, 5)
    del backend.pause
    engine.pause()
    assert backend.calls == ["pause"], "a later pause reaches the backend"


def test_waiting_request_fails_on_destroy(engine: InferenceEngine) -> None:
    async def scene() -> None:
        engine.pause()
        request = asyncio.ensure_future(engine.agenerate(REQUEST))
        await asyncio.sleep(0.01)
        engine.destroy()
        with pytest.raises(EngineStateError, match="destroyed"):
            await asyncio.wait_for(request, 60)

    asyncio.run(scene())


def test_memory_is_released_when_nothing_is_in_flight(engine: InferenceEngine, backend: ToyBackend) -> None:
    def release(response: LLMResponse) -> LLMResponse:
        with pytest.raises(EngineStateError, match="1 requests in flight"):
            engine.release_memory()
        return response

    backend.answer = lambda request, response: release(response)
    ask(engine)
    engine.release_memory()
    for call in (lambda: ask(engine), lambda: engine.score(BATCH)):
        with pytest.raises(EngineStateError, match="resume_memory"):
            call()
    engine.resume_memory()
    backend.answer = lambda request, response: response
    assert ask(engine).output_ids == (3, 4, 5)


def count(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
    return float(sum(output_ids))


def test_rollout_end_to_end(engine: InferenceEngine) -> None:
    data = [{"prompt_ids": [value]} for value in (30, 10, 20)]
    batch = engine.rollout(data, GroupWorkflow(reward=count, sampling=SHORT, group_size=2), timeout=60)
    starts = batch.cu_seqlens[:-1].long()
    assert batch.input_ids[starts].tolist() == [30, 30, 10, 10, 20, 20]
    assert batch["rewards"].tolist() == [96, 96, 36, 36, 66, 66]
    assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_rollout_without_accepted_samples_says_so(engine: InferenceEngine) -> None:
    gated = GatedWorkflow()
    gated.reject, gated.released = {0, 1}, {0, 1}
    with pytest.raises(RolloutError, match="none of 2 samples was accepted"):
        engine.rollout(keys(0, 1), gated, timeout=60)


def test_new_weights_start_waiting_episodes() -> None:
    engine = toy_engine(consumer_batch_size=2)
    engine.initialize()
    gated = GatedWorkflow()
    gated.release(*range(10))
    loader = iter([keys(0, 1), keys(2, 3), keys(4, 5)])
    assert engine.prepare_batch(loader, gated, timeout=60).input_ids.tolist() == [0, 1]
    engine.submit({"key": 2}, gated)
    assert gated.wait_started(2) == [0, 1]
    engine.update_weights(UPDATE).result(60)
    assert gated.wait_started(3) == [0, 1, 2]
    assert engine.wait(1, timeout=60).input_ids.tolist() == [2]
    engine.destroy()


def test_destroy_cancels_episodes_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = toy_engine(consumer_batch_size=2)
    engine.initialize()
    gated = GatedWorkflow()
    for sample in keys(0, 1):
        engine.submit(sample, gated)
    gated.wait_started(2)
    engine.update_weights(UPDATE).result(60)
    engine.destroy()
    assert sorted(gated.cancelled) == [0, 1]
    eventually(lambda: set(threading.enumerate()) <= before)


STREAMED = toy_spec(ALL | {Capability.SYNC_TENSOR})


def test_destroy_fails_waiting_update(backend: ToyBackend, tmp_path: Path) -> None:
    waiting = threading.Event()

    def receive(meta: WeightUpdateMeta) -> None:
        waiting.set()
        with weight_update(meta).receive(10):
            raise AssertionError("no sender connects")

    backend.update = receive
    engine = toy_engine(backend, STREAMED)
    engine.initialize()
    update, queued = (
        engine.update_weights(WeightUpdateMeta(method="tensor", version=n, path=str(tmp_path / "meet")))
        for n in (1, 2)
    )
    assert waiting.wait(60)
    engine.destroy()
    assert queued.cancelled()
    with pytest.raises(WeightsError, match="the sender of the weights is gone"):
        update.result(0)


def test_destroy_ignores_unresponsive_server(backend: ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "CLOSE_WAIT_S", 0.1)
    loading, gone = threading.Event(), threading.Event()

    def load(meta: WeightUpdateMeta) -> None:
        loading.set()
        raise WeightsError("the server is gone" if gone.wait(10) else "the server does not answer")

    backend.update, backend.teardown = load, gone.set  # type: ignore[method-assign]
    engine = toy_engine(backend)
    engine.initialize()
    update = engine.update_weights(UPDATE)
    assert loading.wait(60)
    engine.destroy()
    with pytest.raises(WeightsError, match="the server is gone"):
        update.result(60)


def test_a_subclass_of_the_final_engine_raises() -> None:
    with pytest.raises(
        EngineContractError,
        match=r"Mine is a subclass of InferenceEngine.*docs/write-an-inference-engine\.md",
    ):
        type("Mine", (InferenceEngine,), {})


def test_failed_build_tears_down_the_engine(backend: ToyBackend) -> None:
    def fail(*_arguments: Any) -> None:
        raise ConfigError("no such model")

    backend.build = fail  # type: ignore[assignment,method-assign]
    engine = toy_engine(backend)
    with pytest.raises(ConfigError, match="no such model"):
        engine.initialize()
    assert backend.calls == ["teardown"]
    with pytest.raises(EngineStateError, match="destroyed"):
        engine.initialize()
    engine.destroy()
    assert backend.calls == ["teardown"]


def test_limits_of_wrong_type_are_refused(backend: ToyBackend) -> None:
    backend.build = lambda *_arguments: 50  # type: ignore[assignment,method-assign]
    with pytest.raises(EngineContractError, match=r"build\(\) returned 50"):
        toy_engine(backend).initialize()


def test_rid_in_flight_is_refused(engine: InferenceEngine) -> None:
    async def scene() -> LLMResponse:
        engine.pause()
        first = asyncio.ensure_future(engine.agenerate(REQUEST))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match=f"the rid '{REQUEST.rid}' is in flight already"):
            await asyncio.wait_for(engine.agenerate(REQUEST), 10)
        engine.resume()
        return await asyncio.wait_for(first, 60)

    assert asyncio.run(scene()).output_ids == ask(engine).output_ids == (3, 4, 5)
