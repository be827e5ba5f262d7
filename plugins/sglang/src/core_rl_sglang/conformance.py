"""The conformance profile of the SGLang engine, on real servers."""

from __future__ import annotations

from core_rl.config.layout import ParallelLayout
from core_rl_conformance.profile import Profile, Setting

PROFILE = Profile(
    layouts=(ParallelLayout(), ParallelLayout(dp=2)),
    # SGLang cannot divide gpt2's odd MLP among two ranks.
    settings=(Setting(layout=ParallelLayout(tp=2), families=("qwen3", "llama", "qwen2")),),
    # SGLang's attention on the CPU has neither soft caps nor windows, which gemma2 needs.
    families=("qwen3", "llama", "qwen2", "gpt2", "qwen3_vl"),
    dtypes=("float32", "bfloat16"),
    shared_servers=True,
)
