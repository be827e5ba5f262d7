"""Directories in which the ranks of a machine, or all ranks, write and read the files of a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from core_rl.checkpoint.local import in_use, remove_stale
from core_rl.distributed.agreement import agree, on_all
from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError

__all__ = ["Workspace", "check_visible", "shared_workspace", "workspace_of_each_machine"]

PREFIX = "core-rl-checkpoint."
FILES = "files"
MAKER = "maker"


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A directory and the ranks that see it. Its path is the same on all machines."""

    path: Path
    rank: int
    ranks: tuple[int, ...]
    """The ranks that see the files in it, in order: all of them, or those of one machine."""
    leaders: tuple[int, ...]
    """The first rank of each such directory; rank 0 is one of them."""

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that see the directory."""
        return self.rank == self.ranks[0]

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the files ``names`` that are this rank's work; of files with the number of a rank, its own."""
        return names[self.ranks.index(self.rank) :: len(self.ranks)]


def shared_workspace(path: Path, world: Comm) -> Workspace:
    """The directory ``path``, which all ranks see."""
    return Workspace(path=path, rank=world.rank, ranks=tuple(range(world.size)), leaders=(0,))


def workspace_of_each_machine(world: Comm, stack: ExitStack, subject: str) -> Workspace:
    """An empty directory for temporary files on each machine; collective.

    It lives as long as its leader's ``stack``; what killed processes have left is removed. Machines that share the
    directory of temporary files share this one too.
    """
    root = world.broadcast(Path(tempfile.gettempdir()) / f"{PREFIX}tmp-{uuid.uuid4().hex}")

    def enter() -> None:
        _make(root, world.rank, made)
        stack.enter_context(in_use(root))
        remove_stale(root.parent, PREFIX)

    with ExitStack() as made:
        on_all(world, enter, subject, CheckpointError)
        maker_of = agree(world, lambda: int((root / MAKER).read_text()), subject, CheckpointError)
        made.pop_all()
    own = maker_of[world.rank]
    workspace = Workspace(
        path=root / FILES,
        rank=world.rank,
        ranks=tuple(rank for rank, maker in enumerate(maker_of) if maker == own),
        leaders=tuple(sorted({maker_of.index(maker) for maker in maker_of})),
    )
    if workspace.leads:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
    return workspace


def _make(root: Path, rank: int, stack: ExitStack) -> None:
    """Make ``root``, unless another rank that sees it was first."""
    try:
        root.mkdir(mode=0o700)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{root.parent} does not exist here; set the environment variable TMPDIR to a directory that all machines "
            "have"
        ) from error
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    (root / FILES).mkdir()
    (root / MAKER).write_text(str(rank))


def check_visible(directory: Path) -> None:
    """Raise `CheckpointError` on a rank that does not see what rank 0 made."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} does not exist here; all ranks must see one file system. Name a directory that all machines "
            "share, or an fsspec URL"
        )
