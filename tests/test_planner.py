"""The simulator without tensors, and the planner: against simulated training, by hand, and as commands."""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience
from problem import replica
from processes import run_here, run_together
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from bench.models import throughput
from farflung import Method, methods
from farflung.cells import cells_among
from farflung.codecs import Modulo, Quantize
from farflung.errors import UserError
from farflung.inner import INNER
from farflung.methods import RECIPES
from farflung.networks import Conditions, Simulation
from farflung.networks.simulator.conditions import HEADERS, Cut, Death, Link
from farflung.outer import Everyone, Round, Schedule, kept_bytes, message_bytes
from farflung.outer.companions.base import Added
from farflung.outer.round import Rounds, Sync
from farflung.pipeline.assemble import training
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import architecture, architecture_of
from farflung.planner.command import flags
from farflung.planner.cost import Exchange, blocked_seconds, exchange
from farflung.planner.fitting import RUNTIME
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster, Machines, read_cluster
from farflung.planner.memory import RESERVED, activation_bytes, memory_bytes
from farflung.planner.options import PlanOptions
from farflung.planner.plan import plan
from farflung.planner.printed import reasons
from farflung.planner.sizes import square_model
from farflung.planner.step import step_seconds
from farflung.planner.timing import Size, Timer
from farflung.training.fitting import SLIGHT
from farflung.workloads import models

ROUGH = Conditions(
    bandwidth_mbps=0.4, latency_ms=30, step_ms=50, latency_sigma=0.5, bandwidth_sigma=0.3, speed_sigma=0.2,
    step_sigma=0.1, slow_share=0.05, slow_factor=4, loss=0.01, seed=5,
)  # fmt: skip
"""As uneven as can be, and so slow that the few parameters of the test's model matter."""


def whatever_the_group(nbytes: float) -> Callable[[int], float]:
    """A message that takes so many bytes however it is cut."""
    return lambda members: nbytes


MEGABYTE = whatever_the_group(1e6)


# The simulator without tensors


@pytest.mark.parametrize(
    "method",
    [
        lambda: methods.noloco(every=4),
        lambda: methods.noloco(every=4, delay=2),
        lambda: methods.diloco(every=4, delay=4),
        lambda: methods.diloco(every=5, delay=1, fragments=2),
    ],
)
def test_rounds_without_tensors_happen_when_those_of_simulated_training_do(method: Callable[[], Method]) -> None:
    rounds = 4
    schedule = method().schedule
    assert schedule.every
    steps = schedule.every * rounds + schedule.delay
    rough = replace(ROUGH, latency_sigma=0, loss=0)  # else each network draws its own
    results = Simulation(4, rough).run(replica(method, steps=steps))
    trained: dict[tuple[int, int], list[Round]] = {}
    for round in (r for result in results for r in result.rounds if r.round <= rounds):
        trained.setdefault((round.round, round.fragment), []).append(round)
    parameters = 4 * results[0].weights.numel()
    timing = Timer(method(), whatever_the_group(parameters), rough, 4, rounds, 120).run()
    timed = {(times.round, times.fragment): times for times in timing.rounds}
    assert timed.keys() == trained.keys() and len(timed) == rounds * schedule.fragments
    # Replicas that train first agree on where they start from, which costs a small message and its latency.
    first = min(timed)
    start = min(r.started for r in trained[first]) - timed[first].started
    assert 0.03 < start < 0.04
    near = 0.03  # less than a step, for fragments that are not quite equal
    for key, times in timed.items():
        same = trained[key]
        assert len(same) == times.replicas == 4
        assert times.started + start == pytest.approx(min(r.started for r in same), abs=near)
        assert times.landed + start == pytest.approx(max(r.landed for r in same), abs=near)
        assert times.blocked == pytest.approx(sum(r.landed - r.waited_from for r in same), abs=near)


def test_what_is_averaged_besides_is_waited_for_when_the_next_round_starts_and_not_before() -> None:
    slow, every, rounds = Conditions(bandwidth_mbps=0.01, latency_ms=1, step_ms=50), 4, 4
    method = methods.factored_gossip(every=every)
    results = Simulation(4, slow).run(replica(lambda: method, steps=every * rounds))
    nbytes = 4 * results[0].weights.numel()
    besides = [Added(nbytes / 4, Everyone(), hidden=True)]
    timing = Timer(method, whatever_the_group(nbytes), slow, 4, rounds, 120, besides=besides).run()
    after, at_once = (
        [later - earlier for earlier, later in pairwise(landed)]
        for landed in (
            [times.landed for times in timing.rounds],
            [max(one.rounds[number].landed for one in results) for number in range(rounds)],
        )
    )
    assert after == pytest.approx(at_once, abs=0.01)
    assert min(after) > 2 * every * 0.05, "the mean takes longer than the steps between two rounds"
    assert timing.blocked > sum(times.blocked for times in timing.rounds)


def test_a_round_takes_its_steps_and_its_exchange() -> None:
    conditions = Conditions(bandwidth_mbps=8, latency_ms=50, step_ms=100)
    pairs = Timer(methods.noloco(every=10), MEGABYTE, conditions, 6, 5, 120).run()
    # Half a megabyte each way at a megabyte a second, then the other half; two latencies; ten steps.
    assert pairs.seconds == pytest.approx(5 * (1 + 1 + 0.1)) and pairs.bytes_sent == pytest.approx(6 * 5 * 1e6)
    assert pairs.computed == pytest.approx(6 * 5) and pairs.blocked == pytest.approx(6 * 5 * 1.1)
    everyone = Timer(methods.diloco(every=10), MEGABYTE, conditions, 6, 5, 120).run()
    assert everyone.seconds == pytest.approx(5 * (1 + 10 / 6 + 0.1))
    hidden = Timer(methods.noloco(every=20, delay=20), MEGABYTE, conditions, 6, 5, 120).run()
    assert hidden.seconds == pytest.approx(6 * 2) and hidden.blocked == pytest.approx(0)
    gathered = Timer(methods.noloco(every=10, codec=Modulo(bits=4)), MEGABYTE, conditions, 2, 1, 120, work=0.5).run()
    assert gathered.computed == pytest.approx(2 * 1.5) and gathered.seconds == pytest.approx(1 + 1 + 0.05)


@pytest.mark.parametrize("name", ["ddp", "diloco", "streaming-diloco", "eager-diloco", "dilocox", "nolocox"])
@pytest.mark.parametrize("mbps", [4, 4000])
def test_what_a_round_takes_does_not_depend_on_how_many_there_are(name: str, mbps: float) -> None:
    """Whether or not what is trained meanwhile hides the exchange, and with a replica's own work."""
    conditions = Conditions(bandwidth_mbps=mbps, latency_ms=50, step_ms=100)
    one, two, many = (
        Timer(RECIPES[name](), MEGABYTE, conditions, 4, rounds, 1e9, work=0.01).run() for rounds in (1, 2, 10)
    )
    assert many.seconds_per_round == pytest.approx(two.seconds_per_round) == pytest.approx(one.seconds_per_round)
    shares = [timing.computed / (timing.computed + timing.blocked) for timing in (one, two, many)]
    assert shares == [pytest.approx(shares[0])] * 3
    assert many.uplink == pytest.approx(two.uplink) == pytest.approx(one.uplink)


@pytest.mark.parametrize(
    ("at", "failed", "in_third", "next_starts"), [(4.5, [0, 0, 0, 0, 0, 0], 3, 6.0), (5.5, [0, 0, 2, 0, 0, 0], 4, 6.5)]
)
def test_a_death_costs_its_partner_the_round_that_it_was_in_and_the_rest_go_on(
    at: float, failed: list[int], in_third: int, next_starts: float
) -> None:
    """Ten steps take a second, and a pair's exchange another; who has lost its partner goes on at once."""
    conditions = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=100, deaths=(Death(3, at),))
    timing = Timer(methods.noloco(every=10), MEGABYTE, conditions, 4, 6, 120).run()
    assert [times.failed for times in timing.rounds] == failed
    assert [times.replicas for times in timing.rounds] == [4, 4, in_third, 3, 3, 3]
    assert timing.rounds[3].started == pytest.approx(next_starts)


def test_a_world_in_which_nobody_lives_long_enough_is_refused() -> None:
    conditions = Conditions(step_ms=100, deaths=(Death(0, 0.5), Death(1, 0.6)))
    with pytest.raises(UserError, match="every replica dies before its first round"):
        Timer(methods.noloco(every=10), MEGABYTE, conditions, 2, 6, 120).run()


def test_the_sides_of_a_cut_go_on_by_themselves_and_together_when_it_has_healed() -> None:
    cut = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=100, cuts=(Cut((0, 1), 10.1, 29.9),))
    timing = Timer(methods.diloco(every=10), MEGABYTE, cut, 4, 20, 120).run()
    whole, halves = 1 + 2 * 3 / 4, 1 + 2 * 1 / 2  # ten steps, and all but each one's own part, twice
    lengths = [b.landed - a.landed for a, b in zip(timing.rounds, timing.rounds[1:], strict=False)]
    assert lengths[0] == pytest.approx(whole) and lengths[-1] == pytest.approx(whole)
    assert sum(length == pytest.approx(halves) for length in lengths) >= 4
    assert all(times.replicas == 4 for times in timing.rounds)
    # What was under way when the cut came stood still until it had healed; nothing failed within the deadline.
    assert sum(times.failed for times in timing.rounds) == 0


def test_nobody_waits_for_one_that_a_cut_has_left_ahead_but_it_for_the_others() -> None:
    cut = Conditions(bandwidth_mbps=8, latency_ms=0, step_ms=100, cuts=(Cut((3,), 3.4, 14.1),))
    together = Timer(methods.diloco(every=10), MEGABYTE, cut, 4, 20, 120).run()
    whole, thirds = 1 + 2 * 3 / 4, 1 + 2 * 2 / 3  # ten steps, and all but each one's own part, twice
    ends = [times.landed for times in together.rounds]
    # Replica 3 is alone from the second round to the one that it begins 12 s after the first, its thirteenth.
    assert ends == pytest.approx([whole, *(whole + n * thirds for n in range(1, 12)), *ends[12:]])
    assert ends[12:] == pytest.approx([ends[11] + n * whole for n in range(1, 9)])
    in_pairs = Timer(methods.noloco(every=10), MEGABYTE, cut, 4, 20, 120).run()
    assert in_pairs.seconds < 60 and all(times.failed == 0 for times in in_pairs.rounds[-10:])


def test_who_comes_when_a_cut_has_healed_joins_those_who_have_waited_for_it_since_before() -> None:
    """Replicas 0 and 1 wait for 2 from 1 s on, when 3 is cut off; 2 comes at 2 s, when it could wait for 3 as well."""
    conditions = Conditions(
        bandwidth_mbps=8, latency_ms=0, step_ms=100, speeds=(1, 1, 0.5, 0.4), cuts=(Cut((3,), 0.5, 1.5),)
    )
    rounds = Timer(methods.diloco(every=10), MEGABYTE, conditions, 4, 5, 120).run().rounds
    assert [times.failed for times in rounds] == [0] * 5
    assert rounds[0].landed == pytest.approx(2 + 2 * 2 / 3)


@settings(max_examples=60, deadline=None)
@given(
    method=st.sampled_from([methods.diloco, methods.noloco, partial(methods.noloco, group_size=3), methods.dilocox]),
    cuts=st.lists(
        st.builds(
            lambda ranks, begins, lasts: Cut(tuple(ranks), begins, begins + lasts),
            st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True),
            st.floats(0.3, 20.0),
            st.floats(0.5, 15.0),
        ),
        max_size=4,
    ),
    speeds=st.lists(st.sampled_from([1.0, 0.7]), min_size=5, max_size=5),
    mbps=st.sampled_from([4.0, 8.0, 40.0]),
)
def test_whatever_is_cut_off_no_deadline_passes(
    method: Callable[..., Method], cuts: list[Cut], speeds: list[float], mbps: float
) -> None:
    world = Conditions(bandwidth_mbps=mbps, step_ms=100, cuts=tuple(cuts), speeds=tuple(speeds))
    assert Timer(method(every=10), MEGABYTE, world, 5, 40, 1000).run().seconds < 1000


def test_rounds_come_when_the_schedule_says() -> None:
    rounds = Rounds[float, None]([Schedule(4, 2, 1)] * 2, [Size(0.5), Size(0.5)])
    seen: list[tuple[int, str, int, int]] = []
    while (step := rounds.next_step()) and step < 10:
        for due in rounds.after(step):
            if isinstance(due, Sync):
                seen.append((step, "starts", due.index, due.rounds))
                rounds.pending.append(due.start(step, (0, 1), due.offer(str, 2), None))
            else:
                seen.append((step, "lands", due.fragment, due.round))
    assert seen == [
        (2, "starts", 1, 0), (3, "lands", 1, 0), (4, "starts", 0, 1), (5, "lands", 0, 1),
        (6, "starts", 1, 1), (7, "lands", 1, 1), (8, "starts", 0, 2), (9, "lands", 0, 2),
    ]  # fmt: skip


# Sizes


def test_models_have_the_parameters_asked_for() -> None:
    for parameters in (1e6, 1.3e9, 107e9):
        assert sum(cell.numel for cell in square_model(parameters)) == pytest.approx(parameters, rel=0.06)


# Models


def test_presets_have_the_sizes_they_are_named_after() -> None:
    for name, parameters in (
        ("micro", 133_440),
        ("tiny", 869_504),
        ("llama-125m", 1.34e8),
        ("llama-1.3b", 1.34e9),
        ("llama-6.8b", 6.74e9),
    ):
        assert architecture_of(name).parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_can_configure_is_counted_as_it_builds_it(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for config in (
        LlamaConfig(vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96),
        GPT2Config(vocab_size=500, n_embd=48, n_layer=3, n_head=4, n_positions=2048),
    ):
        config.tie_word_embeddings = tied
        config.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(config)
        known = architecture_of(str(tmp_path))
        assert known.parameters == sum(p.numel() for p in model.parameters())
        assert len(known.layers) == 3 and known.hidden == config.hidden_size
        for stages in (1, 2, 3):
            split = known.kept_cells(stages, 1)
            assert len(split) == stages and sum(map(len, split)) == len(known.cells)
    with pytest.raises(UserError, match="4 pieces of a model that has only 3 layers"):
        known.kept_cells(4, 1)


# Costs, by hand

TWO = Cluster(
    (
        Machines(1, 80, 100, "a", efficiency=0.5, network_gbps=8),
        Machines(1, 80, 100, "b", efficiency=0.5, network_gbps=8),
    ),
    (Link(("a", "b"), 50, 800),),
)
PAIR = Layout(2, 1, 1, ((0,), (1,)))


def test_an_exchange_takes_the_slowest_link_and_its_latency() -> None:
    model = architecture_of("micro")
    nbytes = 4 * model.parameters
    wire = 1 + 66 / 1448
    for method, hops, share in (
        (methods.diloco(), 2, 1),
        (methods.noloco(), 2, 1),
        (methods.diloco(codec=Quantize(8)), 1, 0),
    ):
        found = exchange(model, method, TWO, PAIR)
        if share:
            assert found.bytes_sent == pytest.approx(2 * nbytes, rel=1e-3)
            assert found.seconds == pytest.approx(nbytes * wire / 100e6 + hops * 0.05, rel=1e-3)
        else:
            assert found.bytes_sent == pytest.approx(nbytes / 2, rel=0.05)
    assert exchange(model, methods.local(), TWO, PAIR).seconds == 0
    assert blocked_seconds(methods.diloco(every=10, delay=5), Exchange(2.5, 0.5), 0.5) == 0.5


@pytest.mark.parametrize("name", ["ddp", "diloco", "noloco", "dilocox", "nolocox"])
def test_a_planned_round_takes_as_long_as_a_simulated_one(name: str) -> None:
    model, method = architecture_of("small"), methods.RECIPES[name]()
    each = Machines(4, 80, 100, network_gbps=0.1)
    cluster = Cluster((each,))
    layout = Layout(4, 1, 1, tuple((n,) for n in range(4)))
    planned, every = exchange(model, method, cluster, layout), method.schedule.every or 1
    conditions = Conditions(bandwidth_mbps=100, latency_ms=0.1, step_ms=10, headers=66 / 1448)
    timing = Timer(method, partial(message_bytes, method, model.cells), conditions, 4, 6, 1e6).run()
    landed = [times.landed for times in timing.rounds]
    blocked = blocked_seconds(method, planned, 0.01)
    assert landed[4] - landed[2] == pytest.approx(2 * (every * 0.01 + blocked), rel=1e-3)


def test_a_step_fills_its_pipeline_and_then_goes_on_microbatch_by_microbatch() -> None:
    model = architecture_of("small", 128)
    run = IslandSettings(batch_size=8, microbatches=8)
    (whole,) = model.spans(1)
    one = step_seconds(model, TWO, Layout(1, 1, 1, ((0,),)), run, 128)
    assert one == pytest.approx(model.flops_per_token(whole, 128) * 8 * 128 / 50e12)
    two_stages = step_seconds(model, TWO, Layout(1, 2, 1, ((0, 1),)), replace(run, stages=2), 128)
    compute = [model.flops_per_token(span, 128) * 128 / 50e12 for span in model.spans(2)]
    passing = 2 * (0.05 + 128 * model.hidden * 4 * (1 + HEADERS) / 100e6)
    assert sum(compute) == pytest.approx(one / 8)
    assert two_stages == pytest.approx(one / 8 + passing + 7 * max(*compute, passing))


def test_memory_counts_the_copies_that_the_outer_loop_really_holds() -> None:
    def held(method: Method) -> float:
        def work(network: Any) -> tuple[int, int]:
            model = torch.nn.Linear(300, 300, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = []
            with method.attach(model, optimizer, network) as outer:
                for _ in range(9):
                    model(torch.ones(1, 300)).sum().backward()
                    optimizer.step()
                    anchors = sum(t.nbytes for t in outer.anchors)  # type: ignore[attr-defined]
                    states = outer.outer.state.values()  # type: ignore[attr-defined]
                    momentum = sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))
                    offers = [pending.offer for pending in outer._rounds.pending]  # type: ignore[attr-defined]
                    kept = [o.at_start for o in offers if o.at_start is not None]
                    messages = sum(tensor.nbytes for tensor in (*(o.message for o in offers), *kept))
                    seen.append(anchors + momentum + messages)
            return max(seen), sum(p.numel() for p in model.parameters())

        nbytes, parameters = Simulation(2).run(work)[0]
        return nbytes / parameters

    torch.manual_seed(0)
    for method in (methods.noloco(every=4, delay=2), methods.diloco(every=4, delay=4)):
        assert held(method) == kept_bytes(method, cells_among([[(300, 300)]])) / 300**2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_those_that_a_real_layer_keeps(precision: Any, recompute: bool) -> None:
    width, length = 256, 120
    settings = {"hidden_size": width, "num_attention_heads": 4, "intermediate_size": 688, "vocab_size": 64}

    def kept(layers: int) -> float:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings, num_hidden_layers=layers))
        training(model, IslandSettings(recompute=recompute))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.randint(64, (1, length))
        noting = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with noting, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = models.sequence_loss(model, tokens)
        assert loss.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())

    def planned(layers: int) -> float:
        outline = models.outline(LlamaConfig(**settings, num_hidden_layers=layers))
        run = IslandSettings(precision=precision, recompute=recompute, batch_size=1)
        made = architecture("Llama", outline)
        return activation_bytes(made, run, length, 0, made.spans(1)[0])

    assert planned(4) - planned(2) == pytest.approx(kept(4) - kept(2), rel=0.05)


def test_more_stages_and_shards_need_less_memory_each() -> None:
    model = architecture_of("llama-1.3b")
    run, method = IslandSettings(batch_size=16, microbatches=4), methods.diloco()
    needed = [
        memory_bytes(model, replace(run, stages=stages, shard=shards), method, 1024)
        for stages, shards in ((1, 1), (1, 4), (2, 4), (4, 4))
    ]
    assert needed == sorted(needed, reverse=True)
    states = model.parameters * (16 + 12)
    assert states < needed[0] < states * 2
    # What is gathered of shards is whole until the step is over: weights and gradients.
    assert needed[1] > states / 4 + 8 * model.parameters
    # A step's last backward pass, here the only one, shares gradients out as it computes them.
    alone = memory_bytes(model, replace(run, microbatches=1, shard=4), method, 1024)
    assert alone - activation_bytes(model, replace(run, microbatches=1, shard=4), 1024, 0, model.spans(1)[0]) < (
        states / 4 + 3 * model.parameters
    )


def test_what_the_optimizer_keeps_is_counted_and_no_more() -> None:
    """Muon keeps one moment of layers' matrices where AdamW keeps two, and AdamW's two of all else."""
    model, run = architecture_of("llama-1.3b"), IslandSettings(batch_size=16)
    by_adamw, by_muon = (
        memory_bytes(model, run, replace(methods.diloco(), inner=INNER[name]), 1024) for name in ("adamw", "muon")
    )
    matrices = sum(math.prod(shape) for layer in model.layers for shape in layer.shapes if len(shape) == 2)
    assert matrices > 0.8 * model.parameters
    assert by_adamw - by_muon == pytest.approx(4 * matrices, rel=1e-3)


# The planner

MACHINES = """
currency = "EUR"
[[machines]]
site = "here"
count = 2
workers = 4
memory_gb = 24
tflops = 100
price_per_hour = 3.0
[[machines]]
site = "there"
count = 2
workers = 4
memory_gb = 24
tflops = 100
price_per_hour = 5.0
[[links]]
between = ["here", "there"]
latency_ms = 40
bandwidth_mbps = 1000
shared = true
"""


def options(path: Path, text: str = MACHINES, **settings: Any) -> PlanOptions:
    path.write_text(text)
    return PlanOptions(**{"model": "llama-1.3b", "machines": path, "tokens": 1e9, "search_s": 0.0, **settings})


def test_a_run_that_does_not_fit_is_fitted_at_a_cost_in_time(tmp_path: Path) -> None:
    """A small model of long sequences: kept, what layers save takes more than there is."""
    text = "[[machines]]\ncount = 2\nmemory_gb = {}\ntflops = 1\nhost_gbps = 20"
    asked: dict[str, Any] = {"model": "small", "methods": "noloco", "micro_batch": 16, "sequence_length": 1024}

    def alone(memory: float) -> Any:
        """The plan in which each worker is an island."""
        plans, _, _ = plan(options(tmp_path / "m.toml", text.format(memory), **asked))
        return next(p for p in plans if p.choice.layout.replicas == 2)

    roomy = alone(24)
    assert roomy.choice.fit is None and roomy.choice.settings.island.memory == ""
    tight = alone(RESERVED / 1e9 + 0.6 * (roomy.memory - RESERVED) / 1e9)
    fit, settings = tight.choice.fit, tight.choice.settings
    assert tight.memory == fit.peak_bytes < 0.6 * roomy.memory + 0.4 * RESERVED
    # A host that steps some layers beside the device may save a little.
    assert 0.99 < tight.slower < 1.5 and tight.step == pytest.approx(tight.slower * roomy.step)
    assert settings.rounds.outer_device == "cpu" and settings.island.memory.endswith("MB")
    assert float(settings.island.memory[:-2]) * 1e6 <= tight.memory
    assert f"--memory {settings.island.memory}" in flags(settings)


def wide(folder: Path) -> str:
    """A model whose weights are what counts: 26 million, and little computing."""
    path = folder / "wide"
    sizes = {"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=512).save_pretrained(path)
    return str(path)


SHORT: dict[str, Any] = {"batch_tokens": 32, "sequence_length": 32, "tokens": 12 * 32}
PROCESSOR = '[[machines]]\ncount = 1\ndevice = "cpu"\nmemory_gb = 0.47\ntflops = 0.05\nhost_gbps = 8\n'


def states_of(found: Any) -> set[str]:
    return {layer.state for stage in found.choice.fit.plans for layer in stage.layers}


@pytest.mark.slow
def test_gradients_and_weights_are_far_where_training_can_have_them_there(tmp_path: Path) -> None:
    """Weights of a GPU never are, nor gradients of stages."""
    asked: dict[str, Any] = {"model": wide(tmp_path), **SHORT}
    (only,), _, _ = plan(options(tmp_path / "m.toml", PROCESSOR, far_folder="far", **asked))
    weights = 4 * architecture_of(asked["model"]).parameters
    assert "weights-far" in states_of(only) and only.memory <= 0.47e9 and only.slower > 1
    assert only.choice.fit.far_bytes > weights
    assert flags(only.choice.settings).endswith("--memory 470MB --far-folder far")
    with pytest.raises(UserError, match=r"does not fit: .* GB of 0\.47, and 0\.\d+ with a plan of the memory"):
        plan(options(tmp_path / "m.toml", PROCESSOR, **asked))
    gpus = "[[machines]]\ncount = {}\nmemory_gb = 1.15\ntflops = 0.05\n"
    (only,), _, _ = plan(options(tmp_path / "m.toml", gpus.format(1), **asked))
    assert "optimizer-far" in states_of(only) and "weights-far" not in states_of(only)
    asked |= {"batch_tokens": 64 * 4}
    plans, failures, _ = plan(options(tmp_path / "m.toml", gpus.format(2), methods="ddp,diloco", **asked))
    for found in plans:
        whole = found.choice.layout.stages == 1
        assert found.choice.fit is None or whole or states_of(found) <= {"near", "moments-far"}
    assert any(f.method == "ddp" and "with a plan of the memory" in f.reason for f in failures)


@pytest.mark.slow
def test_each_stage_has_a_plan_of_its_own(tmp_path: Path) -> None:
    """For as many microbatches as wait in it; what a worker has is enough for no stage that keeps all."""
    text = "[[machines]]\ncount = 2\nmemory_gb = {}\ntflops = 1\nhost_gbps = 1"
    asked: dict[str, Any] = {"model": "small", "micro_batch": 16, "sequence_length": 1024, "methods": "noloco"}

    def divided(memory: float) -> Any:
        plans, _, _ = plan(options(tmp_path / "m.toml", text.format(memory), **asked))
        return next(p for p in plans if (p.choice.layout.stages, p.choice.layout.shards) == (2, 1))

    roomy = divided(24)
    tight = divided(RESERVED / 1e9 + 0.5 * (roomy.memory - RESERVED) / 1e9)
    first, last = tight.choice.fit.plans
    assert [len(one.layers) for one in (first, last)] == [
        span.end - span.begin for span in architecture_of("small").spans(2)
    ]
    kept = [sum(layer.mode == "keep" for layer in one.layers) for one in (first, last)]
    assert kept[0] < kept[1]  # two microbatches wait in the first
    assert roomy.choice.fit is None and 1 <= tight.slower < 1.5 and tight.memory < roomy.memory


@pytest.mark.slow
def test_no_plan_is_claimed_where_training_makes_none(tmp_path: Path) -> None:
    text = "[[machines]]\ncount = 1\nworkers = 1\nmemory_gb = 1.25\ntflops = 1\n"
    usual: dict[str, Any] = {"model": "llama-125m", "sequence_length": 1024, "batch_tokens": 8192}
    for what in ("recompute", "offload"):
        with pytest.raises(UserError, match=f"and no plan of memory is made with {what}"):
            plan(options(tmp_path / "m.toml", text, **usual, **{what: True}))


@pytest.mark.slow
def test_a_run_takes_the_memory_that_was_planned_where_it_only_fits_with_weights_far(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": wide(tmp_path), **SHORT}
    (only,), _, _ = plan(options(tmp_path / "m.toml", PROCESSOR, far_folder=str(tmp_path / "far"), **asked))
    weights = 4 * architecture_of(asked["model"]).parameters
    assert RUNTIME["cpu"] + weights > 0.47e9  # so that not all weights can be near
    quick = "--tokenizer bytes --eval-sequences 2 --eval-every 100 --checkpoint-every 100 --max-tokens 100000"
    run_together(
        1, "-m", "farflung", "train", *shlex.split(f"{flags(only.choice.settings)} {quick}"), "--out", tmp_path / "run"
    )
    kept = json.loads((tmp_path / "run/memory/replica-0.json").read_text())
    assert "weights-far" in {layer["state"] for layer in kept["plan"]["layers"]} & states_of(only)
    assert kept["plan"]["peak_bytes"] == pytest.approx(only.memory, rel=0.1)
    # In so small a process, what training itself calls slight is much: free blocks of less than a megabyte stay in it.
    assert kept["measured"]["peak_bytes"] <= 1.1 * only.memory + SLIGHT


def test_a_plan_is_sorted_fits_and_adds_up(tmp_path: Path) -> None:
    plans, failures, cluster = plan(options(tmp_path / "m.toml"))
    assert [p.hours for p in plans] == sorted(p.hours for p in plans)
    assert {p.choice.settings.rounds.method for p in plans} == {
        "ddp",
        "diloco",
        "noloco",
        "dilocox",
        "nolocox",
        "local",
    }
    for found in plans:
        assert found.memory <= 24e9
        assert found.hours == pytest.approx(1e9 / found.tokens_per_second / 3600)
        assert found.price == pytest.approx(16.0 * found.hours)
        assert len({w for island in found.choice.layout.islands for w in island}) == 16
        every = found.choice.method.schedule.every or 1
        assert found.round == pytest.approx(every * found.step / (1 - found.blocked), rel=1e-6)
    assert not failures
    fitted = {found.choice.layout.shards for found in plans if found.choice.fit}
    assert fitted == {1, 2}, "four shards, or two stages, fit as they are"
    by_method = {
        name: min(p.hours for p in plans if p.choice.settings.rounds.method == name) for name in ("ddp", "dilocox")
    }
    assert by_method["dilocox"] < by_method["ddp"]
    assert cluster.currency == "EUR"


@pytest.mark.slow
def test_stages_are_placed_where_links_suit_them(tmp_path: Path) -> None:
    # Machines listed in turn, so that islands as they come would stretch over the slow link.
    mixed = "".join(
        f'[[machines]]\nsite = "s{n}"\ncount = 1\nmemory_gb = 10\ntflops = 100\n' for n in range(4)
    ) + "".join(
        f'[[links]]\nbetween = ["s{one}", "s{other}"]\nlatency_ms = 1\n'
        f"bandwidth_mbps = {50 if (one + other) % 2 else 9000}\n"
        for one in range(4)
        for other in range(one + 1, 4)
    )
    settings = {"methods": "diloco", "model": "llama-125m", "show": 3}
    as_they_come = plan(options(tmp_path / "m.toml", mixed, **settings))[0]
    placed = plan(options(tmp_path / "m.toml", mixed, **settings, search_s=3.0))[0]
    two_stages = [next(p for p in plans if p.choice.layout.stages == 2) for plans in (as_they_come, placed)]
    assert two_stages[1].placed and two_stages[1].step < two_stages[0].step / 3
    assert {frozenset(island) for island in two_stages[1].choice.layout.islands} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


@pytest.mark.parametrize(
    ("change", "settings", "complaint"),
    [
        (("currency", "curency"), {}, "no setting 'curency'; did you mean 'currency'?"),
        (('currency = "EUR"\n', ""), {}, "prices are given without a currency"),
        (("price_per_hour = 5.0", ""), {}, "give all of them one"),
        (("count = 2", "count = 0"), {}, "machines 1: count is 0"),
        (("memory_gb = 24\n", ""), {}, "machines 1: memory_gb is missing"),
        (("tflops = 100", 'tflops = "fast"'), {}, "tflops is 'fast'; it must be of type float"),
        (('"there"\ncount', '"elsewhere"\ncount'), {}, "names the site 'there'; there are: here, elsewhere"),
        (("[[links]]", "[links]"), {}, "links is {"),
        (("", ""), {"tokens": 0.0}, "tokens is 0.0"),
        (("", ""), {"tokens": float("nan")}, "tokens is nan"),
        (("", ""), {"batch_tokens": float("inf")}, "batch_tokens is inf"),
        (("", ""), {"delay": -1}, "delay is -1"),
        (("", ""), {"boundary": "int5"}, "choose one of float32, bfloat16"),
        (("latency_ms = 40", "latency_ms = nan"), {}, "links 1: latency_ms is nan; it must be a finite number"),
        (("latency_ms = 40", "latency_ms = inf"), {}, "links 1: latency_ms is inf; it must be a finite number"),
        (("bandwidth_mbps = 1000", "bandwidth_mbps = 0"), {}, "bandwidth_mbps is 0; it must be at least 1e-06"),
        (("price_per_hour = 5.0", "price_per_hour = inf"), {}, "price_per_hour is inf"),
        (("workers = 4", "workers = 4.5"), {}, "workers is 4.5; it must be of type int"),
        (("", ""), {"model": "llama-6.9b"}, "model 'llama-6.9b'"),
        (("", ""), {"methods": "dilco"}, "did you mean 'diloco'?"),
        (("", ""), {"every": "ten"}, "every is 'ten'; give whole numbers"),
        (("", ""), {"every": "²"}, "every is '²'; give whole numbers"),
        (("", ""), {"codecs": "int5"}, "int5"),
        (("", ""), {"methods": "ddp,gpa", "delay": 5}, "delay changes nothing: none of ddp, gpa has it; leave it out"),
        (("", ""), {"methods": "ddp", "every": "5"}, "every changes nothing: none of ddp has it; leave it out"),
        (("", ""), {"methods": "local", "codecs": "int8"}, "codecs changes nothing: none of local has it"),
        (("memory_gb = 24", "memory_gb = 0.5"), {}, "cannot be trained on"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(
    tmp_path: Path, change: tuple[str, str], settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError) as error:
        plan(options(tmp_path / "m.toml", MACHINES.replace(*change) if change[0] else MACHINES, **settings))
    assert complaint in str(error.value) and "\n" not in str(error.value)


NUMBERS = [line for line in MACHINES.splitlines() if line.strip() and line[-1].isdigit()]


@pytest.mark.parametrize("line", sorted(set(NUMBERS)))
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "-1", "1e300"])
def test_each_number_of_machines_is_finite_and_in_its_range(tmp_path: Path, line: str, bad: str) -> None:
    name = line.split()[0]
    with pytest.raises(UserError) as error:
        plan(options(tmp_path / "m.toml", MACHINES.replace(line, f"{name} = {bad}", 1)))
    told = str(error.value)
    assert f"{name} is {bad if bad == '-1' else float(bad)}; it must be" in told and "\n" not in told


def test_one_island_trains_alone(tmp_path: Path) -> None:
    text = "[[machines]]\ncount = 1\nmemory_gb = 24\ntflops = 100\n"
    plans, failures, _ = plan(options(tmp_path / "m.toml", text, model="llama-125m"))
    assert [found.choice.settings.rounds.method for found in plans] == ["local"] and not failures


def test_a_codec_that_does_not_go_with_a_method_is_told_and_the_others_are_planned(tmp_path: Path) -> None:
    asked = options(tmp_path / "m.toml", methods="diloco,noloco", codecs="modulo4")
    plans, failures, _ = plan(asked)
    told = {(found.choice.settings.rounds.method, found.choice.settings.rounds.codec) for found in plans}
    assert {("diloco", None), ("noloco", None), ("noloco", "modulo4")} <= told
    assert ("diloco", "modulo4") not in told
    (line,) = [line for line in reasons(failures) if line.startswith("any layout: ")]
    assert "use it with noloco" in line and line.endswith("(diloco)")


def test_what_training_would_refuse_is_not_planned(tmp_path: Path) -> None:
    """Eight stages of four microbatches."""
    text = "[[machines]]\ncount = 8\nmemory_gb = 24\ntflops = 100\n"
    with pytest.raises(UserError, match="8 stages × 1 shard: microbatches is 4, too few to fill 8 stages"):
        plan(options(tmp_path / "m.toml", text, model="llama-125m", batch_tokens=4096.0, sequence_length=1024))


@pytest.mark.slow
def test_settings_of_training_change_what_a_plan_costs(tmp_path: Path) -> None:
    def costs(**asked: Any) -> Any:
        plans, _, _ = plan(options(tmp_path / "m.toml", methods="diloco", sequence_length=1024, **asked))
        return next(p for p in plans if (p.choice.layout.stages, p.choice.layout.shards) == (8, 1))

    usual = costs()
    assert costs(boundary="bfloat16").bytes_inside == pytest.approx(usual.bytes_inside / 2, rel=0.001)
    # Autocast keeps a copy of the matrices for each microbatch, so that only large ones save by it.
    assert costs(precision="bfloat16", micro_batch=4).memory < costs(micro_batch=4).memory
    recomputed = costs(recompute=True)
    assert recomputed.memory < usual.memory and usual.step < recomputed.step < usual.step * 8 / 6
    assert costs(offload=True).memory < usual.memory
    assert costs(delay=50).blocked < usual.blocked
    assert costs(delay=50).choice.settings.rounds.delay == 50


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere\.toml"):
        read_cluster(tmp_path / "nowhere.toml")


# The commands


def farflung(*arguments: str, folder: Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farflung", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(100))


@pytest.mark.slow
def test_simulate_prints_plots_and_writes_the_same_events_whatever_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.toml").write_text('preset = "home"\nstep_ms = 500\n[[deaths]]\nreplica = 2\nat_s = 60.0\n')
    command = ["simulate", "--replicas", "12", "--params", "1e6", "--conditions", "net.toml", "--rounds", "5"]
    assert run_here(monkeypatch, tmp_path, *command, "--out", "one") == 0
    first = capsys.readouterr().out
    header, units, *rows = first.split("\n\n")[1].splitlines()
    assert [row.split()[0] for row in rows] == ["ddp", "diloco", "noloco", "dilocox", "nolocox"]
    assert "s a round" in units and "blocked" in header
    assert "plotly" in (tmp_path / "one" / "simulation.html").read_text()
    farflung(*command, "--out", "two", folder=tmp_path, threads=8)
    for name in ("ddp", "noloco", "dilocox"):
        events = (tmp_path / "one" / "events" / f"{name}.jsonl").read_bytes()
        assert events == (tmp_path / "two" / "events" / f"{name}.jsonl").read_bytes()
        assert [json.loads(line)["round"] for line in events.splitlines()] == [1, 2, 3, 4, 5]
    assert run_here(monkeypatch, tmp_path, *command, "--seed", "9", "--out", "three") == 0
    assert capsys.readouterr().out != first.replace("one", "three")


@pytest.mark.slow
def test_simulated_training_writes_the_same_events_whatever_the_threads(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text('preset = "home"\n[[deaths]]\nreplica = 0\nat_s = 0.7\n')
    command = ["train", "--model", "micro", "--network", "simulated", "--conditions", "net.toml", "--replicas", "3"]
    command += ["--steps", "12", "--every", "3", "--eval-every", "12", "--eval-sequences", "4", "--deadline", "5"]
    for name, threads in (("one", 1), ("two", 8)):
        done = farflung(*command, "--out", name, folder=tmp_path, threads=threads)
        assert done.returncode == 0, done.stderr
    for number in range(3):
        path = Path("events", f"replica-{number}.jsonl")
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
    last = [
        json.loads((tmp_path / "one" / "events" / f"replica-{n}.jsonl").read_text().splitlines()[-1]) for n in (0, 1)
    ]
    assert [(event["event"], event["reason"]) for event in last] == [("end", "died"), ("end", "finished")]
    assert (tmp_path / "one" / "summary.json").exists()


@pytest.mark.slow
def test_plan_prints_units_reasons_and_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.toml").write_text(MACHINES.replace("= 24", "= 6"))
    arguments = ["plan", "--model", "llama-1.3b", "--machines", "m.toml", "--tokens", "1e9", "--search-s", "1"]
    assert run_here(monkeypatch, tmp_path, *arguments) == 0
    out = capsys.readouterr().out
    _, header, units, *_ = [line for line in out.splitlines() if line]
    assert header.split()[-1] == "cost" and units.split()[-1] == "EUR" and "tokens/s" in units
    assert "not possible:" in out and " GB of 6, and " in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["simulate"], "give either --params"),
        (["simulate", "--params", "1e6", "--conditions", "mars"], "there are no conditions 'mars'"),
        (["simulate", "--params", "1e6", "--replicas", "0"], "replicas is 0"),
        (["simulate", "--params", "1e6", "--methods", "local"], "has nothing to simulate"),
        (["simulate", "--params", "1e6", "--methods", "noloko"], "did you mean 'noloco'?"),
        (["plan", "--model", "micro", "--machines", "none.toml", "--tokens", "1e6"], "cannot read none.toml"),
        (["plan", "--model", "micro"], "--machines"),
    ],
)
def test_mistakes_end_with_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    assert run_here(monkeypatch, tmp_path, *arguments) == 2
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["OPT-1.3B", "107B"])
def test_dilocox_throughputs_have_the_published_ratios(name: str, tmp_path: Path) -> None:
    config, gpus, rows = throughput.MODELS[name]
    config.save_pretrained(tmp_path)
    model = architecture_of(str(tmp_path))
    first, *others = [(row.published, throughput.tokens_per_second(model, gpus, row)) for row in rows]
    for published, planned in others:
        assert planned / first[1] == pytest.approx(published / first[0], rel=0.1)
