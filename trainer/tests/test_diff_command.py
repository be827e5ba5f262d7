"""`core-rl diff` on recipes of this trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rl_conformance.differences.replay import report_of
from core_rl_conformance.differences.run import compare

RECIPE = """
engine: fsdp
model: {path: nowhere}
data: {train: nowhere.jsonl}
output_dir: nowhere
steps: 20
optimizer: {lr: 1.0e-3, schedule: {type: linear}}
algorithm:
  type: ppo_actor
  args: ARGS
"""
LEFT = "{minibatches: 4, kl_coef: 0.02, kl_estimator: k3}"
RIGHT = "{kl_coef: 0.02, kl_estimator: k2, loss: {type: clipped, clip_high: 0.3}, whiten_advantages: true}"


@pytest.mark.nightly
def test_diff_names_terms_of_two_recipes(tmp_path: Path) -> None:
    arguments = []
    for name, settings in (("left", LEFT), ("right", RIGHT)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(RECIPE.replace("ARGS", settings), encoding="utf-8")
        arguments.append(f"core-rl:{recipe}")
    comparison = compare(arguments[0], arguments[1], None, 0)
    report = report_of(arguments[0], arguments[1], comparison)
    assert [difference.term for difference in comparison.differences] == [
        "advantages",
        "clip bounds",
        "KL",
    ], report
    assert "differ first in: advantages" in report
    kl = comparison.right.terms.kl
    # Coefficients are read in relation to advantages, which whitening scales by n or by n - 1.
    assert kl.estimator == "k2"
    assert kl.coef == pytest.approx(0.02, rel=0.01)
