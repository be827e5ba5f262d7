"""Loading the backend class of a spec, and making an engine of it."""

from __future__ import annotations

import inspect
from typing import Any, overload

from core_rl.backend.inference_backend import InferenceBackend
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineBroken
from core_rl.registry.engines import get_spec, load_class
from core_rl.registry.spec import EngineSpec

__all__ = ["load_backend", "load_engine"]


def load_backend(spec: EngineSpec) -> type[TrainEngine | InferenceBackend[Any]]:
    """Import the class that ``spec.factory`` names.

    Raises:
        EngineBroken: it cannot be imported, is no subclass of `TrainEngine` or `InferenceBackend`, or has a
            coroutine where the core calls a function.
        EngineIncompatible: before anything is imported.
    """
    base: type[Any] = TrainEngine if spec.kind == "train" else InferenceBackend
    backend = load_class(spec, "factory", base)
    wrong = [
        f"{name}() must {'' if inspect.iscoroutinefunction(expected) else 'not '}be an 'async def'"
        for name, expected in inspect.getmembers(base, inspect.isfunction)
        if inspect.iscoroutinefunction(getattr(backend, name)) != inspect.iscoroutinefunction(expected)
    ]
    if wrong:
        raise EngineBroken(
            f"engine {spec.name!r}: factory {spec.factory!r}: {'; '.join(wrong)}, as in {base.__name__}"
        )
    return backend


@overload
def load_engine(spec: EngineSpec | str, config: InferenceEngineConfig) -> InferenceEngine: ...
@overload
def load_engine(spec: EngineSpec | str, config: TrainEngineConfig) -> TrainEngine: ...
@overload
def load_engine(spec: EngineSpec | str, config: EngineConfig) -> TrainEngine | InferenceEngine: ...
def load_engine(spec: EngineSpec | str, config: Any) -> TrainEngine | InferenceEngine:
    """Make the engine of ``spec``, or of the engine with this name, for ``config``; not initialized yet.

    Raises as `load_backend` does, and what the engine raises for a config that it does not declare.
    """
    spec = get_spec(spec) if isinstance(spec, str) else spec
    backend: Any = load_backend(spec)
    return InferenceEngine(spec, config, backend()) if spec.kind == "inference" else backend(spec, config)
