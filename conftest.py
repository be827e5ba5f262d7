"""Settings of all tests, and cases of a sampled test that `nox -s tests` leaves to `nox -s nightly`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# Other work on the machine makes a test slow, not wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


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
