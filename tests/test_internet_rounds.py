"""Methods over the internet network: the same loops, with peers that come late, leave, lie and differ in speed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from problem import Result, flat, inner_steps, small_model
from test_internet import Run

from farflung import methods
from farflung.codecs import Dense, ErrorFeedback, PacketError, Quantize
from farflung.errors import UserError
from farflung.methods import Method
from farflung.networks import PeerLostError, SimulatedNetwork, Simulation
from farflung.networks.internet import InternetNetwork
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.outer import GossipNesterov, ParameterAveraging, Round, Session
from farflung.outer.aggregation import LARGEST_RATIO, Aggregation, Blame, clipped, median
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.columns import Message
from farflung.outer.fragments import Weights, split
from farflung.outer.loop import OuterLoop
from farflung.outer.merges import Keep
from farflung.outer.optimizers import after_a_step, message_of, step_with
from farflung.outer.shared import check_shared, shared_tensors, take_shared

STEP_SECONDS = 0.03

GoesOn = Callable[[Session, list[Round]], bool]


@dataclass
class Trained(Result):
    """With how many steps a peer has computed itself, and its anchors and their history after each round."""

    trained: int = 0
    anchors: dict[int, torch.Tensor] = field(default_factory=dict)
    histories: dict[int, str] = field(default_factory=dict)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def train(network: InternetNetwork, method: Method, goes_on: GoesOn, pace: float = 1.0, join: bool = False) -> Trained:
    """The small problem at a pace, while it goes on; one that joins late takes the others' state first."""
    ends = time.monotonic() + patience(60)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rounds: list[Round] = []
    anchors: dict[int, torch.Tensor] = {}
    histories: dict[int, str] = {}

    def landed(round: Round) -> None:
        rounds.append(round)
        anchors[round.round] = outer.anchors[0].clone()  # type: ignore[attr-defined]
        histories[round.round] = outer.state().facts["history"]  # type: ignore[attr-defined]

    with method.attach(model, optimizer, network, deadline_s=patience(10), on_round=landed) as outer:
        if join:
            assert outer.catch_up(patience(20))
        trained = 0
        while goes_on(outer, rounds):
            assert time.monotonic() < ends, rounds
            time.sleep(STEP_SECONDS * pace)
            inner_steps(model, optimizer, network.rank % 1000, range(trained, trained + 1))
            trained += 1
    return Trained(flat(model), rounds, outer, trained, anchors, histories)


def together(run: Run, method: Method, steps: int, **paces: float) -> list[Trained]:
    def goes_on(outer: Session, _: list[Round]) -> bool:
        return outer.step < steps

    with ThreadPoolExecutor(len(run.peers)) as pool:
        work = [pool.submit(train, p, method, goes_on, paces.get(f"peer{n}", 1.0)) for n, p in enumerate(run.peers)]
        return [w.result() for w in work]


def groups_of(results: list[Trained]) -> list[tuple[int, ...]]:
    """The groups of the rounds in which anybody was met."""
    return [round.group for result in results for round in result.rounds if round.outcome == "averaged"]


@pytest.mark.slow
def test_noloco_averages_in_pairs(run: Run) -> None:
    for _ in range(4):
        run.join()
    run.all_know_each_other()
    groups = groups_of(together(run, methods.noloco(every=30), steps=150))
    assert {len(group) for group in groups} == {2}
    assert len(set(groups)) > 2, "partners change"


@pytest.mark.slow
def test_diloco_averages_all_who_come(run: Run) -> None:
    for _ in range(3):
        run.join()
    run.all_know_each_other()
    everyone = tuple(sorted(peer.rank for peer in run.peers))

    def met(peer: InternetNetwork) -> tuple[int, ...]:
        return peer.meet(everyone, "all of it", 1, 1.0, "", lambda party: party.group).wait(patience(20))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(met, run.peers)) == [everyone] * 3
    groups = groups_of(together(run, methods.diloco(every=30), steps=120))
    assert groups.count(everyone) >= 3 and all(set(group) <= set(everyone) for group in groups)


def test_anchors_that_differ_are_drawn_together_where_weights_travel() -> None:
    anchors = [torch.full((3,), 1.0), torch.full((3,), 5.0)]
    outers = [ParameterAveraging(torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)) for anchor in anchors]
    for _ in range(60):
        mean = (anchors[0] + anchors[1]) / 2
        for outer, anchor in zip(outers, anchors, strict=True):
            outer.step_with(anchor, mean.clone())
    torch.testing.assert_close(anchors[0], anchors[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(anchors[0], torch.full((3,), 3.0), atol=1e-3, rtol=0)


def test_anchored_is_the_plain_optimizer_where_anchors_are_equal() -> None:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(50, generator=generator)
    other = one.clone()
    plain = torch.optim.SGD([one], lr=0.7, momentum=0.9, nesterov=True)
    anchored = ParameterAveraging(torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True))
    for _ in range(10):
        weights = [one - torch.randn(50, generator=generator) for _ in range(4)]
        one.grad = torch.stack([one - w for w in weights]).mean(0)
        plain.step()
        anchored.step_with(other, torch.stack(weights).mean(0))
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def until_one_alone_is_met(run: Run, method: Method, join: bool) -> tuple[Trained, list[torch.Tensor], torch.Tensor]:
    """Trains one peer alone, and then a second one until both have met.

    The first one's result and weights before each step from the 61st on, and the weights that the second one had when
    it had heard of it: before its first step if it was to `join`, else before its second.
    """
    learnt: list[torch.Tensor] = []
    begun_with: list[torch.Tensor] = []

    def until_met(seen: list[torch.Tensor], outer: Session, rounds: list[Round]) -> bool:
        seen.append(flat(outer.trained.model))
        return not any(round.outcome == "averaged" for round in rounds)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train, run.join(), method, partial(until_met, learnt))
        until(lambda: len(learnt) > 70)
        second = train(run.join(trains=False), method, partial(until_met, begun_with), join=join)
    before = first.result()
    assert groups_of([before])[-1] == groups_of([second])[-1]
    return before, learnt[60:], begun_with[0 if join else 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", [methods.diloco(every=20), methods.noloco(every=20, fragments=2, delay=5)])
def test_one_that_comes_to_a_peer_alone_begins_with_what_this_has_learnt(run: Run, method: Method) -> None:
    """And not with the anchors of the last round, of which a peer alone has none."""
    before, learnt, begun_with = until_one_alone_is_met(run, method, join=True)
    assert any(torch.equal(begun_with, weights) for weights in learnt)
    assert not any(round.outcome == "behind" for round in before.rounds)


@pytest.mark.slow
def test_one_host_alone_cannot_have_a_replica_fetch_the_others_state(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is the host in turn, and says that the replica's anchors are not the others'."""
    method = methods.diloco(every=5, codec=ErrorFeedback(Quantize(bits=8)))
    one, liar = run.join(), run.join()
    run.all_know_each_other()
    welcome = liar._matchmaker._welcome

    fetched: list[bool] = []
    averaged, steered = threading.Event(), threading.Event()

    async def steer(rank: int, request: dict[str, Any]) -> dict[str, Any]:
        lies = rank != liar.rank and averaged.is_set()
        return {"weights": [], "behind": True} if lies else await welcome(rank, request)

    async def fetch(identical: bool) -> None:
        if averaged.is_set():  # else it has just begun, and may be behind
            fetched.append(identical)

    def until_steered_in_turn(_: Session, rounds: list[Round]) -> bool:
        outcomes = [round.outcome for round in rounds if round.outcome in ("averaged", "behind")]
        if "averaged" in outcomes:
            averaged.set()
        if outcomes[-3:] == ["behind"] * 3:
            steered.set()
        return not steered.is_set()

    monkeypatch.setattr(liar._matchmaker, "_welcome", steer)
    monkeypatch.setattr(one._states, "fetch", fetch)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(train, liar, method, lambda *_: not steered.is_set())
        train(one, method, until_steered_in_turn)
        other.result()
    assert not fetched


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_a_replica_of_which_one_fragment_is_behind_gets_it_from_the_others(
    run: Run, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it averages its other fragments with them, and though rounds of these land while a state comes."""
    method = methods.diloco(every=30, fragments=3, codec=ErrorFeedback(Quantize(bits=8)))
    peers, done = [run.join() for _ in range(3)], threading.Event()
    run.all_know_each_other()
    fetch = peers[0]._states.fetch
    spoilt_after: list[int] = []

    async def fetch_late(identical: bool) -> Any:
        state = await fetch(identical)
        await asyncio.sleep(late_s)
        return state

    def until_it_is_back(outer: Session, rounds: list[Round]) -> bool:
        if not spoilt_after and [round.outcome for round in rounds].count("averaged") >= 4:
            assert isinstance(outer, OuterLoop)
            outer.anchors[1].detach().add_(1.0)
            spoilt_after.append(len(rounds))
        since = [round.outcome for round in rounds[spoilt_after[0] :] if round.fragment == 1] if spoilt_after else []
        if len(since) > 12 or ("behind" in since and since[-2:] == ["averaged"] * 2):
            done.set()
        return not done.is_set()

    monkeypatch.setattr(peers[0]._states, "fetch", fetch_late)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(train, peer, method, lambda *_: not done.is_set()) for peer in peers[1:]]
        rounds = train(peers[0], method, until_it_is_back).rounds[spoilt_after[0] :]
        for other in others:
            other.result()
    outcomes = [[round.outcome for round in rounds if round.fragment == fragment] for fragment in range(3)]
    assert outcomes[1][-1] == "averaged", outcomes
    assert "behind" not in outcomes[0] + outcomes[2], outcomes


@pytest.mark.slow
def test_where_anchors_differ_anyway_no_host_makes_a_replica_fetch_a_state(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, *liars = (run.join() for _ in range(3))
    run.all_know_each_other()
    fetched, said = list[bool](), list[int]()

    async def fetch(identical: bool) -> None:
        fetched.append(identical)
        raise UserError("there is nothing to fetch")

    def lie(host: int) -> Callable[..., Any]:
        async def welcome(rank: int, request: dict[str, Any]) -> dict[str, Any]:
            said.append(host)
            return {"weights": [], "behind": True}

        return welcome

    for liar in liars:
        monkeypatch.setattr(liar._matchmaker, "_welcome", lie(liar.rank))
    monkeypatch.setattr(one._states, "fetch", fetch)
    monkeypatch.setattr(one._patience, "seconds", lambda key: 0.1)
    result = train(one, methods.noloco(every=5), lambda *_: len({*said}) < 2)
    assert not fetched and all(round.outcome != "behind" for round in result.rounds)


@pytest.mark.slow
def test_one_that_comes_late_to_equal_anchors_gets_them_bit_for_bit(run: Run) -> None:
    method = methods.diloco(every=20, codec=ErrorFeedback(Quantize(bits=8)))
    first, done, steps = run.join(), threading.Event(), []

    def until_done(outer: Session, _: list[Round]) -> bool:
        steps.append(outer.step)
        return not done.is_set()

    def until_two_are_averaged(_: Session, rounds: list[Round]) -> bool:
        return [round.outcome for round in rounds].count("averaged") < 2

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, first, method, until_done)
        try:
            until(lambda: steps and steps[-1] > 5)
            result = train(run.join(), method, until_two_are_averaged, join=True)
        finally:
            done.set()
        other = training.result()
    assert result.rounds[0].step > 5
    # On a busy machine one may lose the other in a round.
    met = [{round.round for round in one.rounds if round.outcome == "averaged"} for one in (result, other)]
    assert met[0] & met[1]
    for number in met[0] & met[1]:
        assert torch.equal(result.anchors[number], other.anchors[number])
        assert result.histories[number] == other.histories[number]
    assert len({other.histories[number] for number in met[1]}) == len(met[1])


@pytest.mark.slow
def test_one_that_finds_the_run_far_ahead_takes_its_state_before_their_first_round(run: Run) -> None:
    """As one does that has begun alone, with --first, while nobody could be reached."""
    _, learnt, begun_with = until_one_alone_is_met(run, methods.noloco(every=20), join=False)
    assert any(torch.equal(begun_with, weights) for weights in learnt)


@pytest.mark.slow
def test_one_that_has_trained_alone_for_long_takes_no_state_of_one_that_says_it_is_further(run: Run) -> None:
    one, asked = run.join(), list[int]()

    async def state(stream: PeerStream, _: Any) -> None:
        asked.append(stream.member.rank)
        raise RequestRefusedError("no")

    def until_it_follows(outer: Session, _: list[Round]) -> bool:
        if outer.step == 60:
            liar = run.join(step=5000, rate=1.0)
            liar.peers.handlers["state"] = state
        return outer.step < 4000

    train(one, methods.noloco(every=5), until_it_follows)
    assert not asked


@pytest.mark.slow
def test_a_slow_peer_trains_fewer_steps_of_its_own(run: Run) -> None:
    run.join()
    run.join()
    run.join()
    run.all_know_each_other()
    results = together(run, methods.noloco(every=20), 100, peer2=6.0)
    assert all(result.outer.step >= 100 for result in results)
    trained = [result.trained for result in results]
    assert trained[2] < 70 <= max(trained), trained


@pytest.mark.slow
def test_a_delayed_round_lands_late_and_waits_for_nothing(run: Run) -> None:
    run.join()
    run.join()
    run.all_know_each_other()
    results = together(run, methods.noloco(every=20, delay=15), 100)
    for result in results:
        met = [round for round in result.rounds if round.outcome == "averaged" and round.step < 100]
        assert met and all(round.step >= round.started_step + 15 for round in met)
        assert any(round.finished < round.waited_from for round in met)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (methods.ddp(), "needs all replicas at every step"),
        (methods.dilocox(every=10), "use nolocox, .*; and the steps between rounds adapt, .* add --adapt False"),
        (methods.dilocox(every=10, adapt=False), "nobody could join"),
    ],
)
def test_methods_that_need_replicas_to_stay_are_refused(run: Run, method: Method, says: str) -> None:
    network = run.join()
    model = small_model()
    with pytest.raises(UserError, match=says):
        method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), network)


def test_a_second_attachment_is_refused(run: Run) -> None:
    """Its rounds would share the first one's pace and state."""
    network = run.join()
    first, second = small_model(), small_model()
    methods.noloco().attach(first, torch.optim.SGD(first.parameters(), lr=0.1), network)
    with pytest.raises(UserError, match=r"serves one session, .* give attach all optimizers in a list"):
        methods.noloco().attach(second, torch.optim.SGD(second.parameters(), lr=0.1), network)


def test_frozen_weights_are_taken_as_long_as_they_stay(run: Run) -> None:
    network = run.join()
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[2:].requires_grad_(False)
    with pytest.raises(UserError, match="buffers is 'round', but peers on the internet average none"):
        methods.noloco().attach(model, optimizer, network, buffers="round")
    network = run.join()
    with methods.noloco(every=50).attach(model, optimizer, network) as outer:
        inner_steps(model, optimizer, 0, range(3))
        assert outer.step == 3
        with torch.no_grad():
            model[2].bias.add_(1e-3)
        with pytest.raises(UserError, match=r"2\.bias is frozen, and yet it moves, which peers .* keep it outside"):
            inner_steps(model, optimizer, 0, range(3, 9))


def sgd(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=1.0, momentum=0.9)


def weights_of(make: Any) -> tuple[list[Weights], torch.optim.Optimizer]:
    """Two layers of 4 and 3 values in fragments of their own, all noughts."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in (4, 3)])
    fragments = split(model, 2)
    anchors = [fragment.read() for fragment in fragments]
    outer = make(anchors)
    pairs = zip(fragments, anchors, strict=True)
    return [Weights(fragment, anchor, outer, Keep(), contextlib.nullcontext) for fragment, anchor in pairs], outer


def test_a_state_is_taken_whole() -> None:
    weights, _ = weights_of(sgd)
    anchors = {"anchor of 0": torch.ones(4), "anchor of 1": torch.ones(3)}
    told = anchors | {"momentum_buffer of 0": torch.full((4,), 2.0)}
    check_shared(told, {"0": 4, "1": 3}, after_a_step(sgd)[1])
    take_shared(weights, told)
    assert dict(shared_tensors(weights))["momentum_buffer of 0"].tolist() == [2.0] * 4
    assert [one.anchor.tolist() for one in weights] == [[1.0] * 4, [1.0] * 3]


@pytest.mark.parametrize("make", [sgd, partial(GossipNesterov, momentum=0.5)], ids=["sgd", "gossip"])
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("anchor of 0", "anchor of 1", "anchor of 2", "momentum_buffer of 1", "velocity of 0"),
                *("step of 0", "evil of 1", "0", "anchor of ", " of 1"),
            ]
        ),
        st.builds(torch.full, st.tuples(st.integers(0, 5)), st.sampled_from([0.5, float("nan"), float("inf")])),
    )
)
def test_any_state_is_taken_so_that_training_goes_on_or_changes_nothing(make: Any, told: dict[str, Any]) -> None:
    weights, outer = weights_of(make)
    anchors = [one.anchor for one in weights]
    try:
        check_shared(told, {"0": 4, "1": 3}, after_a_step(make)[1])
        take_shared(weights, told)
    except UserError:
        assert not outer.state and not any(anchor.any() for anchor in anchors)
    else:
        assert {"anchor of 0", "anchor of 1"} <= told.keys() <= set(dict(shared_tensors(weights)))
        for anchor in anchors:
            step_with(outer, anchor, message_of(outer, anchor, anchor.clone()))
            assert torch.isfinite(anchor).all()


# How messages become one


def rule(blame: Blame = lambda rank, why: None) -> Aggregation:
    return Aggregation("mean", blame)


def test_a_round_that_counts_no_more_ends_while_messages_of_the_next_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so in a thread of its own, which ended the training of the other."""
    aggregation, ones = rule(), [torch.ones(2)]
    for cell in ("one", "other"):
        aggregation.expect([cell], ones, 1.0)
    threads: list[threading.Thread] = []

    def median(numbers: list[float]) -> float:
        threads.append(threading.Thread(target=aggregation.expect, args=([f"late {len(threads)}"], ones, 1.0)))
        threads[-1].start()
        threads[-1].join(0.05)
        return sum(numbers) / len(numbers)

    monkeypatch.setattr("farflung.outer.aggregation.statistics.median", median)
    aggregation.check(["one"], ones)
    for thread in threads:
        thread.join(patience(5))
    assert threads and not any(thread.is_alive() for thread in threads)


def aggregated(
    aggregation: Aggregation,
    own: list[float],
    weights: dict[int, float],
    *packets: torch.Tensor,
    cell: str = "cell",
    growth: float = 1.0,
) -> tuple[list[float], list[int]]:
    """What replica 0 makes of its own message and of others' packets; and whose were of no use."""

    def work(network: SimulatedNetwork) -> tuple[list[float], list[int]]:
        if network.rank:
            network.exchange(packets[network.rank - 1], network.members(), "x, strip 0").wait(60)
            return [], []
        averaging = Averaging(network.rank, methods.noloco(), aggregation=aggregation)
        message, unusable = torch.tensor(own), []
        try:
            meeting = Meeting(network, network.members(), "x", weights=weights, growth=growth)
            averaging.start(Message(message, [cell], lambda flat: {cell: [flat]}), meeting)[0].wait(60)
        except PeerLostError as lost:
            unusable = list(lost.ranks)
        return message.tolist(), unusable

    return Simulation(1 + len(packets)).run(work)[0]


def dense(*values: float) -> torch.Tensor:
    return Dense().encode([torch.tensor(values)])


def test_messages_count_by_their_weights() -> None:
    assert aggregated(rule(), [0.0, 4.0], {0: 1.0, 1: 3.0}, dense(4.0, 0.0)) == ([3.0, 1.0], [])
    assert aggregated(rule(), [1.0], {0: 0.0, 1: 0.0}, dense(9.0))[0] == [1.0], "nobody has trained: nothing changes"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_cannot_be_true_is_refused_and_its_sender_blamed(value: float) -> None:
    from farflung.testing.liars import poisoned

    blamed: list[tuple[int, str]] = []
    blaming = rule(lambda rank, why: blamed.append((rank, why)))
    assert aggregated(blaming, [1.0] * 4, {}, poisoned(4, value), dense(*[3.0] * 4)) == ([2.0] * 4, [1])
    assert [rank for rank, _ in blamed] == [1]
    assert ("times as large as usual" if value == 1e30 else "finite") in blamed[0][1]


def test_a_message_may_be_as_large_as_others_have_been() -> None:
    aggregation = rule()
    assert not aggregated(aggregation, [1.0], {}, dense(LARGEST_RATIO * 0.9))[1]
    assert aggregated(aggregation, [1.0], {}, dense(LARGEST_RATIO * 100))[1] == [1]


def test_who_has_trained_for_less_takes_what_is_larger() -> None:
    assert not aggregated(rule(), [1.0], {}, dense(LARGEST_RATIO * 90), growth=100)[1]
    assert aggregated(rule(), [1.0], {}, dense(LARGEST_RATIO * 110), growth=100)[1] == [1]


def test_small_messages_do_not_make_a_usual_one_too_large() -> None:
    aggregation = rule()
    assert not any(aggregated(aggregation, [1.0], {}, dense(1e-6))[1] for _ in range(40))
    assert not aggregated(aggregation, [1.0], {}, dense(1.0))[1]


def test_parts_of_the_same_shapes_may_differ_in_size() -> None:
    """An island whose shards are dealt out otherwise exchanges many: some rows of a matrix are rarely learnt."""
    aggregation = rule()
    for size, cell in ((1e-3, "rare rows"), (1.0, "rows"), (1e-3, "rare rows"), (1.0, "rows")):
        packets = [dense(0.9 * size)] * 3
        assert not aggregated(aggregation, [size], {}, *packets, cell=cell)[1]


def test_a_part_that_only_others_have_learnt_may_be_as_large_as_other_parts() -> None:
    aggregation = rule()
    assert not aggregated(aggregation, [1.0], {}, dense(1.0), cell="rows")[1]
    assert not aggregated(aggregation, [1e-6], {}, dense(1.0), cell="rare rows")[1]
    assert aggregated(aggregation, [1e-6], {}, dense(LARGEST_RATIO * 2), cell="rare rows")[1] == [1]


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("members", [3, 4])
def test_a_part_is_as_large_as_it_may_be_whatever_other_parts_are(fragments: int, members: int) -> None:
    """Embeddings are many times as large as what comes after them; nobody is blamed."""
    blamed: list[tuple[int, str]] = []

    def work(network: SimulatedNetwork) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(64, 64), *(torch.nn.Linear(64, 64) for _ in range(3)))
        torch.nn.init.normal_(model[0].weight, std=50.0)
        whole = split(model, fragments)
        method = methods.diloco(fragments=fragments)
        averagings = [
            Averaging(network.rank, method, aggregation=rule(lambda rank, why: blamed.append((rank, why))))
            for _ in whole
        ]
        for number, (part, averaging) in itertools.product(range(4), zip(whole, averagings, strict=True)):
            key = f"round {number} of {part.cells[0].name}"
            averaging.start(part.message(part.read()), Meeting(network, network.members(), key, number))[0].wait(60)

    Simulation(members).run(work)
    assert not blamed


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2), min_size=3, max_size=7))
def test_the_median_is_that_of_each_coordinate(rows: list[list[float]]) -> None:
    (found,) = median([[torch.tensor(row)] for row in rows], [1.0] * len(rows))
    wanted = [statistics.median(column) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-4)


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=8), st.floats(1e3, 1e6, width=32), st.integers(0, 3))
def test_a_minority_moves_robust_means_only_as_far_as_the_others_reach(
    honest: list[float], lie: float, sign: int
) -> None:
    lie = lie if sign % 2 else -lie
    rows = [[torch.tensor([value])] for value in [*honest, lie]]
    (middle,) = median(rows, [1.0] * len(rows))
    assert min(honest) <= float(middle) <= max(honest)
    (shrunk,) = clipped(rows, [1.0] * len(rows))
    assert abs(float(shrunk)) <= max(map(abs, honest)) + 1e-5


def test_a_broken_packet_is_no_message() -> None:
    with pytest.raises(PacketError):
        Dense().decode(torch.zeros(10, dtype=torch.uint8), [torch.ones(2)])
    assert aggregated(rule(), [1.0, 1.0], {}, torch.zeros(10, dtype=torch.uint8)) == ([1.0, 1.0], [1])
