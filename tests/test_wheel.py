"""A stranger's first hour: the built wheel in a new environment, in an empty folder, from training to transformers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patience, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__", "*.egg-info", "results")
SMALL = "--model micro --replicas 2 --every 10 --batch-size 2 --sequence-length 32 --eval-sequences 4"
SMALL += " --eval-every 50 --checkpoint-every 10 --steps 100 --warmup 2 --max-tokens 100000 --out first"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist, built without the network."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)  # building leaves files beside the sources
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source"]
    done = subprocess.run(build, capture_output=True, text=True, timeout=patience(120))
    assert not done.returncode, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def stranger(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment in which only the wheel is farflung; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(install, check=True, timeout=patience(60), env=environment)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def run(stranger: Path) -> Run:
    """Runs a program of the new environment in the empty folder."""

    def run(program: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(stranger / "env" / "bin" / program), *arguments]
        place = {"cwd": stranger / "empty", "env": environment_of(stranger)}
        done = subprocess.run(command, **place, capture_output=True, text=True, timeout=patience(120))  # type: ignore[call-overload]
        assert done.returncode == code, done.stdout + done.stderr
        return done  # type: ignore[no-any-return]

    return run


def environment_of(stranger: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": f"{stranger / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def trained(stranger: Path, run: Run) -> str:
    """A run that was stopped with Ctrl-C, and went on by the command that it told."""
    with (stranger / "told").open("w+") as told:
        command = [str(stranger / "env" / "bin" / "farflung"), "train", *SMALL.split()]
        process = subprocess.Popen(
            command, cwd=stranger / "empty", env=environment_of(stranger), stdout=told, stderr=subprocess.STDOUT
        )
        try:
            until(lambda: [*(stranger / "empty").glob("first/checkpoints/step-*")] or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=patience(60))
        finally:
            process.kill()
    said = (stranger / "told").read_text()
    assert process.returncode == 130, said
    (onward,) = re.findall("go on with: (.*)", said)
    resumed = run(*shlex.split(onward))
    assert "goes on from step" in resumed.stdout
    return "first"


def test_wheel_and_sdist_are_as_an_index_wants_them(built: Path) -> None:
    check = [sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()]
    done = subprocess.run(check, capture_output=True, text=True, timeout=patience(60))
    assert not done.returncode and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
    (wheel,), (sources,) = built.glob("*.whl"), built.glob("*.tar.gz")
    sought = {path.relative_to(ROOT).as_posix() for path in (ROOT / "farflung").rglob("*.py")} | {"farflung/py.typed"}
    assert sought <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sources) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sought | {"CHANGELOG.md", "LICENSE", "tests/test_wheel.py", "docs/api.md"} <= held


def test_the_wheel_is_what_runs(stranger: Path, run: Run) -> None:
    where = run("python", "-c", "import farflung; print(farflung.__file__, farflung.__version__)").stdout
    assert where.startswith(str(stranger / "env"))
    version = run("farflung", "--version").stdout.split()[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert "noloco" in run("farflung", "methods").stdout
    assert "noloco" in run("farflung", "simulate", *["--params", "1e6", "--replicas", "4", "--rounds", "5"]).stdout


def test_a_stopped_run_goes_on_and_is_reported(stranger: Path, trained: str, run: Run) -> None:
    summary = json.loads((stranger / "empty" / trained / "summary.json").read_text())
    assert summary["steps"] == 100 and summary["rounds"] == 10
    assert summary["validation_loss"] < 5.5  # at first, 256 bytes are alike: ln 256 is 5.545
    run("farflung", "report", trained, "--out", "page.html")
    assert "noloco" in (stranger / "empty" / "page.html").read_text()


OWN_LOOP = """
import torch
import farflung

torch.manual_seed(0)  # the same first weights in all replicas
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
network = farflung.from_env()
with farflung.methods.noloco(every=5).attach(model, optimizer, network) as outer:
    for step in range(20):
        batch = torch.randn(16, 8)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"replica {network.rank}: {outer.rounds} rounds")
"""


def test_a_loop_of_ones_own_holds_rounds_under_torchrun(stranger: Path, run: Run) -> None:
    (stranger / "empty" / "loop.py").write_text(OWN_LOOP)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py")
    said = run("python", *launch).stdout
    assert "replica 0: 4 rounds" in said and "replica 1: 4 rounds" in said


LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("model"), AutoModelForCausalLM.from_pretrained("model")
written = model.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=8, do_sample=False)
print(tokenizer.decode(written[0]))
"""


def test_transformers_loads_what_was_exported(trained: str, run: Run) -> None:
    told = run("farflung", "export", trained, "model")
    assert told.stdout == "farflung: model holds the replicas' weights averaged at the end\n" and not told.stderr
    assert run("python", "-c", LOAD).stdout.startswith("def f(")
