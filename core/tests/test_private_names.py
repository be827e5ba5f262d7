"""No module touches a private name of a class of ours that is not its own; upstream's private names have a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "core/core_rl",
    "conformance/core_rl_conformance",
    "conformance/core_rl_oracle",
    "trainer/src/core_rl_trainer",
    "cluster/src/core_rl_cluster",
    "plugins/fsdp/src/core_rl_fsdp",
    "plugins/megatron/src/core_rl_megatron",
    "plugins/mindspore/src/core_rl_mindspore",
    "plugins/sglang/src/core_rl_sglang",
    "plugins/torchtitan/src/core_rl_torchtitan",
    "plugins/vllm/src/core_rl_vllm",
    "plugins/vllm/server/src/core_rl_vllm_server",
]
UPSTREAM = {
    "_C": "torch: its own functions in C++",
    "_Function": "mindspore: its own `autograd.Function`, which has no public name",
    "_MAX_TEMP": "vllm: the temperature below which it takes another",
    "_accelerator_getAllocatorSettings": "torch: whether memory is in expandable segments",
    "_accelerator_setAllocatorSettings": "torch: settings of this process alone; the environment would be inherited",
    "_buffers": "torch: a buffer is replaced and stays out of files",
    "_can_set_attn_implementation": "transformers: its own test of whether a model calls its attention interface",
    "_cdata": "torch: the identity of a storage, which has no public one",
    "_current_frames": "Python: where a thread is, for the message about a reward that hangs",
    "_disable_adapters": "peft: enable_adapters() also changes requires_grad, and may find gathered parameters of FSDP",
    "_foreach_add_": "torch: one kernel for many tensors, as torch's own optimizers use it",
    "_foreach_mul_": "torch: one kernel for many tensors, as torch's own clip_grad_norm_ uses it",
    "_foreach_norm": "torch: the norms of many tensors in one kernel, as torch's own clip_grad_norm_ uses it",
    "_exit": "Python: ends a process whose other threads may hold locks that an orderly end would wait for",
    "_forkserver": "Python: the fork server of this process, which an agent ends at once with itself",
    "_fsdp_param_group": "torch: gradients that FSDP has not reduced when a pass raises",
    "_get_cuda_rng_state": "megatron: read on CPUs, where Megatron has only CUDA's",
    "_get_fsdp_state": "torch: the state of a module, to undo a pass that raised",
    "_global_process_group_list": "megatron: groups that destroy_model_parallel() forgets without destroying them",
    "_init_weights": "transformers: draws a new head as transformers does",
    "_is_hf_initialized": "transformers: marks parameters that initialize_weights() leaves alone",
    "_is_root": "torch: None until the first pass, before which there is nothing to undo",
    "_keys_to_ignore_on_load_missing": "transformers: tensors that files may lack",
    "_keys_to_ignore_on_load_unexpected": "transformers: tensors of files that no model reads",
    "_new_shared": "torch: shared memory of a size, without a tensor to copy",
    "_no_split_modules": "transformers: the blocks that wrappers shard",
    "_non_persistent_buffers_set": "torch: buffers that no file has",
    "_reduce_scatter_comm": "torch: the memory of gradients on one rank, after a pass that raised",
    "_replace": "Python: a named tuple with another field",
    "_set_cuda_rng_state": "megatron: set on CPUs, where Megatron has only CUDA's",
    "_timeout": "torch: the timeout of a gloo group that is made from parts",
    "_verify_args": "vllm: refuses temperatures that the core takes",
    "_weight_conversions": "transformers: renamings of the files, which save_pretrained() undoes",
}


@cache
def trees() -> dict[Path, ast.Module]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {file: ast.parse(file.read_text()) for file in files}


def members(tree: ast.Module) -> set[str]:
    """Names that a module's classes and functions define: methods, fields, and attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def private_accesses(tree: ast.Module) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node


def test_no_module_touches_private_names_of_another() -> None:
    ours = {name for tree in trees().values() for name in members(tree)}
    found = []
    for file, tree in trees().items():
        own = members(tree)
        for node in private_accesses(tree):
            if node.attr in own or (node.attr in UPSTREAM and node.attr not in ours):
                continue
            found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_every_listed_name_of_upstream_is_used() -> None:
    used = {node.attr for tree in trees().values() for node in private_accesses(tree)}
    assert set(UPSTREAM) - used == set()


@pytest.mark.parametrize("name", sorted(UPSTREAM))
def test_every_listed_name_has_a_reason(name: str) -> None:
    assert UPSTREAM[name]
