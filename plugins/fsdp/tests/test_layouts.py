"""Every layout of the FSDP engine gives the gradients, norms and training of the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_support as support
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.backend.tensors import TensorDict
from core_rl.config.layout import ParallelLayout
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import OutputName
from core_rl.engine.train import TrainEngine
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.launch.group import EngineGroup
from core_rl.toolkit.dtensor import local_part
from core_rl.toolkit.footprint import footprint_of
from core_rl_conformance.inputs.tiny_models import TinyModel, build
from core_rl_fsdp import sharding
from core_rl_fsdp.engine import FSDPBackend
from core_rl_fsdp.tensor_parallel import check_sequence_parallel, check_tensor_parallel

LOSSES = {"lm": support.LOSS, "value": LossSpec(fn=support.squared_values, outputs=("values",))}
BUDGET = support.BUDGET
MODELS = {"tiny": support.TINY, "uneven": support.UNEVEN, "gpt2": support.GPT2}
STEPS = 50

CASES: dict[str, tuple[str, ParallelLayout, dict[str, Any]]] = {
    "one": ("tiny", ParallelLayout(), {}),
    "dp4": ("tiny", ParallelLayout(dp=4), {"gradient_checkpointing": True, "reshard_after_forward": False}),
    "tp2": ("tiny", ParallelLayout(tp=2), {}),
    "tp2-sp-checkpointing": (
        "tiny",
        ParallelLayout(tp=2, sequence_parallel=True),
        {"gradient_checkpointing": True},
    ),
    "uneven-tp4": ("uneven", ParallelLayout(tp=4), {}),
    "uneven-tp4-sp": ("uneven", ParallelLayout(tp=4, sequence_parallel=True), {}),
    "uneven-dp2tp2": ("uneven", ParallelLayout(dp=2, tp=2), {"reduce_scatter": "last"}),
    "cp4-two-kv-heads": ("tiny", ParallelLayout(cp=4), {}),
    "gpt2-cp2": ("gpt2", ParallelLayout(cp=2), {"gradient_checkpointing": True}),
    "dp2cp2": ("uneven", ParallelLayout(dp=2, cp=2), {}),
    "tp2cp2-sp": ("tiny", ParallelLayout(tp=2, cp=2, sequence_parallel=True), {}),
    "hybrid": ("tiny", ParallelLayout(dp=4), {"replicas": 2, "reduce_scatter": "last"}),
    "replicated": ("tiny", ParallelLayout(dp=2), {"replicas": 2}),
    "dp2tp2": ("tiny", ParallelLayout(dp=2, tp=2), {}),
    "hybrid-tp2": ("uneven", ParallelLayout(dp=2, tp=2), {"replicas": 2}),
}
Expected = dict[tuple[str, str], tuple[dict[str, Tensor], float]]


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    """Four ranks that every test initialises as it needs."""
    with EngineGroup("fsdp", support.fsdp_config(4), timeout_s=120) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Gradients and their norm from the reference engine, by model and head."""
    actual: Expected = {}
    with EngineGroup("reference", support.reference_config()) as plain:
        for name, model in MODELS.items():
            for head, loss in LOSSES.items():
                plain.initialize(config=support.reference_config(model, head))
                plain.forward_backward(support.make_batch(0), loss, MicroBatchSpec(count=1))
                actual[name, head] = plain.named_tensors("grads"), plain.optimizer_step()["grad_norm"]
    return actual


@pytest.mark.sampled(6)
@pytest.mark.parametrize("head", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_plain_model(
    group: EngineGroup, expected: Expected, case: str, head: str
) -> None:
    model, layout, options = CASES[case]
    group.initialize(config=support.fsdp_config(layout, head=head, model=MODELS[model], **options))
    group.forward_backward(support.make_batch(0), LOSSES[head], BUDGET)
    required, norm = expected[model, head]
    grads = group.named_tensors("grads")
    torch.testing.assert_close(grads, required, rtol=1e-4, atol=1e-6)
    assert group.optimizer_step()["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("case", ["dp4", "uneven-tp4-sp", "tp2cp2-sp"])
def test_hidden_states_equal_the_plain_model(group: EngineGroup, case: str) -> None:
    model, layout, options = CASES[case]
    group.initialize(config=support.fsdp_config(layout, model=MODELS[model], **options))
    actual = group.forward(support.make_batch(0), BUDGET, ("hidden_states",))
    with EngineGroup("reference", support.reference_config(MODELS[model])) as plain:
        expected = plain.forward(support.make_batch(0), BUDGET, ("hidden_states",))
    torch.testing.assert_close(actual["hidden_states"], expected["hidden_states"])


def count_all_reduces(engine: TrainEngine, batch: SequenceBatch, loss: LossSpec, parts: int) -> int:
    """Sums over the replicas in one pass of ``parts`` micro-batches."""
    original, calls = dist.all_reduce, [0]

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[0] += tensor.dtype == torch.float32 and tensor.numel() > 1
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        engine.forward_backward(engine.shard_data(batch), loss, MicroBatchSpec(count=parts))
    finally:
        dist.all_reduce = original
    return calls[0]


def test_replicas_add_up_gradients_once_in_a_pass(group: EngineGroup) -> None:
    counts = []
    for parts in (1, 3):
        group.initialize(config=support.fsdp_config(4, replicas=2))
        counts.append(group.run(count_all_reduces, support.make_batch(0), LOSSES["lm"], parts))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0


@pytest.mark.parametrize(("model", "separate"), [("uneven", True), ("tiny", False)])
def test_untied_ends_are_gathered_separately(group: EngineGroup, model: str, separate: bool) -> None:
    """A tied weight is needed at the beginning and at the end of a pass."""
    group.initialize(config=support.fsdp_config(4, model=MODELS[model]))
    assert group.run(ends_are_apart) == [[separate, separate]] * 4


def ends_are_apart(engine: TrainEngine) -> list[bool]:
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    model = backend.packed.model
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [isinstance(end, FSDPModule) for end in ends]


def gathered_at_the_first_block(engine: TrainEngine) -> list[bool]:
    """Whether the embedding and the head have all of their weights when the first block computes."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    model, actual = backend.packed.model, list[bool]()

    def note(*_: object) -> None:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        actual.extend(not isinstance(end.get_parameter("weight"), DTensor) for end in ends)

    with model.base_model.get_submodule("layers.0").register_forward_pre_hook(note):
        engine.forward(support.make_batch(0), MicroBatchSpec(count=1))
    return actual


def test_the_head_is_gathered_when_it_is_needed(group: EngineGroup) -> None:
    group.initialize(config=support.fsdp_config(4, model=MODELS["uneven"]))
    assert group.run(gathered_at_the_first_block) == [[False, False]] * 4


@pytest.mark.parametrize("model", ["tiny", "uneven"])
def test_prefetched_weights_give_the_same_gradients(group: EngineGroup, model: str) -> None:
    """Prefetch as on CUDA, where each part gathers the next part's weights."""
    group.initialize(config=support.fsdp_config(4, model=MODELS[model]))
    group.forward_backward(support.make_batch(0), LOSSES["lm"], BUDGET)
    required = group.named_tensors("grads")
    group.initialize(config=support.fsdp_config(4, model=MODELS[model]))
    group.run(prefetch)
    group.forward_backward(support.make_batch(0), LOSSES["lm"], BUDGET)
    assert support.equal(group.named_tensors("grads"), required)


def prefetch(engine: TrainEngine) -> None:
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    sharding._prefetch(
        [module for module in backend.packed.model.modules() if isinstance(module, FSDPModule)]
    )


MOVES = [
    ("uneven-tp4", "dp2cp2"),
    ("dp2cp2", "uneven-dp2tp2"),
    *(
        pytest.param(before, after, marks=pytest.mark.nightly)
        for before, after in [
            ("uneven-dp2tp2", "uneven-tp4-sp"),
            ("hybrid-tp2", "uneven-tp4"),
            ("tp2", "hybrid"),
            ("one", "dp4"),
            ("hybrid", "cp4-two-kv-heads"),
            ("tp2cp2-sp", "replicated"),
        ]
    ),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", ["sharded", "portable"])
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_checkpoint_moves_between_layouts(
    group: EngineGroup, tmp_path: Path, before: str, after: str, form: CheckpointFormat
) -> None:
    meta = SaveLoadMeta(path=str(tmp_path / "saved"), format=form)
    model, layout, options = CASES[before]
    group.initialize(config=support.fsdp_config(layout, model=MODELS[model], **options))
    group.train_batch(support.make_batch(0), LOSSES["lm"], BUDGET)
    group.save(meta)
    saved = support.state(group)
    loss = group.train_batch(support.make_batch(1), LOSSES["lm"], BUDGET)["loss"]
    model, layout, options = CASES[after]
    group.initialize(config=support.fsdp_config(layout, model=MODELS[model], **options))
    group.load(meta)
    assert support.equal(support.state(group), saved)
    assert group.train_batch(support.make_batch(1), LOSSES["lm"], BUDGET)["loss"] == pytest.approx(
        loss, rel=1e-5
    )


@pytest.mark.parametrize(
    ("model", "layout", "error", "says"),
    [
        ("tiny", ParallelLayout(tp=4), LayoutError, "tp=4 does not divide num_key_value_heads=2"),
        ("gpt2", ParallelLayout(tp=2), UnsupportedCapability, "no tensor parallel plan"),
        ("uneven", ParallelLayout(cp=3), LayoutError, "4 attention heads cannot be spread over cp=3 ranks"),
        ("tiny", ParallelLayout(tp=2, cp=4), LayoutError, "2 attention heads cannot be spread over cp=4"),
    ],
)
def test_unfit_layout_is_refused(
    model: str, layout: ParallelLayout, error: type[Exception], says: str
) -> None:
    with (
        pytest.raises(error, match=says),
        EngineGroup("fsdp", support.fsdp_config(layout, model=MODELS[model])),
    ):
        pass


def test_indivisible_replicas_are_refused(group: EngineGroup) -> None:
    with pytest.raises(LayoutError, match="replicas=3 must divide dp=4"):
        group.initialize(config=support.fsdp_config(4, replicas=3))


def misplaced(engine: TrainEngine) -> list[str]:
    """Parameters of which the part on this rank is not what `local_part` says."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    return [
        name
        for name, parameter in backend.model.named_parameters()
        if not torch.equal(whole(parameter)[local_part(parameter).region], local_part(parameter).tensor)
    ]


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [name for name in CASES if "tp" in name or "hybrid" in name])
def test_each_rank_knows_where_its_parts_lie(group: EngineGroup, case: str) -> None:
    """Against torch's own gathering, also of dimensions that are cut twice, into parts of different sizes."""
    model, layout, options = CASES[case]
    group.initialize(config=support.fsdp_config(layout, model=MODELS[model], **options))
    assert group.run(misplaced) == [[]] * layout.world_size


def held_bytes(engine: TrainEngine) -> tuple[int, int]:
    """Bytes of weights and of moments on this rank."""
    backend = engine.backend
    assert isinstance(backend, FSDPBackend) and backend.optimizer is not None
    parameters = [weight for part in backend.optimizer.param_groups for weight in part["params"]]
    states = [value for state in backend.optimizer.state.values() for value in state.values() if value.dim()]
    return sum(weight.nbytes for weight in parameters), sum(value.nbytes for value in states)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", ["hybrid", "replicated", "dp2cp2", "uneven-dp2tp2"])
def test_plan_lists_local_weights(group: EngineGroup, case: str) -> None:
    """Within a tenth: every tensor parallel rank has the norms, and tiny tensors do not divide."""
    model, layout, options = CASES[case]
    config = support.fsdp_config(layout, model=MODELS[model], **options)
    group.initialize(config=config)
    group.train_batch(support.make_batch(0), LOSSES["lm"], BUDGET)
    footprint = footprint_of(config.model)
    planned = config.state_bytes(footprint.parameters, footprint.trained)
    stored = group.run(held_bytes)
    mean = [sum(values) / len(stored) for values in zip(*stored, strict=True)]
    assert mean == pytest.approx([planned.weights, planned.moments], rel=0.1)


def weights_of(engine: TrainEngine) -> list[tuple[torch.dtype, int]]:
    backend = engine.backend
    assert isinstance(backend, FSDPBackend)
    return [(weight.dtype, weight.nbytes) for weight in backend.memory("weights")]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_forward_only_weights_use_compute_dtype(group: EngineGroup, head: Any) -> None:
    """Half the memory, and the same results: each pass would round them anyway."""
    output: OutputName = "values" if head == "value" else "logprobs"
    trained = support.fsdp_config(2, dtype="bfloat16", head=head)
    alone = trained.model_copy(update={"optimizer": None})
    actual, stored = [], []
    for config in (trained, alone):
        group.initialize(config=config)
        actual.append(group.forward(support.make_batch(0), BUDGET, (output,))[output])
        stored.append(group.run(weights_of)[0])
    assert torch.equal(*actual)
    scalar = [(torch.float32, size) for dtype, size in stored[1] if dtype == torch.float32]
    assert len(scalar) == (head == "value")
    assert [(dtype, 2 * size) for dtype, size in stored[1] if dtype == torch.bfloat16] == [
        (torch.bfloat16, size) for _, size in stored[0][: len(stored[0]) - len(scalar)]
    ]
    planned = [config.state_bytes(1000, 0).weights for config in (trained, alone)]
    assert planned == [2000.0, 1000.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4 * (40 + 2 * 20) + 4 * 20),
        ({"dtype": "bfloat16"}, 2 * (40 + 2 * 20) + 4 * 20),
        ({"reshard_after_forward": False}, 4 * (40 + 3 * 20) + 4 * 20),
        ({"layout": ParallelLayout(dp=2, tp=2)}, (4 * (40 + 2 * 20) + 4 * 20) / 2),
    ],
    ids=str,
)
def test_plan_lists_gathered_weights(changes: dict[str, Any], expected: float) -> None:
    """Model with 40 weights in embeddings and head, and 20 in each of three layers."""
    config = support.fsdp_config(**{"layout": 2, **changes})
    assert config.gathered_bytes(100, 40, 3) == expected


def losses(group: EngineGroup) -> Tensor:
    actual = []
    for step in range(STEPS):
        actual.append(group.train_batch(support.make_batch(step), LOSSES["lm"], BUDGET)["loss"])
        group.lr_scheduler_step()
    return torch.tensor(actual, dtype=torch.float64)


@pytest.mark.nightly
def test_training_runs_of_all_layouts_stay_together(group: EngineGroup) -> None:
    """Tolerance: four times the distance of runs whose weights differ by one unit in the last place."""
    group.initialize(config=support.fsdp_config(1))
    start = group.named_tensors("master")
    straight = losses(group)
    spread = torch.zeros_like(straight)
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        moved = {
            name: torch.nextafter(value, value + torch.randn(value.shape, generator=random))
            for name, value in start.items()
        }
        group.initialize(config=support.fsdp_config(1))
        group.load_named_tensors("master", TensorDict(moved))
        spread = torch.maximum(spread, (losses(group) - straight).abs())
    # Curves that have spread by a step come together again only by luck.
    limit = 4 * torch.cummax(spread, dim=0).values + 1e-6
    for layout in (ParallelLayout(dp=2), ParallelLayout(dp=2, tp=2), ParallelLayout(dp=2, cp=2)):
        group.initialize(config=support.fsdp_config(layout))
        separate = (losses(group) - straight).abs()
        assert bool((separate <= limit).all()), (layout, float((separate / limit).max()))


def test_unsharded_attention_refuses_sequence_parallelism() -> None:
    """DeepSeek's plan cuts the MLPs alone, so latent projections see the tokens of one rank."""
    model = build(TinyModel(family="deepseek_v3"))
    with pytest.raises(LayoutError, match=r"DeepseekV3ForCausalLM leaves layers\.0\.self_attn whole"):
        check_sequence_parallel(model)
    check_sequence_parallel(build(TinyModel(family="llama")))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3_vl", "internvl"])
def test_tensor_parallelism_refuses_uneven_text_heads(family: str) -> None:
    """The plan is that of the text, with two heads of keys."""
    model = build(TinyModel(family=family))
    check_tensor_parallel(model, 2)
    with pytest.raises(LayoutError):
        check_tensor_parallel(model, 3)


def test_tensor_parallelism_refuses_experts_with_images() -> None:
    with pytest.raises(UnsupportedCapability, match="asks for 'moe_tp_experts' at .*; set tp to 1"):
        check_tensor_parallel(build(TinyModel(family="qwen3_vl_moe")), 2)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_vl"])
def test_images_refuse_sequence_parallelism(family: str) -> None:
    with pytest.raises(
        LayoutError, match="features of images go to their places among all tokens .*; leave it off"
    ):
        check_sequence_parallel(build(TinyModel(family=family)))


@pytest.mark.parametrize("case", ["replicated", "uneven-dp2tp2"])
def test_replicas_save_equal_parts(group: EngineGroup, tmp_path: Path, case: str) -> None:
    model, layout, options = CASES[case]
    group.initialize(config=support.fsdp_config(layout, model=MODELS[model], **options))
    group.save(SaveLoadMeta(path=str(tmp_path)))
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("shards/rank-*.safetensors"))]
    assert len(sizes) == layout.world_size
    assert min(sizes) > 0.9 * max(sizes)
