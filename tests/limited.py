"""`python limited.py MEGABYTES ARGUMENTS`: farflung in a process whose address space may grow by so much; 0: any."""

from __future__ import annotations

import ctypes
import importlib
import resource
import sys
from pathlib import Path

from farflung import cli

ALLOCATING = {-8: 1, -3: 1 << 20}
"""glibc's M_ARENA_MAX and M_MMAP_THRESHOLD: what is free is given back, and threads reserve no 64 MB each."""

# What training imports takes address space, too, and more on one machine than on another.
for name in ("farflung.training.launch", "transformers.models.llama.modeling_llama", "torch.distributed.checkpoint"):
    importlib.import_module(name)

megabytes = int(sys.argv.pop(1))
if megabytes:
    for kind, value in ALLOCATING.items():
        ctypes.CDLL(None).mallopt(kind, value)
    now = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20),) * 2)
cli.main()
