"""The conformance profile of the vLLM engine, on real servers."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Setting

PROFILE = Profile(
    layouts=(ParallelLayout(), ParallelLayout(dp=2)),
    settings=(Setting(layout=ParallelLayout(tp=2)),),
    families=("qwen3", "llama"),
    # The smallest that vLLM's attention on CPUs has.
    head_size=32,
    dtypes=("float32", "bfloat16"),
    shared_servers=True,
)
