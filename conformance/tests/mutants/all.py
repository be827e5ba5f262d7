"""Every mutant of the zoo."""

from __future__ import annotations

from mutants import checkpoints, loss_scale, outputs, steps

MUTANTS = (*loss_scale.MUTANTS, *outputs.MUTANTS, *steps.MUTANTS, *checkpoints.MUTANTS)
