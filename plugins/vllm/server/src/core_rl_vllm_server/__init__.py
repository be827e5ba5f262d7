"""Plugin of vLLM, in each of its processes: log-probs as core-rl means them, and weights as it sends them."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM, perhaps more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from core_rl_vllm_server.patches import (
        keep_tied_heads_current,
        report_full_distribution,
        take_every_temperature,
    )

    report_full_distribution()
    take_every_temperature()
    keep_tied_heads_current()
    # Last: vLLM only logs an error of a plugin, and without this engine the server does not start.
    with_engine = WeightTransferEngineFactory.register_engine
    try:
        with_engine("core_rl", "core_rl_vllm_server.transfer", "BucketTransferEngine")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
