"""The architecture: a room imports only from floors below it."""

import ast
import re
from pathlib import Path

import farflung

PACKAGE = Path(farflung.__file__).parent
FLOORS = {
    "errors": 0,
    "findings": 0,
    "cells": 0,
    "cores": 0,
    "lazy": 0,
    "renamed": 1,
    "tables": 2,
    "scoped": 1,
    "signals": 1,
    "durations": 1,
    "formats": 1,
    "events": 2,
    "registry": 2,
    "figure": 1,
    "files": 2,
    "codecs": 3,
    "networks": 3,
    "workloads": 3,
    "joint": 3,
    "data": 4,
    "hooks": 4,
    "adamw": 5,
    "inner": 6,
    "memory": 6,
    "embeddings": 7,
    "outer": 7,
    "pipeline": 7,
    "subnets": 8,
    "swarm": 8,
    "methods": 9,
    "settings": 10,
    "training": 11,
    "report": 11,
    "planner": 11,
    "mixtures": 11,
    "cli": 12,
    "integrations": 12,
    "testing": 12,
    "__init__": 13,
    "__main__": 13,
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floors"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("farflung.")}
    return rooms


def test_a_room_imports_only_from_floors_below() -> None:
    paths = list(PACKAGE.rglob("*.py"))
    assert len(paths) > 20
    for path in paths:
        room = room_of(path)
        for other in imported_rooms(path) - {room}:
            assert FLOORS[other] < FLOORS[room], f"{path.relative_to(PACKAGE)} imports from {other}"


def test_states_are_built_on_contact_and_rounds_on_both() -> None:
    internet = PACKAGE / "networks" / "internet"
    for folder, above in {"contact": {"states", "rounds"}, "states": {"rounds"}}.items():
        for path in (internet / folder).glob("*.py"):
            found = re.findall(r"^from farflung\.networks\.internet\.(\w+)(?:\.\w+)? import", path.read_text(), re.M)
            rooms = {room if room in ("contact", "states") else "rounds" for room in found}
            assert not rooms & above, f"{path.relative_to(PACKAGE)} imports from {rooms & above}"
