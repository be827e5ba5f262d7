"""The reference inference engine against a plain forward pass of the same weights."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_support import GroupWorkflow
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.distributed.comm import Comm
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.loading import load_backend, load_engine
from core_rl.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    CoreRLError,
    EngineStateError,
    LayoutError,
    UnsupportedCapability,
    WeightsError,
)
from core_rl.reference import ROLLOUT_SPEC, SPEC, ReferenceConfig, ReferenceRolloutConfig, rollout
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.sampling import generate
from core_rl.registry.engines import load_config
from core_rl_conformance.inputs.tiny_models import MAX_LENGTH, ModelStore, TinyModel

FAMILIES = ("qwen3", "llama", "gpt2", "gemma2")
QWEN3 = TinyModel(family="qwen3")
Serve = Callable[..., InferenceEngine]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("models"))


@pytest.fixture
def serve(store: ModelStore) -> Iterator[Serve]:
    made: list[InferenceEngine] = []

    def start(model: TinyModel | Path = QWEN3, **fields: Any) -> InferenceEngine:
        path = model if isinstance(model, Path) else store.directory(model)
        config = ReferenceRolloutConfig(model=ModelConfig(path=str(path)), device="cpu", **fields)
        made.append(load_engine(ROLLOUT_SPEC, config))
        made[-1].initialize()
        return made[-1]

    yield start
    for engine in made:
        engine.destroy()


def plain_logits(path: Path, ids: Sequence[int]) -> Tensor:
    """Float32 logits ``[L, V]`` of one unpadded sequence."""
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits
    return logits[0]


def plain_logprobs(path: Path, response: LLMResponse, temperature: float) -> Tensor:
    """Expected ``response.logprobs``, ``[output]``."""
    ids = [*response.input_ids, *response.output_ids]
    log_p = torch.log_softmax(plain_logits(path, ids).double() / temperature, dim=-1)
    first = len(response.input_ids)
    return torch.stack([log_p[t - 1, ids[t]] for t in range(first, len(ids))])


def prompts(vocab_size: int, count: int = 6) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(0, vocab_size, (1 + 3 * i,), generator=generator).tolist()) for i in range(count)
    ]


def ask(engine: InferenceEngine, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """All at once."""

    async def gather() -> list[LLMResponse]:
        return await asyncio.gather(*(engine.agenerate(request) for request in requests))

    return asyncio.run(gather())


def requests_for(engine: InferenceEngine, sampling: SamplingParams) -> list[LLMRequest]:
    return [
        LLMRequest(input_ids=prompt, sampling=replace(sampling, seed=100 + i))
        for i, prompt in enumerate(prompts(engine.limits.vocab_size))
    ]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that were generated."""
    sizes: list[int] = []

    def counted(model: Any, prompts: Sequence[Sequence[int]], *rest: Any) -> Any:
        sizes.append(len(prompts))
        return generate(model, prompts, *rest)

    monkeypatch.setattr(rollout, "generate", counted)
    return sizes


SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=8),
    "hot": SamplingParams(max_new_tokens=8, temperature=1.7),
    "cold, cut": SamplingParams(max_new_tokens=8, temperature=0.6, top_p=0.8, top_k=7),
    "greedy": SamplingParams(max_new_tokens=8, temperature=0.0),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_batching_does_not_change_draws(
    store: ModelStore, serve: Serve, batches: list[int], family: str, name: str
) -> None:
    model, sampling = TinyModel(family=family), SAMPLINGS[name]
    engine = serve(model)
    requests = [*requests_for(engine, sampling), *requests_for(engine, sampling)]  # equal prompts share work
    together = ask(engine, requests)
    alone = [ask(engine, [request])[0] for request in requests]
    assert batches == [12, *(1 for _ in requests)]
    for one, single in zip(together, alone, strict=True):
        assert one.output_ids == single.output_ids
        torch.testing.assert_close(one.logprobs, single.logprobs, rtol=0, atol=1e-4)
        expected = plain_logprobs(store.directory(model), one, sampling.logprob_temperature)
        torch.testing.assert_close(torch.tensor(one.logprobs).double(), expected, rtol=0, atol=1e-4)
        assert one.versions == (0,) * 8
        assert one.stop_reason == "length"


def test_a_lower_limit_draws_the_same_tokens(serve: Serve) -> None:
    engine, limits = serve(), (40, 8, 2)
    requests = [
        LLMRequest(input_ids=(5, 6), sampling=SamplingParams(max_new_tokens=limit, seed=3))
        for limit in limits
    ]
    drawn = [response.output_ids for response in ask(engine, requests)]
    assert drawn == [drawn[0][:limit] for limit in limits]


def test_greedy_takes_the_most_likely_token(store: ModelStore, serve: Serve) -> None:
    engine = serve()
    for response in ask(engine, requests_for(engine, SAMPLINGS["greedy"])):
        ids = [*response.input_ids, *response.output_ids]
        best = plain_logits(store.directory(QWEN3), ids).argmax(-1).tolist()
        assert list(response.output_ids) == best[len(response.input_ids) - 1 : -1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=1, temperature=1.5),
        SamplingParams(max_new_tokens=1, temperature=0.7, top_k=9),
        SamplingParams(max_new_tokens=1, top_p=0.9),
    ],
)
def test_draws_follow_the_distribution(store: ModelStore, serve: Serve, sampling: SamplingParams) -> None:
    """The frequencies of 4096 draws lie within 5 standard deviations of the truncated softmax."""
    prompt, count = (5, 6, 7), 4096
    engine = serve(max_batch_size=1024)
    requests = [LLMRequest(input_ids=prompt, sampling=replace(sampling, seed=seed)) for seed in range(count)]
    drawn = torch.tensor([response.output_ids[0] for response in ask(engine, requests)])
    frequency = torch.bincount(drawn, minlength=QWEN3.vocab_size).double() / count

    p = torch.softmax(plain_logits(store.directory(QWEN3), prompt)[-1].double() / sampling.temperature, -1)
    if sampling.top_k is not None:
        p = torch.where(p >= p.topk(sampling.top_k).values[-1], p, 0)
    if sampling.top_p < 1:
        ordered, order = p.sort(descending=True)
        p = p.index_fill(0, order[ordered.cumsum(0) - ordered >= sampling.top_p], 0)
    p = p / p.sum()
    assert not frequency[p == 0].any()
    assert ((frequency - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1e-12).all()
    assert len(drawn.unique()) > 3


def test_unseeded_requests_differ_and_run_repeats(serve: Serve) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    requests = [LLMRequest(input_ids=(1, 2), sampling=sampling) for _ in range(4)]
    outputs = [[r.output_ids for r in ask(serve(seed=seed), requests)] for seed in (0, 0, 1)]
    assert len(set(outputs[0])) == 4
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_requests_are_batched_by_parameters(serve: Serve, batches: list[int]) -> None:
    engine = serve(max_batch_size=3)
    short, long = SamplingParams(max_new_tokens=2, seed=1), SamplingParams(max_new_tokens=5, seed=2)
    requests = [LLMRequest(input_ids=(i,), sampling=long if i % 3 == 2 else short) for i in range(9)]
    lengths = [len(response.output_ids) for response in ask(engine, requests)]
    assert lengths == [2, 2, 5] * 3
    assert batches == [3, 3, 3]


@pytest.mark.parametrize("source", ["generation config", "config", "tokenizer", "request"])
def test_answers_end_with_their_stop_token(
    store: ModelStore, serve: Serve, tmp_path: Path, source: str
) -> None:
    free = SamplingParams(max_new_tokens=8, temperature=0.0)
    request = LLMRequest(input_ids=(3, 1, 4), sampling=free)
    unstopped = ask(serve(), [request])[0].output_ids
    stop = unstopped[4]
    end = unstopped.index(stop) + 1
    path, sampling = tmp_path / "model", free
    shutil.copytree(store.directory(QWEN3), path)
    if source == "request":
        sampling = replace(free, stop_token_ids=(stop,))
    elif source == "tokenizer":
        words = Tokenizer(WordLevel({str(token): token for token in range(stop + 1)}, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(stop)).save_pretrained(path)
    else:
        file = path / ("config.json" if source == "config" else "generation_config.json")
        eos = stop if source == "config" else [stop, 0]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": eos}))
        if source == "config":
            (path / "generation_config.json").unlink()
    engine = serve(path)
    second = LLMRequest(input_ids=(9, 9), sampling=sampling)
    response = ask(engine, [second, replace(request, sampling=sampling)])[1]
    assert response.output_ids == unstopped[:end]
    assert response.stop_reason == "stop"
    ignoring = ask(engine, [replace(request, sampling=replace(sampling, ignore_eos=True))])[0]
    assert ignoring.output_ids == (unstopped[:end] if source == "request" else unstopped)


# ------------------------------------------------------------------ weights


def update(engine: InferenceEngine, path: Path, version: int, verify: bool = False) -> None:
    engine.update_weights(WeightUpdateMeta(path=str(path), version=version, verify=verify)).result(60)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_from_disk_changes_answers_and_version(
    store: ModelStore, serve: Serve, family: str
) -> None:
    new = TinyModel(family=family, seed=1)
    engine = serve(TinyModel(family=family))
    requests = requests_for(engine, SAMPLINGS["hot"])
    before = ask(engine, requests)
    update(engine, store.directory(new), 7)
    assert engine.get_version() == 7
    after = ask(engine, requests)
    assert [r.output_ids for r in after] != [r.output_ids for r in before]
    assert [r.output_ids for r in after] == [r.output_ids for r in ask(serve(new), requests)]
    assert {v for r in after for v in r.versions} == {7}


def missing(path: Path) -> None:
    shutil.rmtree(path)


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def weightless(path: Path) -> None:
    (path / "model.safetensors").unlink()


def incomplete(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def foreign(path: Path) -> None:
    config = TinyModel(family="qwen3").config()
    config.intermediate_size += 1
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def reconfigured(path: Path) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (missing, CheckpointNotFound),
        (truncated, WeightsError),
        (weightless, WeightsError),
        (incomplete, WeightsError),
        (reconfigured, WeightsError),
        (foreign, WeightsError),
    ],
)
def test_a_failed_update_keeps_weights_and_version(
    store: ModelStore, serve: Serve, tmp_path: Path, damage: Callable[[Path], None], error: type[CoreRLError]
) -> None:
    path = tmp_path / "new"
    shutil.copytree(store.directory(TinyModel(family="qwen3", seed=1)), path)
    damage(path)
    engine = serve()
    requests = requests_for(engine, SAMPLINGS["hot"])
    before = ask(engine, requests)
    with pytest.raises(error):
        update(engine, path, 1)
    assert engine.get_version() == 0
    assert [r.output_ids for r in ask(engine, requests)] == [r.output_ids for r in before]
    assert {v for r in ask(engine, requests) for v in r.versions} == {0}


def test_changed_file_of_sealed_directory_is_refused(store: ModelStore, serve: Serve, tmp_path: Path) -> None:
    source, path = store.directory(TinyModel(family="qwen3", seed=1)), tmp_path / "sealed"

    def write(directory: Path) -> None:
        shutil.copytree(source, directory, dirs_exist_ok=True)

    write_checkpoint(str(path), write, Comm(), kind="hf")
    engine = serve()
    update(engine, path, 1, verify=True)
    file = path / "model.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[-3] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        update(engine, path, 2, verify=True)
    assert engine.get_version() == 1


def test_verify_needs_digests(store: ModelStore, serve: Serve) -> None:
    with pytest.raises(CheckpointDamaged, match="manifest"):
        update(serve(), store.directory(QWEN3), 1, verify=True)


def test_tokens_carry_version_during_updates(store: ModelStore, serve: Serve) -> None:
    paths = [store.directory(TinyModel(family="llama", seed=seed)) for seed in range(3)]
    engine = serve(paths[0])

    def ask() -> list[asyncio.Future[LLMResponse]]:
        requests = requests_for(engine, SAMPLINGS["plain"])  # anew, as each has a rid of its own
        return [asyncio.ensure_future(engine.agenerate(request)) for request in requests]

    async def scene() -> list[LLMResponse]:
        rounds = []
        for version in (1, 2):
            asked = ask()
            await asyncio.sleep(0.002)
            done = asyncio.wrap_future(
                engine.update_weights(WeightUpdateMeta(path=str(paths[version]), version=version))
            )
            asked += ask()
            await done
            asked += ask()
            rounds += await asyncio.gather(*asked)
        return rounds

    responses = asyncio.run(scene())
    assert {v for response in responses for v in response.versions} >= {1, 2}
    for response in responses:
        (version,) = set(response.versions)
        expected = plain_logprobs(paths[version], response, 1.0)
        torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, rtol=0, atol=1e-4)


def test_uploaded_weights_agree_with_trainer(store: ModelStore, serve: Serve, tmp_path: Path) -> None:
    trained = TinyModel(family="qwen3", seed=5)
    config = ReferenceConfig(model=ModelConfig(path=str(store.directory(trained))), device="cpu")
    trainer = load_engine(SPEC, config)
    trainer.initialize()
    engine = serve()
    meta = WeightUpdateMeta(path=str(tmp_path / "sync"), version=1, verify=True)
    trainer.upload_weights(meta)
    engine.update_weights(meta).result(60)
    batch = SequenceBatch.from_sequences(prompts(trained.vocab_size))
    expected = trainer.forward(batch, MicroBatchSpec(count=1), temperature=0.8)["logprobs"]
    torch.testing.assert_close(engine.score(batch, 0.8), expected, rtol=0, atol=1e-5)
    trainer.destroy()


# ------------------------------------------------------------------- scores


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_a_plain_forward(
    store: ModelStore, serve: Serve, family: str, temperature: float
) -> None:
    model = TinyModel(family=family)
    rows = prompts(model.vocab_size)
    engine = serve(model)
    batch = SequenceBatch.from_sequences(rows)
    scores = engine.score(batch, temperature).split(batch.lengths)
    top = engine.top_logprobs(batch, 4, temperature)
    tops = zip(top.ids.split(batch.lengths), top.logprobs.split(batch.lengths), strict=True)
    for ids, score, (top_ids, top_logprobs) in zip(rows, scores, tops, strict=True):
        log_p = torch.log_softmax(plain_logits(store.directory(model), ids) / temperature, -1)[:-1]
        expected = torch.cat(
            [torch.zeros(1), log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:], dtype=torch.long)]]
        )
        torch.testing.assert_close(score, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(top_logprobs[1:], log_p.topk(4).values, rtol=0, atol=1e-5)
        assert top_ids[1:].tolist() == log_p.topk(4).indices.tolist()
        assert not top_ids[0].any()


def test_scores_equal_the_log_probs_of_the_rollout(serve: Serve) -> None:
    def reward(prompt_ids: Sequence[int], output_ids: Sequence[int], data: Mapping[str, Any]) -> float:
        return float(len(output_ids))

    engine = serve()
    sampling = SamplingParams(max_new_tokens=6, temperature=1.3, top_p=0.9, seed=4)
    workflow = GroupWorkflow(reward=reward, sampling=sampling, group_size=3)
    batch = engine.rollout([{"prompt_ids": prompt} for prompt in prompts(QWEN3.vocab_size)], workflow, 60)
    scores = engine.score(batch, sampling.logprob_temperature)
    mask = batch.loss_mask
    torch.testing.assert_close(scores[mask], batch["logprobs"][mask], rtol=0, atol=1e-4)
    assert batch.num_sequences == 18


# --------------------------------------------------------- limits, life cycle


def test_limits_come_from_the_model(serve: Serve) -> None:
    limits = serve().limits
    assert (limits.vocab_size, limits.context_length) == (QWEN3.vocab_size, MAX_LENGTH)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dtype": "bfloat16"}, UnsupportedCapability),
        ({"layout": {"dp": 2}}, LayoutError),
        ({"model": {"path": "/nowhere"}}, ConfigError),
        ({"model": {"config": {"model_type": "no_such_model"}}}, ConfigError),
    ],
)
def test_unservable_requests_are_refused(fields: dict[str, Any], error: type[CoreRLError]) -> None:
    values = {"model": {"config": QWEN3.config().to_dict()}, "device": "cpu"} | fields
    with pytest.raises(error):
        load_engine(ROLLOUT_SPEC, ReferenceRolloutConfig.model_validate(values)).initialize()


def test_a_server_address_is_refused(store: ModelStore) -> None:
    config = ReferenceRolloutConfig(model=ModelConfig(path=str(store.directory(QWEN3))), device="cpu")
    with pytest.raises(ConfigError, match="no server"):
        load_engine(ROLLOUT_SPEC, config).initialize("127.0.0.1:1")


def test_a_cancelled_request_is_not_drawn(serve: Serve, batches: list[int]) -> None:
    engine = serve()

    async def scene() -> LLMResponse:
        first, second = (
            asyncio.ensure_future(engine.agenerate(request))
            for request in requests_for(engine, SAMPLINGS["plain"])[:2]
        )
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(scene()).stop_reason == "length"
    assert batches == [1]


def test_generate_error_reaches_caller(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    engine = serve()
    monkeypatch.setattr(rollout, "generate", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(engine, requests_for(engine, SAMPLINGS["plain"]))


def test_destroy_leaves_no_thread_and_no_waiting_request(serve: Serve) -> None:
    engine = serve()

    async def scene() -> None:
        request = asyncio.ensure_future(engine.agenerate(requests_for(engine, SAMPLINGS["plain"])[0]))
        await asyncio.sleep(0)
        engine.destroy()
        with pytest.raises(EngineStateError, match="destroyed"):
            await request

    asyncio.run(scene())
    ours = ("core-rl", "reference-rollout")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(ours)] == []


def test_reference_spec_is_valid_without_imports() -> None:
    assert load_backend(ROLLOUT_SPEC) is ReferenceRolloutBackend
    assert load_config(ROLLOUT_SPEC) is ReferenceRolloutConfig
    code = "import sys, core_rl.reference;print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
