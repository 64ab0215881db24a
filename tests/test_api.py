"""What programs can rely on: a name that goes, or comes, is a change of this list and of docs/api.md.

python tests/test_api.py > docs/api.md
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from patience import patience

import farflung

PAGE = Path(__file__).parent.parent / "docs" / "api.md"

KINDS = {
    "Rooms": {"codecs", "data", "embeddings", "integrations", "joint", "methods", "networks", "outer"},
    "A run's method": {"Method", "Schedule", "Everyone", "RandomGroups", "GossipNesterov", "Session", "Round"},
    "Your own loop": {"RunFolder"},
    "Codecs": {"Codec", "Dense", "ErrorFeedback", "LowRank", "Modulo", "Quantize", "TopK", "codec_named"},
    "Networks": {
        *("Network", "ElasticNetwork", "TorchNetwork", "InternetNetwork", "SimulatedNetwork", "Simulation"),
        *("Conditions", "Traffic", "from_env"),
    },
    "Errors": {"UserError", "PeerLostError", "DisagreementError", "DivergedError"},
    "Release": {"__version__"},
}

HEAVY = ("transformers", "datasets", "plotly", "hivemind", "rich", "tyro", "farflung.training", "farflung.report")


def about(name: str) -> str:
    """The first sentence of a name's docstring."""
    if name == "__version__":
        return "The release of farflung, such as 0.1.0."
    text = inspect.cleandoc(getattr(farflung, name).__doc__ or "").partition("\n\n")[0]
    text = re.sub(r"^Floor \d: ", "", " ".join(text.split()))
    return (text[:1].upper() + text[1:]).replace("|", "\\|")


def page() -> str:
    lines = [
        "# What programs can rely on",
        "",
        "`import farflung` gives the names below. They stay, or warn for one release before they go. So do the names",
        "in the rooms' `__all__`, such as `farflung.codecs.Threshold`, all of `farflung.methods`, and the optimizer",
        "that `demo` is published with, `farflung.inner.SignSGD`. All else may change with any release. The docstrings",
        "say more: `help(farflung.Method)`.",
    ]
    for kind, names in KINDS.items():
        lines += ["", f"## {kind}", "", "| name | what it is |", "| --- | --- |"]
        lines += [f"| `{name}` | {about(name)} |" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def test_the_list_is_what_it_was_told_to_be() -> None:
    assert set().union(*KINDS.values()) == set(farflung.__all__)
    assert farflung.__all__ == sorted(farflung.__all__)
    assert farflung.__version__ == version("farflung")


def test_each_name_says_what_it_is_in_a_sentence() -> None:
    for name in farflung.__all__:
        assert re.fullmatch(r"[A-Z`'].*\.", about(name)) and len(about(name)) < 400, (name, about(name))


def test_the_page_is_of_these_names_and_says_what_their_docstrings_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "make it anew: python tests/test_api.py > docs/api.md"


@pytest.mark.slow
def test_importing_farflung_imports_nothing_that_takes_long_but_torch() -> None:
    asked = f"import json, sys, farflung; print(json.dumps([one for one in {HEAVY} if one in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=patience(60))
    assert json.loads(done.stdout) == [], done.stderr


if __name__ == "__main__":
    print(page(), end="")
