import os

# Hubs are not for tests; and one thread gives the same bits as the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
