"""Loading the engine class of a spec."""

from __future__ import annotations

import inspect

from core_rl.engine.inference import InferenceEngine
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineBroken
from core_rl.registry.engines import load_class
from core_rl.registry.spec import EngineSpec

__all__ = ["load_engine"]


def load_engine(spec: EngineSpec) -> type[TrainEngine | InferenceEngine]:
    """Import the engine class that ``spec.factory`` names. This imports the backend.

    Raises:
        EngineBroken: it cannot be imported, is no subclass of `TrainEngine` or `InferenceEngine`, or has a
            coroutine where the core calls a function.
        EngineIncompatible: before anything is imported.
    """
    base: type[TrainEngine | InferenceEngine] = TrainEngine if spec.kind == "train" else InferenceEngine
    engine = load_class(spec, "factory", base)
    wrong = [
        f"{name}() must {'' if inspect.iscoroutinefunction(expected) else 'not '}be an 'async def'"
        for name, expected in inspect.getmembers(base, inspect.isfunction)
        if inspect.iscoroutinefunction(getattr(engine, name)) != inspect.iscoroutinefunction(expected)
    ]
    if wrong:
        raise EngineBroken(
            f"engine {spec.name!r}: factory {spec.factory!r}: {'; '.join(wrong)}, as in {base.__name__}"
        )
    return engine
