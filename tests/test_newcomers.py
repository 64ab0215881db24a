"""What newcomers try first: each mistake is told in one line that helps, and leaves nothing behind."""

import json
import logging
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from patience import patience
from processes import SMALL, farflung, run_here, run_together
from warm import Python

from farflung import cli, scoped
from farflung.cli.peers import NOT_INVITED
from farflung.errors import UserError
from farflung.settings import Settings, names_that_may_differ
from farflung.tables import AFTER_RESUME, help_of
from farflung.workloads import text

SIMULATED = [*SMALL, "--replicas", "2", "--network", "simulated", "--every", "5", "--steps", "5"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(1, 4):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"hello world, text {number}\n" * 500)
    return tmp_path / "texts"


def test_data_below_a_folder_leaves_out_farflungs_own_runs(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("runs/first", "runs/noloco-1"):
        assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--data", str(tmp_path), "--out", run) == 0
    losses = [json.loads((tmp_path / "runs" / run / "summary.json").read_text()) for run in ("first", "noloco-1")]
    assert losses[0]["validation_loss"] == losses[1]["validation_loss"], "the second run has read the first"


@pytest.mark.parametrize("command", ["processes", "simulated", "invite"])
def test_a_run_that_cannot_read_its_data_leaves_nothing(texts: Path, tmp_path: Path, command: str) -> None:
    row = {f"column{number}": "words" for number in range(40)}
    (texts / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = ["--data", texts, *SMALL, "--max-tokens", 10**9]
    arguments = {
        "processes": ["train", "--replicas", "2"],
        "simulated": ["train", "--replicas", "2", "--network", "simulated"],
        "invite": ["invite", "--name", "noloco", "--train", "--listen", "127.0.0.1"],
    }[command]
    done = farflung(*arguments, *data, "--out", tmp_path / "runs" / "noloco-1")
    assert done.returncode == 2
    named = ", ".join(list(row)[:6])
    (line,) = [line for line in done.stderr.splitlines() if "no column" in line]
    assert line.endswith(
        f"rows.jsonl: no column 'text'; set --text-column to one of {named}, …, or give a narrower path or glob"
    )
    assert not (tmp_path / "runs" / "noloco-1").exists()


@pytest.mark.parametrize("network", ["torch", "simulated"])
def test_too_little_data_is_told_before_a_run_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], network: str
) -> None:
    (tmp_path / "short.txt").write_text("too short a text")
    train = ["train", *SMALL, "--network", network, "--out", "run", "--data"]
    assert run_here(monkeypatch, tmp_path, *train, "short.txt") == 2
    said = capsys.readouterr()
    assert said.err.endswith("give more text or a smaller --sequence-length\n") and not said.out
    (tmp_path / "config.toml").write_text('data = "short.txt"\nsequence_length = 20\n')
    assert run_here(monkeypatch, tmp_path, "train", "config.toml", "--out", "run") == 2
    assert capsys.readouterr().err.endswith("give more text or a smaller sequence_length\n")
    (tmp_path / "empty").mkdir()
    assert run_here(monkeypatch, tmp_path, *train, "empty") == 2
    assert "data 'empty': this folder has no file to train on; give stdlib" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"short.txt", "config.toml", "empty"}


def test_attempts_to_reach_the_hub_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that another test has left may still hold the logger.
    monkeypatch.setattr(scoped, "_holders", Counter())
    monkeypatch.setattr(scoped, "_before", {})
    heard = list[str]()
    handler, hub = logging.Handler(), logging.getLogger("huggingface_hub.utils._http")
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    hub.addHandler(handler)
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)  # whatever tests before have left
    with pytest.raises(UserError, match="data hf:x: cannot be read: away"), text._reading("hf:x"):
        hub.warning("Retrying in 1s")
        raise OSError("away")
    hub.warning("heard outside")
    hub.removeHandler(handler)
    assert heard == ["heard outside"]


@pytest.mark.parametrize("pattern", ["texts/*.txt", "*.txt", "texts/*"])
def test_a_pattern_that_the_shell_has_filled_in_is_to_be_quoted(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    folder = tmp_path if pattern.startswith("texts") else texts
    if pattern == "texts/*":
        (texts / "4.md").write_text("more")
    files = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
    assert run_here(monkeypatch, folder, "train", "--data", *files, "--steps", "5") == 2
    assert f"quote the pattern: --data '{pattern}'\n" in capsys.readouterr().err
    assert run_here(monkeypatch, folder, "train", "--steps", "5", *files) == 2
    assert "Unrecognized options" in capsys.readouterr().err


def help_of_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command's --help-all prints, on one line."""
    with monkeypatch.context() as wide, pytest.raises(SystemExit):
        wide.setenv("COLUMNS", "100")
        cli.command_named(command)(["--help-all"])
    return re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out))


def test_a_settings_help_is_one_line_of_its_source() -> None:
    """What prints the help breaks it where the source does."""
    tables = [type(table) for table in vars(Settings()).values()]
    for kind in tables:
        source = Path(str(__import__("sys").modules[kind.__module__].__file__)).read_text()
        for one in fields(kind):
            assert f'"""{help_of(kind)[one.name]}"""' in source.replace(r"\"", '"'), one.name


def test_invite_offers_no_settings_that_mean_nothing_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown, everything = (help_of_command(monkeypatch, capsys, command) for command in ("invite", "train"))
    for name in NOT_INVITED:
        flag = f" --{name.replace('_', '-')} "
        assert flag not in shown and flag in everything, name
    assert " --every " in shown
    assert run_here(monkeypatch, tmp_path, "invite", "--name", "x", "--replicas", "2") == 2
    assert "peers come and go; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--adapt"], "--adapt is given without a value; it must be True or False; see:"),
        (["train", "--merge"], "--merge is given without a value; it must be kept or dropped or mixed or eager or"),
        (["train", "--seed"], "--seed is given without a value; it must be a whole number; see:"),
        (["train", "--lr"], "--lr is given without a value; it must be a number; see:"),
        (["train", "--data"], "--data is given without a value; see:"),
        (["train", "--resume", "x", "--pipeline-schedule"], "it must be 1f1b or gpipe or interleaved or zero-bubble"),
        (
            ["invite", "--name", "x", "--inner"],
            "--inner is given without a value; it must be adamw or muon or muloco or sign",
        ),
        (["export", "a"], "export needs OUT; see: farflung export --help"),
    ],
)
def test_a_flag_without_a_value_is_told_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    told: str,
) -> None:
    assert run_here(monkeypatch, tmp_path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_help_says_what_may_change_and_what_an_argument_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = ", ".join(f"--{name.replace('_', '-')}" for name in names_that_may_differ(AFTER_RESUME, Settings()))
    assert f"only {free} can then change" in help_of_command(monkeypatch, capsys, "train")
    assert "farflung export [-h] RUN OUT" in help_of_command(monkeypatch, capsys, "export")
    for command in ("status", "doctor"):
        assert "The ticket's file, or the folder of a run on the internet." in help_of_command(
            monkeypatch, capsys, command
        )


def test_a_run_that_is_not_on_the_internet_is_told_from_a_missing_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--out", "runs/my run") == 0
    capsys.readouterr()
    for command, code in (("status", 2), ("doctor", 1)):
        assert run_here(monkeypatch, tmp_path, command, "runs/my run") == code
        said = capsys.readouterr()
        told = "the run in runs/my run is not on the internet; see it with: farflung report 'runs/my run'\n"
        assert (said.out + said.err).endswith(told)
    (tmp_path / "empty").mkdir()
    assert run_here(monkeypatch, tmp_path, "status", "empty") == 2
    assert "give the path of a ticket file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--resume", "--out", "runs/first"], ["--steps", "5", "--resume"], ["--resume="]]
)
def test_resume_without_a_folder_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    assert run_here(monkeypatch, tmp_path, "train", *arguments) == 2
    told = "farflung: --resume needs the run's folder: farflung train --resume RUN\n"
    assert capsys.readouterr().err == told


def test_a_folder_that_holds_a_run_is_told_before_all_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "events" / "replica-0.jsonl").touch()
    for more in ([], ["--data", "/no/such"]):
        assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--every", "50", *more, "--out", "run") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "run already holds a run; choose another folder with --out" in line
    (tmp_path / "run" / "config.toml").touch()
    assert run_here(monkeypatch, tmp_path, "train", "run") == 2
    assert capsys.readouterr().err == "farflung: run is a run; go on with it: farflung train --resume run\n"


def test_a_run_is_not_mixed_into_the_folder_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--out", "mine") == 2
    told = "farflung: mine holds a model, which a run would mix with; choose another folder with --out\n"
    assert capsys.readouterr().err == told
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]


@pytest.mark.parametrize(("method", "every", "compared"), [("noloco", 5, True), ("noloco", 9, False), ("ddp", 0, True)])
def test_bytes_are_compared_only_where_a_round_was_held(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    method: str,
    every: int,
    compared: bool,
) -> None:
    often = ["--every", str(every)] if every else []
    run = [*SMALL, "--replicas", "2", "--network", "simulated", "--steps", "5", "--method", method, *often]
    assert run_here(monkeypatch, tmp_path, "train", *run, "--out", "run") == 0
    assert ("times fewer than ddp's" in capsys.readouterr().out) is compared


@pytest.mark.parametrize(("replicas", "rounds"), [(1, 0), (2, 4)])
def test_the_readmes_own_loop_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, rounds: int
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    block = readme.partition("## In your own loop")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "loop.py").write_text(f"{block}open(f'{tmp_path}/{{network.rank}}', 'w').write(str(outer.rounds))\n")
    if replicas == 1:
        done = Python(tmp_path / "loop.py")
        out, errors = done.communicate(timeout=patience(60))
        assert done.returncode == 0 and out.startswith("replica 0: loss ") and out.endswith("after 0 rounds\n"), errors
    else:
        run_together(replicas, tmp_path / "loop.py")
    assert [(tmp_path / str(rank)).read_text() for rank in range(replicas)] == [str(rounds)] * replicas
