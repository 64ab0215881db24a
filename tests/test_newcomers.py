"""What newcomers try first: each mistake is told in one line that helps, and leaves nothing behind."""

import json
from pathlib import Path

import pytest
from processes import SMALL, farflung, run_here

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
        f"rows.jsonl: no column 'text'; set text_column to one of {named}, …, or give a narrower path or glob"
    )
    assert not (tmp_path / "runs" / "noloco-1").exists()


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
