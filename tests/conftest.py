import os

# Hubs are not for tests; and one thread gives the same bits as the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import patience
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
patience.measure()

# Time is no part of any claim: a test of a busy machine says the same as one of an idle one.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

MADE_BY_PROCESSES = {"islands", "trained", "undisturbed"}
"""Fixtures that cost much; the tests of one run in one of pytest-xdist's workers, so that it is made once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in MADE_BY_PROCESSES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {name}"))
