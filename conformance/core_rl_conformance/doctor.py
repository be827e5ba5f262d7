"""``core-rl doctor``: engines on a user's model, and the first place where they part.

A session of the suite with ``--model-dir`` judges them against the float64 oracle; this reads its report.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from core_rl.config.engine import DType
from core_rl.errors import ConfigError, CoreRLError
from core_rl_conformance.case import Target
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.given_data import read_sequences
from core_rl_conformance.given_model import GivenModel, read_given
from core_rl_conformance.hints.tokens import LOOKS_LIKE
from core_rl_conformance.outcomes import CaseRecord, Outcome, Record
from core_rl_conformance.report.files import read_report, write_text
from core_rl_conformance.report.html import render
from core_rl_conformance.servers.options import ServerArguments
from core_rl_conformance.session.matrix import load_target
from core_rl_conformance.session.session import load_server_target
from core_rl_conformance.session.summary import FINISHED, SYMBOLS, worst_line
from core_rl_conformance.smaller_model import Cuts, write_smaller_model

STAGES: Mapping[str, Sequence[str]] = {
    "layers": ("I7.layers",),
    "outputs": (
        "I7.logprobs",
        "I7.entropy",
        "I8.temperature",
        "I6.neighbours",
        "I7.score",
        "I7.top-logprobs",
        "I7.rollout-logprobs",
        "I8.rollout-temperature",
    ),
    "loss": (),
    "gradients": (
        "I1.gradients",
        "I1.micro-batches",
        "I2.data-parallel",
        "I5.two-calls",
        "I5.eval-leaves-nothing",
        "I6.masked-nan",
        "I6.masked-tokens",
    ),
    "norm": ("I4.grad-norm",),
    "optimizer step": ("I1.train-batch", "I4.clipping", "I20.adamw", "I16.all-masked"),
    "export": ("I10.export", "I10.import"),
    "checkpoint": ("I11.resume",),
    "sync": ("I12.disk", "I12.tensor", "I12.receive-disk", "I12.receive-tensor"),
    "standstill": ("I12.standstill", "I12.standstill-sync"),
}
"""Checks by the part of a step that they judge, in order, of train and of inference engines."""
MEASURED = {"the loss": "loss", "the norm": "norm", "weights after": "optimizer step"}
"""Stages by the beginning of a measurement's label: checks of gradients compare more than these."""
SUITE = ("--pyargs", "core_rl_conformance", "-p", "no:cacheprovider")
NOT_JUDGED = "could not be judged: "
RAISED_AT = "last line of the "
PLACE = re.compile(r"^ *first(?:: | at )(?P<place>.+?)(?: \[| by |: expected)", re.MULTILINE)
SHOWN = re.compile(r"expected (\S+), the engine gave (\S+)")
MAP_ROW = re.compile(r"^ +(\d+) ([.1-9]+)$", re.MULTILINE)
"""A line of the map of errors in a message."""
CUT = "model"
"""Directory of a model that was cut."""
SCRIPT_S = 600.0
"""Time limit of a reproduction."""
HINT = re.compile(rf"^ *{LOOKS_LIKE}.+$", re.MULTILINE)


class Finding(Record):
    """A failed check of one engine."""

    stage: str
    engine: str
    check: str
    place: str
    """The first parameter, token or number that is off, or else the message's first line."""
    size: str
    """Of the difference from the oracle, and of the allowed one; empty for an error."""
    hint: str
    message: str

    @property
    def error_map(self) -> list[tuple[str, str]]:
        """Layers and the mark of each token, where the message has a map of errors."""
        return MAP_ROW.findall(self.message)


class Diagnosis(Record):
    """The results of a session about engines, each as NAME:LAYOUT."""

    verdict: str
    """The first line."""
    exit_code: int
    """0 nothing found, 1 a finding, 2 an engine that could not be judged."""
    engines: Mapping[str, str]
    """The judgement on each."""
    findings: tuple[Finding, ...]
    """The first stage comes first."""
    checks: tuple[str, ...]
    """One line for each check and engine."""
    cut: str
    """Layers, experts and words that were left out."""
    scripts: Mapping[str, str] = {}
    """Files by engine: scripts without core-rl that show first differences."""

    @property
    def text(self) -> str:
        """The verdict for a terminal."""
        engines = [f"{label}: {judgement}" for label, judgement in self.engines.items()]
        cut = [f"model: {self.cut}"] if self.cut else []
        first = ["", self.findings[0].message] if self.findings else []
        scripts = [f"reproduction of {label}: {file}" for label, file in self.scripts.items()]
        return "\n".join([self.verdict, *engines, *cut, *scripts, *first, "", *self.checks])

    @property
    def page(self) -> str:
        """The same as a web page, with all findings."""
        return render("doctor.html.jinja", {"diagnosis": self})


def diagnose(
    engines: Sequence[str],
    path: Path,
    data: Path | None,
    dtype: DType | None,
    cuts: Cuts,
    server: ServerArguments | None = None,
    scripts: Path | None = None,
    seed: int = 0,
    still_steps: int = 0,
) -> Diagnosis:
    """Judge ``engines``, each NAME or NAME:LAYOUT, on the model in ``path``.

    The sequences are drawn by ``seed``, or come from the file ``data``. A ``server`` of the whole model is judged, too.
    Scripts of first differences, and the model that they read if it is cut, go into the directory ``scripts``. Raises
    `ConfigError` for a model that nothing can be computed with, for sequences that it does not take, for options that
    exclude each other, and for a session without an end.
    """
    _check_options(data, cuts, server)
    with TemporaryDirectory(prefix="core-rl-doctor-") as temporary:
        cut, options = "", [f"--lr0={still_steps}", f"--seed={seed}"]
        options += [f"--dtype={dtype}"] if dtype else []
        if data is not None:
            file = Path(temporary) / "sequences.jsonl"
            file.write_text("\n".join(map(json.dumps, read_sequences(data, path))), encoding="utf-8")
            options.append(f"--data={file}")
        if cuts:
            smaller = (scripts or Path(temporary)) / CUT
            cut = write_smaller_model(path, cuts, smaller)
            path = smaller
        model = read_given(path, "--model")
        labels = {engine: _label_or_refusal(partial(_target, engine, model, dtype)) for engine in engines}
        options += [f"--engine={label}" for label in dict.fromkeys(labels.values()) if isinstance(label, str)]
        if server is not None:
            labels[server.url] = _label_or_refusal(partial(load_server_target, server))
            options += server.command_line if isinstance(labels[server.url], str) else []
        accepted = list(dict.fromkeys(label for label in labels.values() if isinstance(label, str)))
        options.append(f"--model-dir={path}")
        results = _results(options, Path(temporary) / "report.json") if accepted else ()
    refused = {engine: str(error) for engine, error in labels.items() if isinstance(error, CoreRLError)}
    diagnosis = diagnosis_of(accepted, refused, results, cut)
    if scripts is None:
        return diagnosis
    return diagnosis.model_copy(update={"scripts": write_scripts(diagnosis.findings, results, scripts)})


def _check_options(data: Path | None, cuts: Cuts, server: ServerArguments | None) -> None:
    if server is not None and cuts:
        raise ConfigError(f"--server={server.url} serves the whole model; leave out the options that cut it")
    if data is not None and cuts.vocabulary is not None:
        raise ConfigError(
            f"--data={data} has tokens that --vocab={cuts.vocabulary} may cut; leave out --vocab"
        )


def _target(engine: str, model: GivenModel, dtype: DType | None) -> Target:
    """``engine`` at its layout, by default the first of its profile."""
    name, _, layout = engine.partition(":")
    return model.judged_by(load_target(name, load_checks()), [layout] if layout else None, dtype)


def _label_or_refusal(load: Callable[[], Target]) -> str | CoreRLError:
    """NAME:LAYOUT, or the reason for none."""
    try:
        target = load()
    except CoreRLError as error:
        return error
    return f"{target.spec.name}:{target.profile.layouts[0]}"


def _results(options: Sequence[str], file: Path) -> tuple[CaseRecord, ...]:
    """The results of a session with ``options``, which shows its progress on the standard error."""
    checks = [f"--check={check}" for check in _checks() if check not in STAGES.get("standstill", ())]
    with redirect_stdout(sys.stderr):
        code = pytest.main([*options, *checks, f"--report={file}", *SUITE])
    if code not in FINISHED:
        raise ConfigError(f"the session ended early, with pytest's exit code {int(code)}; see its text above")
    return read_report(file).results


def write_scripts(
    findings: Sequence[Finding], results: Sequence[CaseRecord], directory: Path
) -> dict[str, str]:
    """The first reproduction of each engine that runs, and shows a difference: its file in ``directory``."""
    texts = {(_label(case), case.check): case.reproduction for case in results if case.reproduction}
    files: dict[str, str] = {}
    for finding in findings:
        text = texts.get((finding.engine, finding.check))
        if text is None or finding.engine in files:
            continue
        file = directory / f"{finding.engine}-{finding.check}.py".replace(":", "-")
        # Directory and all may go upstream: a model that was cut lies beside its scripts.
        write_text(file, text.replace(repr(str(directory / CUT)), repr(CUT)))
        if _shows_difference(file):
            files[finding.engine] = str(file)
        else:
            file.unlink()
    return files


def _shows_difference(file: Path) -> bool:
    command = [sys.executable, "-I", file.name]  # as in an environment without core-rl
    try:
        result = subprocess.run(
            command, cwd=file.parent, capture_output=True, text=True, check=True, timeout=SCRIPT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return any(expected != got for expected, got in SHOWN.findall(result.stdout))


def diagnosis_of(
    labels: Iterable[str], refused: Mapping[str, str], results: Sequence[CaseRecord], cut: str
) -> Diagnosis:
    """The diagnosis from ``results``; some engines were ``refused`` before, with the reason."""
    cases: dict[str, list[CaseRecord]] = {label: [] for label in labels}
    for case in results:
        cases[_label(case)].append(case)
    stages, order = list(STAGES), _checks()
    findings = [_finding(case) for case in results if case.outcome is Outcome.FAILED]
    findings.sort(key=lambda finding: (stages.index(finding.stage), order.index(finding.check)))
    judgements = {label: _judgement(label, cases[label], findings) for label in cases}
    judgements |= {engine: f"{NOT_JUDGED}{reason.splitlines()[0]}" for engine, reason in refused.items()}
    judged = [label for label, rows in cases.items() if any(case.outcome.executed for case in rows)]
    return Diagnosis(
        verdict=_verdict(judged, findings),
        exit_code=1 if findings else 2 if len(judged) < len(judgements) else 0,
        engines=judgements,
        findings=tuple(findings),
        checks=tuple(_lines([case for case in results if _label(case) in judged])),
        cut=cut,
    )


def _checks() -> list[str]:
    return [check for checks in STAGES.values() for check in checks]


def _label(case: CaseRecord) -> str:
    return f"{case.engine}:{case.layout}"


def _finding(case: CaseRecord) -> Finding:
    place, hint = PLACE.search(case.message), HINT.search(case.message)
    worst = case.worst if case.worst and case.worst.ratio > 1 else None
    number = worst.what if worst else ""
    lines = [line.strip() for line in case.message.splitlines()[1:]]
    error = next((line for line in lines if not line.startswith(RAISED_AT)), "")
    stage = next(stage for stage, checks in STAGES.items() if case.check in checks)
    if stage == "gradients":
        stage = next((name for label, name in MEASURED.items() if number.startswith(label)), stage)
    return Finding(
        stage=stage,
        engine=_label(case),
        check=case.check,
        place=place["place"] if place else number or error,
        size=f"{worst.what} by {worst.error:.1e} (allowed {worst.limit:.1e})" if worst else "",
        hint=hint[0].strip() if hint else "",
        message=case.message,
    )


def _verdict(judged: Sequence[str], findings: Sequence[Finding]) -> str:
    if not judged:
        return "no engine could be judged"
    if not findings:
        return f"no difference beyond rounding: {', '.join(judged)}"
    first = findings[0]
    alike = {other.engine for other in findings if (other.check, other.place) == (first.check, first.place)}
    subject = "they part" if alike < set(judged) else f"{', '.join(judged)}: off the oracle"
    if not first.size:
        subject = f"{first.engine} fails"
    return f"{subject} first at {first.stage}: {first.place}"


def _judgement(label: str, cases: Sequence[CaseRecord], findings: Iterable[Finding]) -> str:
    executed = sum(case.outcome.executed for case in cases)
    if not executed:
        return f"{NOT_JUDGED}{next((case.reason for case in cases), 'no check ran')}"
    wrong = [finding for finding in findings if finding.engine == label]
    if not wrong:
        return f"within rounding of the oracle in {executed} checks"
    first = wrong[0]
    count = f"in {len(wrong)} of {executed} checks, first {first.check}"
    if not first.size:
        return f"fails {count}; {first.place}"
    # A later check is mostly a consequence, and may show the cause better.
    hint = next((finding.hint for finding in wrong if finding.hint), "")
    return "; ".join(filter(None, (f"off the oracle {count}", first.size, hint)))


def _lines(cases: Sequence[CaseRecord]) -> Iterator[str]:
    order = _checks()
    places = [f"{case.check.ljust(max(map(len, order)))}  {_label(case)}" for case in cases]
    width = max(map(len, places), default=0)
    for place, case in sorted(zip(places, cases, strict=True), key=lambda pair: order.index(pair[1].check)):
        yield f"{place.ljust(width)}  {SYMBOLS[case.outcome].ljust(7)}  {worst_line([case])}"
