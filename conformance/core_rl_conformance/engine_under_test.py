"""`EngineUnderTest`: argument of a check function: an engine on one layout with one tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec
from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import Head, InferenceEngineConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.engine.inference import InferenceEngine
from core_rl.errors import (
    ConfigError,
    CoreRLError,
    GroupError,
    LayoutError,
    MissingPackage,
    UnsupportedCapability,
)
from core_rl.launch.group import EngineGroup
from core_rl.registry.engines import load_config
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.case import Case
from core_rl_conformance.expected_values import (
    ExpectedGradients,
    ExpectedOutputs,
    ExpectedValues,
    Judged,
    Snapshot,
)
from core_rl_conformance.findings import reproduced, reproduced_tokens, scalar_finding, weights_finding
from core_rl_conformance.hints import diagnose
from core_rl_conformance.hints.diagnose import Again, Explain, explain_loss, explain_named, explain_tokens
from core_rl_conformance.hints.mistakes import explain_norm
from core_rl_conformance.hints.tokens import Places
from core_rl_conformance.inputs.data import (
    GIVEN_LENGTHS,
    LENGTHS,
    Ragged,
    Repeated,
    given,
    ragged,
    with_images,
)
from core_rl_conformance.inputs.losses import CheckLoss
from core_rl_conformance.inputs.tiny_adapters import TinyAdapter
from core_rl_conformance.inputs.tiny_models import TinyModel, layer_of, save_with
from core_rl_conformance.outcomes import MeasurementRecord, NotSupported
from core_rl_conformance.profile import Setting, laid_over
from core_rl_conformance.reproduction import Computation
from core_rl_oracle.tolerance import Tolerance

ONE_PASS = MicroBatchSpec(count=1)
BUDGET = MicroBatchSpec(max_tokens=64)
"""Several micro-batches of unequal numbers of sequences."""
REFUSALS = (UnsupportedCapability, LayoutError)
"""The errors of an engine that does not compute a model or an option, and of degrees that do not fit."""
ConfigT = TypeVar("ConfigT", TrainEngineConfig, InferenceEngineConfig)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineUnderTest:
    """The engine of ``case``, with the oracle's expected values.

    A check starts it with `start`, compares with `verify` (which keeps the measured error and raises
    an `AssertionError` that helps), and takes fresh directories from `directory`.
    """

    def __init__(self, case: Case, expected_values: ExpectedValues, directory: Path) -> None:
        self.case = case
        self.expected = expected_values
        self.spec = case.target.spec
        self.layout = case.layout
        self.dtype = DTYPES[case.dtype]
        self.measurements: list[MeasurementRecord] = []
        self.reproduction = ""
        """A script for the failed comparison, in plain torch."""
        self._directory = directory

    def model(self, head: Head = "lm", dropout: float = 0.0, layers: int | None = None) -> TinyModel:
        """The tiny model, with this head, and this number of layers or more; None is the family's own.

        ``dropout`` is for an engine that declares it, and 0 for others. A user's model comes as it is.
        """
        if self.case.target.given:
            return TinyModel(family=self.case.family, source=self.case.target.model_dir, head=head)
        model = TinyModel(
            family=self.case.family,
            seed=0 if (source := self.case.target.model_dir) else self.case.seed,
            source=source,
            longest=self.case.target.longest,
            head=head,
            dropout=dropout if self.spec.supports(Capability.DROPOUT) else 0.0,
            layers=layers,
            head_size=self.case.head_size,
        )
        multiples = self.case.multiples
        return self.expected.keep(model, ("multiples", multiples), lambda: model.with_multiples(*multiples))

    def data(self, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Ragged:
        """Ragged sequences, few for a user's model; ``seed`` distinguishes several."""
        drawn = 1000 * self.case.seed + seed
        if self.case.target.given:
            return self.given_data(GIVEN_LENGTHS, drawn)
        data = ragged(self.model().vocab_size, drawn, lengths)
        return with_images(data, self.case.family, drawn) if self.model().vision else data

    def given_data(self, lengths: Sequence[int], seed: int = 0) -> Ragged:
        """Six of the user's sequences for a model, or else ragged ones of ``lengths``."""
        if sequences := self.case.target.sequences:
            return given(sequences, seed)
        return ragged(self.model().vocab_size, seed, lengths)

    @property
    def first_layer(self) -> str:
        """A pattern for the parameters of the first transformer layer."""
        names = self.expected.oracle(self.model()).parameters()
        return next(f"{layer}.*" for name in names if (layer := layer_of(name)))

    def directory(self, name: str) -> Path:
        """A path inside a directory that is this case's own; nothing is there yet."""
        return self._directory / name

    def start(
        self,
        model: TinyModel | None = None,
        *,
        layout: ParallelLayout | Setting | None = None,
        optimizer: Mapping[str, Any] | None = None,
        frozen: Sequence[str] = (),
        spec: EngineSpec | None = None,
        changes: Mapping[str, Any] | None = None,
        promised: bool = True,
    ) -> EngineGroup:
        """The engine, or another one by its ``spec``, freshly initialized. An earlier group of it is gone.

        ``changes`` are laid over the config, section by section. A plain ``layout`` goes without the options of the
        case's setting. A refusal is the profile's mistake where it was ``promised``.
        """
        model, spec = model or self.model(), spec or self.spec
        under_test = spec == self.spec
        setting = layout
        if layout is None and under_test:
            setting = self.case.setting
        if not isinstance(setting, Setting):
            setting = Setting(layout=setting or ParallelLayout())
        path = str(self.expected.models.directory(model))
        values: dict[str, Any] = {
            **(setting.over(self.case.target.profile.options) if under_test else {}),
            "model": {"path": path, "head": model.head, "vision": model.vision, "frozen": list(frozen)},
            "dtype": self.case.dtype if under_test else "float32",
            "device": self.case.device if under_test else "cpu",
            "layout": setting.layout,
            "optimizer": {"lr": 1e-3, "max_grad_norm": None, **(optimizer or {})},
        }
        config = _parsed(spec, laid_over(values, changes or {}), TrainEngineConfig)
        try:
            return self.expected.groups.start(spec, config, FinetuneSpec())
        except REFUSALS as error:
            promised = promised and not self.case.target.given
            if promised and under_test and setting == self.case.setting:
                if model == self.model() and not (optimizer or frozen or changes):
                    raise self._broken_promise(error) from error
                self.start()  # the model alone, which the profile promises
            raise

    def _broken_promise(self, error: UnsupportedCapability | LayoutError) -> CoreRLError:
        """``error``, the refusal of the plain model, as a mistake of the profile."""
        case = self.case
        promise = case.target.profile.promise(self.spec, case.setting, case.family, case.dtype)
        return type(error)(f"{promise}. The engine refuses it: {error}")

    def start_unless_refused(
        self, model: TinyModel, layout: ParallelLayout | None = None
    ) -> EngineGroup | None:
        """The engine with a ``model`` that it need not compute.

        None where it raises an error of `REFUSALS`, or lacks a package.
        """
        try:
            return self.start(model, layout=layout, promised=False)
        except (*REFUSALS, MissingPackage):
            return None
        except ConfigError as error:
            problem = (
                f"a model of type {model.config().model_type!r} was refused by a ConfigError; raise an "
                "UnsupportedCapability for a model that is not computed, and a LayoutError for degrees that do not "
                f"fit. The message was: {error}"
            )
            raise AssertionError(self.failure_message(problem)) from error

    def start_long(self, model: TinyModel) -> tuple[EngineGroup, TinyModel]:
        """The engine with a ``long`` form of ``model``, without rotary scaling where it refuses the family's.

        A user's model comes as it is.
        """
        if self.case.target.given:
            return self.start(), self.model()
        long = replace(model, long=True).with_multiples(*self.case.multiples)
        group = self.start_unless_refused(long)
        if group is None:
            long = replace(long, usual="rope scaling")
            group = self.start(long)
        return group, long

    def serve(
        self, model: TinyModel | None = None, *, keep: bool = True, adapter: TinyAdapter | None = None
    ) -> InferenceEngine:
        """The inference engine with ``model``; ``keep=False`` for a check that changes its weights.

        With ``adapter``, the engine takes adapters of this kind.
        """
        shared, config = self.case.target.profile.shared_servers, self._serving(model, adapter)
        try:
            return self.expected.servers.start(self.spec, config, keep=keep, shared=shared)
        except REFUSALS as error:
            if adapter is None and model in (None, self.model()):
                if self.case.target.model_dir:
                    raise NotSupported(f"refused: {error}".splitlines()[0]) from error
                raise self._broken_promise(error) from error
            self.serve()  # the model alone, which the profile promises
            raise

    def connect(self, model: TinyModel | None = None) -> InferenceEngine:
        """A second engine at the servers of `serve`, for the caller to destroy."""
        return self.expected.servers.connect(self.spec, self._serving(model))

    def _serving(self, model: TinyModel | None, adapter: TinyAdapter | None = None) -> InferenceEngineConfig:
        model = model or self.model()
        values: dict[str, Any] = {
            **self.case.setting.over(self.case.target.profile.options),
            "model": {
                "path": str(self.expected.models.directory(model)),
                "vision": model.vision,
                "lora": None if adapter is None else adapter.section(),
            },
            "dtype": self.case.dtype,
            "device": self.case.device,
            "layout": self.layout,
        }
        return _parsed(self.spec, values, InferenceEngineConfig)

    @property
    def peer(self) -> EngineUnderTest:
        """The second engine of a pair, for `start` or `serve`."""
        return self.of(self.case.of_partner())

    def of(self, case: Case) -> EngineUnderTest:
        """Another ``case``, in the same directory."""
        return EngineUnderTest(case, self.expected, self._directory)

    def outputs(self, model: Judged, data: Ragged, name: str, temperature: float = 1.0) -> ExpectedOutputs:
        """The output ``name`` of each sequence, by a model, with or without an adapter."""
        return self.expected.outputs(model, data, name, temperature, self.dtype, self.case.device)

    def gradients(self, model: Judged, data: Ragged, loss: CheckLoss) -> ExpectedGradients:
        """Loss, gradients (with an adapter also of its factors) and norm."""
        return self.expected.gradients(model, data, loss, self.dtype, self.case.device, self.layout.dp)

    def gradients_of_many(self, model: Judged, data: Repeated) -> ExpectedGradients:
        """The same of a mean over all tokens of ``data``."""
        return self.expected.gradients_of_many(model, data, self.dtype, self.case.device)

    def snapshot(self, group: EngineGroup, model: TinyModel, name: str) -> Snapshot:
        """The weights that ``group`` exports, in the directory ``name``, as something to expect values of."""
        save_with(model, group.named_tensors("master"), self.directory(name))
        return Snapshot(self.directory(name), model.head, vision=model.vision)

    def places(self, data: Ragged) -> Places:
        """Positions of the tokens of ``data`` for hints, in a group that shards it."""
        return Places.of(data.batch(), self.model().vocab_size, self.layout, ONE_PASS)

    def verify(self, finding: diagnose.Finding) -> None:
        """Keep the measurement; raise `AssertionError` where the comparison does not hold."""
        self.measurements.append(
            MeasurementRecord(
                what=finding.what, error=finding.error, limit=finding.limit, points=finding.points
            )
        )
        if finding.problem is not None:
            self.reproduction = finding.reproduction
            raise AssertionError(self.failure_message(finding.message))

    def require(self, holds: bool, problem: str) -> None:
        """Raise `AssertionError` with ``problem`` unless ``holds``."""
        if not holds:
            raise AssertionError(self.failure_message(problem))

    def require_error(
        self, errors: type[Exception] | tuple[type[Exception], ...], act: Callable[[], object], problem: str
    ) -> None:
        """Raise `AssertionError` with ``problem`` unless ``act`` raises any of ``errors``."""
        try:
            act()
        except errors:
            return
        except GroupError:  # a rank has failed: its own message says more
            raise
        except CoreRLError as error:
            problem = f"{problem}, but {type(error).__name__}: {error}"
        self.require(False, problem)

    def failure_message(self, problem: str) -> str:
        """``problem`` with its place, the requirement, and where to look."""
        return self.case.failure_message(problem)

    def verify_scalar(
        self, label: str, got: float, expected: float, allowed: Tolerance, *, explain: Explain | None = None
    ) -> None:
        self.verify(diagnose.compare_scalar(label, got, expected, allowed, explain=explain))

    def verify_loss(
        self, label: str, got: float, expected: ExpectedGradients, *, explain: Explain | None = None
    ) -> None:
        """Compare a reported loss with the oracle's."""
        known = partial(explain_loss, got, expected.oracle.loss, expected.loss, expected.mistakes, None)
        self.verify(scalar_finding(self.case, "loss", label, got, expected, explain or known))

    def verify_norm(self, label: str, got: float, expected: ExpectedGradients) -> None:
        """Compare a reported norm of gradients with the oracle's."""
        explain = partial(explain_norm, got, expected.oracle.grads, expected.norm)
        self.verify(scalar_finding(self.case, "norm", label, got, expected, explain))

    def verify_named(
        self,
        label: str,
        got: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        tolerances: Mapping[str, Tolerance],
        since: Mapping[str, Tensor] | None = None,
        *,
        explain: Explain | None = None,
    ) -> None:
        """Compare tensors by name, as `diagnose.compare_named` does."""
        self.verify(diagnose.compare_named(label, got, expected, tolerances, since, explain=explain))

    def verify_same(
        self,
        label: str,
        got: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        since: Mapping[str, Tensor] | None = None,
        *,
        of: Computation | None = None,
    ) -> None:
        """Compare tensors by name, bit for bit; ``since`` are those before the checked change, for hints.

        A script shows the weights that ``of`` computes.
        """
        finding = diagnose.same_named(label, got, expected, since)
        self.verify(weights_finding(self.case, finding, of, got, expected))

    def verify_tokens(
        self,
        label: str,
        got: Sequence[Tensor],
        expected: ExpectedOutputs,
        places: Places | None = None,
        *,
        plotted: bool = False,
        again: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """Compare an output of each sequence with the oracle's; ``plotted`` keeps some values for a plot.

        ``again`` makes the same call once more, to detect nondeterminism.
        """
        finding = diagnose.compare_tokens(
            label,
            got,
            expected.values,
            expected.tolerance,
            places,
            keep_points=plotted,
            explain=partial(
                explain_tokens, got, expected.values, expected.tolerance, expected.mistakes, again
            ),
        )
        of, tolerance = expected.computation, expected.tolerance
        self.verify(reproduced_tokens(self.case, finding, of, got, expected.values, tolerance))

    def verify_logprobs(
        self, label: str, group: EngineGroup, model: TinyModel, data: Ragged, cut: MicroBatchSpec = ONE_PASS
    ) -> None:
        """Compare the log-probs of every token of ``data`` with the oracle's for ``model``."""

        def answer() -> list[Tensor]:
            return per_sequence(group.forward(data.batch(), cut), "logprobs", data)

        expected = self.outputs(model, data, "logprobs")
        self.verify_tokens(f"log-probs {label}", answer(), expected, self.places(data), again=answer)

    def verify_gradients(
        self,
        label: str,
        group: EngineGroup,
        metrics: Mapping[str, float],
        expected: ExpectedGradients,
        again: Again | None = None,
        *,
        name: str = "loss",
    ) -> None:
        """Compare the reported loss, the metric ``name``, and the exported gradients with the oracle's.

        ``again`` makes the same pass once more, to detect nondeterminism.
        """
        truth, loss, mistakes = expected.oracle, metrics.get(name, math.nan), expected.mistakes
        grads = group.named_tensors("grads")
        of_grads = partial(explain_named, grads, expected.tolerances, mistakes, again, expected.shares)
        values = grads, truth.grads, expected.tolerances
        finding = diagnose.compare_named(f"gradients {label}", *values, explain=of_grads)

        def of_loss() -> str | None:
            return explain_loss(loss, truth.loss, expected.loss, mistakes, again) or finding.cause

        self.verify_loss(f"the {name} {label}", loss, expected, explain=of_loss)
        self.verify(reproduced(self.case, finding, expected.computation, *values))

    def verify_backward(
        self,
        label: str,
        group: EngineGroup,
        model: Judged,
        data: Ragged,
        loss: CheckLoss,
        cut: MicroBatchSpec = ONE_PASS,
    ) -> dict[str, float]:
        """Run forward and backward; compare loss and gradients with the oracle's, and drop them. The metrics."""

        def again() -> tuple[float, dict[str, Tensor]]:
            group.optimizer_zero_grad()
            repeated = group.forward_backward(data.batch(), loss.spec(), cut)
            return repeated["loss"], group.named_tensors("grads")

        metrics = group.forward_backward(data.batch(), loss.spec(), cut)
        self.verify_gradients(label, group, metrics, self.gradients(model, data, loss), again)
        group.optimizer_zero_grad()
        return metrics


def _parsed(spec: EngineSpec, values: Mapping[str, Any], kind: type[ConfigT]) -> ConfigT:
    config = parse_config(load_config(spec), values, f"the config of {spec.name!r}")
    assert isinstance(config, kind)
    return config


def per_sequence(output: ModelOutput, name: str, data: Ragged) -> list[Tensor]:
    """A token output of the whole batch ``[T]`` as one tensor for each sequence, a sequence output as scalars."""
    value = output[name]
    return list(value.unbind() if name in ("scores", "bootstrap") else value.split(data.lengths))
