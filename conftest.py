"""Cases of a sampled test that `nox -s tests` leaves to `nox -s nightly`."""

from __future__ import annotations

from collections import Counter

import pytest


# Before pytest deselects by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as nightly all but the first of each ``N`` cases of a test with the marker ``sampled(N)``."""
    counts: Counter[object] = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) and isinstance(item, pytest.Function):
            if counts[item.function] % sampled.args[0]:
                item.add_marker(pytest.mark.nightly)
            counts[item.function] += 1
