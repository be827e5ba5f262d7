"""Script that starts an SGLang server in the server's own Python, which has no core-rl.

``python serve.py --model-path ... --port ...`` takes the arguments of ``sglang.launch_server``. `server_side` documents
standard input.

Without CUDA, three workarounds come before the import of SGLang: two for a plain ``pip install``, one for adapters.
SGLang spawns its workers, which run the top of this file again, and so get them too.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CPU_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
"""Functions that SGLang imports from ``sgl_kernel`` on a CPU, all for speculative decoding."""


def apply_workarounds() -> None:
    """Let SGLang and its adapters run with a CPU build of torch; does nothing with CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    _declare_torchvision()
    if importlib.util.find_spec("sgl_kernel") is None:
        _add_kernel_stubs()
    if "--enable-lora" in sys.argv:
        _disable_pinned_memory()


def _declare_torchvision() -> None:
    """The compiled part of a torchvision for CUDA does not load with a CPU torch, and its import fails.

    It registers fake kernels for two operators; their schemas are all that it needs for that.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        try:
            library.define(schema)
        except RuntimeError as error:
            if "multiple times" not in str(error):  # torchvision's own part has loaded
                raise
    apply_workarounds.library = library  # type: ignore[attr-defined]  # its operators live as long as it does


def _add_kernel_stubs() -> None:
    """The CPU build of ``sgl_kernel`` is not on PyPI; nothing calls these functions without speculative decoding."""
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", None)
    for name in CPU_KERNELS:
        setattr(module, name, _missing(name))
    sys.modules["sgl_kernel"] = module


def _disable_pinned_memory() -> None:
    """SGLang's LoRA (0.5.23) pins host memory on every device, which torch refuses without an accelerator.

    Pinned memory only speeds up copies to an accelerator. Remove this when sgl-project/sglang#31894 is fixed: the
    torch backend must check whether memory can be pinned.
    """
    import torch

    def unpinned(make: Callable[..., object]) -> Callable[..., object]:
        def made(*args: object, **keywords: object) -> object:
            keywords.pop("pin_memory", None)
            return make(*args, **keywords)

        return made

    for name in ("tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment,return-value]


def _missing(name: str) -> object:
    def raise_it(*_args: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: install SGLang's CPU kernels for speculative decoding")

    return raise_it


if __name__ in ("__main__", "__mp_main__"):  # the second is its name in the workers that SGLang spawns
    # Python looks for modules in a script's directory first, and those there would hide the server's own.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    apply_workarounds()

if __name__ == "__main__":
    api_key = runpy.run_path(os.environ["CORE_RL_SERVER_SIDE"])["begin"]()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *(["--api-key", api_key] if api_key else [])]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
