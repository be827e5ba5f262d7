"""Distributions that tests install without pip: metadata and modules in a directory for ``sys.path``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

Texts = Mapping[str, str]
NOTHING: Mapping[str, Texts] = MappingProxyType({})


def write_distribution(
    site: Path,
    name: str,
    version: str = "1.0",
    *,
    points: Mapping[str, Texts] = NOTHING,
    files: Texts = MappingProxyType({}),
    metadata: str = "",
) -> None:
    """Install ``name`` in ``site`` with entry ``points`` by group, ``files`` by path, and lines of ``metadata``."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in points.items())
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/entry_points.txt": "".join(groups),
        **files,
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in texts)
    for path, text in texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")


def install_project(project: Path, site: Path) -> list[str]:
    """Install the sources ``project`` as an editable installation does; the directories that ``sys.path`` needs."""
    declared = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_distribution(site, declared["name"], declared["version"], points=declared["entry-points"])
    return [str(project / "src"), str(site)]
