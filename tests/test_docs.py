"""The documentation: each block of README and tutorials runs, the site builds without a warning, each link leads there.

A page's blocks run in order in one folder. A comment before a block says how, where it is not simply run:
`<!-- not run: WHY -->`; `<!-- file: NAME -->`, so it is written there; `<!-- run small: FLAGS -->`, so runs that it
begins get these flags and those of a run of seconds; `<!-- run as peers: FLAGS -->`, so its lines run at the same time,
as in terminals of their own, with these flags, until the last of them has held a round.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from patience import patience, until
from processes import SMALL
from warm import Python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUN = [ROOT / "README.md", DOCS / "start.md", *sorted((DOCS / "tutorials").glob("*.md"))]
SHOWN = {"text", "ini", "yaml", "toml"}
"""Languages of blocks that nothing here runs."""
BLOCK = re.compile(r"((?:^<!-- .+? -->\n+)*)^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code, with what the comments before it say."""

    language: str
    text: str
    marks: dict[str, str]


def blocks_of(page: Path) -> list[Block]:
    found = []
    for before, language, text in BLOCK.findall(page.read_text("utf-8")):
        marks = dict(re.findall(r"<!-- (not run|file|run small|run as peers):? ?(.*?) ?-->", before))
        found.append(Block(language, text, marks))
    return found


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
    # Classes look for their module, and modules that a page has written lie in its folder.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.syspath_prepend(str(folder))
    for block in blocks_of(page):
        if "not run" in block.marks:
            continue
        if name := block.marks.get("file"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), vars(module))
        elif block.language == "sh":
            lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
            if "run as peers" in block.marks:
                run_as_peers(lines, block.marks["run as peers"])
            else:
                for line in lines:
                    run_line(smaller(line, block.marks["run small"]) if "run small" in block.marks else line)
        else:
            assert block.language in SHOWN or block.language.startswith("{"), f"say what this is:\n{block.text}"


def smaller(line: str, flags: str = "") -> str:
    """A line with the flags of a run of seconds, where it begins one."""
    begins = {"train", "invite"} & set(shlex.split(line, comments=True))
    return f"{line.partition(' #')[0]} {shlex.join(SMALL)} --steps 20 {flags}" if begins else line


def run_line(line: str) -> None:
    """A line as a shell would run it; farflung alone as a fork of a process that has imported it."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["farflung"] and not set("$|&;<>") & set(line):
        process = Python("-m", *words)
        out, errors = process.communicate(timeout=patience(120))
        assert process.wait() == 0, f"{line}\n{out}\n{errors}"
    else:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=patience(120))
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def run_as_peers(lines: list[str], flags: str) -> None:
    """Lines that begin and join a run on the internet, each a peer of its own; Ctrl-C ends them."""
    pytest.importorskip("hivemind")
    peers: list[Python] = []
    try:
        for line in lines:
            words = shlex.split(line, comments=True)
            if "join" in words:
                words += ["--max-tokens", "100000"]
                until(Path(words[words.index("join") + 1]).exists, 60)
            else:
                words = [*shlex.split(smaller(line, flags), comments=True), "--steps", "1000000"]
            peers.append(Python("-m", *words))
        folder = Path(words[words.index("--out") + 1])
        until(lambda: any('"averaged"' in path.read_text() for path in folder.glob("events/*.jsonl")), 120)
        for peer in peers:
            peer.send_signal(signal.SIGINT)
        for peer in peers:
            _, errors = peer.communicate(timeout=patience(60))
            assert peer.wait() == 130, errors
    finally:
        for peer in peers:
            peer.kill()


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


def pages_of_the_site() -> Iterator[Path]:
    return (path for path in DOCS.rglob("*.md") if not {"_build", "_made"} & set(path.parts))


def test_no_block_of_a_site_page_is_left_without_a_language() -> None:
    for page in pages_of_the_site():
        assert all(block.language for block in blocks_of(page)), page
