"""The pages that are made from farflung itself: methods, settings, codecs, events. Sphinx's build writes them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from farflung import events, methods
from farflung.codecs import CODECS
from farflung.errors import UserError
from farflung.files import write_text
from farflung.methods import RECIPES, RoundSettings, defaults_of
from farflung.networks.listening import ListenAddress
from farflung.outer import Method, bytes_per_parameter
from farflung.planner.options import PlanOptions, RecommendOptions, SimulateOptions
from farflung.settings import Settings
from farflung.tables import MayDiffer, Rule, help_of, hints_of, rule_of

NOTE = "<!-- Made by docs/made_pages.py; change farflung, not this page. -->"
COMMANDS = {
    "plan": PlanOptions,
    "simulate": SimulateOptions,
    "recommend": RecommendOptions,
    "invite, join, status and doctor": ListenAddress,
}
KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", Path: "a path"}
DIFFERS = {
    MayDiffer.AFTER_RESUME: "may change with `--resume`",
    MayDiffer.BETWEEN_MACHINES: "may differ between machines",
    MayDiffer.BETWEEN_PEERS: "each peer's own",
}


def write(docs: Path) -> None:
    """Writes all pages that have changed."""
    evidence = (docs / "evidence.md").read_text("utf-8")
    pages = {f"methods/{name}.md": method_page(name, evidence) for name in own_methods()}
    pages |= {"reference/settings.md": settings_page(), "reference/events.md": events_page()}
    pages |= {"_made/codecs.md": codecs_table()}
    for name, text in pages.items():
        path = docs / name
        if not path.exists() or path.read_text("utf-8") != text:
            write_text(path, text)


def own_methods() -> list[str]:
    """The methods that come with farflung, without those of other installed packages."""
    return [name for name, recipe in RECIPES.usable() if recipe.__module__.startswith(f"{methods.__name__}.")]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; empty where there are no rows."""
    lines = [[_cell(cell) for cell in row] for row in rows]
    if not lines:
        return ""
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *lines])


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def method_page(name: str, evidence: str) -> str:
    """What a method is, its settings, what it sends, and what it reached."""
    recipe = RECIPES[name]
    what, _, paper = inspect.cleandoc(recipe.__doc__ or "").partition("\n\n")
    sections = [
        *(NOTE, f"# {name}", what, _linked(paper)),
        f"```sh\nfarflung train --method {name}\n```",
        f"```python\nmethod = farflung.methods.{recipe.__name__}()\n```",
        *("## Settings", _settings_of(name) or "It has no settings."),
        *("## What a round is made of", _choices(recipe())),
        *("## On the internet", _elastic(recipe())),
        *("## Evidence", _evidence_of(name, evidence)),
    ]
    return "\n\n".join(sections) + "\n"


def _linked(paper: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def _settings_of(name: str) -> str:
    helps = help_of(RoundSettings)
    shown = {key: value for key, value in defaults_of(name).items() if key != "seed"}
    return table(
        ["setting", "default", "what"], ((f"`{key}`", _shown(value), helps[key]) for key, value in shown.items())
    )


def _shown(value: object) -> str:
    return "unset" if value in (None, "") else f"`{value}`"


def _choices(method: Method) -> str:
    chosen = {one.name: getattr(method, one.name) for one in dataclasses.fields(method)}
    chosen["outer"] = _called(method.outer) if method.outer else None
    chosen["needs_inner"] = method.needs_inner and method.needs_inner.__name__
    chosen["inner"] = None
    rows = [(f"`{name}`", f"`{value}`") for name, value in chosen.items() if value is not None]
    size = f"One message has {bytes_per_parameter(method):.3g} bytes a parameter and round."
    if method.sends_more:
        size += " What goes along with its rounds sends more."
    if method.dealing:
        size = "What a round sends is told in [its how-to page](../how-to/subnets.md#what-travels)."
    return f"{size}\n\n{table(['choice', 'value'], rows)}"


def _called(outer: Any) -> str:
    """An outer optimizer's factory as one would write it."""
    given = ", ".join(f"{key}={value}" for key, value in getattr(outer, "keywords", {}).items())
    return f"{getattr(outer, 'func', outer).__name__}({given})"


def _elastic(method: Method) -> str:
    if not method.exchanges:
        return "It exchanges nothing, so there is nothing to join."
    try:
        method.check_elastic()
    except UserError as error:
        return f"It is refused there: {error}."
    return "It works where peers come and go: `farflung invite` and `farflung join` take it."


def _evidence_of(name: str, evidence: str) -> str:
    """The rows about a method in the tables of evidence, each under its table's head."""
    found = []
    for title, told, head, rows in _tables_in(evidence):
        own = [row for row in rows if re.match(rf"\| {re.escape(name)}[ ,]", row)]
        if own:
            anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            found.append("\n".join([f"From [{title}](../evidence.md#{anchor}){told}:", "", *head, *own]))
    return "\n\n".join(found) or "No table has a row of it yet. [Evidence](../evidence.md) has the other methods."


def _tables_in(page: str) -> Iterable[tuple[str, str, list[str], list[str]]]:
    """Each table's section, what the table is called after that, its head of two lines, and its rows."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        for told, block in re.findall(r"(?:^\*\*(.+)\*\*\n\n)?((?:^\|.*\n)+)", section, flags=re.MULTILINE):
            lines = block.splitlines()
            yield title, f", {told}" if told else "", lines[:2], lines[2:]


def settings_page() -> str:
    """Every setting of runs and commands."""
    parts = [
        *(NOTE, "# Every setting"),
        "A setting has the same name as a flag (`--eval-every 50`) and as a key of a file (`eval_every = 50`).",
        "A file has the tables below, or no tables at all. Flags win over the file.",
    ]
    for name, one in vars(Settings()).items():
        parts += [f"## `[{name}]`", inspect.cleandoc(type(one).__doc__ or ""), _fields_of(type(one))]
    for command, kind in COMMANDS.items():
        parts += [
            f"## Only `farflung {command}`".replace("`farflung invite, join, status and doctor`", "peers' commands")
        ]
        parts += [inspect.cleandoc(kind.__doc__ or ""), _fields_of(kind)]
    return "\n\n".join(parts) + "\n"


def _fields_of(kind: type) -> str:
    helps, hints = help_of(kind), hints_of(kind)
    rows = []
    for one in dataclasses.fields(kind):
        default = "required" if one.default is dataclasses.MISSING else _shown(one.default)
        told = "; ".join([_type(hints[one.name]), *_rule(rule_of(one))])
        rows.append((f"`{one.name}`", default, f"{helps.get(one.name, '')} *({told})*"))
    return table(["setting", "default", "what"], rows)


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"several of {typing.get_args(hint)[0].__name__}"
    if inside := typing.get_args(hint):
        return " or ".join(_type(one) for one in inside if one is not type(None))
    return KINDS.get(hint, str(hint.__name__))


def _rule(rule: Rule) -> list[str]:
    """A field's limits, and where it may differ, in words."""
    limits = (("at least", rule.least), ("at most", rule.most), ("above", rule.above), ("below", rule.below))
    told = [f"{words} {limit:g}" for words, limit in limits if limit is not None]
    return told + [words for where, words in DIFFERS.items() if where in rule.may_differ]


def codecs_table() -> str:
    """The codecs that settings can name."""
    rows = [(", ".join(f"`{one}`" for one in row.examples), row.travels) for _, row in CODECS.usable()]
    return table(["name", "what is sent"], rows) + "\n"


def events_page() -> str:
    """What the lines of events hold."""
    about = inspect.cleandoc(events.__doc__ or "")
    kinds = [kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, events.Event)]
    parts = [NOTE, "# Events", about]
    for kind in kinds:
        if hasattr(kind, "kind"):
            parts += [f"## `{kind.kind}`", inspect.cleandoc(kind.__doc__ or ""), _event_fields(kind)]
    return "\n\n".join(parts) + "\n"


def _event_fields(kind: type) -> str:
    """A kind's fields; those that share what is said of them share a row."""
    helps, rows, names = help_of(kind), [], []
    for one in dataclasses.fields(kind):
        names.append(f"`{one.name}`")
        if told := helps.get(one.name):
            rows.append((", ".join(names), f"`{one.type}`", told))
            names = []
    return table(["field", "type", "what"], rows)
