"""Run folders of one's own loops: resumed bit for bit, whole whenever processes are killed, read by the report."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from problem import flat, inner_steps, small_model
from processes import HERE, farflung
from torch import Tensor
from warm import Python

from farflung import RunFolder, methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.report import read_run
from farflung.testing.hosts import torch_rendezvous
from farflung.training import checkpoint

STEPS = 30


def start(folder: Path, steps: int = STEPS) -> list[Python]:
    common = {**torch_rendezvous(2), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = (HERE / "own_loop.py", folder, steps)
    return [Python(*arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def finished(folder: Path) -> list[dict[str, Any]]:
    processes = start(folder)
    try:
        for process in processes:
            _, errors = process.communicate(timeout=patience(60))
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]


def killed_while_writing(folder: Path, after: int) -> None:
    """Starts the loop, and kills both processes when one writes its next checkpoint after some step."""
    processes = start(folder)
    ends = time.monotonic() + patience(60)
    seen = False
    while not seen and time.monotonic() < ends and all(process.poll() is None for process in processes):
        with contextlib.suppress(FileNotFoundError):  # a folder has just been removed
            written = folder.glob("checkpoints/step-*/*.tmp")
            seen = any(int(path.parent.name.removeprefix("step-")) > after for path in written)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=patience(20))
    assert seen, "no checkpoint was being written"


def told_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a replica's steps and rounds came to; bytes are counted while they are under way."""
    lines = map(json.loads, (folder / "events" / f"replica-{rank}.jsonl").read_text().splitlines())
    kept = ("event", "step", "loss", "rounds", "tokens", "outcome")
    return [{key: line.get(key) for key in kept} for line in lines if line["event"] in ("step", "round")]


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_resume_bit_for_bit(tmp_path: Path) -> None:
    """Three times: at the first checkpoint, before any is whole everywhere, and at later ones."""
    straight = finished(tmp_path / "straight")
    for after in (0, 8, 20):
        killed_while_writing(tmp_path / "killed", after)
    resumed = finished(tmp_path / "killed")
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one["weights"], other["weights"]) and one["rounds"] == other["rounds"] == 6
    for rank in range(2):
        told = [told_of(tmp_path / name, rank) for name in ("straight", "killed")]
        assert told[0] == told[1] and len(told[0]) == 3 + 6
    assert not list(tmp_path.glob("killed/checkpoints/*/*.tmp"))
    run = read_run(tmp_path / "killed")
    assert run.results()["steps"] == STEPS and run.unread() == [] and run.ended
    whole = checkpoint.whole_steps(tmp_path / "killed")
    assert whole == [28, 24]
    exported = farflung("export", tmp_path / "killed", tmp_path / "model")
    assert exported.returncode == 2 and re.search(
        r"is of a training loop of its own.*RunFolder\('.*killed'\)\.weights\(\).*mean of 2 replicas at step 28$",
        exported.stderr.strip(),
    )
    means = RunFolder(tmp_path / "killed").weights()
    each = [checkpoint.read(checkpoint.path_of(tmp_path / "killed", 28, f"replica-{r}"))["model"] for r in range(2)]
    for name, mean in means.items():
        torch.testing.assert_close(mean, (each[0][name].double() + each[1][name].double()) / 2)


# In one process.


def loop(folder: Path, network: SimulatedNetwork, steps: range, save_at: tuple[int, ...] = (), **own: Any) -> Any:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method = methods.noloco(every=4, delay=2)
    with RunFolder(folder) as run, method.attach(model, optimizer, network) as outer:
        told = run.begin(outer, steps=20, batch=4)
        for step in range(outer.step, steps.stop):
            inner_steps(model, optimizer, network.rank, range(step, step + 1))
            run.log(torch.tensor(float(step), requires_grad=True), count=4)
            if outer.step in save_at:
                run.evaluated(1.5)
                run.save(**own)
    return flat(model), told, outer


def simulated(folder: Path, steps: int, *save_at: int, replicas: int = 2, **own: Any) -> list[Any]:
    return Simulation(replicas).run(lambda network: loop(folder, network, range(steps), save_at, **own))


def test_a_simulated_loop_resumes_with_what_it_gave_and_its_report_reads_as_any(tmp_path: Path) -> None:
    straight = simulated(tmp_path / "one", 20, 7, 14)
    simulated(tmp_path / "two", 15, 7, 14, epoch=3, best=torch.ones(2), nested={"a": [1, (2, None)]})
    resumed = simulated(tmp_path / "two", 20, 7, 14)
    for (one, _, _), (other, told, outer) in zip(straight, resumed, strict=True):
        assert torch.equal(one, other) and outer.rounds == 5
        assert (
            told["epoch"] == 3 and torch.equal(told["best"], torch.ones(2)) and told["nested"] == {"a": [1, (2, None)]}
        )
    run = read_run(tmp_path / "two")
    results = run.results()
    assert (results["replicas"], results["steps"], results["tokens"], results["rounds"]) == (2, 20, 160, 4)
    assert run.settings["batch"] == 4 and run.settings["workload"] == "own loop" and run.ended
    assert list(run.consensus_distance()) == [7, 14]


def test_what_a_checkpoint_cannot_hold_is_told_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pool\['x'\]\[0\] is a object, which a checkpoint cannot hold; give numbers"):
        simulated(tmp_path, 7, 7, pool={"x": [object()]})
    assert not list(tmp_path.glob("checkpoints/*/*"))


def test_replicas_without_a_checkpoint_in_common_are_refused_and_one_that_never_came_to_its_first_is_not(
    tmp_path: Path,
) -> None:
    straight = simulated(tmp_path / "straight", 10)
    simulated(tmp_path / "run", 7, 7)
    theirs = checkpoint.path_of(tmp_path / "run", 7, "replica-1")
    kept = theirs.read_bytes()
    theirs.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in common .*replica 0 has \[7\]; replica 1 has none\); copy"):
        simulated(tmp_path / "run", 10)
    events = tmp_path / "run" / "events" / "replica-1.jsonl"
    whole = events.read_text()
    events.write_text("".join(line for line in whole.splitlines(True) if '"checkpoint"' not in line))
    for (one, _, _), (other, told, _) in zip(straight, simulated(tmp_path / "run", 10), strict=True):
        assert torch.equal(one, other) and not told
    assert kept


def test_other_numbers_of_replicas_and_folders_of_other_kinds_are_refused(tmp_path: Path) -> None:
    simulated(tmp_path, 7, 7, replicas=3)
    with pytest.raises(UserError, match=r"of a run of 3 replicas, and 2 are here; start as many, or load"):
        simulated(tmp_path, 10)
    assert set(RunFolder(tmp_path).weights()) == set(small_model().state_dict())
    with pytest.raises(UserError, match=r"nothing has no whole checkpoint; let the loop call save"):
        RunFolder(tmp_path / "nothing").weights()


def test_a_folder_is_begun_once_and_before_the_first_step(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    run = RunFolder(tmp_path)
    with pytest.raises(UserError, match=r"has not begun, or is closed; call begin\(\)"):
        run.log(1.0)
    with run, methods.diloco(every=2).attach(model, optimizer, SimulatedNetwork.alone()) as outer:
        inner_steps(model, optimizer, 0, range(1))
        with pytest.raises(UserError, match=r"1 steps were made before begin\(\); call it right after attach"):
            run.begin(outer)


def test_lost_rounds_are_in_the_events(tmp_path: Path) -> None:
    def work(network: SimulatedNetwork) -> Tensor:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with (
            RunFolder(tmp_path) as run,
            methods.diloco(every=4).attach(model, optimizer, network, deadline_s=5) as outer,
        ):
            run.begin(outer)
            inner_steps(model, optimizer, network.rank, range(8 - 2 * network.rank))
        return flat(model)

    Simulation(2).run(work)
    lines = [json.loads(line) for line in (tmp_path / "events" / "replica-0.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines if line["event"] == "round"] == ["averaged", "peer lost"]
    assert any("peer lost" in line.get("message", "") for line in lines)
