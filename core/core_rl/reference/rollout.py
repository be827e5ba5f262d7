"""The reference inference engine: a plain Hugging Face model in this process, through ``generate``.

Everything that touches the model runs on one worker thread, in order: batches of requests, scores
and weight updates. A batch is therefore drawn by one version of the weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from core_rl.backend.inference_backend import InferenceBackend, InferenceContext, ModelLimits, TopLogprobs
from core_rl.backend.meta import FinetuneSpec, WeightUpdateMeta
from core_rl.backend.tensors import TensorDict, check_source
from core_rl.checkpoint.directory import open_update
from core_rl.checkpoint.end_tokens import end_tokens
from core_rl.config.engine import ModelConfig
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import NO_MEDIA
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.distributed.comm import Comm
from core_rl.distributed.devices import chosen_device, give_back_cache
from core_rl.distributed.loop_thread import Handover
from core_rl.engine.delta_files import open_delta_update
from core_rl.errors import ConfigError, EngineStateError, WeightsError
from core_rl.reference import ReferenceRolloutConfig
from core_rl.reference.sampling import Completion, generate
from core_rl.seeds import derive_seed
from core_rl.state.store import digest_of_parts
from core_rl.toolkit.build import build_model
from core_rl.toolkit.hf_state import HFShardedState, fill
from core_rl.toolkit.lora import ADAPTER_PREFIX, checkpoint_name
from core_rl.toolkit.model_files import carried_tensors
from core_rl.toolkit.positions import rotary_modules
from core_rl.toolkit.vision import sequence_arguments
from core_rl.weight_sync.delta import DeltaDecoder
from core_rl.weight_sync.update import weight_update

_Row = TypeVar("_Row")
_Result = TypeVar("_Result")

RECEIVE_TIMEOUT_S = 300.0
"""The longest wait of an update, by any method but ``disk``, for its sender."""


class ReferenceRolloutBackend(InferenceBackend[ReferenceRolloutConfig]):
    """One process, float32, eager. Concurrent requests with equal sampling parameters share a batch.

    The draws of a request with a seed depend on nothing but the weights; a request without one takes the
    next seed of ``config.seed``.
    """

    _worker: ThreadPoolExecutor | None = None

    def build(
        self,
        context: InferenceContext[ReferenceRolloutConfig],
        addresses: tuple[str, ...],
        ft_spec: FinetuneSpec,
    ) -> ModelLimits:
        if addresses:
            raise ConfigError(f"the reference engine has no server; remove the addresses {addresses}")
        self.config = context.config
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="reference-rollout")
        self._queue: deque[tuple[LLMRequest, Future[LLMResponse]]] = deque()
        self._will_drain = False
        self._handover = Handover()
        self._unseeded = 0
        self._served_version = 0
        self._received = DeltaDecoder()
        model = self._load(self.config.model)
        self._eos_token_ids = end_tokens(model.config, self.config.model.path)
        self._adopt(model)
        return ModelLimits.of(model.config, self.config.model.vision)

    def _load(self, model: ModelConfig) -> PreTrainedModel:
        return build_model(model, seed=self.config.seed, attn_implementation="eager")

    def _adopt(self, model: PreTrainedModel) -> None:
        # A published generation config may hold penalties and forced tokens; a request has all parameters.
        model.generation_config = GenerationConfig()
        torch.nn.Module.to(model, self._device())
        self._model = model
        # Where rotary frequencies depend on the length, a batch has the frequencies of its longest prompt.
        self._batch_size = 1 if rotary_modules(model) else self.config.max_batch_size

    def _device(self) -> torch.device:
        return chosen_device(self.config.device, self.config.devices[0] if self.config.devices else None)

    def teardown(self) -> None:
        if self._worker is not None:
            self._on_worker(self._refuse_queued)
            self._worker.shutdown()
            self._worker = None

    def _on_worker(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of ``work(*arguments)`` on the worker thread, after all that was submitted before."""
        assert self._worker is not None
        return self._worker.submit(work, *arguments).result()

    def _refuse_queued(self) -> None:
        for _, future in self._queue:
            if future.set_running_or_notify_cancel():
                future.set_exception(
                    EngineStateError("the engine was destroyed before it came to this request")
                )

    # ------------------------------------------------------------- generation

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        future: Future[LLMResponse] = Future()
        ended: asyncio.Future[Future[LLMResponse]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(self._handover.set_result, ended))
        self._queue.append((request, future))
        try:
            # Whatever else is ready to run queues its requests first, so that they share a batch.
            await asyncio.sleep(0)
            if not future.done() and not self._will_drain:
                assert self._worker is not None
                self._will_drain = True
                self._worker.submit(self._drain)
            return (await ended).result()
        finally:
            future.cancel()

    def _drain(self) -> None:
        """On the worker: complete all queued requests."""
        self._will_drain = False  # a request that is queued from now on may come too late for this call
        groups: dict[tuple[object, ...], list[tuple[LLMRequest, Future[LLMResponse]]]] = {}
        for _ in range(len(self._queue)):
            request, future = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                key = tuple(value for name, value in vars(request.sampling).items() if name != "seed")
                groups.setdefault(key, []).append((request, future))
        size = self._batch_size
        for entries in groups.values():
            for start in range(0, len(entries), size):
                self._complete(entries[start : start + size])

    def _complete(self, entries: Sequence[tuple[LLMRequest, Future[LLMResponse]]]) -> None:
        requests = [request for request, _ in entries]
        try:
            completions = generate(
                self._model,
                [request.input_ids for request in requests],
                requests[0].sampling,
                [self._seed(request.sampling) for request in requests],
                self._eos_token_ids,
                self._tokenizer if requests[0].sampling.stop else None,
                [request.media for request in requests],
            )
        except Exception as error:  # noqa: BLE001  (the thread's boundary: the caller of agenerate raises it)
            for _, future in entries:
                future.set_exception(error)
            return
        for (request, future), completion in zip(entries, completions, strict=True):
            future.set_result(self._response(request, completion))

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """For texts that end a response; read when the first request has some."""
        path = self.config.model.path
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"sampling with stop = TEXTS needs a tokenizer, and {path!r} has none; use stop_token_ids"
            ) from error
        return tokenizer

    def _response(self, request: LLMRequest, completion: Completion) -> LLMResponse:
        return LLMResponse(
            rid=request.rid,
            input_ids=request.input_ids,
            output_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=(self._served_version,) * len(completion.ids),
            stop_reason=completion.stop_reason,
        )

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed
        self._unseeded += 1
        return derive_seed(self.config.seed, self._unseeded)

    # ---------------------------------------------------------------- weights

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.delta:
            self._receive_changes(meta)
            return
        self._received.forget()
        if meta.method == "disk":
            self._on_worker(self._install_from_disk, meta)
            return
        if meta.method == "lora":
            self._receive_adapter(meta)
            return
        with weight_update(meta).receive_copies(RECEIVE_TIMEOUT_S) as buckets:
            # Requests use the old weights until all of the new ones have arrived.
            tensors = {name: tensor for bucket in buckets for name, tensor in bucket}
            self._on_worker(self._install_tensors, tensors, meta.version)

    def _receive_changes(self, meta: WeightUpdateMeta) -> None:
        if meta.method == "disk":
            with open_delta_update(meta) as update:
                self._install_changes(update.items(), meta)
            return
        with weight_update(meta, base=self._received.base).receive_copies(RECEIVE_TIMEOUT_S) as buckets:
            self._install_changes((item for bucket in buckets for item in bucket), meta)

    def _install_changes(self, items: Iterable[tuple[str, Tensor]], meta: WeightUpdateMeta) -> None:
        weights = self._received.decode(items)
        self._on_worker(self._install_tensors, weights.tensors, meta.version)
        self._received.commit(weights, meta.version)

    def _receive_adapter(self, meta: WeightUpdateMeta) -> None:
        lora = self.config.model.lora
        assert lora is not None  # the core asks only then
        with weight_update(meta).receive(RECEIVE_TIMEOUT_S) as received:
            assert received.adapter is not None
            received.adapter.require_fit(lora, self._base_digest)
            factors = {name: tensor.clone() for bucket in received for name, tensor in bucket}
            self._on_worker(self._install_adapter, factors, meta.version)

    def _base_digest(self) -> str:
        state = HFShardedState(self._model, None, {}, Comm())
        return digest_of_parts(Comm(), ((part.name, part.tensor) for part in state.local("params")))

    @torch.no_grad()
    def _install_adapter(self, factors: Mapping[str, Tensor], version: int) -> None:
        written = {checkpoint_name(name): value for name, value in self._model.named_parameters()}
        adapter = {name: value for name, value in written.items() if name.startswith(ADAPTER_PREFIX)}
        check_source(
            TensorDict(factors),
            {name: tuple(value.shape) for name, value in adapter.items()},
            "the adapter that was sent",
        )
        for name, value in adapter.items():
            value.copy_(factors[name])
        self._served_version = version

    def _install_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        state, sent = HFShardedState(self._model, None, {}, Comm()), TensorDict(tensors)
        expected = state.shapes("master") | state.shapes("buffers")
        # This engine does not serve carried tensors, and an update has them all the same.
        carried = carried_tensors(self._model, self.config.model, expected)
        carried_shapes = {} if carried is None else {name: carried.shape(name) for name in carried.names()}
        check_source(sent, expected | carried_shapes, "the weights that were sent")
        fill(state, "master", sent)
        fill(state, "buffers", sent)
        self._served_version = version

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        with open_update(meta) as directory:
            try:
                model = self._load(ModelConfig(path=str(directory), vision=self.config.model.vision))
            except ConfigError as error:
                raise WeightsError(f"the weights in {meta.path!r} cannot be read: {error}") from error
        expected = {name: tuple(value.shape) for name, value in self._model.named_parameters()}
        check_source(TensorDict(dict(model.named_parameters())), expected, f"the weights in {meta.path!r}")
        self._adopt(model)
        self._served_version = meta.version

    def release_memory(self) -> None:
        self._on_worker(torch.nn.Module.to, self._model, torch.device("cpu"))
        give_back_cache(self._device())

    def resume_memory(self) -> None:
        self._on_worker(torch.nn.Module.to, self._model, self._device())

    def set_version(self, version: int) -> None:
        # On the worker, since a batch has one version.
        self._on_worker(setattr, self, "_served_version", version)

    # ----------------------------------------------------------------- scores

    def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        def chosen(ids: Tensor, log_p: Tensor) -> Tensor:
            return F.pad(log_p.gather(1, ids[1:, None]).squeeze(1), (1, 0))

        return torch.cat(self._on_worker(self._for_each, batch, temperature, chosen))

    def top_logprobs(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        def top(_ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = log_p.topk(k, dim=-1)
            return F.pad(indices, (0, 0, 1, 0)), F.pad(values, (0, 0, 1, 0))

        rows = self._on_worker(self._for_each, batch, temperature, top)
        return TopLogprobs(ids=torch.cat([i for i, _ in rows]), logprobs=torch.cat([v for _, v in rows]))

    def _for_each(
        self, batch: SequenceBatch, temperature: float, read: Callable[[Tensor, Tensor], _Row]
    ) -> list[_Row]:
        """On the worker: ``read(ids [L], log-probs [L - 1, V] that predict ids[1:])`` of each sequence alone."""
        results = []
        with torch.inference_mode():
            media = batch.media or (NO_MEDIA,) * batch.num_sequences
            for row, images in zip(batch.input_ids.split(batch.lengths), media, strict=True):
                ids = row.to(self._model.device)
                arguments = sequence_arguments(self._model.base_model, ids[None], images)
                logits = self._model(input_ids=ids[None], use_cache=False, **arguments).logits[0, :-1].float()
                results.append(read(ids, torch.log_softmax(logits / temperature, dim=-1)))
        return results
