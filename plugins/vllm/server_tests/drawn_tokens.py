"""Expected tokens of real servers: log-probs of the oracle, and updates that reach requests in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from server_stub import complete_during
from vllm_support import backend_of

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse, SamplingParams
from core_rl.engine.inference import InferenceEngine
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.procedures.streaming import tensors_of
from core_rl_oracle.oracle import Oracle

BATCH = SequenceBatch.from_sequences([[5, 8, 2, 9, 11], [7, 1, 150], list(range(64))])
LENGTH = 900
"""Tokens of requests that are in flight while something happens."""
LONG = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
TOLERANCE = 5e-5


def logprobs_of(model: str, row: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the oracle for all tokens at positions after the first, ``[L - 1, V]``."""
    with torch.no_grad():
        logits = Oracle(Path(model)).model(input_ids=torch.tensor([row])).logits[0, :-1]
    return torch.log_softmax(logits / temperature, -1)


def require_serves(engine: InferenceEngine, model: str) -> None:
    """The log-probs of ``BATCH`` by ``model``."""
    expected = []
    for row in (row.tolist() for row in BATCH.input_ids.split(BATCH.lengths)):
        selected = logprobs_of(model, row).gather(1, torch.tensor(row[1:])[:, None]).squeeze(1)
        expected += [torch.zeros(1, dtype=selected.dtype), selected]
    torch.testing.assert_close(engine.score(BATCH), torch.cat(expected).float(), atol=TOLERANCE, rtol=0)


def require_drawn_by(model: str, response: LLMResponse, first: int, last: int, temperature: float) -> None:
    """Tokens ``first`` to ``last`` of ``response`` have the log-probs of ``model``."""
    row = [*response.input_ids, *response.output_ids]
    full = logprobs_of(model, row, temperature)[len(response.input_ids) - 1 :]
    for index in range(first, last):
        expected = full[index, response.output_ids[index]].item()
        assert response.logprobs[index] == pytest.approx(expected, abs=TOLERANCE)


def check_update_in_flight(engine: InferenceEngine, before: str, new: str, meta: WeightUpdateMeta) -> None:
    """Requests in flight get the weights of the model ``new`` by ``meta``; each token has its version and log-prob."""
    old, version = engine.get_version(), meta.version

    def update() -> None:
        backend = backend_of(engine)
        # They wait for the update, however long it takes to come.
        backend.loop.wait(backend.servers[0].pause("continue"))
        arrival = engine.update_weights(meta)
        if meta.method != "disk":
            weight_update(meta).send(iter(tensors_of(Path(new)).items()))
        arrival.result(60)

    requests = [LLMRequest(input_ids=(1, 2, number), sampling=LONG) for number in range(4)]
    actual = complete_during(engine, update, *requests)
    assert any(set(response.versions) == {old, version} for response in actual), "the update missed them all"
    for response in actual:
        assert set(response.versions) <= {old, version}
        change = response.versions.index(version) if version in response.versions else LENGTH
        require_drawn_by(before, response, 0, change, 1.0)
        require_drawn_by(new, response, change, LENGTH, 1.0)
    require_serves(engine, new)
