"""What importing farflung does to the process: nothing but define names, and no more than is asked for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from patience import patience

from farflung.scoped import environment, quiet

ALL_ROOMS = """
import importlib, json, logging, os, pkgutil, sys, warnings
import datasets, hivemind, torch, transformers, torch.distributed.elastic.multiprocessing.errors
import torch.distributed.pipelining.schedules, huggingface_hub, plotly, rich, tyro

def seen():
    made = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in made if isinstance(one, logging.Logger))]
    own = [one for one in loggers if one.name.split(".")[0] == "farflung"]
    return {
        "environment": dict(os.environ),
        "levels": {one.name: one.level for one in loggers if one not in own},
        "handlers": {one.name: len(one.handlers) for one in loggers if one not in own},
        "threads": [torch.get_num_threads(), str(torch.get_default_dtype())],
    }

before = seen()
import farflung
rooms = [one.name for one in pkgutil.walk_packages(farflung.__path__, "farflung.") if not one.name.endswith("__main__")]
for room in rooms:
    importlib.import_module(room)
after = seen()
own = [one for name, one in logging.root.manager.loggerDict.items() if name.split(".")[0] == "farflung"]
levels = [one.level for one in own if isinstance(one, logging.Logger)]
handlers = [type(one).__name__ for one in logging.getLogger("farflung").handlers]
print(json.dumps([len(rooms), before, after, levels, handlers]))
"""


def python(text: str) -> Any:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=patience(120))
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_importing_every_room_leaves_environment_and_others_loggers_as_they_were() -> None:
    count, before, after, levels, handlers = python(ALL_ROOMS)
    assert count > 100 and len(before["levels"]) > 100
    assert after["environment"] == before["environment"] and after["threads"] == before["threads"]
    for what in ("levels", "handlers"):
        assert {name: after[what][name] for name in before[what]} == before[what]
    assert set(levels) == {logging.NOTSET} and handlers == ["NullHandler"]


def test_a_level_is_put_back_when_the_last_of_several_has_left() -> None:
    logger = logging.getLogger("somebody.elses")
    logger.setLevel(logging.INFO)
    one, other = quiet(logger.name), quiet(logger.name)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert logger.level == logging.CRITICAL
    other.__exit__(None, None, None)
    assert logger.level == logging.INFO


def test_loggers_below_with_levels_of_their_own_are_quiet_too() -> None:
    below = logging.getLogger("somebody.elses.part")
    below.setLevel(logging.WARNING)
    with quiet("somebody.elses"):
        assert not below.isEnabledFor(logging.ERROR)
    assert below.level == logging.WARNING


def test_the_environment_is_put_back_and_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_HERE", "user's")
    with pytest.raises(ZeroDivisionError), environment(FARFLUNG_HERE="ours", FARFLUNG_THERE="ours"):
        assert (os.environ["FARFLUNG_HERE"], os.environ["FARFLUNG_THERE"]) == ("user's", "ours")
        _ = 1 / 0
    assert os.environ["FARFLUNG_HERE"] == "user's" and "FARFLUNG_THERE" not in os.environ
