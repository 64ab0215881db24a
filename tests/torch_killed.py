"""Runs a script, and kills it as `kill -9` does after so many steps of optimizers: `torch_killed.py STEPS SCRIPT …`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

counted = [0]


def die(*_: Any) -> None:
    counted[0] += 1
    if counted[0] == int(steps):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, steps, *sys.argv = sys.argv
    register_optimizer_step_post_hook(die)
    runpy.run_path(sys.argv[0], run_name="__main__")
