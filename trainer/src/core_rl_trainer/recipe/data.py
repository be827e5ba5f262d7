"""The section ``data`` of a recipe, under the path of the other sections."""

from __future__ import annotations

from core_rl_trainer.data.config import DataSection, DataSource, Sources

__all__ = ["DataSection", "DataSource", "Sources"]
