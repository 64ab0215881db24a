"""The benches: each keeps to one form and runs in its smallest, and what they share keeps, finds and shows results."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from patience import patience
from warm import Python

from bench.lib.catalog import ROOT, Bench, benches
from bench.lib.page import write
from bench.lib.store import RESULTS, Store
from bench.lib.table import Table, from_json, markdown, to_json, told

BENCHES = benches()


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_every_bench_runs_in_its_smallest_form_and_keeps_nothing_of_it(bench: Bench) -> None:
    if reason := getattr(bench.load(), "needs", lambda: "")():
        pytest.skip(reason)
    before = {path: path.read_bytes() for path in RESULTS.glob("*")}
    process = Python("-m", "bench", "run", bench.name, "--smoke", cwd=ROOT.parent)
    out, errors = process.communicate(timeout=patience(60))
    assert process.returncode == 0, errors
    assert out.strip()
    assert {path: path.read_bytes() for path in RESULTS.glob("*")} == before


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES)
def test_every_bench_says_in_one_paragraph_what_it_asks_and_how_long_it_takes(bench: Bench) -> None:
    assert "\n\n" not in bench.docstring
    assert bench.summary.endswith("?") and "Take" in bench.docstring
    module = bench.load()
    assert dataclasses.is_dataclass(module.Options) and isinstance(module.SMOKE, module.Options)


def test_there_are_no_two_benches_of_one_name_and_the_list_has_them_all() -> None:
    paths = [path for path in ROOT.glob("*/[!_]*.py") if path.parent.name != "lib"]
    assert sorted(BENCHES) == sorted(path.stem for path in paths)
    process = Python("-m", "bench", "list", cwd=ROOT.parent)
    out, errors = process.communicate(timeout=patience(30))
    assert process.returncode == 0, errors
    assert all(f"  {name} " in out for name in BENCHES)


@pytest.mark.slow
def test_an_unknown_bench_is_refused_in_one_line() -> None:
    process = Python("-m", "bench", "run", "nothing", cwd=ROOT.parent)
    _, errors = process.communicate(timeout=patience(30))
    assert process.returncode == 1 and errors == "there is no bench 'nothing'; see python -m bench list\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["page", "evidence", "run"])
def test_a_command_that_is_asked_for_help_says_what_there_is_and_does_nothing(command: str, tmp_path: Path) -> None:
    process = Python("-m", "bench", command, "--help", cwd=tmp_path, PYTHONPATH=str(ROOT.parent))
    out, errors = process.communicate(timeout=patience(30))
    assert process.returncode == 0, errors
    assert "python -m bench page [FILE]" in out and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_page_has_every_kept_table_and_asks_no_other_file(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html").read_text()
    for path in RESULTS.glob("*.json"):
        assert f'id="{path.stem}"' in page
    assert "DiLoCo as published" in page and page.count("<svg") >= 3
    assert not any(reference in page for reference in ("<script", "<link", "src=", "@import", 'href="http'))


def test_a_table_is_the_same_after_it_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (row for row in [("one", 1.25, None), ("a longer name", -10.5, 3)])
    parts = list(told(["a line", Table({"name": "", "value": "+.1f", "count": "d"}, rows, "title")]))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        *("a line", "", "title"),
        *("name    value    count", "one      +1.2", "a longer name    -10.5        3", ""),
    ]
    store = Store("bench", tmp_path)
    store.keep_told({"steps": (1, 2)}, parts)
    store.keep_told({"steps": (1, 2)}, parts)
    ((options, kept),) = Store("bench", tmp_path).told()
    assert options == {"steps": [1, 2]} and markdown(kept) == markdown(parts)
    assert [to_json(from_json(to_json(part))) for part in parts] == [to_json(part) for part in parts]


def test_results_name_what_they_were_made_with() -> None:
    for path in RESULTS.glob("*.json"):
        kept = json.loads(path.read_text())
        for run in kept["runs"]:
            assert run.keys() == {"settings", "seed", "result", "versions", "machine"}
        for said in kept.get("told", []):
            assert said.keys() == {"settings", "parts", "versions", "machine"}


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def test_benches_are_short() -> None:
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path
        for function in functions(path):
            assert (function.end_lineno or 0) - function.lineno < 50, (path, function.name)
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            assert len([each for each in arguments if each.arg != "self"]) <= 7, (path, function.name)
