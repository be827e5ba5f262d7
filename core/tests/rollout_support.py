"""An inference backend whose responses are known, and workflows that wait for the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from group_support import eventually
from torch import Tensor

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.config.engine import InferenceEngineConfig, ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import WeightsError
from core_rl.registry.spec import EngineSpec
from core_rl.rollout.workflow import TokenGenerator, pack_responses
from core_rl.seeds import derive_seed

__all__ = ["eventually"]

VOCAB, CONTEXT = 50, 32
ALL = frozenset(
    {
        Capability.SCORE,
        Capability.TOP_LOGPROBS,
        Capability.SYNC_DISK,
        Capability.PAUSE,
        Capability.RELEASE_MEMORY,
        Capability.LAUNCH_SERVER,
    }
)


def toy_spec(capabilities: frozenset[Capability] = ALL) -> EngineSpec:
    return EngineSpec(
        name="toy", kind="inference", protocol=(0, 3), factory="x:X", config="x:X", capabilities=capabilities
    )


def toy_config(**fields: Any) -> InferenceEngineConfig:
    return InferenceEngineConfig(model=ModelConfig(config={"model_type": "toy"}), **fields)


class ToyBackend(InferenceBackend[InferenceEngineConfig]):
    """Counts on from the last token of the prompt. ``answer`` may spoil a response, ``update`` an update."""

    answer: Callable[[LLMRequest, LLMResponse], LLMResponse] = staticmethod(
        lambda request, response: response
    )
    update: Callable[[WeightUpdateMeta], None] = staticmethod(lambda meta: None)

    def __init__(self) -> None:
        self.served = 0
        self.calls: list[str] = []

    def build(
        self,
        context: InferenceContext[InferenceEngineConfig],
        addresses: tuple[str, ...],
        ft_spec: FinetuneSpec,
    ) -> ModelLimits:
        self.addresses = addresses
        return ModelLimits(vocab_size=VOCAB, context_length=CONTEXT)

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        count, last = request.sampling.max_new_tokens, request.input_ids[-1]
        await asyncio.sleep(0)
        response = LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=tuple((last + 1 + i) % VOCAB for i in range(count)),
            logprobs=(-0.5,) * count,
            versions=(self.served,) * count,
            stop_reason="length",
        )
        return self.answer(request, response)

    def set_version(self, version: int) -> None:
        self.served = version

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self.update(meta)
        self.served = meta.version

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        values = torch.full((batch.num_tokens,), -temperature)
        values[batch.cu_seqlens[:-1].long()] = 0
        return values

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        ids = torch.zeros(batch.num_tokens, k, dtype=torch.long)
        return TopLogprobs(ids=ids, logprobs=torch.zeros(batch.num_tokens, k))

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def release_memory(self) -> None:
        self.calls.append("release")

    def resume_memory(self) -> None:
        self.calls.append("resume_memory")

    def launch_server(self, context: InferenceContext[InferenceEngineConfig], count: int) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{9000 + i}" for i in range(count))

    def teardown(self) -> None:
        self.calls.append("teardown")


def toy_engine(
    backend: ToyBackend | None = None, spec: EngineSpec | None = None, **fields: Any
) -> InferenceEngine:
    """An engine over ``backend``, with these fields of the config; not initialized."""
    return InferenceEngine(spec or toy_spec(), toy_config(**fields), backend or ToyBackend())


def refuse(meta: WeightUpdateMeta) -> None:
    raise WeightsError(f"cannot read {meta.path}")


def one_token(value: int, **fields: Tensor) -> SequenceBatch:
    return SequenceBatch.from_sequences([[value]], sequences=fields)


class GatedWorkflow:
    """Episodes that run until `release` names their ``data["key"]``; starts and ends are recorded."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.released: set[int] = set()
        self.cancelled: list[int] = []
        self.reject: set[int] = set()
        self.fail: set[int] = set()
        self._changed = threading.Condition()

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        key = data["key"]
        with self._changed:
            self.started.append(key)
            self._changed.notify_all()
        try:
            while key not in self.released:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        if key in self.fail:
            raise ValueError(f"no luck with {key}")
        return None if key in self.reject else one_token(key)

    def release(self, *keys: int) -> None:
        self.released.update(keys)

    def wait_started(self, count: int) -> list[int]:
        """Wait until ``count`` have started, and a little longer for any that should not have."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, 60), self.started
        time.sleep(0.05)
        return sorted(self.started)


def keys(*values: int) -> list[dict[str, int]]:
    return [{"key": value} for value in values]


@dataclass(frozen=True, kw_only=True)
class GroupWorkflow:
    """``group_size`` completions of one prompt, each with a reward; a seed is derived for each."""

    reward: Callable[[Sequence[int], Sequence[int], Mapping[str, Any]], float]
    sampling: SamplingParams
    group_size: int = 1

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        prompt, seed = tuple(data["prompt_ids"]), self.sampling.seed
        responses = await asyncio.gather(
            *(
                engine.agenerate(
                    LLMRequest(
                        input_ids=prompt,
                        sampling=self.sampling
                        if seed is None
                        else replace(self.sampling, seed=derive_seed(seed, episode, member)),
                    )
                )
                for member in range(self.group_size)
            )
        )
        return pack_responses(responses).with_sequences(
            rewards=torch.tensor([self.reward(prompt, one.output_ids, data) for one in responses]),
            group=torch.full((self.group_size,), episode),
        )
