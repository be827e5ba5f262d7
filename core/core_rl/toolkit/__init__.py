"""Toolkit for engines over Hugging Face modules, and the interface that an engine implements, in one import.

The names are imported on first use (PEP 562): a config of an engine then loads no torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_rl.backend.steps import MicroBatchStep as MicroBatchStep
    from core_rl.backend.tensors import LocalSlice as LocalSlice
    from core_rl.backend.tensors import ReplicatedState as ReplicatedState
    from core_rl.backend.tensors import ShardedState as ShardedState
    from core_rl.backend.tensors import TensorDict as TensorDict
    from core_rl.backend.tensors import TensorSource as TensorSource
    from core_rl.backend.tensors import check_source as check_source
    from core_rl.backend.train_backend import BuildContext as BuildContext
    from core_rl.backend.train_backend import PassMode as PassMode
    from core_rl.backend.train_backend import TrainBackend as TrainBackend
    from core_rl.checkpoint.model_config import read_config as read_config
    from core_rl.checkpoint.tensor_files import TensorFiles as TensorFiles
    from core_rl.config.base import Config as Config
    from core_rl.config.engine import ModelConfig as ModelConfig
    from core_rl.config.engine import TrainEngineConfig as TrainEngineConfig
    from core_rl.data.batch import SequenceBatch as SequenceBatch
    from core_rl.data.outputs import ModelOutput as ModelOutput
    from core_rl.toolkit.attention import PACKED_ATTENTION as PACKED_ATTENTION
    from core_rl.toolkit.attention import register_packed_attention as register_packed_attention
    from core_rl.toolkit.build import build_model as build_model
    from core_rl.toolkit.hf_backend import HFBackend as HFBackend
    from core_rl.toolkit.meta_build import build_on_meta as build_on_meta
    from core_rl.toolkit.optimizer import build_adamw as build_adamw
    from core_rl.toolkit.optimizer import moment_kinds as moment_kinds
    from core_rl.toolkit.optimizer import set_step_count as set_step_count
    from core_rl.toolkit.packed import PackedModel as PackedModel
    from core_rl.toolkit.token_logprobs import token_logprobs as token_logprobs

_LAZY = {
    "core_rl.backend.steps": ("MicroBatchStep",),
    "core_rl.backend.tensors": (
        "LocalSlice",
        "ReplicatedState",
        "ShardedState",
        "TensorDict",
        "TensorSource",
        "check_source",
    ),
    "core_rl.backend.train_backend": ("BuildContext", "PassMode", "TrainBackend"),
    "core_rl.checkpoint.tensor_files": ("TensorFiles",),
    "core_rl.config.base": ("Config",),
    "core_rl.config.engine": ("ModelConfig", "TrainEngineConfig"),
    "core_rl.data.batch": ("SequenceBatch",),
    "core_rl.data.outputs": ("ModelOutput",),
    "core_rl.toolkit.attention": ("PACKED_ATTENTION", "register_packed_attention"),
    "core_rl.toolkit.build": ("build_model", "read_config"),
    "core_rl.toolkit.hf_backend": ("HFBackend",),
    "core_rl.toolkit.meta_build": ("build_on_meta",),
    "core_rl.toolkit.optimizer": ("build_adamw", "moment_kinds", "set_step_count"),
    "core_rl.toolkit.packed": ("PackedModel",),
    "core_rl.toolkit.token_logprobs": ("token_logprobs",),
}
_HOMES = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [*_HOMES]  # noqa: PLE0604  (the names come from a table)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'core_rl.toolkit' has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)
