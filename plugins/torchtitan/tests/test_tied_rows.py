"""An embedding that is tied to the head, of rows that the ranks do not divide."""

from __future__ import annotations

import pytest
import titan_support as support
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from transformers import AutoConfig

from core_rl.config.layout import ParallelLayout
from core_rl.engine.train import TrainEngine
from core_rl.toolkit.fully_sharded import add_up_gradients
from core_rl_torchtitan.backend import TorchtitanBackend, materialize, tie
from core_rl_torchtitan.modules import PackedDecoder
from core_rl_torchtitan.translation import decoder_config

LAYOUT = ParallelLayout(dp=2, tp=2)


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def stale_after_a_step(engine: TrainEngine, vocabulary: int, retied: bool) -> float:
    """The largest difference between the tied weight that a step left and those that the next pass gathers.

    ``Module._distribute_states`` (torchtitan 0.3.0, protocols/module.py) says that a weight that is a DTensor already
    was distributed by a tied module. But ``register_parameter`` replaces it in the one module, and the other one
    distributes the old weight again (https://github.com/pytorch/torchtitan/issues/2495 is about the same groups).
    """
    assert isinstance(engine.backend, TorchtitanBackend)
    dims = engine.backend.meshes.dims
    model = AutoConfig.for_model(**support.TINY | {"vocab_size": vocabulary})
    with torch.device("meta"):
        decoder = decoder_config(model, LAYOUT, "lm").build()
        packed = PackedDecoder(decoder, "lm", engine.backend.meshes.shards)
    assert decoder.tok_embeddings.weight is decoder.lm_head.weight
    decoder.parallelize(dims)
    assert (
        decoder.tok_embeddings.weight is not decoder.lm_head.weight
    )  # if this fails, torchtitan has cured it
    if retied:
        tie(decoder)
    mesh = dims.get_mesh(["fsdp"])
    apply_fsdp_to_decoder(
        decoder, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False
    )
    add_up_gradients(decoder, mesh.size())
    materialize(packed, torch.device("cpu"))  # which ties, as torchtitan's `Decoder.init_states`
    for parameter in packed.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    outputs = packed(support.batch(), ("logprobs",), temperature=1.0, trained_only=False)
    outputs["logprobs"].sum().backward()
    torch.optim.SGD(packed.parameters(), lr=0.1).step()
    stepped = whole(decoder.lm_head.weight.detach())
    decoder.tok_embeddings.unshard()  # FSDP has both modules in one group
    gathered = [whole(module.weight.detach()) for module in (decoder.tok_embeddings, decoder.lm_head)]
    return max(float((weight - stepped).abs().max()) for weight in gathered)


@pytest.mark.parametrize(
    ("vocabulary", "retied", "parts"), [(61, False, True), (61, True, False), (64, False, False)]
)
def test_torchtitan_alone_parts_tied_rows(vocabulary: int, retied: bool, parts: bool) -> None:
    """In silence: only weights after a step show it, and only where rows do not divide by dp and tp."""
    with support.started(support.config(layout={"dp": 2, "tp": 2})) as group:
        gaps = group.run(stale_after_a_step, vocabulary, retied)
    assert all((gap > 1e-3) == parts for gap in gaps), gaps
