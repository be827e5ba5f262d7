"""core-rl: one interface for LLM post-training engines, and the kit to build them.

What lists engines and reports errors is imported at once. The other names are imported on first use (PEP 562), so
that ``import core_rl`` is quick and loads neither torch nor any backend.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from core_rl import errors as _errors
from core_rl.config.capability import Capability as Capability
from core_rl.errors import *  # noqa: F403  (the one list is in that module)
from core_rl.registry.engines import get_spec as get_spec
from core_rl.registry.engines import list_engines as list_engines
from core_rl.registry.engines import load_config as load_config
from core_rl.registry.engines import register_engine as register_engine
from core_rl.registry.spec import PROTOCOL_VERSION as PROTOCOL_VERSION
from core_rl.registry.spec import EngineSpec as EngineSpec
from core_rl.version import __version__

if TYPE_CHECKING:
    from core_rl.backend.loss import LossSpec as LossSpec
    from core_rl.backend.meta import FinetuneSpec as FinetuneSpec
    from core_rl.backend.meta import SaveLoadMeta as SaveLoadMeta
    from core_rl.backend.meta import Scheduling as Scheduling
    from core_rl.backend.meta import WeightUpdateMeta as WeightUpdateMeta
    from core_rl.backend.metrics import Metric as Metric
    from core_rl.config.engine import EngineConfig as EngineConfig
    from core_rl.config.engine import InferenceEngineConfig as InferenceEngineConfig
    from core_rl.config.engine import ModelConfig as ModelConfig
    from core_rl.config.engine import OptimizerConfig as OptimizerConfig
    from core_rl.config.engine import ScheduleConfig as ScheduleConfig
    from core_rl.config.engine import TrainEngineConfig as TrainEngineConfig
    from core_rl.config.layout import ParallelLayout as ParallelLayout
    from core_rl.data.batch import SequenceBatch as SequenceBatch
    from core_rl.data.micro_batch import MicroBatchSpec as MicroBatchSpec
    from core_rl.data.outputs import ModelOutput as ModelOutput
    from core_rl.data.requests import LLMRequest as LLMRequest
    from core_rl.data.requests import LLMResponse as LLMResponse
    from core_rl.data.requests import SamplingParams as SamplingParams
    from core_rl.distributed.process_group import RankAddress as RankAddress
    from core_rl.engine.inference import InferenceEngine as InferenceEngine
    from core_rl.engine.loading import load_engine as load_engine
    from core_rl.engine.sync import sync_weights as sync_weights
    from core_rl.engine.train import TrainEngine as TrainEngine
    from core_rl.launch.group import EngineGroup as EngineGroup
    from core_rl.launch.hosts import LocalHosts as LocalHosts

_LAZY = {
    "core_rl.backend.loss": ("LossSpec",),
    "core_rl.backend.meta": ("FinetuneSpec", "SaveLoadMeta", "Scheduling", "WeightUpdateMeta"),
    "core_rl.backend.metrics": ("Metric",),
    "core_rl.config.engine": (
        "EngineConfig",
        "InferenceEngineConfig",
        "ModelConfig",
        "OptimizerConfig",
        "ScheduleConfig",
        "TrainEngineConfig",
    ),
    "core_rl.config.layout": ("ParallelLayout",),
    "core_rl.data.batch": ("SequenceBatch",),
    "core_rl.data.micro_batch": ("MicroBatchSpec",),
    "core_rl.data.outputs": ("ModelOutput",),
    "core_rl.data.requests": ("LLMRequest", "LLMResponse", "SamplingParams"),
    "core_rl.distributed.process_group": ("RankAddress",),
    "core_rl.engine.inference": ("InferenceEngine",),
    "core_rl.engine.loading": ("load_engine",),
    "core_rl.engine.sync": ("sync_weights",),
    "core_rl.engine.train": ("TrainEngine",),
    "core_rl.launch.group": ("EngineGroup",),
    "core_rl.launch.hosts": ("LocalHosts",),
}
_HOMES = {name: module for module, names in _LAZY.items() for name in names}
_AT_ONCE = (
    "Capability",
    "EngineSpec",
    "PROTOCOL_VERSION",
    "get_spec",
    "list_engines",
    "load_config",
    "register_engine",
)
_ERRORS = (name for name in _errors.__all__ if name != "raise_all")

__all__ = ["__version__", *_ERRORS, *_AT_ONCE, *_HOMES]  # noqa: PLE0604  (the names come from tables)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'core_rl' has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
