"""Script that starts an SGLang server in the server's own Python, which has no core-rl.

``python serve.py --model-path ... --port ...`` takes the arguments of ``sglang.launch_server``. `server_side` documents
standard input.

Without CUDA, three workarounds come before the import of SGLang: two for a plain ``pip install``, one for adapters.
SGLang spawns its workers, which run the top of this file again, and so get them too.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
CPU_OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Operators that SGLang's Qwen3.5 looks up when it is imported, with all Qwen-VL models (0.5.23, ``qwen_vl.py``)."""
SERVES_IMAGES = "CORE_RL_SERVES_IMAGES"
"""The environment variable of a server whose requests bring images."""
IMAGES = "data:application/safetensors;base64,"
"""Begins the tensors of images, in the place of a file."""


LIBRARIES: list[object] = []
"""Their operators live as long as these do."""


def apply_workarounds() -> None:
    """Let SGLang and its adapters run with a CPU build of torch; does nothing with CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    # The compiled part of a torchvision for CUDA does not load with a CPU torch, and its import fails.
    # It registers fake kernels for two operators; their schemas are all that it needs for that.
    _declare(
        "torchvision",
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    )
    if importlib.util.find_spec("sgl_kernel") is None:
        # The CPU build is not on PyPI; nothing calls these functions without speculative decoding.
        module = types.ModuleType("sgl_kernel")
        module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", None)
        for name in CPU_KERNELS:
            setattr(module, name, _missing(name))
        sys.modules["sgl_kernel"] = module
    if "--enable-lora" in sys.argv:
        _disable_pinned_memory()
    if SERVES_IMAGES in os.environ:
        _declare("sgl_kernel", *(f"{name}() -> ()" for name in CPU_OPERATORS))


def _declare(namespace: str, *schemas: str) -> None:
    import torch

    library = torch.library.Library(namespace, "FRAGMENT")
    LIBRARIES.append(library)
    for schema in schemas:
        try:
            library.define(schema)
        except RuntimeError as error:
            if "multiple times" not in str(error):  # the package's own part has loaded
                raise


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


def take_tensors() -> None:
    """Let requests bring the tensors of images that a processor has made, and the server run without a processor.

    SGLang takes these in Python alone: the schema of ``/generate`` has files and URLs (0.5.23, ``api_contract.py``).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    managers = "sglang.srt.managers"
    HookRegistry.register(
        f"{managers}.tokenizer_manager.get_processor_wrapper", _NoProcessor, HookType.REPLACE
    )
    target = f"{managers}.io_struct.GenerateReqInput.normalize_batch_and_arguments"
    HookRegistry.register(target, _read_images, HookType.BEFORE)
    HookRegistry.register(f"{managers}.mm_utils.get_new_expanded_mm_items", _tell_apart, HookType.AFTER)


class _NoProcessor:
    """In the place of the image processor, which nothing calls."""

    @property
    def tokenizer(self) -> _NoProcessor:
        return self

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token}>" for token in ids]


def _read_images(request: Any) -> None:
    if isinstance(request.image_data, list):
        request.image_data = [_processed(item) for item in request.image_data]


def _processed(item: object) -> object:
    from safetensors.torch import load

    if not isinstance(item, str) or not item.startswith(IMAGES):
        return item
    return {"format": "processor_output", **load(base64.b64decode(item.removeprefix(IMAGES)))}


def _tell_apart(items: Sequence[Any], *_arguments: object) -> None:
    """Name images by pixels and grid: SGLang's digest is of pixels alone (0.5.23, ``hash_feature``).

    Blank images of different shapes have the same pixels, and would share features and keys.
    """
    for item in items:
        hashed = hashlib.sha256(repr(item.image_grid_thw.tolist()).encode())
        hashed.update(item.feature.contiguous().numpy().tobytes())
        item.set_hash(int.from_bytes(hashed.digest()[:8], "big"))


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

    if SERVES_IMAGES in os.environ:
        take_tensors()
    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *(["--api-key", api_key] if api_key else [])]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
