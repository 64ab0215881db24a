"""Plans of swarms, beside what a few lines of arithmetic and a search of all plans find."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shlex
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from families import ROUTED
from processes import run_here

from farflung.errors import UserError
from farflung.networks.simulator.conditions import HEADERS
from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.planner.architecture import architecture_of
from farflung.planner.options import SwarmOptions
from farflung.planner.swarm import Kind, Rate, served, swarm_plans, without_slow
from farflung.swarm.letters import Microbatch
from farflung.swarm.peer import IN_FLIGHT, StagePeer, under_way
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.simulated import SimulatedPost, TimeAlone, in_virtual_seconds

MACHINES = """
[[machines]]
count = 3
memory_gb = 24
tflops = {tflops}
efficiency = 0.5
network_gbps = {gbps}
"""
LENGTH = 32


def options(folder: Path, tflops: float, gbps: float, stages: int, boundaries: str = "float32") -> SwarmOptions:
    (folder / "m.toml").write_text(MACHINES.format(tflops=tflops, gbps=gbps))
    return SwarmOptions("micro", folder / "m.toml", boundaries=boundaries, stages=stages, sequence_length=LENGTH)


def test_where_networks_are_slow_each_packet_takes_its_bytes(tmp_path: Path) -> None:
    plan, _ = swarm_plans(options(tmp_path, 100.0, 0.001, stages=2))
    token = 4 * architecture_of("micro").hidden * (1 + HEADERS)
    # Of three machines with 125 kB a second each, one stage has one; it sends one packet for each microbatch.
    assert plan.tokens_per_second == pytest.approx(125_000 / token)
    assert plan.limit.startswith("networks of stage")
    assert sorted(kinds.total() for kinds in plan.serving) == [1, 2]


def test_where_networks_are_quick_the_slowest_stage_computes_all_the_time(tmp_path: Path) -> None:
    plan, _ = swarm_plans(options(tmp_path, 1e-6, 100.0, stages=2))
    model = architecture_of("micro", LENGTH, "bytes")
    flops = [model.flops_per_token(span, LENGTH) for span in plan.spans]
    # A worker does half of 10^6 operations a second; two serve one stage, in the way that is quicker.
    one_each = [min(0.5e6 * a / flops[0], 0.5e6 * b / flops[1]) for a, b in ((1, 2), (2, 1))]
    assert plan.tokens_per_second == pytest.approx(max(one_each))
    assert plan.limit.startswith("computing of stage")


def test_the_most_exact_of_the_boundaries_that_are_nearly_as_fast_is_taken(tmp_path: Path) -> None:
    slow, plans = swarm_plans(options(tmp_path, 100.0, 0.001, 2, "float32,int8"))
    assert slow.boundary == "int8" and plans[0].tokens_per_second > 3 * plans[1].tokens_per_second
    quick, _ = swarm_plans(options(tmp_path, 1e-6, 100.0, 2, "float32,int8"))
    assert quick.boundary == "float32"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_deal_workers_out_is_much_faster(seed: int) -> None:
    chance, stages = random.Random(seed), 3
    kinds: Counter[Kind] = Counter()
    flops, packets = [chance.uniform(1, 2) for _ in range(stages)], (1, 2, 1)
    for number in range(3):
        flops_a_second, bytes_a_second = chance.uniform(1, 8), chance.uniform(1, 8)
        rates = [Rate(flops_a_second / one, bytes_a_second / two) for one, two in zip(flops, packets, strict=True)]
        small = chance.randrange(stages + 2)  # for this stage, if there is such
        able = tuple(None if stage == small else rate for stage, rate in enumerate(rates))
        kinds[able, f"kind {number}"] += chance.randint(1, 3)
    ours = slowest([Counter(one) for one in served(kinds, stages)])
    best, workers = 0.0, list(kinds.elements())
    for places in itertools.product(range(stages), repeat=len(workers)):
        if all(kind[0][place] for kind, place in zip(workers, places, strict=True)):
            dealt = [Counter(k for k, p in zip(workers, places, strict=True) if p == s) for s in range(stages)]
            best = max(best, slowest(dealt))
    assert 0.85 * best <= ours <= best * (1 + 1e-9)


def kind_of(speed: float) -> Kind:
    return (Rate(speed, 1e9),) * 2, f"speed {speed}"


@pytest.mark.parametrize("speed", [0.3, 0.003])
def test_who_is_left_out_as_too_slow_is_a_swarm_slower_with(speed: float) -> None:
    serving = [Counter({kind_of(2.0): 1}), Counter({kind_of(1.0): 1, kind_of(speed): 1})]
    alone = [Counter({kind_of(2.0): 1}), Counter({kind_of(1.0): 1})]
    quicker = simulated([2.0], [1.0, speed]) > simulated([2.0], [1.0])
    assert without_slow(serving) == (serving if quicker else alone)


def simulated(heads: list[float], others: list[float]) -> float:
    """Microbatches that come through two stages of peers of these speeds, in virtual time."""

    async def main() -> int:
        loop, post = asyncio.get_running_loop(), SimulatedPost()
        ranks, works = range(len(heads), len(heads) + len(others)), [TimeAlone() for _ in others]
        for rank, work, speed in zip(ranks, works, others, strict=True):
            quick = in_virtual_seconds(1 / speed / 3, 2 / speed / 3)
            post.peers[rank] = StagePeer(1, 2, work, quick, post.of(rank), None, 1e6, loop.time)
        running = []
        for rank, speed in enumerate(heads):
            quick, router = in_virtual_seconds(1 / speed / 3, 2 / speed / 3), ThroughputRouter(ranks)
            head = post.peers[rank] = StagePeer(0, 2, TimeAlone(), quick, post.of(rank), router, 1e6, loop.time)
            names = itertools.count()
            start = lambda head=head, names=names: head.start(Microbatch(next(names), 0), 0)  # noqa: E731
            running.append(asyncio.ensure_future(under_way(start, lambda: 2 * IN_FLIGHT)))
        await asyncio.sleep(3000)
        for one in running:
            one.cancel()
        return sum(len(work.learnt) for work in works)

    return run_in_virtual_time(main())


def slowest(serving: list[Counter[Kind]]) -> float:
    able = []
    for stage, kinds in enumerate(serving):
        rates = [(kind[0][stage], count) for kind, count in kinds.items()]
        able.append(sum(min(rate.computes, rate.carries) * count for rate, count in rates if rate))
    return min(able)


def test_the_command_tells_cuts_and_how_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options(tmp_path, 1.0, 0.01, stages=2)
    assert run_here(monkeypatch, tmp_path, "plan", "--swarm", "--machines", "m.toml", "--model", "micro") == 0
    told = capsys.readouterr().out
    assert "stage 0: embeddings and layers 0 to" in told and "and the head" in told
    assert "farflung invite --name NAME --ticket NAME.ticket --method noloco --model micro" in told
    words = ("plan", "--swarm", "--machines", "m.toml", "--model", "llama-6.8b", "--stages", "2")
    assert run_here(monkeypatch, tmp_path, *words) == 2
    assert "no cut gives each stage a worker with enough memory" in capsys.readouterr().err


def test_a_swarm_is_begun_as_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options(tmp_path, 1.0, 0.01, stages=3)
    given = {"--stages": "3", "--sequence-length": "48", "--precision": "bfloat16"}
    words = ("plan", "--swarm", "--machines", "m.toml", "--micro-batch", "3", "--boundaries", "int8", "--recompute")
    assert run_here(monkeypatch, tmp_path, *words, "--model", "tiny", *chain(*given.items())) == 0
    *_, command = capsys.readouterr().out.splitlines()
    begins = shlex.split(command)
    assert begins[:2] == ["farflung", "invite"] and {"--swarm", "--recompute"} <= {*begins}
    # A batch has as many microbatches as a head has under way, each of 3 sequences.
    expected = given | {"--batch-size": str(3 * IN_FLIGHT * 3), "--boundary": "int8"}
    assert expected.items() <= dict(pairwise(begins)).items()
    # No port has this number, which is seen when all else is in order.
    assert run_here(monkeypatch, tmp_path, *begins[1:], "--port", "99999") == 2
    assert "port 99999 is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"stages": 3}, "3 pieces of a model that has only 2 layers; choose fewer stages"),
        ({"boundaries": "subspace100"}, "boundary subspace100 has more dimensions than the model's 64"),
        ({"boundaries": " , "}, "boundaries names none"),
    ],
    ids=str,
)
def test_what_no_swarm_can_be_is_no_matter_of_memory(arguments: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(MACHINES.format(tflops=1.0, gbps=1.0))
    with pytest.raises(UserError, match=re.escape(told)):
        swarm_plans(SwarmOptions("micro", tmp_path / "m.toml", **arguments))


def test_a_model_that_a_swarm_cannot_train_is_not_planned(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(MACHINES.format(tflops=1.0, gbps=1.0))
    ROUTED["mixtral"].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a mixture of experts has a loss of all stages"):
        swarm_plans(SwarmOptions(str(tmp_path), tmp_path / "m.toml", sequence_length=LENGTH))
