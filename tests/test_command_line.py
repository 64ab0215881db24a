"""The command line as a user meets it: real processes, real mistakes, real signals."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from patience import patience, until
from processes import farflung, free_port, run_here, same_weights, train_together
from warm import Python

from farflung import cli
from farflung.cli import mixtures, peers, runs, training, watching
from farflung.cli.arguments import flag, parse
from farflung.errors import UserError
from farflung.mixtures.kinds import KINDS
from farflung.mixtures.pictures.student import StudentSettings
from farflung.networks.listening import ListenAddress
from farflung.planner.options import PlanOptions, RecommendOptions
from farflung.planner.simulation import SimulateOptions
from farflung.settings import Settings, read_settings
from farflung.testing.hosts import processes_of
from farflung.training import checkpoint
from farflung.training.cautions import cautions
from farflung.workloads.registry import WORKLOADS

QUICK = [
    *("--replicas", 2, "--every", 5, "--batch-size", 2, "--sequence-length", 32, "--eval-sequences", 4),
    *("--eval-every", 8, "--log-every", 4, "--checkpoint-every", 6, "--warmup", 2, "--max-tokens", 200_000),
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "did you mean 'train'"]),
        (["train", "--evry", 3], ["--evry", "did you mean --every"]),
        (["train", "--every", "x"], ["--every is 'x'; give inner steps, such as 50, or a time, such as 30s"]),
        (["train", "--delay", "1.5"], ["--delay is '1.5'; give inner steps, such as 50, or a time, such as 30s"]),
        (["train", "--outer-lr=x"], ["--outer-lr is 'x'; it must be a number"]),
        (["train", "--seed"], ["--seed is given without a value"]),
        (["train", "--seed", "-1"], ["farflung: --seed is -1; it must be at least 0"]),
        (["train", "--merge", "keept"], ["--merge is 'keept'; did you mean 'kept'?"]),
        (["train", "--merge", "x"], ["--merge is 'x'; there are: dropped, eager, kept, mixed"]),
        (["train", "--steps", 3, "a.toml"], ["a.toml comes too late", "one config file, before all flags"]),
        (["join", "--first"], ["farflung: join needs TICKET; see: farflung join --help"]),
        (["plan"], ["farflung: plan needs --model and --machines and --tokens; see: farflung plan --help"]),
        (
            ["recommend", "--link", "1gbps"],
            ["farflung: recommend needs --params and --step-ms; see: farflung recommend --help"],
        ),
        (
            ["recommend", "--link", "1gbps", "--step-ms", 1, "--params", "nan"],
            ["farflung: --params is nan; it must be a finite number"],
        ),
        (["train", "--learning-rate", 1], ["train has no --learning-rate; did you mean --lr? see: farflung train"]),
        (["train", "--epochs=3"], ["train has no --epochs; did you mean --steps? see: farflung train --help"]),
        (["report", "--epochs", 3], ["report has no --epochs; see: farflung report --help"]),
        (["train", "--network", "pigeon"], ["pigeon", "simulated"]),
        (["train", "--replicas", 0], ["replicas is 0", "at least 1"]),
        (["train", "--method", "nolco"], ["nolco", "did you mean 'noloco'"]),
        (["train", "--method", "ddp", "--gamma", 1], ["ddp has no setting gamma"]),
        (["train", "--outer-momentum", 1.5], ["--outer-momentum is 1.5; it must be less than 1"]),
        (["train", "--outer-lr", 0], ["--outer-lr is 0.0; it must be more than 0"]),
        (["train", "--gamma", -1], ["--gamma is -1.0; it must be at least 0"]),
        (["train", "--group-size", 1], ["--group-size is 1; it must be at least 2"]),
        (
            ["train", "--group-size", 100],
            ["--group-size is 100, but replicas is 4; choose a --group-size"],
        ),
        (["train", "--every", 5, "--delay", 6], ["--delay is 6 but --every is 5"]),
        (["train", "--codec", "itn4"], ["no codec 'itn4'", "modulo4"]),
        (["train", "--codec", "int5"], ["codec 'int5'", "bits=5", "choose 8, 4 or 2"]),
        (["train", "--codec", "modulo99"], ["codec 'modulo99'", "bits=99", "choose 2 to 8"]),
        (["train", "--codec", "topk200"], ["codec 'topk200': it would send 200% of the values", "at most 100"]),
        (["train", "--codec", "modulo4-int8"], ["modulo4-int8", "only works alone"]),
        (["train", "--codec", "topk0"], ["topk0", "more than 0"]),
        (["train", "--method", "demo", "--codec", "int8"], ["demo has no setting codec"]),
        (["train", "--method", "eager-diloco", "--delay", 3], ["eager-diloco has no setting delay"]),
        (["train", "--every", 5, "--delay", 3, "--merge", "eager"], ["eager needs a delay of a whole round"]),
        (["train", "--merge", "thrown"], ["thrown", "dropped"]),
        (["train", "--conditions", "home"], ["conditions is 'home'", "add --network simulated"]),
        (["train", "--latency-ms", 80], ["--latency-ms is 80", "add --network simulated"]),
        (["train", "--network", "simulated", "--conditions", "hme"], ["'hme'", "did you mean 'home'"]),
        (["train", "--data", "/no/such"], ["/no/such", "no such file"]),
        (["train", "--model", "/no/such"], ["/no/such", "no such folder"]),
        (["train", "--model", "micr"], ["there is no model 'micr'; did you mean 'micro'?"]),
        (["train", "--tokenizer", "/no/such"], ["/no/such", "no such folder"]),
        (["train", "--out", "/proc/x"], ["/proc/x", "choose another folder"]),
        (["train", "missing.toml"], ["missing.toml", "No such file"]),
        (["train", "--resume", "/no/such"], ["/no/such", "holds no run"]),
        (["train", "--restart", "--out", "x"], ["say which: farflung train --resume RUN --restart"]),
        (
            ["train", "--resume", "x", "--seed", 8],
            ["--seed cannot go with --resume", "farflung train --help says at --resume which can change"],
        ),
        (["train", "--resume=x", "--every_final=8"], ["--every-final cannot go with --resume"]),
        (["train", "config.toml", "--resume", "x"], ["config.toml cannot go with --resume"]),
        (["train", "--resume", "x", "--stagse", 8], ["did you mean --stages"]),
        (["report", "/no/such"], ["/no/such", "holds no run"]),
        (["export", "/no/such", "x"], ["/no/such", "holds no run"]),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    words: list[str],
) -> None:
    assert run_here(monkeypatch, tmp_path, *map(str, arguments)) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert not said.out and all(word in line for word in ["farflung: ", *words]), line
    assert not any(tmp_path.iterdir())


OPTIONS = (*map(type, vars(Settings()).values()), *(kind.Settings for _, kind in WORKLOADS.usable()))
OPTIONS += (ListenAddress, PlanOptions, RecommendOptions, SimulateOptions, StudentSettings)
OPTIONS += tuple(kind.Settings for kind in KINDS.values())
OF_TRACKERS = {"logdir", "project"}
OF_TYRO = {"tyro-print-completion"}
OF_TORCHRUN = {"nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port", "max-restarts"}


def test_every_flag_that_a_message_or_the_documentation_names_exists() -> None:
    own = [
        kind
        for room in (mixtures, peers, runs, training, watching)
        for kind in vars(room).values()
        if is_dataclass(kind)
    ]
    known = {field.name.replace("_", "-") for kind in (*OPTIONS, *own) for field in fields(kind)}
    package = Path(cli.__file__).parents[1]
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    pages = (path for path in (package.parent / "docs").rglob("*.md") if "_build" not in path.parts)
    for path in (package.parent / "README.md", *pages):
        texts[path] = "\n".join(line for line in path.read_text().splitlines() if line.startswith("farflung "))
    named = {path: set(re.findall(r"(?<![\w-])--([a-z][a-z-]*[a-z])", text)) for path, text in texts.items()}
    assert {"resume", "announce", "adapt"} <= set.union(*named.values())
    for path, flags in named.items():
        # No field can have the name of --as, which is a word of Python's own.
        assert flags <= known | OF_TORCHRUN | OF_TRACKERS | OF_TYRO | {"help", "help-all", "version", "as"}, path


@pytest.mark.parametrize("command", [["report", "wan"], ["export", "wan", "model"], ["train", "--resume", "wan"]])
def test_a_simulations_folder_is_told_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    simulated = ["simulate", "--model", "micro", "--replicas", "2", "--rounds", "2", "--methods", "noloco"]
    assert run_here(monkeypatch, tmp_path, *simulated, "--out", "wan") == 0
    said = capsys.readouterr().out
    (computing,) = re.findall(r"^noloco +\S+ +\S+ +\S+ +(\S+)", said, re.MULTILINE)
    pace = r"^under two-data-centres, a machine computes a step in 0.1 s on average; .* longer, times: noloco (\S+)$"
    (slowed,) = re.findall(pace, said, re.MULTILINE)
    assert float(slowed) == pytest.approx(100 / float(computing), rel=0.01)
    assert run_here(monkeypatch, tmp_path, *command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wan holds no run: farflung simulate has written it" in line and "simulation.html" in line


def test_a_simulation_writes_over_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = ["simulate", "--model", "micro", "--replicas", "2", "--rounds", "2", "--methods", "noloco"]
    for file, what in (
        ("config.toml", "a run"),
        ("events/replica-0.jsonl", "a run"),
        ("simulation.html", "a simulation"),
    ):
        folder = tmp_path / what.replace(" ", "-") / file.partition("/")[0]
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("mine")
        assert run_here(monkeypatch, tmp_path, *simulated, "--out", str(folder)) == 2
        assert capsys.readouterr().err == f"farflung: {folder} already holds {what}; choose another folder with --out\n"
        assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["mine"]


def flags_shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The flags that a command's help shows, which says nothing of what is unset."""
    with pytest.raises(SystemExit):
        cli.command_named(arguments[0])(list(arguments[1:]))
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert not re.search(r"\{None|default:[\s│]+(None|False|'')?\)", plain)
    return re.findall(r"^\W? (--\w[\w-]+)", plain, re.MULTILINE)


@pytest.mark.parametrize("command", [["train"], ["invite", "--name", "x"]], ids=" ".join)
def test_help_shows_what_matters_first_and_all_on_request(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    module = {"train": training, "invite": peers}[command[0]]
    shown = flags_shown(capsys, *command, "--help")
    assert shown[-10:] == [flag(name) for name in module.FIRST] and "--help-all" in shown and len(shown) < 18
    assert {*shown, "--every-final", "--adapt"} - {*flags_shown(capsys, *command, "--help-all")} == {"--help-all"}
    if command == ["train"]:
        assert {"--resume", "--restart"} <= {*shown}


def test_a_printed_config_is_the_settings_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--method", "dilocox", "--adapt", "False", "--lr", "0.002", "--data", 'a "b".txt', "--recompute"]
    assert run_here(monkeypatch, tmp_path, "train", *flags, "--out", "mine", "--print-config") == 0
    (tmp_path / "1.toml").write_text(capsys.readouterr().out)
    wanted = training.what_is_asked(flags).settings
    assert read_settings(tmp_path / "1.toml") == wanted.changed(out="") != Settings.of(method="dilocox")
    assert [path.name for path in tmp_path.iterdir()] == ["1.toml"]


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (["--steps", "x"], "--steps is 'x'; it must be a whole number; see: farflung train --help"),
        (["--modle", "x"], "train has no --modle; did you mean --model? see: farflung train --help"),
        ([long := "a-word-that-is-" * 9 + "long"], f"Unrecognized options: {long}; see: farflung train --help"),
        (["--merge", "keept"], "--merge is 'keept'; did you mean 'kept'?"),
        (["--replicas", "0"], "--replicas is 0; it must be at least 1"),
    ],
)
def test_a_mistake_reads_the_same_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, mistake: list[str], said: str
) -> None:
    """There tyro draws boxes in colours, as wide as the terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w", encoding="utf-8") as terminal:
        for name in ("stdout", "stderr", "__stdout__"):
            monkeypatch.setattr(sys, name, terminal)
        with pytest.raises(UserError) as error:
            parse(Settings, mistake, "train", None)
    assert str(error.value) == said


@pytest.mark.parametrize("command", ["farflung methods", "farflung train --help", "farflung --help", "bench list"])
def test_output_that_cannot_be_written_ends_without_a_traceback(command: str) -> None:
    python = [sys.executable, "-m", *command.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(python, stdout=full, stderr=subprocess.PIPE, text=True, timeout=patience(60))
    assert done.returncode == 1
    assert done.stderr.endswith(": cannot print: No space left on device; make room, or print somewhere else\n")
    assert done.stderr.count("\n") == 1
    read, write = os.pipe()
    os.close(read)  # what head has done after a line
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(python, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=patience(60))
    assert (done.returncode, done.stderr) == (0, "")


def test_methods_lists_settings_that_have_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    runs.methods([])
    lines = capsys.readouterr().out.splitlines()
    (about_ddp,) = [number for number, line in enumerate(lines) if line.startswith("ddp ")]
    assert lines[about_ddp + 3].strip() == "settings: codec"


def test_a_simulated_run_tells_its_time_and_one_that_had_ended_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--network", "simulated", "--step-ms", "1000", "--model", "micro", *map(str, QUICK), "--out", "run"]
    assert run_here(monkeypatch, tmp_path, "train", *small, "--steps", "8", "--replicas", "1") == 0
    said = capsys.readouterr().out
    assert "farflung: 1 replica, noloco, 8 steps; run folder run" in said
    assert "took 8.0 s of simulated time" in said
    assert len(re.findall("^step 8/8 ", said, re.MULTILINE)) == 1
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run") == 0
    assert capsys.readouterr().out.startswith("farflung: this run has ended already: no step is left")
    assert run_here(monkeypatch, tmp_path, "report", "run") == 0
    assert "farflung: report of 1 run in run/report.html" in capsys.readouterr().out


def test_methods_tells_of_those_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, tmp_path, "methods", "diloco") == 0
    said = capsys.readouterr().out
    assert re.findall(r"^\S+", said, re.MULTILINE) == ["diloco"] and "outer_momentum=" in said
    assert run_here(monkeypatch, tmp_path, "methods", "dilocoo") == 2
    assert "there is no method 'dilocoo'; did you mean 'diloco'?" in capsys.readouterr().err


@pytest.mark.slow
def test_methods_lists_each_with_paper_and_settings() -> None:
    """In a process as users start it, where others here are forks."""
    done = subprocess.run([sys.executable, "-m", "farflung", "methods"], capture_output=True, text=True, check=True)
    for word in ("noloco", "arXiv 2506.10911", "gamma=0.7", "diloco", "outer_momentum=0.5", "ddp", "local"):
        assert word in done.stdout
    for word in (
        "dilocox",
        "0.0665 bytes a parameter and round",
        "LowRank(rank=64) | Quantize(bits=4",
        "--codec takes",
    ):
        assert word in done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    config = folder.parent / "config.toml"
    config.write_text('method = "diloco"\nsteps = 9999\n')
    done = farflung("train", config, *QUICK, "--method", "noloco", "--steps", 40, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout and f"report     {folder}/report.html" in done.stdout
    assert "step 40/40" in done.stdout and "times fewer than ddp's" in done.stdout
    return folder


@pytest.mark.slow
def test_flags_win_over_the_file_and_the_folder_holds_all(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["method"] == "noloco" and summary["steps"] == 40 and summary["rounds"] == 8
    present = {path.name for path in undisturbed.iterdir()}
    assert present >= {"config.toml", "events", "checkpoints", "report.html", "summary.json"}
    again = farflung("train", "--out", undisturbed)
    assert again.returncode == 2 and "already holds a run" in again.stderr


@pytest.mark.slow
def test_simulated_replicas_get_the_weights_of_real_processes(undisturbed: Path, tmp_path: Path) -> None:
    done = farflung("train", *QUICK, "--network", "simulated", "--steps", 40, "--out", tmp_path / "simulated")
    assert done.returncode == 0, done.stderr
    assert same_weights(undisturbed, tmp_path / "simulated", 40)


def start(folder: Path) -> tuple[Python, list[int]]:
    """A run in the background, once it is past its first checkpoint; and its replicas' process ids."""
    process = Python("-m", "farflung", "train", *QUICK, "--steps", 40, "--out", folder)
    until(lambda: checkpoint.whole_steps(folder) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process, processes_of(folder)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a replica", "the launcher"])
def test_after_kill_9_resume_goes_on_bit_for_bit(undisturbed: Path, tmp_path: Path, who: str) -> None:
    folder = tmp_path / "killed"
    process, replicas = start(folder)
    assert len(replicas) == 2
    os.kill(replicas[1] if who == "a replica" else process.pid, signal.SIGKILL)
    _, complaint = process.communicate(timeout=patience(100))
    until(lambda: gone(replicas))  # no orphan process
    if who == "a replica":
        assert process.returncode == 1 and "replica 1 failed: it died of signal 9" in complaint
        assert "Traceback" not in complaint and f"--resume {folder}" in complaint
    assert not (folder / "summary.json").exists()
    if who == "a replica":
        resumed = farflung("train", "--resume", folder)
        assert resumed.returncode == 0, resumed.stderr
    else:
        train_together(2, "--resume", folder)
    assert same_weights(undisturbed, folder, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to"), [(signal.SIGINT, "all"), (signal.SIGTERM, "all"), (signal.SIGTERM, "one")])
def test_a_signal_leaves_a_checkpoint_and_no_process(undisturbed: Path, tmp_path: Path, number: int, to: str) -> None:
    folder = tmp_path / "stopped"
    process, replicas = start(folder)
    os.kill(process.pid if to == "all" else replicas[1], number)
    _, complaint = process.communicate(timeout=patience(100))
    assert process.returncode == 130 and f"go on with: farflung train --resume {folder}" in complaint
    assert "Traceback" not in complaint and "death signal" not in complaint
    until(lambda: gone(replicas))
    ends = [json.loads(f.read_text().splitlines()[-1]) for f in sorted(folder.glob("events/*.jsonl"))]
    assert {end["event"] for end in ends} == {"end"} and len({end["step"] for end in ends}) == 1
    assert checkpoint.whole_steps(folder)[0] == ends[0]["step"] < 40
    if number == signal.SIGTERM:  # the same checkpoint, whatever the signal
        train_together(2, "--resume", folder)
        assert same_weights(undisturbed, folder, 40)


LOST = """
import os, signal, sys, time
from farflung import cli

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

def command(_):
    Dying()
    time.sleep(1000)

from farflung.cli import runs
runs.methods = command
sys.argv = ["farflung", "methods"]
cli.main()
"""


def test_an_interrupt_that_falls_into_a_destructor_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    process = Python(tmp_path / "lost.py")
    _, complaint = process.communicate(timeout=patience(60))
    assert process.returncode == 130 and complaint == "farflung: stopped\n"


LOGGED_OUT = """
import os, signal, sys, time
from pathlib import Path

if os.fork():  # the login shell, which ends when training has begun
    while not any(Path.cwd().glob("run/checkpoints/*/*.pt")): time.sleep(0.02)
    os._exit(0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
from farflung import cli
shell, sys.argv[0] = os.getppid(), "farflung"
Path("pid").write_text(str(os.getpid()))
cli.main()
"""


@pytest.mark.slow
def test_who_was_started_with_nohup_goes_on_when_the_shell_has_ended(tmp_path: Path) -> None:
    peer = ["invite", "--name", "run", "--train", "--listen", "127.0.0.1"]
    shells = {}
    for kind, command in {"simulation": ["train", "--network", "simulated"], "peer": peer}.items():
        (folder := tmp_path / kind).mkdir()
        replicas = QUICK if kind == "simulation" else QUICK[2:]
        settings = (*replicas, "--model", "micro", "--steps", 100, "--out", "run")
        shells[folder] = Python("-c", LOGGED_OUT, *command, *settings, cwd=folder, err=folder / "err")
    for folder, shell in shells.items():
        shell.wait(patience(60))
        pid = int((folder / "pid").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
    for folder in shells:
        until(lambda folder=folder: gone([int((folder / "pid").read_text())]))
        assert (folder / "run" / "summary.json").exists(), (folder / "err").read_text()


def test_messages_name_folders_as_one_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for given, told in ((tmp_path / "here/runs/a", "runs/a"), (tmp_path / "b", str(tmp_path / "b")), ("../c", "../c")):
        asked = training.what_is_asked(["--out", str(given)])
        assert str(asked.folder) == asked.settings.run.out == told


def test_a_run_that_ends_before_its_first_round_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--network", "simulated", "--model", "micro", *map(str, QUICK), "--out", "run"]
    assert run_here(monkeypatch, tmp_path, "train", *small, "--steps", "8", "--every", "9") == 0
    assert "the run ends at step 8, before its first round, which comes after step 9" in capsys.readouterr().err
    assert run_here(monkeypatch, tmp_path, "train", *small, "--replicas", "1", "--steps", "8", "--out", "alone") == 0
    said = capsys.readouterr()
    assert "before its first round" not in said.err and "no round was held" in said.out
    assert "averaged" not in said.out and "by all" not in said.out, "there is one replica"
    for arguments in (["--every", "8"], ["--every", "9", "--fragments", "2", "--method", "diloco"]):
        assert not cautions(training.what_is_asked(["--steps", "8", *arguments]).settings)
    assert run_here(monkeypatch, tmp_path, "train", *small, "--steps", "8", "--every", "9", "--dry-run") == 0
    assert "the run ends at step 8, before its first round" in capsys.readouterr().err


def torchrun(rank: int, port: int, folder: Path, resume: bool) -> Python:
    """One of two machines: its own torchrun and its own run folder."""
    return Python(
        *("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "farflung", "train"),
        *(("--resume", folder) if resume else (*QUICK, "--steps", 40, "--out", folder)),
        GLOO_SOCKET_IFNAME="lo",
    )


@contextlib.contextmanager
def two_machines(folders: list[Path], resume: bool) -> Iterator[list[Python]]:
    port = free_port()
    machines = [torchrun(rank, port, folders[rank], resume) for rank in (0, 1)]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()


@pytest.mark.slow
def test_two_machines_with_torchrun_stop_together_and_give_the_same_run(undisturbed: Path, tmp_path: Path) -> None:
    """Only one of them is told to stop, as when a queue wants one machine back."""
    folders = [tmp_path / f"machine-{rank}" for rank in (0, 1)]

    def ends() -> list[bytes]:
        paths = [folders[rank] / "events" / f"replica-{rank}.jsonl" for rank in (0, 1)]
        return [line for path in paths for line in path.read_bytes().splitlines() if b'"event": "end"' in line]

    with two_machines(folders, resume=False) as machines:
        until(lambda: checkpoint.steps_of(folders[1], 1))
        machines[1].send_signal(signal.SIGTERM)
        until(lambda: len(ends()) == 2)  # torchrun itself waits for minutes for the other machine's
    stopped = [max(checkpoint.steps_of(folders[rank], rank)) for rank in (0, 1)]
    assert stopped[0] == stopped[1] < 40
    with two_machines(folders, resume=True) as machines:
        for machine in machines:
            _, complaint = machine.communicate(timeout=patience(100))
            assert machine.returncode == 0, complaint
    for rank in (0, 1):
        assert (folders[rank] / "config.toml").exists() and (folders[rank] / "summary.json").exists()
        assert same_weights(undisturbed, folders[rank], 40, [rank])


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = farflung(
            *("train", *QUICK, "--out", tmp_path / "run"),
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"farflung: port 127.0.0.1:{port} is in use")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (["--lr", 0.1], "--lr is 0.01 for process 0 and 0.1 for process 1; start all machines with the same settings"),
        (["--method", "diloco"], "--method is noloco for process 0 and diloco for process 1; start all"),
        (["--eval-sequences", 3], "--eval-sequences is 4 for process 0 and 3 for process 1; start all"),
        (["--data", "{other}", "--log-every", 7], ""),
    ],
)
def test_machines_with_other_settings_or_text_do_not_train_together_in_silence(
    other: list[object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("another text than the standard library's\n" * 500)
    other = [str(word).replace("{other}", str(tmp_path / "other.txt")) for word in other]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    words = [[], other]
    machines = [
        Python(
            *("-m", "farflung", "train", *QUICK, "--steps", 5, *words[rank], "--out", tmp_path / f"run-{rank}"),
            **common,
            RANK=str(rank),
            TORCHELASTIC_ERROR_FILE=str(tmp_path / f"{rank}.json"),  # what torchrun would print
        )
        for rank in (0, 1)
    ]
    told = [machine.communicate(timeout=patience(60)) for machine in machines]
    complaints = [complaint for _, complaint in told]
    if said:
        for rank, machine in enumerate(machines):
            line = complaints[rank].strip()
            assert machine.returncode == 2 and said in line and "\n" not in line, line
            kept = json.loads((tmp_path / f"{rank}.json").read_text())["message"]
            assert kept["message"] == line.replace("farflung:", "UserError:")
            assert "\n" not in kept["extraInfo"]["py_callstack"]
    else:
        assert [machine.returncode for machine in machines] == [0, 0], complaints
        assert "machines hold other data than each other" in "".join(told[0])


@pytest.mark.slow
def test_a_replica_that_never_comes_is_named(tmp_path: Path) -> None:
    done = farflung(
        *("train", *QUICK, "--starting", 2, "--out", tmp_path / "run"),
        RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 2
    assert "replica 1 of 2 has not come within 2 s" in done.stderr


def test_without_arguments_the_demo_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = training.what_is_asked([])
    assert asked.settings.flat() | {"out": ""} == Settings().flat()
    assert asked.folder == Path("runs/noloco-1")
