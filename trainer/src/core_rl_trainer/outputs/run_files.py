"""Names of files in the directory of a run. Importing this module imports nothing else."""

from __future__ import annotations

__all__ = ["IDENTITY", "LOCK", "LOG", "METRICS", "PAGE", "PICTURE", "RECIPE", "RESTARTS", "RESULT", "STATUS"]

RECIPE = "recipe.yaml"
"""The recipe with all defaults."""
IDENTITY = "identity.json"
"""The rest of what identifies the run."""
STATUS = "status.json"
"""``status``, the ``problem`` that stopped the run, the ``working_directory`` of its relative paths, and times."""
METRICS = "metrics.jsonl"
"""An object of metrics for each step."""
RESTARTS = "restarts.jsonl"
"""An object for each restart after ranks or machines were lost (``cluster.restarts``)."""
RESULT = "result.json"
"""The result of a run that has come to its end."""
PAGE = "index.html"
"""The page that shows the run."""
PICTURE = "curve.svg"
"""The rewards, or the losses, over the steps."""
LOG = "run.log"
"""The lines of the terminal and warnings, with times."""
LOCK = ".lock"
"""Locked as long as a process is at work on the run."""
