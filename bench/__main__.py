"""Benchmarks by question.

python -m bench list                         all benches, a line each
python -m bench run NAME [options]           runs one; its results go to bench/results; --help tells its options
python -m bench run NAME --smoke             in its smallest form, in seconds, which claims and keeps nothing
python -m bench page [FILE]                  one HTML page of all kept results; runs/bench.html unless given
python -m bench evidence                     docs/evidence.md, its pictures, and what `farflung recommend` knows
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from bench.lib.catalog import ROOT, Bench, benches, docstring_of
from farflung.cli.printing import printing


def main() -> None:
    match sys.argv[1:]:
        case ["list"]:
            list_benches()
        case ["run", name, *arguments] if name in benches():
            run(benches()[name], arguments)
        case ["run", name, *_] if not name.startswith("-"):
            raise SystemExit(f"there is no bench {name!r}; see python -m bench list")
        case ["page"]:
            write_page(Path("runs", "bench.html"))
        case ["page", file] if not file.startswith("-"):
            write_page(Path(file))
        case ["evidence"]:
            from bench.lib.evidence import write as write_evidence

            write_evidence()
        case [*_, "--help" | "-h"]:
            print(__doc__)
        case _:
            raise SystemExit(__doc__)


def list_benches() -> None:
    longest = max(map(len, benches()))
    for question, group in groupby(benches().values(), key=lambda bench: bench.question):
        print(f"{question}: {docstring_of(ROOT / question / '__init__.py')}")
        for bench in group:
            print(f"  {bench.name:{longest}} {bench.summary}")


def write_page(file: Path) -> None:
    from bench.lib.page import write

    print(write(file))


def run(bench: Bench, arguments: list[str]) -> None:
    """Tells what a bench finds, and keeps it unless it was in its smallest form."""
    import tyro

    from bench.lib.store import Store
    from bench.lib.table import told

    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT.parent), os.environ.get("PYTHONPATH", "")]))
    module = bench.load()
    smoke = "--smoke" in arguments
    arguments = [argument for argument in arguments if argument != "--smoke"]
    options = tyro.cli(
        module.Options,
        default=module.SMOKE if smoke else module.Options(),
        prog=f"python -m bench run {bench.name}",
        description=bench.docstring,
        args=arguments,
    )
    if reason := getattr(module, "needs", lambda: "")():
        raise SystemExit(f"{bench.name}: {reason}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = Store(bench.name, folder / "results", folder / "scratch") if smoke else Store(bench.name)
        store.scratch.mkdir(parents=True, exist_ok=True)
        parts = list(told(module.run(options, store)))
        if not hasattr(module, "tables"):
            store.keep_told(dataclasses.asdict(options), parts)


if __name__ == "__main__":
    with printing("bench"):
        main()
