"""What pages say in words is what tables and kept results say: figures, beside the cells that they come from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest

from bench.lib.store import RESULTS, ROOT

EVIDENCE, MEASURED, FAILED = "docs/evidence.md", "docs/measured.md", "docs/what-did-not-work.md"
METHODS, CHOOSE = "docs/methods/index.md", "docs/how-to/choose.md"
BEST, PAIRS, THREE = "diloco, ef-int2, every 4 to 16", "noloco, modulo4, every 5", ("200", "800", "3200")
Figures = Callable[[], list[float]]


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def rows_of(table: str) -> list[list[str]]:
    """The cells of one of the tables that are made of kept results."""
    (found,) = re.findall(rf"<!-- table: {table} -->\n(.*?)<!-- end -->", text_of(EVIDENCE), re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines() if line[:1] == "|"]


def cell(table: str, column: int, *starts: str) -> str:
    """One cell, of the row that begins with these."""
    (row,) = [cells for cells in rows_of(table) if tuple(cells[: len(starts)]) == starts]
    return row[column]


def number(text: str) -> float:
    """The first one in a text."""
    (first, *_) = re.findall(r"[-+]?\d+(?:\.\d+)?", text)
    return float(first)


def longer(way: str, *lengths: str) -> Figures:
    """A way's gaps in per cent in longer runs."""
    return lambda: [number(cell("length", 3, length, way)) for length in lengths]


def late(steps: str, merge: str, spread: bool = False) -> Figures:
    """What a late round costs in per cent, and its deviation."""

    def figures() -> list[float]:
        middle, _, deviation = cell("late", 3, steps, merge).partition("±")
        return [number(middle), *([number(deviation)] if spread else [])]

    return figures


def above(table: str, name: str) -> Figures:
    """By how many per cent a way of gossip is above averaging among all, with 8, 16 and 32 replicas."""
    return lambda: [number(cell(table, column, name).partition("(")[2]) for column in (1, 2, 3)]


def lower() -> list[float]:
    """By how many per cent averaging among all is below pairs' mean weights, with as many: the least and the most."""
    found = [100 - 100 / (1 + gap / 100) for gap in above("gossip averaged", "noloco")()]
    return [min(found), max(found)]


def gaps() -> list[float]:
    """Of the last line of the gap: how far below ddp with AdamW, and above that with Muon; then in longer runs."""
    (*_, last) = rows_of("gap")
    names = [name for name, *_ in rows_of("gap regimes") if name.startswith("four times the steps")]
    return [-number(last[3]), number(last[4]), *(number(cell("gap regimes", 3, name)) for name in names)]


def with_muon() -> list[float]:
    """By how many per cent Muon lowers losses: the least and the most."""
    changes = [-number(cells[3]) for cells in rows_of("inner")[2:]]
    return [min(changes), max(changes)]


def unlike() -> list[float]:
    plain, apart = (number(cell("unlike", 1, name)) for name in ("diloco", "diloco, RDA"))
    return [100 * (apart / plain - 1)]


def hidden() -> list[float]:
    return [max(above("gossip", "factored-gossip")())]


def missed(*names: str) -> Figures:
    """By how many per cent ways of gossip end higher, at most, where replicas miss rounds."""

    def cost(name: str) -> float:
        whole, *missing = (number(cell("gossip", column, name)) for column in (2, 6, 7))
        return max(100 * (one / whole - 1) for one in missing)

    return lambda: [cost(name) for name in names]


def larger(way: str, column: int, *batches: str) -> Figures:
    """Of the table of batches: what a way loses by, or its gap to ddp, with some batches."""
    return lambda: [number(cell("batch size", column, way, batch)) for batch in batches]


def published(way: str, beside: str, *lengths: str) -> Figures:
    """By how many per cent one row's loss is above another's, or below it, where NoLoCo is as published."""
    return lambda: [
        abs(100 * (number(cell("published", 2, steps, way)) / number(cell("published", 2, steps, beside)) - 1))
        for steps in lengths
    ]


def claimed(name: str) -> Figures:
    """By how many per cent a method is above the one that it is said to come near, after 800 and 3200 steps."""
    return lambda: [number(cell("long claims", column, name)) for column in (2, 3)]


def plain_lower() -> list[float]:
    """By how many per cent DiLoCo is below NoLoCo after 3200 steps where neither has a codec."""
    return [100 - 100 / (1 + claimed("noloco")()[1] / 100)]


def eager() -> list[float]:
    """By how many per cent eager rounds end above DiLoCo after 3200 steps, by what both are above ddp."""
    gaps = {name: number(gap) for name, _, gap, *_ in rows_of("long frontier") if name in ("diloco", "eager-diloco")}
    return [100 * ((100 + gaps["eager-diloco"]) / (100 + gaps["diloco"]) - 1)]


def grown(name: str) -> Figures:
    """By how many per cent a row is above ddp on the larger model, after 800 and 3200 steps."""
    return lambda: [number(row[2]) for row in rows_of("long frontier, larger") if row[0] == name]


def batches(steps: str) -> Figures:
    """By how many per cent the best way is above ddp with larger batches."""
    return lambda: [number(cell("length batches", 4, steps, "32", "diloco, ef-int2, every 4 to 18"))]


def after_rounds(rounds: str, *names: str) -> Figures:
    """By how many per cent rows of the long frontier are above ddp after so many rounds."""
    return lambda: [
        number(row[2]) for name in names for row in rows_of("long frontier") if row[0] == name and row[3] == rounds
    ]


def rda() -> list[float]:
    """By how many per cent means by lengths and directions end higher after 800 steps: the least and the most."""
    rows = rows_of("long scaling")
    (*_, plain), (*_, apart) = ([cells for cells in rows if cells[0] == name] for name in ("diloco", "diloco, RDA"))
    pairs = [(number(one), number(other)) for one, other in zip(plain[1:-1], apart[1:-1], strict=True) if one]
    found = [100 * ((100 + other) / (100 + one) - 1) for one, other in pairs]
    return [min(found), max(found)]


def doubled(way: str) -> Figures:
    """What a doubling of the replicas adds to a gap in 200 steps, and in 800."""
    return lambda: [number(row[-1]) for row in rows_of("long scaling") if row[0] == way]


def grew_last() -> list[float]:
    """The most that a gap grows by from 16 to 32 replicas after 800 steps, of two methods."""
    rows = [next(row for row in reversed(rows_of("long scaling")) if row[0] == way) for way in ("diloco", "noloco")]
    return [max(number(row[4]) - number(row[3]) for row in rows)]


def began_and_ended() -> list[float]:
    """Gaps to the better ddp of DiLoCo as published, and of the best that was found."""
    return [number(cell("gap", 4, "DiLoCo as published")), gaps()[1]]


def share(table: str, one: str, other: str, *columns: int) -> Figures:
    """How many per cent one row of gossip is of another."""
    return lambda: [100 * number(cell(table, column, one)) / number(cell(table, column, other)) for column in columns]


def more(table: str, one: str, other: str, column: int) -> Figures:
    """By how many per cent one row of gossip is above another."""
    return lambda: [share(table, one, other, column)()[0] - 100]


def least_and_most(figures: Figures) -> Figures:
    return lambda: [min(figures()), max(figures())]


def nats(column: int, *names: str) -> Figures:
    """Of replicas of unlike data: what they are above the source's entropy."""
    return lambda: [number(cell("unlike", column, name)) for name in names]


def part(steps: str, name: str) -> Figures:
    """What a part that was put into the best way has changed, in per cent."""
    return lambda: [number(cell("length parts", 4, steps, BEST, name))]


def among_all_with_more() -> list[float]:
    """By how many per cent 32 replicas that average among all end below 8."""
    few, many = (number(cell("gossip", column, "diloco, among all")) for column in (1, 3))
    return [100 - 100 * many / few]


def larger_model() -> list[float]:
    """By how many per cent two rows are above ddp, each on the model that they were tuned on and on a larger one."""
    gap = {
        (name, column): 100 * (number(cell("transfer", column, name)) / number(cell("transfer", column, "ddp")) - 1)
        for name in ("diloco, every 20", "noloco, every 5")
        for column in (1, 3)
    }
    return [*gap.values()]


def on_small() -> list[float]:
    """By how many per cent three rows are above ddp on the largest model."""
    names = "diloco, every 20", "noloco, every 5", "sparseloco, every 5"
    return [100 * (number(cell("transfer", 5, name)) / number(cell("transfer", 5, "ddp")) - 1) for name in names]


def rank_correlation(model: str) -> Figures:
    return lambda: [number(cell("transfer ranks", 2, f"{model} as tuned"))]


ALL, PAIR = "diloco, among all", "noloco"
EVERY_BATCH = ("8", "16", "32", "64")
GOSSIP_MISSED = r"averaging among all (\S+)% at most, `noloco` (\S+)%, `factored-gossip` (\S+)% and `gasloc` (\S+)%"

CLAIMS: list[tuple[str, str, Figures]] = [
    ("README.md", r"ended (\d) to (\d)% lower after 800", lower),
    (METHODS, r"\[(\d) to (\d)% lower\]", lower),
    ("README.md", r"(\S+)% above ddp's after 200 steps", longer(BEST, "200")),
    ("README.md", r"(\S+)% after 800 and after 3200", longer(BEST, "800")),
    ("README.md", r"(\S+)% after 800 and after 3200", longer(BEST, "3200")),
    (METHODS, r"(\S+)% above after 200 steps, and (\S+)% after 800", longer(BEST, "200", "800")),
    (METHODS, r"(\S+)% after 800 and after 3200", longer(BEST, "3200")),
    (
        EVIDENCE,
        r"106 times fewer bytes, raise it by (\S+)%",
        part("3200", "0.975, a late average, and statistical levels"),
    ),
    (METHODS, r"after 12,800, on one seed, (\S+)%", longer(BEST, "12800")),
    (METHODS, r"after 12,800, on one seed, (\S+)%", longer(PAIRS, "12800")),
    ("README.md", r"(\S+)% after 12,800 \(one seed\)", longer(BEST, "12800")),
    (
        EVIDENCE,
        r"nearer at first: (\S+)%, (\S+)% after 109 rounds, still (\S+)% after 435, and (\S+)% after 1741",
        longer(BEST, *THREE, "12800"),
    ),
    (
        EVIDENCE,
        r"closing: (\S+)%, (\S+)%, (\S+)% after 640 rounds, and (\S+)% after 2560",
        longer(PAIRS, *THREE, "12800"),
    ),
    (FAILED, r"after 12,800, both (\S+)% \(one seed\)", longer(BEST, "12800")),
    (FAILED, r"after 12,800, both (\S+)% \(one seed\)", longer(PAIRS, "12800")),
    (FAILED, r"\[(\S+) and \S+%\]\(evidence.md#longer-runs\)", longer(BEST, "3200")),
    (FAILED, r"\[\S+ and (\S+)%\]\(evidence.md#longer-runs\)", longer(PAIRS, "3200")),
    (METHODS, r"(\S+)% below that of ddp with AdamW, and (\S+)% .*? is (\S+)% above the latter, or (\S+)%", gaps),
    (EVIDENCE, r"on every seed, by (\d+) to (\d+)%", with_muon),
    (
        EVIDENCE,
        r"`dynamic-threshold` ends (\S+), `demo` (\S+) and `sparta` (\S+)% above",
        after_rounds("800", "dynamic-threshold", "demo", "sparta"),
    ),
    (
        EVIDENCE,
        r"above ddp; after 3200, (\S+), (\S+) and (\S+)%",
        after_rounds("3200", "dynamic-threshold", "demo", "sparta"),
    ),
    (EVIDENCE, r"no smaller than with 8 sequences, (\S+)%", batches("800")),
    (EVIDENCE, r"times fewer bytes; after 3200 it is (\S+)%, where", batches("3200")),
    (EVIDENCE, r"for 800 steps alone: (\S+)% above ddp", grown("streaming-diloco, ef-int2")),
    (EVIDENCE, r"it ends (\S+)% and \S+% above ddp with Muon", after_rounds("100", "gpa")),
    (EVIDENCE, r"it ends \S+% and (\S+)% above ddp with Muon", after_rounds("400", "gpa")),
    (EVIDENCE, r"`streaming-diloco` in 2 bits is (\S+)% above ddp", after_rounds("800", "streaming-diloco, ef-int2")),
    (EVIDENCE, r"DiLoCo in 2 bits (\S+)%, half a per cent", after_rounds("400", "diloco, ef-int2")),
    (EVIDENCE, r"NoLoCo with `modulo4` (\S+)%, no worse", after_rounds("400", "noloco, modulo4")),
    (EVIDENCE, r"of `diloco` (\S+) and (\S+)%, of `des-loc`", grown("diloco")),
    (EVIDENCE, r"of `des-loc` (\S+) and (\S+)%", grown("des-loc")),
    (EVIDENCE, r"of `streaming-diloco` (\S+) and (\S+)%", grown("streaming-diloco")),
    (EVIDENCE, r"never meet are (\S+)% above ddp, and (\S+)% after", grown("local")),
    (EVIDENCE, r"of DiLoCo in 2 bits (\S+) and (\S+)%", grown("diloco, ef-int2")),
    (EVIDENCE, r"of NoLoCo with `modulo4` (\S+) and (\S+)%", grown("noloco, modulo4")),
    (EVIDENCE, r"of `nolocox` (\S+) and (\S+)%, at 288", grown("nolocox")),
    (EVIDENCE, r"A delay of a whole round costs (\S+)% after 100 rounds", late("800", "kept")),
    (EVIDENCE, r"costs (\S+) ± (\S+)% where the round's gradient", late("3200", "turned (HeLoCo)", spread=True)),
    (EVIDENCE, r"and (\S+) ± (\S+)% where the steps trained meanwhile", late("3200", "kept", spread=True)),
    (FAILED, r"cost (\S+)% after 100 rounds", late("800", "kept")),
    (FAILED, r"and (\S+) ± (\S+)% after 400\]", late("3200", "kept", spread=True)),
    (FAILED, r"eager ones (\d+)% after 100", late("800", "eager")),
    (
        EVIDENCE,
        r"costs\s(\S+)% where it is half of each step, (\S+)% where it forgets sooner",
        lambda: [part("800", name)()[0] for name in ("a slow momentum, averaged", "one that forgets sooner")],
    ),
    (EVIDENCE, r"as a tenth of each step nothing \((\S+)%\)", part("800", "less of it")),
    (EVIDENCE, r"doubling of the replicas adds (\S+) per cent .* in 200 steps, and (\S+) in 800", doubled("diloco")),
    (EVIDENCE, r"to `noloco`'s (\S+), then (\d\.\d+)\.", doubled("noloco")),
    (EVIDENCE, r"neither gap grows by more than (\S+) points", lambda: [math.ceil(grew_last()[0] * 10) / 10]),
    (CHOOSE, r"to (\S+)% in 3200 steps, and to (\S+)% in 12,800", longer(PAIRS, "3200", "12800")),
    (CHOOSE, r"\[cost (\S+) ± (\S+)%\]", late("3200", "kept", spread=True)),
    (FAILED, r"\[(\d)% worse\]\(evidence.md#unlike-data\)", unlike),
    (CHOOSE, r"\[within (\S+)%\]\(../evidence.md#gossip\)", hidden),
    (EVIDENCE, r"stays within (\S+)% of averaging among all", hidden),
    (EVIDENCE, r"a replica of `noloco` is (\d+), (\d+) and (\d+)% above", above("gossip", "noloco")),
    (EVIDENCE, r"`noloco`'s is (\d+), (\d+) and (\d+)% above", above("gossip averaged", "noloco")),
    (EVIDENCE, r"`dilocox` was (\S+)% above DiLoCo after 100 rounds, and is (\S+)% above", claimed("dilocox")),
    (EVIDENCE, r"`nolocox` is (\S+)% above NoLoCo", lambda: claimed("nolocox")()[1:]),
    (EVIDENCE, r"\*\*NoLoCo\*\* is (\S+)% above DiLoCo", lambda: claimed("noloco")()[1:]),
    (EVIDENCE, GOSSIP_MISSED, missed("diloco, among all", "noloco", "factored-gossip", "gasloc")),
    (CHOOSE, r"\[cost it (\S+)%\]", missed("noloco")),
    (EVIDENCE, r"at 8 times the batch `ddp` loses (\S+)%", larger("ddp, Muon", 3, "64")),
    (EVIDENCE, r"lose more: `diloco` (\S+)%", larger("diloco, Muon", 3, "64")),
    (EVIDENCE, r"its gap to `ddp` grows from (\S+) to (\S+)%", larger("diloco, Muon", 4, "8", "64")),
    (FAILED, r"with Muon from (\S+) to (\S+)% at 8 times", larger("diloco, Muon", 4, "8", "64")),
    (EVIDENCE, r"`noloco` \S+%, from (\S+) to (\S+)%", larger("noloco, Muon", 4, "8", "64")),
    ("README.md", r"and (\S+)% lower where neither", plain_lower),
    (METHODS, r"\[(\S+)% lower\]\(../evidence.md#all-methods", plain_lower),
    (EVIDENCE, r"from (\S+)% above ddp to (\S+)% \|", began_and_ended),
    (EVIDENCE, r"costs about (\S+)% after 100 rounds", late("800", "kept")),
    (METHODS, r"raises the loss, by (\S+)% after 100", late("800", "kept")),
    (METHODS, r"and by (\S+)% after \[hundreds", late("3200", "kept")),
    (EVIDENCE, r"after 100 rounds, and (\S+)% after 400 \|", late("3200", "kept")),
    (EVIDENCE, r"at that length, it is \[(\S+)%\]\(#longer-runs\)", longer(BEST, "800")),
    (EVIDENCE, r"Muon it is (\d+)% above in this short run", lambda: gaps()[1:2]),
    (EVIDENCE, r"four times the steps it is (\S+)% at one learning rate and (\S+)%", lambda: gaps()[2:]),
    (EVIDENCE, r"among all, at 32 by (\d)%", among_all_with_more),
    (
        EVIDENCE,
        r"`diloco` does, in (\d+) to (\d+)% of the time",
        least_and_most(share("gossip hours", PAIR, ALL, 1, 2, 3)),
    ),
    (EVIDENCE, r"takes (\d+)% of the time of averaging among all", share("gossip hours", PAIR, ALL, 5)),
    (EVIDENCE, r"where it took (\d+)% over equal links", share("gossip hours", PAIR, ALL, 2)),
    (EVIDENCE, r"takes (\d+)% more time than averaging", more("gossip hours", "factored-gossip", ALL, 5)),
    (EVIDENCE, r"from each other, and (\d+) to (\d+)% above", least_and_most(above("gossip", "diloco, in pairs"))),
    (EVIDENCE, r"plain pairs, which end (\d+)% above", more("gossip", "diloco, in pairs", ALL, 4)),
    (EVIDENCE, r"both lose (\d+) to", larger("diloco, AdamW", 3, "64")),
    (EVIDENCE, r"both lose \d+ to (\d+)%", larger("ddp, AdamW", 3, "64")),
    (EVIDENCE, r"`diloco` ends (\d+) to (\d+)% above", least_and_most(larger("diloco, AdamW", 4, *EVERY_BATCH))),
    (EVIDENCE, r"never sees: (\S+) nats", nats(1, "diloco")),
    (EVIDENCE, r"never meet have (\S+)\. `ddp`", nats(1, "local")),
    (EVIDENCE, r"is of all sources, has (\S+)\. ", nats(1, "ddp")),
    (
        EVIDENCE,
        r"across: (\S+) nats with it, (\S+) with half of it, and without it (\S+),",
        nats(1, "noloco", "noloco, half the pull", "noloco, no pull"),
    ),
    (EVIDENCE, r"GASLoC does it better, (\S+)\. ", nats(1, "gasloc")),
    (EVIDENCE, r"after GASLoC it is better \((\S+)\)", nats(4, "gasloc")),
    (EVIDENCE, r"replicas that never meet has (\S+)\. So use", nats(4, "local")),
    (FAILED, r"`dilocox` ended (\S+)% above DiLoCo", lambda: claimed("dilocox")()[1:]),
    (FAILED, r"`nolocox` (\S+)% above NoLoCo", lambda: claimed("nolocox")()[1:]),
    (FAILED, r"`eager-diloco` (\S+)% above DiLoCo", eager),
    (FAILED, r"\[(\S+)% higher\]\(evidence.md#longer-runs\)", part("800", "one value in twenty, every 2")),
    (FAILED, r"\[(\S+)%\]\(evidence.md#longer-runs\) in 2 bits", part("800", "lengths and directions averaged apart")),
    (FAILED, r"\[(\d) to (\d)%\]\(evidence.md#more-replicas-at-length\)", rda),
    (
        EVIDENCE,
        r"`noloco` every 50 steps ends (\S+)% below.*; after 3200 it is (\S+)% above it, and after 12,500.*, (\S+)%\.",
        published("noloco, every 50", "diloco, every 100, momentum 0.9", "800", "3200", "12500"),
    ),
    (
        EVIDENCE,
        r"every 50 steps by (\S+), (\S+) and (\S+)%",
        published("noloco, every 50", "diloco, every 50", "800", "3200", "12500"),
    ),
    (
        FAILED,
        r"it was \[(\S+)% ahead after 16 rounds, and (\S+)% behind after 250\]",
        published("noloco, every 50", "diloco, every 100, momentum 0.9", "800", "12500"),
    ),
    (EVIDENCE, r"every 100 by (\S+) and (\S+)%", published("noloco, every 100", "diloco, every 100", "800", "3200")),
    (EVIDENCE, r"(\d+)% above ddp on `micro` and (\d+)% on `tiny`, `noloco` every 5 (\d+)% and (\d+)%", larger_model),
    (
        EVIDENCE,
        r"the correlation of the ranks is (0\.\d+), and no row moves by more than two",
        rank_correlation("tiny"),
    ),
    (EVIDENCE, r"correlation with those on `micro` is (0\.\d+)", rank_correlation("small")),
    (EVIDENCE, r"(\d)% for `diloco` every 20 steps, (\d)% for\s`noloco` every 5, (\d)% for `sparseloco`", on_small),
]
"""A page, words on it with figures, and what these are by the tables."""


def test_the_page_of_evidence_begins_with_all_of_its_sections_and_the_benches_that_made_them() -> None:
    before, *sections = text_of(EVIDENCE).split("\n## ")
    titles = [text.splitlines()[0] for text in sections]
    listed = re.findall(r"^\| \[(.+?)\]\(#\S+\) \| .+ \| `(\w+)` \|$", before, re.MULTILINE)
    assert [title for title, _ in listed] == titles[:-1] and titles[-1] == "What these were made on"
    assert sorted(bench for _, bench in listed) == [name for name, *_ in rows_of("machines")[2:]]


@pytest.mark.parametrize(("page", "words", "figures"), CLAIMS, ids=[f"{page}: {words}" for page, words, _ in CLAIMS])
def test_a_sentence_has_the_figures_of_the_tables(page: str, words: str, figures: Figures) -> None:
    (told,) = re.finditer(words, " ".join(text_of(page).split()))
    pairs = zip(told.groups(), figures(), strict=True)
    assert [*told.groups()] == [f"{value:.{len(text.partition('.')[2])}f}" for text, value in pairs]


def test_what_the_readme_says_was_measured_stands_in_the_pages_that_say_how() -> None:
    _, _, section = text_of("README.md").partition("\n## Measured\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    figures = re.findall(r"\d[\d,]*\.?\d+", " ".join(line.split("|")[2] for line in lines))
    pages = text_of(MEASURED) + text_of(EVIDENCE)
    assert len(figures) > 20
    assert [one for one in figures if not re.search(rf"(?<![\d.,]){re.escape(one)}(?!\d)", pages)] == []


def section(title: str) -> str:
    """A section of the page of measurements."""
    return text_of(MEASURED).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def told_by(bench: str) -> object:
    return json.loads((RESULTS / f"{bench}.json").read_text("utf-8"))["told"]


@pytest.mark.parametrize(
    ("title", "benches"),
    [
        ("Mixtures of experts", ("mixtures", "mixtures_of_text")),
        ("Parts of one model", ("subnets", "masks")),
        ("A core that weak replicas train", ("cores",)),
    ],
)
def test_means_and_deviations_are_those_that_a_bench_has_told(title: str, benches: tuple[str, ...]) -> None:
    found = re.findall(r"\d\.\d{3,4} ± \d\.\d{3,4}", section(title).partition("\n### Of pictures")[0])
    kept = "".join(str(told_by(name)) for name in benches)
    assert len(found) > 10 and [one for one in found if one not in kept] == []


def numbers_in(told: object) -> list[float]:
    """All numbers in what a bench has told."""
    if isinstance(told, list | dict):
        return [one for part in (told.values() if isinstance(told, dict) else told) for one in numbers_in(part)]
    return [abs(float(one)) for one in re.findall(r"\d+(?:\.\d+)?", str(told))]


@pytest.mark.parametrize(
    ("title", "bench"),
    [("Graphs", "graphs"), ("Memory", "memory"), ("Adapters", "lora")],
)
def test_figures_of_a_table_are_rounded_from_those_that_a_bench_has_told(title: str, bench: str) -> None:
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    found = re.findall(r"(?<![\w,.])\d+\.\d+", " ".join(lines))
    kept = [number * scale for number in numbers_in(told_by(bench)) for scale in (1, 100)]

    def is_kept(figure: str) -> bool:
        half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
        return any(abs(number - float(figure)) <= half for number in kept)

    assert len(found) > 5 and [figure for figure in found if not is_kept(figure)] == []
