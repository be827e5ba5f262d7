"""Options of the benchmarks."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping

from rich.console import Console

INSTALL = {
    "trl": "pip install trl==1.16.0",
    "verl": "pip install --no-deps verl==0.9.1, with what docs/benchmarks.md lists",
}


def options(doc: str) -> argparse.ArgumentParser:
    """The parser of a script; its description is the first line of ``doc``."""
    return argparse.ArgumentParser(description=doc.splitlines()[0])


def step_options(doc: str) -> argparse.ArgumentParser:
    """The options of a script that times training steps."""
    parser = options(doc)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="tokens in one packed micro-batch")
    parser.add_argument("--threads", type=int, help="of each rank; 2 in all by default")
    return parser


def model_dir_option(parser: argparse.ArgumentParser) -> None:
    """The option of a script that takes a Hugging Face directory."""
    parser.add_argument("--model-dir", help="a directory of a model, in place of a small Qwen3")


def read(parser: argparse.ArgumentParser, tiny: Mapping[str, object]) -> argparse.Namespace:
    """The values of the command line; with ``--rehearse`` the sizes of ``tiny`` instead."""
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: does the command run?")
    arguments = parser.parse_args()
    if arguments.rehearse:
        vars(arguments).update(tiny)
    return arguments


def installed(peer: str) -> bool:
    """Whether ``peer`` can be imported; prints the install command if not."""
    present = importlib.util.find_spec(peer) is not None
    if not present:
        Console(stderr=True).print(f"{peer} is left out, since it is not installed: {INSTALL[peer]}")
    return present
