"""The suite as a pytest session: collection, counting, and exit status."""

from __future__ import annotations

import platform
import re
import secrets
from collections.abc import Collection, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import importlib_metadata as metadata
import pytest
import torch
import transformers
from transformers.utils import logging as hf_logging
from xdist.scheduler import LoadScopeScheduling

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError, CoreRLError, MissingPackage, raise_all
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec, check_spec
from core_rl_conformance.case import Target
from core_rl_conformance.catalogue import CHECKS_DIRECTORY, load_checks
from core_rl_conformance.disk_cache import DiskCache
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.given_data import read_sequences
from core_rl_conformance.given_model import read_given
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.profile import MOE
from core_rl_conformance.report.code import suite_code
from core_rl_conformance.servers.options import ServerArguments
from core_rl_conformance.session.items import EXPECTED_VALUES, PLAN, CheckFile, CheckItem, Plan
from core_rl_conformance.session.matrix import Selection, load_target, select
from core_rl_conformance.session.order import level
from core_rl_conformance.session.summary import Summary
from core_rl_conformance.trainers.spec import find_trainer


def load_trainer(name: str, known_checks: Collection[str]) -> Target:
    """The trainer ``name`` with its profile; raises `ConfigError` with everything that is wrong with them."""
    trainer, distribution, version = find_trainer(name)
    origin = f"trainer {name!r}"
    profile = trainer.profile
    special = {Capability.BFLOAT16} if "bfloat16" in profile.dtypes else set()
    special |= {Capability.MOE} if MOE in profile.families else set()
    spec = EngineSpec(
        name=trainer.name,
        kind="train",
        protocol=PROTOCOL_VERSION,
        factory=trainer.factory,
        config="core_rl.config.engine:TrainEngineConfig",
        capabilities=frozenset(special).union(*(layout.needed_capabilities() for layout in profile.layouts)),
        description=trainer.description,
    )
    check_spec(spec, origin)
    raise_all(ConfigError, f"the profile of {origin}", profile.violations(spec, known_checks))
    if trainer.package:
        try:
            version = f"{trainer.package} {metadata.version(trainer.package)}"
        except metadata.PackageNotFoundError as error:
            raise ConfigError(f"{origin} needs {trainer.package}, which is not installed") from error
    return Target(spec=spec, profile=profile, trainer=trainer, distribution=distribution, version=version)


CASE = re.compile(r"(?P<module>[^/]*)\.py::[^\[]*\[.*?-(?P<model>[^-]+-(?:bfloat16|float32))")
"""The name of a case, as far as its model and dtype."""
FILTERS = ("keyword", "markexpr", "deselect", "lf", "stepwise")
"""Options of pytest that leave tests out."""


class ConformanceSession:
    """The hooks of a session with ``--engine``."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.plan = _plan(config)
        config.stash[PLAN] = self.plan
        # Paths that hold a copy of the suite, or no path at all, mean the checks of this one.
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = [str(CHECKS_DIRECTORY)]
        elif not config.getoption("pyargs"):
            config.args = [_in_this_copy(argument, config.invocation_params.dir) for argument in config.args]
        filtered = any(config.getoption(name, default=None) for name in FILTERS) or any(
            "::" in argument or argument.endswith(".py") for argument in config.args
        )
        narrowed = self.plan.selection.narrowed or filtered or self.plan.given is not None
        self.summary = Summary(self.plan, narrowed)

    # ------------------------------------------------------------ collection

    def pytest_report_header(self) -> list[str]:
        targets, selection, given = self.plan
        names = ", ".join(target.spec.name for target in targets)
        lines = [f"core-rl conformance: {names}; checks in {CHECKS_DIRECTORY}; seed {selection.seed}"]
        if given is not None:
            checks = [check for name, check in load_checks().items() if selection.wants(name)]
            places = sum(len(target.profile.layouts) for target in targets if target.given)
            lines.append(given.header(checks, places))
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool:
        """Nothing but the checks, wherever they are installed."""
        on_the_way = collection_path in CHECKS_DIRECTORY.parents
        return not (on_the_way or CHECKS_DIRECTORY in (collection_path, *collection_path.parents))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector:
        """Plain directories: pytest's packages would import modules in ways of their own."""
        directory: pytest.Dir = pytest.Dir.from_parent(parent, path=path)
        return directory

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, object, list[pytest.Collector]]:
        """Each module of checks once, whatever the name patterns and doctest options."""
        yield
        if file_path.parent != CHECKS_DIRECTORY or file_path.suffix != ".py":
            return []
        # The same name wherever the suite is installed and however it was asked for.
        nodeid = f"core_rl_conformance/checks/{file_path.name}"
        if file_path.is_relative_to(self.config.rootpath):
            nodeid = file_path.relative_to(self.config.rootpath).as_posix()
        return [CheckFile.from_parent(parent, path=file_path, nodeid=nodeid)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Neighbours share processes, and values computed for a model; basic checks come first."""

        def place(item: pytest.Item) -> tuple[int, int, int, int, int]:
            assert isinstance(item, CheckItem)
            case = item.case
            profile = case.target.profile
            # A server has one model, and takes long to start with another.
            serves = case.target.kind == "inference"
            return (
                self.plan.targets.index(case.target),
                profile.dtypes.index(case.dtype),
                case.layout.world_size,
                profile.families.index(case.family) if serves else 0,
                level(case.check),
            )

        items.sort(key=place)

    # --------------------------------------------------------------- running

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> CaseScheduling | None:
        """Ours, unless ``--dist`` asks for another."""
        return CaseScheduling(config, log) if config.getoption("dist") == "load" else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Keep the groups of ranks for the whole session, and end them with it."""
        timeout_s: float = self.config.getoption("core_rl_call_timeout")
        with (
            TemporaryDirectory(prefix="core-rl-conformance-") as directory,
            ExpectedValues(Path(directory), timeout_s, cache=self._cache()) as expected_values,
        ):
            self.config.stash[EXPECTED_VALUES] = expected_values
            return (yield)

    def _cache(self) -> DiskCache | None:
        """In pytest's cache directory; none with ``-p no:cacheprovider``, nor for a soak, which repeats nothing."""
        cache = getattr(self.config, "cache", None)
        if cache is None or self.plan.selection.soak_minutes is not None:
            return None
        machine = (platform.machine(), torch.backends.cpu.get_cpu_capability())
        code = (suite_code().digest, torch.__version__, transformers.__version__, *machine)
        on_disk = DiskCache(cache.mkdir("core-rl-expected"), " ".join(code))
        on_disk.trim()
        return on_disk

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the outcome into the report, which travels from workers and into JUnit files."""
        report = yield
        assert isinstance(item, CheckItem)
        outcome, reason = _outcome(item, report)
        if report.when == "call" or outcome not in (Outcome.PASSED, None):
            assert outcome is not None
            record = item.result(outcome, reason).to_property()
            report.user_properties.append(record)
            if outcome is Outcome.FAILED and item.reproduction:
                report.sections.append(("reproduction without core-rl", item.reproduction))
            # JUnit files show the properties of the last report on an item, that of its teardown.
            item.user_properties.append(record)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = CaseRecord.from_properties(report.user_properties)
        if result is not None:
            failed = result.outcome in (Outcome.FAILED, Outcome.WAIVED)
            # Not `longreprtext`: from a worker it begins with the path of its Python.
            message = str(report.longrepr or "") if failed else ""
            self.summary.add(result.model_copy(update={"message": message}))

    # ---------------------------------------------------------------- ending

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let failures name the failure to fix first; a session that shows nothing is no success."""
        self._name_firsts()
        done = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self.is_worker or self.config.option.collectonly or not done:
            return
        if any(self.summary.problems().values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _name_firsts(self) -> None:
        """Below each failure, name the failure to fix before it, which only the whole session shows."""
        firsts = self.summary.firsts()
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        for report in () if reporter is None else reporter.stats.get("failed", ()):
            record = CaseRecord.from_properties(report.user_properties)
            if record is not None and (record.engine, record.check) in firsts:
                report.sections.append(("fix first", firsts[record.engine, record.check]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.config.option.collectonly:
            self.summary.write(terminalreporter)


def unit_of(nodeid: str, servers: Collection[str]) -> str:
    """The group of cases that run on one worker with the case ``nodeid``.

    The cases of one module, model and dtype: they ask for the same expected values. For ``servers`` all cases of
    a model: a server has one, and takes long to start with another.
    """
    match = CASE.search(nodeid)
    if match is None:
        return nodeid
    engines = nodeid.partition("[")[2]
    serves = any(engines.startswith(f"{name}-") or f"-with-{name}-" in engines for name in servers)
    return match["model"] if serves else f"{match['module']} {match['model']}"


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no annotations
    """Whole units, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        targets = self.config.stash[PLAN].targets
        return unit_of(nodeid, [target.spec.name for target in targets if target.kind == "inference"])


def _plan(config: pytest.Config) -> Plan:
    """Read the options; a mistake in them, or in an engine, ends the session with its message."""
    # Tiny models gain nothing from threads, and the ranks want the cores.
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    if config.option.core_rl_seed is None:  # workers get the number that is set here
        config.option.core_rl_seed = 0 if config.option.core_rl_soak is None else secrets.randbelow(10**6)
    layouts, families, names = (config.getoption(f"core_rl_{name}") for name in ("layout", "model", "check"))
    selection = Selection(
        layouts=tuple(layouts) if layouts else None,
        families=tuple(families) if families else None,
        checks=tuple(names) if names else None,
        dtype=config.getoption("core_rl_dtype"),
        seed=config.getoption("core_rl_seed"),
        quick=config.getoption("core_rl_quick"),
        sample_every=config.getoption("core_rl_sample_every"),
        device=config.getoption("core_rl_device"),
        soak_minutes=config.getoption("core_rl_soak"),
        still_steps=config.getoption("core_rl_lr0"),
    )
    try:
        checks = load_checks()
        directory = config.getoption("core_rl_model_dir")
        engines = _layouts_of(config.getoption("core_rl_engines"), bool(directory))
        targets = [load_target(name, checks) for name in engines]
        targets += [
            load_trainer(name, checks) for name in dict.fromkeys(config.getoption("core_rl_trainer") or ())
        ]
        server = _server_arguments(config)
        given = read_given(Path(directory)) if directory and (targets or server is None) else None
        if given is not None:
            targets = [
                given.judged_by(target, engines.get(target.spec.name) or selection.layouts, selection.dtype)
                for target in targets
            ]
        targets += [] if server is None else [load_server_target(server)]
        if file := config.getoption("core_rl_data"):
            if not directory:
                raise ConfigError(f"--data={file}: sequences are for a given model; give --model-dir, too")
            sequences = read_sequences(Path(file), Path(directory))
            targets = [replace(target, sequences=sequences) for target in targets]
        select(targets, selection, checks)
    except CoreRLError as error:
        raise pytest.UsageError(str(error)) from error
    if given is not None and selection.soak_minutes is not None:
        raise pytest.UsageError("--soak with --model-dir: a soak draws models; leave either out")
    if selection.soak_minutes is not None and all(target.kind != "train" for target in targets):
        raise pytest.UsageError(
            f"--soak: {', '.join(engines)}: no train engine; a soak draws calls of train engines"
        )
    return Plan(targets, selection, given)


def _layouts_of(names: Iterable[str], on_model: bool) -> dict[str, list[str]]:
    """The layouts of each engine in ``names``, as in ``fsdp:dp2``; none for a name alone."""
    engines: dict[str, list[str]] = {}
    for text in names:
        name, _, layout = text.partition(":")
        if layout and not on_model:
            raise ConfigError(
                f"--engine={text}: a layout is for --model-dir; write --engine={name} --layout={layout}"
            )
        engines.setdefault(name, []).extend([layout] if layout else [])
    return engines


def load_server_target(arguments: ServerArguments) -> Target:
    """The server under test; raises `MissingPackage` without the packages of the extra ``servers``."""
    try:  # engines without servers need none of them
        from core_rl_conformance.servers.target import load_server
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"--server and --server-command need {error.name}: pip install 'core-rl[conformance,servers]'"
        ) from error
    return load_server(arguments)


def _server_arguments(config: pytest.Config) -> ServerArguments | None:
    """The server of the command line; None without one."""
    url, command = config.getoption("core_rl_server"), config.getoption("core_rl_server_command")
    if url is None and command is None:
        return None
    return ServerArguments(
        url=url or "",
        command=command or "",
        wire=config.getoption("core_rl_wire") or "",
        model_dir=config.getoption("core_rl_model_dir") or "",
        take_over=config.getoption("core_rl_take_over"),
        key_variable=config.getoption("core_rl_server_key"),
        dtype=config.getoption("core_rl_dtype"),
        device=config.getoption("core_rl_device"),
    )


def _in_this_copy(argument: str, directory: Path) -> str:
    """``argument``, moved here if it leads to another copy of the suite, or is a name that the suite prints."""
    path, separator, rest = argument.partition("::")
    full, package = (directory / path).resolve(), CHECKS_DIRECTORY.parent
    above = next((part for part in (full, *full.parents) if part.name == package.name), None)
    if (full / package.name / "checks").is_dir():
        suite = full / package.name
    elif above is not None and ((above / "checks").is_dir() or not full.exists()):
        suite = above
    else:
        return argument
    if suite == package:
        return argument
    inside = full.relative_to(suite) if suite is above else Path()
    return f"{package / inside}{separator}{rest}"


def _outcome(item: CheckItem, report: pytest.TestReport) -> tuple[Outcome | None, str]:
    expected = str(getattr(report, "wasxfail", ""))
    if report.skipped and item.case.not_supported:
        return Outcome.NOT_SUPPORTED, item.case.not_supported
    if report.skipped and not expected:
        return Outcome.NOT_RUN, item.case.not_run or "skipped"
    if report.skipped:
        return Outcome.WAIVED, expected
    if report.failed:
        return Outcome.FAILED, ""
    return (Outcome.PASSED, "") if report.when == "call" else (None, "")
