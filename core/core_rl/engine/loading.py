"""Loading the backend of a spec, and making an engine of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, overload

from core_rl.backend.inference_backend import InferenceBackend
from core_rl.backend.inference_protocols import INFERENCE_PROTOCOLS
from core_rl.backend.protocols import NAMED_PROTOCOLS, TRAIN_PROTOCOLS
from core_rl.backend.train_backend import AnyTrainBackend, TrainBackend
from core_rl.config.engine import EngineConfig, InferenceEngineConfig, TrainEngineConfig
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.train import TrainEngine
from core_rl.errors import EngineBroken, EngineContractError, raise_all
from core_rl.registry.engines import get_spec, load_class
from core_rl.registry.packages import refuse_packages
from core_rl.registry.spec import CONTRACT_PAGE, EngineSpec

Backend = AnyTrainBackend | InferenceBackend[Any]


def load_backend(spec: EngineSpec) -> type[Backend]:
    """Import the class that ``spec.factory`` names, and compare it with what ``spec`` declares.

    Raises:
        EngineBroken: it cannot be imported, is no subclass of `TrainBackend` or `InferenceBackend`, or has a
            coroutine where the core calls a function.
        EngineContractError: declared and implemented differ; see `check_backend`.
        EngineIncompatible: before anything is imported.
        MissingPackage, UnsupportedPackage: a package of ``spec.packages``, before anything is imported.
    """
    refuse_packages(spec.name, spec.packages)
    base: type[Any] = TrainBackend if spec.kind == "train" else InferenceBackend
    backend: type[Any] = load_class(spec, "factory", base)
    wrong = [
        f"{name}() must {'' if inspect.iscoroutinefunction(expected) else 'not '}be an 'async def'"
        for name, expected in inspect.getmembers(base, inspect.isfunction)
        if inspect.iscoroutinefunction(getattr(backend, name)) != inspect.iscoroutinefunction(expected)
    ]
    if wrong:
        raise EngineBroken(
            f"engine {spec.name!r}: factory {spec.factory!r}: {'; '.join(wrong)}, as in {base.__name__}"
        )
    check_backend(spec, backend)
    return backend


def check_backend(spec: EngineSpec, backend: type[Any]) -> None:
    """Raise one `EngineContractError` where ``backend`` and the capabilities of ``spec`` differ.

    A declared capability that has protocols is implemented by a protocol. A protocol among the bases has all of its
    methods, and its capability, if any, is declared. A method of that name in any other class is a helper.
    """
    subject = f"engine {spec.name!r}: {backend.__module__}.{backend.__qualname__} ({CONTRACT_PAGE})"
    raise_all(EngineContractError, subject, _differences(spec, backend))


def _differences(spec: EngineSpec, backend: type[Any]) -> Iterator[str]:
    table = TRAIN_PROTOCOLS if spec.kind == "train" else INFERENCE_PROTOCOLS
    for capability in sorted(spec.capabilities & table.keys()):
        protocols = table[capability]
        if not any(_implements(backend, protocol) for protocol in protocols):
            names = " or ".join(
                f"{protocol.__name__} ({', '.join(f'{m}()' for m in _members(protocol))})"
                for protocol in protocols
            )
            yield f"it declares {capability.value!r} and lacks {names}"
    supported = {protocol for protocols in table.values() for protocol in protocols}
    for protocol in sorted(supported.union(NAMED_PROTOCOLS).intersection(backend.__mro__), key=str):
        absent = [name for name in _members(protocol) if _owner(backend, name) is protocol]
        if absent:
            yield f"it names {protocol.__name__} among its bases and lacks {', '.join(f'{name}()' for name in absent)}"
        serving = [capability for capability, protocols in table.items() if protocol in protocols]
        if serving and not spec.capabilities.intersection(serving):
            names = " or ".join(repr(capability.value) for capability in serving)
            yield f"it names {protocol.__name__} among its bases and does not declare {names}"


def _members(protocol: type) -> list[str]:
    return sorted(name for name in protocol.__dict__ if not name.startswith("_"))


def _implements(backend: type[Any], protocol: type) -> bool:
    return all(callable(getattr(backend, name, None)) for name in _members(protocol))


def _owner(backend: type[Any], name: str) -> type | None:
    return next((kind for kind in backend.__mro__ if name in kind.__dict__), None)


@overload
def load_engine(spec: EngineSpec | str, config: InferenceEngineConfig) -> InferenceEngine: ...
@overload
def load_engine(spec: EngineSpec | str, config: TrainEngineConfig) -> TrainEngine: ...
@overload
def load_engine(spec: EngineSpec | str, config: EngineConfig) -> TrainEngine | InferenceEngine: ...
def load_engine(spec: EngineSpec | str, config: Any) -> TrainEngine | InferenceEngine:
    """Make the engine of ``spec``, or of the engine with this name, for ``config``; not initialized yet.

    Raises as `load_backend` does, and the engine's errors for a config that it does not declare.
    """
    spec = get_spec(spec) if isinstance(spec, str) else spec
    backend: Any = load_backend(spec)
    if spec.kind == "train":
        return TrainEngine(spec, config, backend())
    return InferenceEngine(spec, config, backend())
