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
import accelerate, lightning.pytorch, datasets, hivemind, torch, transformers
import torch.distributed.elastic.multiprocessing.errors
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


OWN_LOOP = """
import importlib.metadata, json, sys, torch, torch.distributed
before = set(sys.modules)
import farflung
from farflung import SimulatedNetwork, Simulation, TorchNetwork, methods

def replica(network):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with methods.noloco(every=2, codec="ef-lowrank2-int8").attach(model, optimizer, network):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

Simulation(2).run(replica)
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
packages = importlib.metadata.packages_distributions()
print(json.dumps(sorted({package for name in imported & packages.keys() for package in packages[name]})))
"""


@pytest.mark.slow
def test_an_own_loop_with_codecs_and_networks_needs_torch_and_numpy_only() -> None:
    of_torch = {"sympy", "mpmath"}  # which it imports at an optimizer's first step
    assert set(python(OWN_LOOP)) <= {"farflung", "torch", "numpy", *of_torch}


COMMAND = """
import contextlib, io, json, sys
from farflung.__main__ import main

sys.argv = ["farflung", *{arguments!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
    with contextlib.suppress(SystemExit):
        main()
heavy = ["torch", "numpy", "transformers", "datasets", "plotly", "hivemind", "starlette", "uvicorn"]
print(json.dumps([told.getvalue(), [name for name in heavy if name in sys.modules]]))
"""
MORE = [["report"], ["export"], ["mixture"], ["mixture", "split"], ["completion"], ["track"], ["watch"]]
HELP = [[]] + [[name] for name in ("train", "invite", "join", "status", "doctor", "plan", "simulate", "methods")]


@pytest.mark.parametrize("command", [*HELP, *MORE], ids=" ".join)
def test_help_waits_for_no_large_library(command: list[str]) -> None:
    assert python(COMMAND.format(arguments=[*command, "--help"])) == ["", []]


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("train --methd noloco", "did you mean --method?"),
        ("train --method nolocco", "did you mean 'noloco'?"),
        ("train --steps x", "it must be a whole number"),
        ("train nosuch.toml", "cannot read nosuch.toml"),
        ("train --resume nosuch", "nosuch holds no run"),
        ("export nosuch out", "nosuch holds no run"),
        ("watch nosuch", "there is no nosuch"),
        ("exprt", "did you mean 'export'?"),
    ],
)
def test_mistakes_are_told_before_a_large_library_is_imported(mistake: str, told: str) -> None:
    said, heavy = python(COMMAND.format(arguments=mistake.split()))
    assert told in said and said.count("\n") == 1 and not heavy, said


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
