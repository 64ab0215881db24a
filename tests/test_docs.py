"""The documentation: the blocks of its pages run, the site builds without a warning, and each link leads somewhere."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from pages import blocks_of, make_own, run_shell, write
from patience import patience

from farflung import cli
from farflung.cli import splitting
from farflung.cli.arguments import parse

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUN = [
    ROOT / "README.md",
    DOCS / "start.md",
    *sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "how-to").glob("*.md")]),
]


def pages_of_the_site() -> Iterator[Path]:
    return (path for path in DOCS.rglob("*.md") if not {"_build", "_made"} & set(path.parts))


SHOWN = {"docker", "ini", "text", "toml", "yaml"}
"""Languages of blocks that nothing here runs."""


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bin := tmp_path / "bin").mkdir()
    (bin / "farflung").write_text(f'#!/bin/sh\nexec {sys.executable} -m farflung "$@"\n')
    (bin / "farflung").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (folder := tmp_path / "page").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Classes look for their module, and modules that a page has written lie in its folder.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks_of(page):
        if "not run" in block.marks:
            continue
        make_own(block.marks.get("with", ""))
        if write(block, folder):
            continue
        if block.language == "python":
            exec(compile(block.text, str(page), "exec"), vars(module))
        elif block.language == "sh":
            run_shell(block)
        else:
            assert block.language in SHOWN or block.language.startswith("{"), f"say what this is:\n{block.text}"


class ParsedError(Exception):
    """A command has understood its arguments."""


@pytest.mark.parametrize("page", [ROOT / "README.md", *pages_of_the_site()], ids=lambda page: page.stem)
def test_commands_of_a_page_take_the_flags_that_it_gives_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing runs them: each reads its own arguments, and goes no further."""

    def parsed(*arguments: Any, **named: Any) -> None:
        parse(*arguments, **named)
        raise ParsedError

    for module in {splitting, *map(importlib.import_module, cli.COMMANDS.values())}:
        monkeypatch.setattr(module, "parse", parsed, raising=False)
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        write(block, tmp_path)
        for line in block.lines if block.language in ("sh", "bash") else ():
            for name, *arguments in commands_in(line):
                assert name in cli.COMMANDS, line
                for file in (word for word in arguments if word.endswith(".toml")):
                    (tmp_path / file).touch()  # which the page may leave to its readers
                with pytest.raises(ParsedError):
                    cli.command_named(name)(arguments)


def commands_in(line: str) -> list[list[str]]:
    """What farflung is told in a line, with flags whose values are left out as they are."""
    words = shlex.split(line, comments=True)
    ends = [number for number, word in enumerate(words) if word in ("|", "&", "&&", ";", ">")]
    words = words[: min(ends, default=len(words))]
    starts = [n for n, word in enumerate(words) if word == "farflung" and (n == 0 or words[n - 1] == "-m")]
    return [words[starts[0] + 1 :]] if starts else []


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_a_page_beside_the_site_is_short_and_its_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert page != "README.md" or len(text.splitlines()) <= 150, "say it on a page of the site"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"!\[[^]]*\]\((?!https://)", prose), "a relative image shows nothing in the wheel's metadata"
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        where = urlsplit(link)
        if where.scheme:
            assert_sound(link)
            continue
        target = ROOT / unquote(where.path) if where.path else ROOT / page
        assert target.exists(), link
        assert not where.fragment or where.fragment in anchors_in(target.read_text("utf-8")), link


def anchors_in(page: str) -> set[str]:
    """The anchors of a Markdown page's headings."""
    titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def assert_sound(link: str) -> None:
    """Whether an address of somebody else's can be one; nobody is called."""
    where = urlsplit(link)
    assert where.scheme in ("http", "https") and re.fullmatch(r"([a-z0-9-]+\.)+[a-z]+", where.netloc), link
    assert not re.search(r"[\s<>\"]", link), link


class Page(HTMLParser):
    """The links, pictures and anchors of a page of the site."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [link for name in ("href", "src") if (link := given.get(name))]
        self.anchors |= {anchor for name in ("id", "name") if (anchor := given.get(name))}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        built / "doctrees",
        DOCS,
        built / "html",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(180), env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return built / "html"


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        for link in page.links:
            assert links_well(path, link, pages), f"{path.relative_to(site)}: {link}"


def links_well(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    where = urlsplit(link)
    if where.scheme in ("data", "mailto"):
        return True
    if where.scheme or where.netloc:
        assert_sound(link)
        return True
    target = (path.parent / unquote(where.path)).resolve() if where.path else path
    if target not in pages:
        return target.is_file()
    return where.fragment in ("", "top") or unquote(where.fragment) in pages[target].anchors


@pytest.mark.slow
def test_every_page_of_the_tutorials_is_in_the_site(site: Path) -> None:
    for source in pages_of_the_site():
        assert (site / source.relative_to(DOCS).with_suffix(".html")).exists(), source


def test_no_block_of_a_site_page_is_left_without_a_language() -> None:
    for page in pages_of_the_site():
        assert all(block.language for block in blocks_of(page)), page
