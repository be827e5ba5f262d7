"""Experts that are spread over ranks give the gradients of the plain model, whatever their routers choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import ModelConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import LayoutError, LossError, UnsupportedCapability
from core_rl.launch.group import EngineGroup
from core_rl.toolkit.dtensor import local_part
from core_rl_fsdp import sharding
from core_rl_fsdp.engine import FSDPBackend

LOSS, BUDGET = support.LOSS, support.BUDGET
MODELS: dict[str, dict[str, Any]] = {
    "six": support.MOE,
    # Two of them on each of two ranks, so that the ranks with the same ones can have one each.
    "four": support.MOE | {"num_experts": 4},
    # A width that no grouped product takes.
    "loop": support.MOE | {"moe_intermediate_size": 14},
}
CASES: dict[str, tuple[str, ParallelLayout, dict[str, Any]]] = {
    "dp2": ("six", ParallelLayout(dp=2), {}),
    "dp2ep2": ("six", ParallelLayout(dp=2, ep=2), {}),
    "dp2ep2-last": (
        "six",
        ParallelLayout(dp=2, ep=2),
        {"reduce_scatter": "last", "activation_offload": True, "reshard_after_forward": False},
    ),
    "dp4ep2": ("six", ParallelLayout(dp=4, ep=2), {"gradient_checkpointing": True}),
    "dp4ep2-four": ("four", ParallelLayout(dp=4, ep=2), {"reduce_scatter": "last"}),
    "dp4ep4-four": ("four", ParallelLayout(dp=4, ep=4), {}),
    "dp2ep2-loop": ("loop", ParallelLayout(dp=2, ep=2), {"gradient_checkpointing": True}),
    "dp4ep2-loop": ("loop", ParallelLayout(dp=4, ep=2), {}),
    "cp2ep2": ("six", ParallelLayout(cp=2, ep=2), {}),
    "dp2cp2ep4-four": ("four", ParallelLayout(dp=2, cp=2, ep=4), {"gradient_checkpointing": True}),
    "hybrid": ("six", ParallelLayout(dp=4, ep=2), {"replicas": 2, "reduce_scatter": "last"}),
}
SPREAD = [name for name, (_, layout, _) in CASES.items() if layout.ep > 1]
Expected = dict[tuple[str, str], tuple[dict[str, Tensor], float]]


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup("fsdp", support.fsdp_config(4), timeout_s=60) as ranks:
        yield ranks


def config_of(case: str, **changes: Any) -> Any:
    model, layout, options = CASES[case]
    return support.fsdp_config(layout, model=MODELS[model], **{**options, **changes})


def one_sided() -> SequenceBatch:
    """A batch whose tokens all go to the first two experts, in both layers."""
    data = support.make_batch(0)
    selected = torch.tensor([0, 1]).expand(data.num_tokens, 2, 2)
    return data.with_tokens(routing=selected.clone())


BATCHES = {"own": support.make_batch(0), "one-sided": one_sided()}


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Gradients and their norm from the reference engine, by model and batch."""
    actual: Expected = {}
    with EngineGroup("reference", support.reference_config()) as plain:
        for name, model in MODELS.items():
            for kind, batch in BATCHES.items():
                plain.initialize(config=support.reference_config(model))
                plain.forward_backward(batch, LOSS, MicroBatchSpec(count=1))
                actual[name, kind] = plain.named_tensors("grads"), plain.optimizer_step()["grad_norm"]
    return actual


SHORT = ("dp2ep2-last", "dp4ep2", "dp4ep2-four", "dp2ep2-loop", "dp2cp2ep4-four", "hybrid")
"""Between them, they have every option, both kernels and both ways to shard experts."""


def in_turn(cases: Sequence[str]) -> list[Any]:
    """The short ones, and all others at night."""
    return [case if case in SHORT else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("case", in_turn(SPREAD))
def test_gradients_equal_the_plain_model(
    group: EngineGroup, expected: Expected, case: str, kind: str
) -> None:
    """Also where routers leave ranks without tokens for their experts."""
    group.initialize(config=config_of(case))
    group.forward_backward(BATCHES[kind], LOSS, BUDGET)
    required, norm = expected[CASES[case][0], kind]
    grads = group.named_tensors("grads")
    torch.testing.assert_close(grads, required, rtol=1e-4, atol=1e-6)
    assert group.optimizer_step()["grad_norm"] == pytest.approx(norm, rel=1e-5)


def logprobs(group: EngineGroup, batch: SequenceBatch) -> Tensor:
    actual: Tensor = group.forward(batch, BUDGET)["logprobs"]
    return actual


@pytest.mark.parametrize("case", ["dp4ep2", "dp2cp2ep4-four"])
def test_ranks_without_sequences_compute_their_experts(group: EngineGroup, case: str) -> None:
    """One rank has a long sequence, and the others a token that stands for none."""
    batch = support.make_batch(1, lengths=(23,))
    actual = []
    for name in (case, "dp2"):
        group.initialize(config=support.fsdp_config(CASES[name][1], model=MODELS[CASES[case][0]]))
        group.forward_backward(batch, LOSS, BUDGET)
        actual.append((group.named_tensors("grads"), logprobs(group, batch)))
    (spread, ours), (plain, theirs) = actual
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread, plain, rtol=1e-4, atol=1e-6)


def test_forward_only_role_computes_the_same(group: EngineGroup) -> None:
    """With weights in bfloat16."""
    trained = config_of("dp4ep2", dtype="bfloat16")
    actual = []
    for config in (trained, trained.model_copy(update={"optimizer": None})):
        group.initialize(config=config)
        actual.append(logprobs(group, BATCHES["own"]))
    assert torch.equal(*actual)


def misplaced(engine: TrainEngine) -> list[str]:
    """Parameters of which the part on this rank is not what `local_part` says, and experts that are not spread."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    actual = []
    for name, parameter in backend.model.named_parameters():
        part = local_part(parameter)
        complete: Any = parameter
        if not torch.equal(complete.full_tensor()[part.region], part.tensor):
            actual.append(name)
        if ".experts." in name and 4 * part.tensor.numel() != parameter.numel() * _copies(engine):
            actual.append(f"{name}: {list(part.tensor.shape)}")
    return actual


def _copies(engine: TrainEngine) -> int:
    config: Any = engine.config
    return int(config.options.replicas) * 4 // int(config.layout.world_size)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", in_turn(SPREAD))
def test_experts_are_sharded_evenly(group: EngineGroup, case: str) -> None:
    """And knows where it lies, against torch's own gathering; also where their number does not divide."""
    group.initialize(config=config_of(case))
    assert group.run(misplaced) == [[]] * CASES[case][1].world_size


MOVES = [("dp2", "dp4ep2"), ("dp4ep2", "hybrid"), ("dp4ep2-four", "dp4ep4-four"), ("hybrid", "dp2ep2")]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", ["sharded", pytest.param("portable", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_checkpoint_moves_between_degrees(
    group: EngineGroup, tmp_path: Path, before: str, after: str, form: CheckpointFormat
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "saved"), format=form)
    group.initialize(config=config_of(before))
    group.train_batch(BATCHES["own"], LOSS, BUDGET)
    group.save(meta)
    saved = support.state(group)
    loss = group.train_batch(support.make_batch(1), LOSS, BUDGET)["loss"]
    group.initialize(config=config_of(after))
    group.load(meta)
    assert support.equal(support.state(group), saved)
    actual = group.train_batch(support.make_batch(1), LOSS, BUDGET)["loss"]
    assert actual == pytest.approx(loss, rel=1e-5)


# ------------------------------------------------------------------ loading


READ: set[int] = set()
"""Experts of which this rank has read weights."""


def note_reads(engine: TrainEngine) -> None:
    original = TensorFiles.read

    def noted(self: TensorFiles, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        if ".experts." in name:
            READ.add(int(name.split(".experts.")[1].split(".", maxsplit=1)[0]))
        return original(self, name, slices)

    TensorFiles.read = noted  # type: ignore[method-assign]


def experts_read(engine: TrainEngine) -> set[int]:
    return READ


def test_each_rank_reads_its_own_experts_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**support.MOE), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = config_of("dp2ep2").model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    with EngineGroup("fsdp", support.fsdp_config(2), timeout_s=60) as ranks:
        ranks.run(note_reads)
        ranks.initialize(config=config)
        assert ranks.run(experts_read) == [{0, 1, 2}, {3, 4, 5}]
        loaded = ranks.named_tensors("master")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(
        loaded["model.layers.1.mlp.experts.4.up_proj.weight"], model.get_parameter(name)[4, 16:]
    )


# ------------------------------------------------------------------ failures


def test_engine_works_after_loss_raises(group: EngineGroup) -> None:
    group.initialize(config=config_of("dp2ep2-last"))
    batch = support.make_batch(1, lengths=(9, 30, 9, 30))
    batch.input_ids.clamp_(max=support.VOCABULARY - 2)
    batch.input_ids[11] = support.VOCABULARY - 1
    group.forward_backward(batch, LOSS, BUDGET)
    required = group.named_tensors("grads")
    group.optimizer_zero_grad()
    with pytest.raises(LossError, match=r"rank \d: ZeroDivisionError: the loss divides by zero"):
        group.forward_backward(batch, LossSpec(fn=support.sometimes_raising, outputs=LOSS.outputs), BUDGET)
    group.optimizer_zero_grad()
    group.forward_backward(batch, LOSS, BUDGET)
    assert support.equal(group.named_tensors("grads"), required)


MOE = ParallelLayout(dp=2, ep=2)
REFUSED = [
    ("six", ParallelLayout(dp=4, ep=4), {}, LayoutError, "ep=4 does not divide the 6 experts of"),
    ("dense", MOE, {}, LayoutError, "ep=2 for Qwen3ForCausalLM, which has no experts"),
    ("six", ParallelLayout(dp=2, ep=2), {"replicas": 2}, LayoutError, r"must divide dp / replicas \* cp = 1"),
    ("six", ParallelLayout(tp=2, ep=2), {}, LayoutError, r"must divide dp / replicas \* cp = 1"),
    ("six", ParallelLayout(dp=2, tp=2, ep=2), {}, UnsupportedCapability, "set tp to 1"),
]


@pytest.mark.parametrize(("model", "layout", "options", "error", "says"), REFUSED)
def test_unfit_expert_layout_is_refused(
    group: EngineGroup,
    model: str,
    layout: ParallelLayout,
    options: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    config = support.fsdp_config(layout, model={**MODELS, "dense": support.TINY}[model], **options)
    with pytest.raises(error, match=says):
        group.initialize(config=config)


# ------------------------------------------------------------------ other options


@pytest.mark.nightly
def test_compiled_blocks_give_the_same_gradients() -> None:
    actual = []
    with EngineGroup("fsdp", config_of("dp2ep2"), timeout_s=400) as ranks:
        for compiled in (False, True):
            ranks.initialize(config=config_of("dp2ep2", compile=compiled))
            ranks.forward_backward(BATCHES["own"], LOSS, BUDGET)
            actual.append(ranks.named_tensors("grads"))
    torch.testing.assert_close(*actual, rtol=1e-4, atol=1e-6)


def test_frozen_experts_pass_gradients_on(group: EngineGroup) -> None:
    actual = []
    for case in ("dp2", "dp2ep2"):
        config = config_of(case)
        frozen = config.model.model_copy(update={"frozen": ("*.experts.*", "model.layers.1.*")})
        group.initialize(config=config.model_copy(update={"model": frozen}))
        group.forward_backward(BATCHES["one-sided"], LOSS, BUDGET)
        actual.append(group.named_tensors("grads"))
    plain, spread = actual
    assert not any(".experts." in name for name in spread)
    torch.testing.assert_close(spread, plain, rtol=1e-4, atol=1e-6)


def prefetched(engine: TrainEngine) -> None:
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    sharding._prefetch([module for module in backend.model.modules() if hasattr(module, "self_attn")])


def test_prefetched_experts_give_the_same_gradients(group: EngineGroup) -> None:
    """Prefetch as on CUDA."""
    actual = []
    for prefetch in (False, True):
        group.initialize(config=config_of("dp4ep2"))
        if prefetch:
            group.run(prefetched)
        group.forward_backward(BATCHES["own"], LOSS, BUDGET)
        actual.append(group.named_tensors("grads"))
    assert support.equal(*actual)
