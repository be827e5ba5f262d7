"""Starts an SGLang server. Runs in the server's own Python, by its path, and needs nothing of core-rl there.

``python serve.py --model-path ... --port ...`` takes the arguments of ``sglang.launch_server``. Standard input is
a pipe from the process that started it. Its first line is the API key, or empty; and when that process ends,
however it ends, so does the server with all its children.

Where there is no CUDA, gaps are filled before SGLang is imported: two of a plain ``pip install``, one of adapters.
SGLang spawns its workers, which run the top of this file again, so that they are filled there too.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
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
"""What SGLang imports from ``sgl_kernel`` on a CPU; all of it serves speculative decoding."""


def fill_gaps() -> None:
    """Make SGLang and its adapters possible beside a CPU build of torch; does nothing where there is CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    _declare_torchvision()
    if importlib.util.find_spec("sgl_kernel") is None:
        _stand_in_for_kernels()
    if "--enable-lora" in sys.argv:
        _do_without_pinned_memory()


def _declare_torchvision() -> None:
    """The compiled part of a torchvision for CUDA does not load beside a CPU torch, and its import fails.

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
    fill_gaps.library = library  # type: ignore[attr-defined]  # its operators live as long as it does


def _stand_in_for_kernels() -> None:
    """The CPU build of ``sgl_kernel`` is not on PyPI; nothing calls these functions without speculative decoding."""
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", None)
    for name in CPU_KERNELS:
        setattr(module, name, _missing(name))
    sys.modules["sgl_kernel"] = module


def _do_without_pinned_memory() -> None:
    """SGLang's LoRA (0.5.23) pins host memory on every device, which torch refuses without an accelerator.

    Pinned memory is what copies to an accelerator are faster from; here there are none. Upstream it is
    sgl-project/sglang#31894; this goes when its torch backend asks whether memory can be pinned.
    """
    import torch

    def unpinned(make: Callable[..., object]) -> Callable[..., object]:
        def made(*args: object, **named: object) -> object:
            named.pop("pin_memory", None)
            return make(*args, **named)

        return made

    for name in ("tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment,return-value]


def _missing(name: str) -> object:
    def raise_it(*_args: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: install SGLang's CPU kernels for speculative decoding")

    return raise_it


def die_with_parent() -> None:
    """End this process group, children included, as soon as standard input ends."""

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="die-with-parent", daemon=True).start()


if __name__ in ("__main__", "__mp_main__"):  # the second is its name in the workers that SGLang spawns
    # Python looks for modules beside a script first, and what is there would hide the server's own.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    fill_gaps()

if __name__ == "__main__":
    api_key = sys.stdin.buffer.raw.readline().decode().strip()  # type: ignore[union-attr]  # nothing is read ahead
    die_with_parent()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *(["--api-key", api_key] if api_key else [])]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
