"""Import Megatron-Core without a warning for each of its modules that falls back to torch.

`core_rl_megatron.backend` imports this first. On each rank there would be a dozen lines, which ask nobody to do
anything: Transformer Engine and Apex are not dependencies of this plugin.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
