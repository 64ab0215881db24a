"""A swarm as users meet it: peers of the command line that serve a stage each, on loopback."""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import signal
import threading
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from families import FAMILIES, ROUTED
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from processes import HERE, farflung, free_port, run_here
from swarm import SETTINGS, Swarm
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from warm import Python

from farflung.errors import UserError
from farflung.events import JoinedEvent, LearntEvent, RoundEvent, StepEvent, events_in
from farflung.networks import SharedState
from farflung.networks.internet import InternetNetwork
from farflung.report.peers import stages_of
from farflung.settings import Settings, read_settings
from farflung.swarm.copies import Copies
from farflung.swarm.states import given as given_by_cells
from farflung.swarm.states import weights_in
from farflung.testing.peers import join_network, write_ticket
from farflung.training import seats
from farflung.training.beginning import write_settings
from farflung.training.checkpoint import read
from farflung.training.launch import check_settings
from farflung.workloads.models import within_documents

TWO_STAGES = ("--swarm", "--stages", 2, "--batch-size", 4, "--microbatches", 2, "--eval-every", 100, "--lr", 0.003)


def stage_of(swarm: Swarm, name: str) -> int:
    return int((swarm.folder / name / "stage").read_text())


def counted(swarm: Swarm, stage: int) -> Counter[tuple[int, int, int]]:
    """How often each microbatch was counted in a stage, by the ledgers of all that have served it."""
    folders = [path.parent for path in swarm.folder.glob("*/stage") if path.read_text().strip() == str(stage)]
    paths = [
        *swarm.folder.glob(f"*/earlier/*-stage-{stage}/events/*"),
        *(p for f in folders for p in f.glob("events/*")),
    ]
    found = Counter[tuple[int, int, int]]()
    for path in paths:
        events, spoilt = events_in(path.read_bytes().rpartition(b"\n")[0], str(path))
        assert not spoilt
        for event in events:
            for sign, told in ledger(event) if isinstance(event, LearntEvent) else []:
                for stream, step, *numbers in told:
                    for number in numbers:
                        found[stream, step, number] += sign
    return found


def ledger(event: LearntEvent) -> list[tuple[int, Sequence[Sequence[int]]]]:
    return [(1, event.microbatches), (-1, event.unlearnt or [])]


def lines_of(swarm: Swarm, module: ModuleType) -> str:
    """A file whose documents are the lines of a module."""
    path = swarm.folder / f"{module.__name__}.jsonl"
    lines = inspect.getsource(module).splitlines()
    path.write_text("".join(json.dumps({"text": f"{number} {line}"}) + "\n" for number, line in enumerate(lines)))
    return str(path)


@pytest.mark.slow
def test_a_swarm_trains_past_deaths_counts_each_microbatch_once_and_is_exported(swarm: Swarm) -> None:
    sources = [lines_of(swarm, argparse), lines_of(swarm, typing)]
    data = ("--data", " + ".join(f"0.5*{source}" for source in sources), "--document-mask")
    waits = swarm.invite(*TWO_STAGES, *data, steps=700)  # of which two may train some hundred before all have joined
    until(lambda: "serves stage 0 of 2" in swarm.said("first"))
    until((swarm.folder / "first" / "run.ticket").exists)
    waits.send_signal(signal.SIGINT)  # nobody serves the stage behind it yet
    assert waits.wait(patience(60)) == 130, swarm.said("first")
    running = {"first": swarm.join("first", "--first", "--port", swarm.port)}
    until(lambda: swarm.said("first").count("serves stage 0 of 2") == 2)
    running["one"] = swarm.join("one")
    until(lambda: swarm.step("one") > 3)
    for name, stage in (("two", 0), ("three", 1)):
        (swarm.folder / name).mkdir()
        (swarm.folder / name / "stage").write_text(f"{stage}\n")  # as if it had served that before
        running[name] = swarm.join(name)
    until(lambda: min(swarm.step("two"), swarm.step("three")) > 3)
    stages = {name: stage_of(swarm, name) for name in running}
    assert stages == {"first": 0, "one": 1, "two": 0, "three": 1}, "a newcomer goes where it is needed most"
    status = farflung("status", "run.ticket", "--once", "--listen", "127.0.0.1", cwd=swarm.folder, COLUMNS="160")
    assert "stage 1: 2 peers" in status.stdout and status.stdout.count("the bottleneck") == 1, status

    dying = [name for name, stage in stages.items() if stage == 1]
    heads = [name for name, stage in stages.items() if stage == 0]
    running.pop(dying[0]).kill()
    reached = swarm.step(heads[0])
    until(lambda: swarm.step(heads[0]) > reached + 10)
    running.pop(dying[1]).kill()  # nobody serves stage 1 any more
    until(lambda: any("has nobody; this peer goes there" in swarm.said(name) for name in heads))
    for name, process in running.items():
        assert process.wait(patience(120)) == 0, swarm.said(name)
    moved, stayed = sorted(heads, key=lambda name: stage_of(swarm, name), reverse=True)
    assert (stage_of(swarm, moved), stage_of(swarm, stayed)) == (1, 0)
    started, ended = counted(swarm, 0), counted(swarm, 1)
    assert {1} <= {*started.values(), *ended.values()} <= {0, 1}
    # What those that died had learnt since their last step is lost with them, as is what they had in hand.
    assert len(started - ended) < len(started) / 10
    assert any(len(event.group) == 2 for event in swarm.events(stayed, RoundEvent))
    assert swarm.events(moved, JoinedEvent), "it has begun with the copy that others kept of the stage"
    last = [swarm.events(name, StepEvent)[-1] for name in running]
    assert all(event.boundary_bytes and event.peak_memory for event in last)
    assert not any("validation loss not finite" in swarm.said(name) for name in stages), "before anybody has judged"
    losses = [event.loss for event in swarm.events(stayed, StepEvent) if event.loss is not None]
    assert sum(losses[-10:]) / 10 < 3.5, "from 5.5 nats a token, untrained"

    assert farflung("export", stayed, "model", cwd=swarm.folder).returncode == 0
    model = AutoModelForCausalLM.from_pretrained(swarm.folder / "model")
    settings = read_settings(swarm.folder / stayed / "config.toml")
    workload = settings.made_workload()
    summary = json.loads((swarm.folder / stayed / "summary.json").read_text())
    score = workload.evaluate(model.eval(), 2, torch.device("cpu"))
    assert score.value == pytest.approx(summary["validation_loss"], abs=1e-4)
    assert score.sources == pytest.approx(summary["validation_losses"], abs=1e-4) and list(score.sources) == sources

    @torch.no_grad()
    def forward(batch: Tensor, pick: Any, _: int) -> Tensor:
        positions = within_documents(batch, workload.tokenizer.end)
        return pick(model(batch, position_ids=positions, use_cache=False).logits).double()

    assert summary["sample"] == workload.sample_in_pieces(forward, settings.run.seed) != ""


REFUSED: list[tuple[list[object], str]] = [
    (["--stages", 1], "a swarm has two stages or more; say how many with --stages"),
    (["--shard", 2], "shard is 2, but a peer of a swarm is one process with one stage"),
    (["--routes", "random"], "routes is 'random', but a peer of a swarm"),
    (["--pipeline-schedule", "gpipe"], "--pipeline-schedule is 'gpipe', but a peer of a swarm"),
    (["--offload"], "leave out --offload"),
    (["--batch-size", 3], "choose a multiple of 4, or set --microbatches"),
    (["--tail-average", 0.5], "leave out --tail-average"),
    (["--stages", 3, "--batch-size", 6], "layers"),
    (["--network", "simulated"], "peers meet on the internet"),
    (["--method", "ddp"], "ddp"),
    (["--boundary", "nonsense"], "choose one of"),
    (
        ["--stepping", "synchronous"],
        "peers whose steps are synchronous are equal without rounds; choose --method local",
    ),
    (["--stepping", "asynchronous", "--microbatches", 2], "asynchronous steps are of one microbatch each"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_swarm_cannot_do_is_refused_before_there_is_a_ticket(
    arguments: list[object],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("invite", "--name", "x", *SETTINGS, "--swarm", "--stages", 2, "--batch-size", 4, *arguments)
    assert run_here(monkeypatch, tmp_path, *map(str, words)) == 2
    captured = capsys.readouterr()
    assert told in captured.err and len(captured.err.strip().splitlines()) == 1, captured.err
    assert "[settings]" not in captured.out


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (FAMILIES["llama, tied"], "the model's head is its embeddings, which peers of two stages cannot share"),
        (ROUTED["mixtral"], "a mixture of experts has a loss of all stages, which a swarm does not pass on"),
    ],
)
def test_a_model_whose_stages_share_more_than_hidden_states_is_refused(
    config: PretrainedConfig, told: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    settings = Settings.of(**SHARED | {"model": str(tmp_path)}, network="internet", sequence_length=32)
    with pytest.raises(UserError, match=told):
        check_settings(settings)


def test_more_microbatches_than_fit_into_a_message_are_refused() -> None:
    more = {"stepping": "synchronous", "method": "local", "batch_size": 300_000, "microbatches": 300_000}
    with pytest.raises(UserError, match="take together has at most 200000; choose fewer"):
        check_settings(Settings.of(**SHARED | more, network="internet"))


def test_a_swarm_is_no_run_of_farflung_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", *SETTINGS, "--swarm", "--stages", 2, "--batch-size", 4)
    assert run_here(monkeypatch, tmp_path, *map(str, words)) == 2
    assert "begin it with farflung invite, or leave out --swarm" in capsys.readouterr().err
    assert run_here(monkeypatch, tmp_path, *map(str, ("train", *SETTINGS, "--stepping", "synchronous"))) == 2
    assert "only a swarm's peers choose; add --swarm or leave it out" in capsys.readouterr().err
    assert run_here(monkeypatch, tmp_path, "invite", "--name", "x", "--stepping", "synchronous", "--port", "99999") == 2
    assert "only a swarm's peers choose; add --swarm or leave it out" in capsys.readouterr().err


@pytest.fixture
def ticket(tmp_path: Path) -> Path:
    """Of a swarm that nobody is in."""
    write_ticket(tmp_path / "run.ticket", tmp_path / "0.key", "127.0.0.1", free_port(), **SHARED)
    return tmp_path / "run.ticket"


SHARED = {"swarm": True, "stages": 2, "model": "micro", "batch_size": 4, "method": "noloco"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--batch-size", "8"], "--batch-size is 8, and 4 in the run; all peers of a swarm have the same"),
        (["--stages", "4"], "stages is 4, and 2 in the run"),
        (["--gateway"], "gateway"),
    ],
)
def test_a_peer_whose_microbatches_would_be_others_is_refused(
    arguments: list[str],
    told: str,
    ticket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(monkeypatch, ticket.parent, "join", "run.ticket", "--out", "peer", *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (ticket.parent / "peer").exists()


def test_a_peer_too_small_for_any_stage_is_told_what_it_lacks(tmp_path: Path) -> None:
    settings = Settings.of(**SHARED, network="internet")
    assert seats.stages_within_reach(settings, settings, tmp_path) == [0, 1]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"a stage needs about 0\.00\d+ GB; free some, or have the run begun with"):
            seats.stages_within_reach(settings, settings, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    (tmp_path / "stage").write_text("1\n")
    assert seats.stages_within_reach(settings, settings, tmp_path) == [1], "it comes back to its own"


@pytest.mark.parametrize("kept", [b"2\n", b"", b"-1", b"\xff", b"1 0"])
def test_a_folder_of_no_stage_of_the_run_is_refused(kept: bytes, tmp_path: Path) -> None:
    settings = Settings.of(**SHARED, network="internet")
    (tmp_path / "stage").write_bytes(kept)
    with pytest.raises(UserError, match="names none of this run's 2 stages; choose another folder with --out"):
        seats.stages_within_reach(settings, settings, tmp_path)


def test_only_a_swarm_is_exported_by_its_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ticket(tmp_path / "run.ticket", tmp_path / "0.key", "127.0.0.1", free_port(), "plain", model="micro")
    assert run_here(monkeypatch, tmp_path, "export", "run.ticket", "model") == 2
    assert "plain is no swarm: each of its peers has all of the model" in capsys.readouterr().err


def test_nobody_has_a_swarms_best_checkpoint(
    ticket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(Settings.of(**SHARED, network="internet"), ticket.parent / "head")
    for one in ("run.ticket", "head"):
        assert run_here(monkeypatch, ticket.parent, "export", one, "model", "--best") == 2
        assert "no peer of a swarm has all of a checkpoint to judge; leave out --best" in capsys.readouterr().err


@contextmanager
def newcomers(folder: Path, stages: int) -> Iterator[list[InternetNetwork]]:
    """As many peers as there are stages, which know each other and have chosen none."""
    port = free_port()
    write_ticket(folder / "run.ticket", folder / "0.key", "127.0.0.1", port)
    with ExitStack() as leaving:
        networks = []
        for number in range(stages):
            networks.append(join_network(folder, number, "127.0.0.1", port, patience(20)))
            leaving.callback(networks[-1].close)
        until(lambda: all(len(one.peers.members.proven()) == stages - 1 for one in networks))
        for network in networks:
            network.peers.info.update(trains=False, stage=stages, shapes="alike")
        yield networks


@pytest.mark.slow
def test_newcomers_that_choose_at_once_share_out_the_stages(tmp_path: Path) -> None:
    with newcomers(tmp_path, 3) as networks:
        for number in range(3):
            (tmp_path / f"{number}").mkdir()

        def choose(number: int) -> None:
            seats.take_stage(networks[number], [*range(3)], 3, tmp_path / f"{number}")

        choosing = [threading.Thread(target=choose, args=(number,)) for number in range(3)]
        for one in choosing:
            one.start()
        for one in choosing:
            one.join(patience(60))
        assert sorted(network.peers.info["stage"] for network in networks) == [0, 1, 2]


@pytest.mark.slow
def test_one_that_hears_late_of_a_choice_thinks_again_though_its_rank_is_the_lower(tmp_path: Path) -> None:
    """The other one knew of nobody when it chose, and has begun to serve."""
    with newcomers(tmp_path, 2) as networks:
        lower, higher = sorted(networks, key=lambda one: one.rank)
        seats.take_stage(higher, [0, 1], 2, tmp_path)
        assert higher.peers.info["stage"] == 0
        lower.peers.members.by_rank[higher.rank].stage = 2  # what it said has not come yet
        seats.take_stage(lower, [0, 1], 2, tmp_path)
        assert lower.peers.info["stage"] == 1


def test_the_bottleneck_is_the_stage_whose_peers_can_do_least_and_an_empty_one_before_all() -> None:
    def row(stage: int, capacity: float, state: str = "trains") -> dict[str, Any]:
        told = {"name": f"{stage}-{capacity}", "queue": 2.0, "microbatches_per_second": 1.0, "step": 1, "heard": 0.0}
        return {**told, "state": state, "stage": stage, "stages": 3, "capacity": capacity}

    rows = [row(0, 5.0), row(1, 2.0), row(1, 2.0), row(2, 30.0, "gone"), row(2, 4.5)]
    told = stages_of(rows)
    assert [line.endswith("the bottleneck") for line in told] == [False, True, False]
    assert told[1].startswith("stage 1: 2 peers, up to 4.0 microbatches/s, 4 waiting")
    alone = stages_of([one for one in rows if one["state"] == "gone" or one["stage"] < 2])
    assert alone[2] == "stage 2: nobody serves it: join, and it is yours · the bottleneck"
    assert stages_of([{"name": "plain", "state": "trains"}]) == []
    assert stages_of([row(0, 5.0, "gone"), row(1, 2.0, "gone")]) == [], "the run is over"
    assert stages_of([row(0, 5.0), row(1, 0.0, "begins")])[1].startswith("stage 1: 1 peer, ")


@pytest.mark.slow
def test_a_damaged_copy_of_a_stage_is_none(tmp_path: Path) -> None:
    port, whole = free_port(), tmp_path / "copies" / "stage-1.pt"
    write_ticket(tmp_path / "run.ticket", tmp_path / "0.key", "127.0.0.1", port)
    network = join_network(tmp_path, 0, "127.0.0.1", port, patience(20))
    try:
        network.peers.info["stage"] = 0
        copies = Copies(network, 2, whole.parent, 10, lambda: True)
        assert copies.lent(1) is None
        whole.parent.mkdir()
        torch.save({"tensors": {"a": torch.arange(1000.0)}, "facts": {"step": 7}}, whole)
        found, content = copies.lent(1), whole.read_bytes()
        assert (
            found is not None and found.facts == {"step": 7} and torch.equal(found.tensors["a"], torch.arange(1000.0))
        )
        for damaged in (b"", content[:10], content[: len(content) // 2], b"junk" * 1000):
            whole.write_bytes(damaged)
            assert copies.lent(1) is None
    finally:
        network.close()


@pytest.mark.slow
def test_a_copy_for_which_there_is_no_room_is_told_of_and_the_next_one_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, folder = free_port(), tmp_path / "copies"
    write_ticket(tmp_path / "run.ticket", tmp_path / "0.key", "127.0.0.1", port)
    networks = [join_network(tmp_path, number, "127.0.0.1", port, patience(20)) for number in range(2)]
    try:
        keeps, gives = networks
        state = SharedState({"anchor": torch.arange(1000.0)}, {"step": 7, "until": 8, "history": ""})

        def until_it_is_given(holds: Callable[[], object]) -> None:
            until(lambda: (gives.give(state) if gives.wanted else None) or holds())

        for network in networks:
            network.expect_model("alike", 1000)
        gives.peers.background.run(gives.peers.announce(stage=1), patience(20))
        until(lambda: any(one.stage == 1 for one in keeps.peers.members.proven()))
        folder.write_text("what lies here is no folder")
        copies = Copies(keeps, 2, folder, 10, lambda: True)
        keeps.peers.info["step"] = 10
        keeps.peers.background.keep("keeping a copy of a stage", copies.go_on)
        until_it_is_given(lambda: "no copy of stage 1 is kept" in caplog.text)
        folder.unlink()
        keeps.peers.info["step"] = 20
        until_it_is_given(lambda: copies.lent(1))
        assert copies.lent(1).tensors.keys() == state.tensors.keys()  # type: ignore[union-attr]
    finally:
        for network in networks:
            network.close()


SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@given(SHAPES)
def test_weights_come_out_of_a_state_as_they_went_in(shapes: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {
        f"layers.{number % 3}.part{number}": torch.randn(shape, generator=generator)
        for number, shape in enumerate(shapes)
    }
    state = given_by_cells(weights)
    found = weights_in(state, weights)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    state.pop(next(iter(state)))
    with pytest.raises(UserError, match="other shapes"):
        weights_in(state, weights)


def begin(swarm: Swarm, stepping: str, steps: int, *arguments: object) -> dict[str, Any]:
    """Two peers of each of two stages, which have begun to train."""
    kind = ("--swarm", "--stages", 2, "--stepping", stepping, "--steps", steps, *arguments)
    common = (*BARE, "--name", "test", "--train", "--port", swarm.port, "--out", "first", "--ticket", "run.ticket")
    running = {"first": swarm.start("invite", *common, *kind, log="first")}
    until((swarm.folder / "run.ticket").exists)
    until(lambda: "serves stage 0 of 2" in swarm.said("first"))
    for name, stage in (("one", 1), ("two", 0), ("three", 1)):
        (swarm.folder / name).mkdir()
        (swarm.folder / name / "stage").write_text(f"{stage}\n")
        running[name] = swarm.join(name)
    return running


BARE = (
    *("--model", "micro", "--sequence-length", 32, "--eval-sequences", 4, "--max-tokens", 200_000, "--log-every", 1),
    *("--eval-every", 1000, "--checkpoint-every", 10, "--lr", 0.003, "--deadline", patience(15), "--batch-size", 8),
)


@pytest.mark.slow
def test_steps_taken_together_are_those_of_one_process_whoever_dies(swarm: Swarm) -> None:
    steps, one_batch = 40, ("--method", "local", "--clip", 0)
    running = begin(swarm, "synchronous", steps, *one_batch, "--microbatches", 8)
    until(lambda: min(map(swarm.step, running)) > 5)
    running.pop("one").kill()
    reached = swarm.step("first")
    until(lambda: swarm.step("first") > reached + 3)
    running["one"] = swarm.join("one")  # comes back, and is given what it has missed
    for name, process in running.items():
        assert process.wait(patience(120)) == 0, swarm.said(name)
    steps_of = {name: steps_learnt_from(swarm, name) for name in ("first", "two", "three")}
    # On a busy machine one may come late, or be left out of a step, which its mate then takes without it.
    assert {*steps_of["first"], *steps_of["two"]} == set(range(steps)), "the heads' stage has taken all"
    plain = farflung("train", *BARE, *one_batch, "--steps", steps, "--replicas", 1, "--out", "plain", cwd=swarm.folder)
    assert plain.returncode == 0, plain.stderr
    assert farflung("export", "first", "model", cwd=swarm.folder).returncode == 0
    assert farflung("export", "plain", "reference", cwd=swarm.folder).returncode == 0
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(swarm.folder / name).state_dict() for name in ("model", "reference")
    )
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-4, atol=1e-5)
    for first, second in (("first", "two"), ("one", "three")):
        for path in (swarm.folder / first / "checkpoints").glob("averaged*"):
            one, other = (read(swarm.folder / name / "checkpoints" / path.name)["model"] for name in (first, second))
            assert all(torch.equal(weights, other[name]) for name, weights in one.items()), path


@pytest.mark.slow
def test_after_a_power_cut_steps_taken_together_go_on_from_the_last_checkpoints(swarm: Swarm) -> None:
    """And the head that leads is followed by the other one when it stands still, and comes back."""
    running = begin(swarm, "synchronous", 70, "--method", "local", "--microbatches", 8)
    until(lambda: min(map(swarm.step, running)) > 13)
    for process in running.values():
        process.kill()
    running = {"first": swarm.join("first", "--first", "--port", swarm.port)}
    running |= {name: swarm.join(name) for name in ("one", "two", "three")}
    until(lambda: min(map(swarm.step, running)) > 23)
    leads, follows = sorted(("first", "two"), key=lambda name: swarm.events(name, StepEvent)[0].replica)
    running[leads].send_signal(signal.SIGSTOP)
    reached = swarm.step(follows)
    until(lambda: swarm.step(follows) > reached + 5)
    running[leads].send_signal(signal.SIGCONT)
    for name, process in running.items():
        assert process.wait(patience(120)) == 0, swarm.said(name)
    assert max(max(steps_learnt_from(swarm, name)) for name in ("first", "two")) == 69


def steps_learnt_from(swarm: Swarm, name: str) -> list[int]:
    """The steps that a peer has taken with its mates: each once, and with each of the step's microbatches once."""
    events = swarm.events(name, LearntEvent)
    assert not any(event.unlearnt for event in events)
    counted = [[list(one) for one in event.microbatches] for event in events]
    steps = [step for ((_, step, *_),) in counted]
    assert steps == sorted(set(steps)), "no step twice"
    assert counted == [[[0, step, *range(8)]] for step in steps]
    return steps


@pytest.mark.slow
def test_peers_may_step_after_each_microbatch(swarm: Swarm) -> None:
    steps = 400  # of which one of the heads may take some hundred before the other has joined
    running = begin(swarm, "asynchronous", steps, "--method", "noloco", "--every", 10)
    for name, process in running.items():
        assert process.wait(patience(120)) == 0, swarm.said(name)
    for stage in (0, 1):
        assert {1} <= {*counted(swarm, stage).values()} <= {0, 1}
    for name in ("first", "two"):
        sizes = [sum(len(numbers) - 2 for numbers in event.microbatches) for event in swarm.events(name, LearntEvent)]
        assert sizes.count(1) > len(sizes) * 0.9, "what comes in the time of a checkpoint or a round goes into one step"
        assert any(len(event.group) == 2 for event in swarm.events(name, RoundEvent))
        losses = [event.loss for event in swarm.events(name, StepEvent) if event.loss is not None]
        assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.3


@pytest.mark.slow
def test_a_peer_moves_where_it_is_needed_though_nobody_is_missing(swarm: Swarm) -> None:
    running = begin(swarm, "local", 100_000, "--method", "noloco", "--every", 10)
    (swarm.folder / "four").mkdir()
    (swarm.folder / "four" / "stage").write_text("0\n")
    running.pop("three").kill()
    until(lambda: swarm.step("one") > 5)
    files = {"out": swarm.folder / "four.out", "err": swarm.folder / "four.err"}
    words = ("join", "run.ticket", "--out", "four", "--listen", "127.0.0.1")
    running["four"] = Python(HERE / "restless_peer.py", *words, cwd=swarm.folder, **files)
    swarm.processes.append(running["four"])
    until(lambda: "stage 1 holds the others up; this peer goes there" in swarm.said("four"))
    until(lambda: swarm.events("four", JoinedEvent) and stage_of(swarm, "four") == 1)
    reached = swarm.step("first")
    until(lambda: swarm.step("four") > reached)
