import os

# Hubs are not for tests; and one thread gives the same bits as the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import patience
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
patience.measure()

# Time is no part of any claim: a test of a busy machine says the same as one of an idle one.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
