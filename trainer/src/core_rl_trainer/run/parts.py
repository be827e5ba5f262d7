"""The engines' parts of a run checkpoint: written in an engine's own format and in ``portable``, read in either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.checkpoint.manifest import read_manifest
from core_rl.checkpoint.run import RunCheckpoint
from core_rl.config.capability import Capability
from core_rl.config.layout import ParallelLayout
from core_rl.errors import CheckpointDamaged, CheckpointMismatch
from core_rl.launch.group import EngineGroup
from core_rl.registry.spec import EngineSpec
from core_rl_trainer.plan.engines import resume_format

PORTABLE = "-portable"
"""The end of the name of a part that is written in ``portable`` besides the engine's own format."""


def part_writers(
    groups: Mapping[str, EngineGroup], *, portable: bool, background: bool
) -> dict[str, Callable[[Path], None]]:
    """Writers by the names of their parts, with ``portable`` for other engines and layouts too.

    In the ``background``, the files of an engine's own format are still to come when its writer returns.
    """
    writers: dict[str, Callable[[Path], None]] = {}
    for name, group in groups.items():
        exact_format = resume_format(group.spec)
        if portable and exact_format != "portable":  # first: a save waits for the previous save
            writers[f"{name}{PORTABLE}"] = partial(_save, group, "portable", False)
        writers[name] = partial(_save, group, exact_format, background)
    return writers


def _save(group: EngineGroup, name: CheckpointFormat, background: bool, path: Path) -> None:
    group.save(SaveLoadMeta(path=str(path), format=name, asynchronous=background))


def has_portable(checkpoint: RunCheckpoint, roles: Mapping[str, EngineSpec]) -> bool:
    """Whether engines of another kind or layout can read the parts of ``roles``."""
    return all(
        resume_format(spec) == "portable" or (checkpoint.path / f"{name}{PORTABLE}").is_dir()
        for name, spec in roles.items()
    )


def readable_part(
    checkpoint: RunCheckpoint, name: str, spec: EngineSpec, layout: ParallelLayout
) -> SaveLoadMeta:
    """Path and format of the part ``name`` for an engine ``spec`` at ``layout``: the exact one where it can read that.

    Raises `CheckpointMismatch` where it can read neither.
    """
    part = checkpoint.part(name)
    manifest = read_manifest(part)
    portable = part.with_name(f"{name}{PORTABLE}")
    if manifest.kind == "portable":
        return SaveLoadMeta(path=str(part), format="portable")
    engine, saved = manifest.state["engine"], ParallelLayout.model_validate(manifest.state["layout"])
    if engine == spec.name and (saved == layout or spec.supports(Capability.RESHARDING)):
        return SaveLoadMeta(path=str(part), format="sharded")
    if portable.is_dir():
        return SaveLoadMeta(path=str(portable), format="portable")
    raise CheckpointMismatch(
        f"the {name} in {checkpoint.path} was saved by the engine {engine!r} at {saved} in a format of its own, and "
        f"this run has {spec.name!r} at {layout}. Resume the earlier run with save_portable_every=N, also if it is "
        "complete: its next checkpoint can be read by any engine"
    )


def restore_parts(groups: Mapping[str, EngineGroup], checkpoint: RunCheckpoint) -> None:
    """Load the parts of ``checkpoint``.

    Raises `CheckpointDamaged` for changed files, and `CheckpointMismatch` when they do not belong
    together.
    """
    for name, group in groups.items():
        try:
            group.load(readable_part(checkpoint, name, group.spec, group.layout))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(
                f"{error}\nRestore the file, or remove {checkpoint.path} to go on from the checkpoint before it"
            ) from error
        version = group.get_version()
        if version != checkpoint.step:
            raise CheckpointMismatch(
                f"{checkpoint.path} is of step {checkpoint.step}, and its {name} of version {version}; remove it"
            )
