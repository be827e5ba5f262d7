"""The outcome of the recipes of this folder as one JSON file and a table: ``python results.py OUTPUT RUN…``.

Other runs in the file OUTPUT stay.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

REWARD, GREEDY, LOSS = "eval_reward", "eval_reward_greedy", "eval_loss"
MISMATCH = re.compile(r"mismatch_(k1|k3|max|share)_lag\d+")


def outcome(run: Path) -> dict[str, Any]:
    """Held-out measures before and after the run ``run``, with its steps and minutes."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    began, ended = (datetime.fromisoformat(status[moment]) for moment in ("started", "updated"))
    minutes = round((ended - began).total_seconds() / 60, 1)
    held_out = {
        moment: {
            name: value for name, value in (result[moment] or {}).items() if name in (REWARD, GREEDY, LOSS)
        }
        for moment in ("before", "after")
    }
    mismatch = mismatch_of(run)
    ends = {"mismatch": {"first": mismatch[0], "last": mismatch[-1]}} if mismatch else {}
    return {"run": run.name, "steps": result["steps"], "minutes": minutes, **held_out, **ends}


def mismatch_of(run: Path) -> list[dict[str, float]]:
    """Differences of the log-probs of server and actor in each step, in nats, by the lag of the weights."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {name: value for name, value in json.loads(line).items() if MISMATCH.fullmatch(name)}
        for line in lines
    ]
    return [row for row in rows if row]


def table(outcomes: list[dict[str, Any]]) -> str:
    """A Markdown table of held-out measures, with a row for each run and measure."""
    rows = ["| run | steps | minutes | held out | before | after |", "| --- | --- | --- | --- | --- | --- |"]
    for run in outcomes:
        for name, before in run["before"].items():
            cells = [
                run["run"],
                run["steps"],
                run["minutes"],
                name,
                f"{before:.3f}",
                f"{run['after'][name]:.3f}",
            ]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the file, and the table to the output."""
    output, *runs = map(Path, sys.argv[1:])
    outcomes = [outcome(run) for run in runs]
    earlier = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    rows = {row["run"]: row for row in (*earlier, *outcomes)}
    output.write_text(json.dumps([*rows.values()], indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(outcomes))


if __name__ == "__main__":
    main()
