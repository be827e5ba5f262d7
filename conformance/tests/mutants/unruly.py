"""Engines that do not answer as engines do: for tests of the plugin."""

from __future__ import annotations

import os
from collections.abc import Sequence

from core_rl.data.batch import SequenceBatch
from core_rl.engines.steps import MicroBatchStep
from core_rl_conformance.reference.train import ReferenceEngine


class DiesInEvaluation(ReferenceEngine):
    """The process ends in the middle of a pass."""

    def _run(self, micro_batches: Sequence[SequenceBatch], step: MicroBatchStep, forward_only: bool) -> None:
        if forward_only:
            os._exit(3)
        super()._run(micro_batches, step, forward_only)
