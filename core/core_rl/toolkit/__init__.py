"""Toolkit for engines over Hugging Face modules, and the interface that an engine implements, in one import.

The names are imported on first use (PEP 562): a config of an engine then loads no torch.
"""

from typing import TYPE_CHECKING

from core_rl.lazy import lazy_names as _lazy_names
from core_rl.lazy import load_name as _load_name

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

_HOMES = _lazy_names(__name__)

__all__ = [*_HOMES]  # noqa: PLE0604  (the names come from a table)


def __getattr__(name: str) -> object:
    return _load_name(__name__, _HOMES, name)
