"""Several machines that split a text: they meet by a ticket, read the same text, and believe no packet as it comes."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixed_texts import LENGTH, PREFIX, make, settings
from patience import patience, until
from processes import Python, run_here
from safetensors.torch import save
from test_expert_splits import files_of

from farflung.errors import UserError
from farflung.mixtures import packets
from farflung.mixtures.corpus import Corpus
from farflung.mixtures.routers import Routers, largest_packet
from farflung.mixtures.split import split
from farflung.mixtures.tickets import settings_of, ticket_to
from farflung.networks import SimulatedNetwork, Simulation
from farflung.networks.base import packet_of
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.training.peer import ticket_settings
from farflung.workloads.tokenizers import Bytes

PEER = "12D3KooWGzms1Kxcy5XTDyDmfWA9ZjKRHCidhKDXMdwwCKq6aBoH"
FLAGS = ("--sequence-length", LENGTH, "--prefix", PREFIX, "--router-sequences", 256)


@contextlib.contextmanager
def machines(folder: Path, count: int, *flags: object) -> Iterator[list[Python]]:
    """Processes that split together, each into a folder by its number."""
    data = ("--data", *settings(folder).data, "--listen", "127.0.0.1")
    ticket = folder / "mix.ticket"

    def start(number: int, *more: object) -> Python:
        return Python("-m", "farflung", "mixture", "split", *data, "--out", folder / str(number), *more)

    started = [start(0, "--invite", ticket, "--machines", count, *FLAGS, *flags)]
    try:
        until(lambda: ticket.exists() or started[0].poll() is not None)
        started += [start(number, "--join", ticket) for number in range(1, count)]
        yield started
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
def test_machines_that_meet_by_a_ticket_come_to_what_one_comes_to(tmp_path: Path) -> None:
    mixture = make(tmp_path, experts=3)
    with machines(tmp_path, 3, "--experts", 3, "--rounds", 3) as started:
        said = [process.communicate(timeout=patience(60)) for process in started]
    assert [process.returncode for process in started] == [0] * 3, said
    alone = files_of(mixture.folder)
    assert all(files_of(tmp_path / str(number)) == alone for number in range(3))
    assert "1 of 3 machines are there" in said[0][1] and all("all 3 machines are there" in err for _, err in said)
    sequences = 3 * 3 * 256 + sum(map(sum, mixture.dealt)) + sum(mixture.held_out)
    weights = (mixture.router(0) / "model.safetensors").stat().st_size
    for out, _ in said:
        (told,) = re.findall(r"scores and routers: ([\d,]+) bytes in all", out)
        beside = int(told.replace(",", "")) / 2 - 2 * sequences - weights  # to each of two
        assert abs(beside) < 1000, "names of weights, and what was read"


@pytest.mark.slow
def test_one_that_is_killed_ends_the_split_on_all_others_in_a_line(tmp_path: Path) -> None:
    with machines(tmp_path, 3, "--experts", 3, "--rounds", 1000) as started:
        until(lambda: "round 1: " in started[0].out.read_text() or started[0].poll() is not None)
        started[1].send_signal(signal.SIGKILL)
        for survivor in (started[0], started[2]):
            _, err = survivor.communicate(timeout=patience(60))
            *_, last = err.splitlines()
            assert survivor.returncode == 2 and "Traceback" not in err, err
            assert re.match(r"farflung: the split has lost a machine \(lost \S+ \(...\): ", last), err
            assert last.endswith("start it again on all of them")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def machine_of_two(folder: Path, other: dict[str, Any]) -> list[str]:
    """What machines say, of which the second splits otherwise."""

    def machine(network: SimulatedNetwork) -> str:
        changed = other if network.rank else {}
        with pytest.raises(UserError) as error:
            split(settings(folder, out=f"mix-{network.rank}", **changed), network, lambda _: None)
        return str(error.value)

    return Simulation(2).run(machine)


def test_machines_with_unlike_texts_say_who_has_read_what(tmp_path: Path) -> None:
    words, sums = settings(tmp_path).data
    counts = [Corpus(settings(tmp_path, data=data), Bytes()) for data in ((words, sums), (words,))]
    both, one = (f"{len(found):,}" for found in counts)
    assert both != one
    first, second = machine_of_two(tmp_path, {"data": (words,)})
    assert re.match(rf"replica 1 has read {one} sequences of \S+ tokens, and this machine {both} of", first)
    assert re.match(rf"replica 0 has read {both} sequences of \S+ tokens, and this machine {one} of", second)
    assert not (tmp_path / "mix-0").exists()


@pytest.mark.parametrize("differs", ["text", "order", "seed"])
def test_machines_with_as_much_of_another_text_or_other_settings_are_told(differs: str, tmp_path: Path) -> None:
    words, sums = settings(tmp_path).data
    text = Path(sums).read_text()
    other = tmp_path / "other.txt"
    other.write_text(text[:5000] + ("1" if text[5000] != "1" else "2") + text[5001:])
    changed = {"text": {"data": (words, str(other))}, "order": {"data": (sums, words)}, "seed": {"seed": 1}}
    for told in machine_of_two(tmp_path, changed[differs]):
        assert "has read as much as this machine, but other text, or has other settings; give all" in told


def lied_to(folder: Path, name: str, lie: torch.Tensor, ask: str) -> str:
    """What an honest machine says of another one that sends a lie under a name."""
    wanted = settings(folder)

    def machine(network: SimulatedNetwork) -> str:
        if network.rank:
            network.exchange(lie, (0, 1), f"routers-0-{name}").wait(60)
            return ""
        routers = Routers(wanted, Bytes(), network)
        asked = {"read": Corpus(wanted, Bytes())} if ask == "refuse_other_data" else {}
        arguments = [*asked.values(), *([torch.zeros(5, PREFIX, dtype=torch.int64), name] if ask == "scores" else [])]
        with pytest.raises(UserError) as error:
            getattr(routers, ask)(*arguments)
        return str(error.value)

    told = Simulation(2).run(machine)[0]
    assert "replica 1" in told and "\n" not in told and len(told) < 500
    return told


@pytest.mark.parametrize("size", [1, 9, 11, 10**6])
def test_scores_of_another_length_are_told_in_a_line(size: int, tmp_path: Path) -> None:
    assert f"its scores have {size:,} bytes, and not 10" in lied_to(tmp_path, "a", packet_of(bytes(size)), "scores")


def test_scores_that_no_model_gives_are_told_in_a_line(tmp_path: Path) -> None:
    told = lied_to(tmp_path, "a", packet_of(np.array([-1, -2, 0, -3, 0.1], np.float16).tobytes()), "scores")
    assert "its scores say that texts are more than certain" in told


@pytest.mark.parametrize("score", [b"\x00\x7e", b"\x00\x7c", b"\x00\xfc"], ids=["nan", "inf", "-inf"])
def test_scores_that_are_not_finite_are_told_in_a_line(score: bytes, tmp_path: Path) -> None:
    told = lied_to(tmp_path, "a", packet_of(bytes(8) + score), "scores")
    assert told.startswith("router 1, of replica 1, has diverged with --lr 0.001")


@pytest.mark.parametrize(
    "told",
    [b"x", b"\xff", b"[]", b"{}", b"[" * 50_000, b'{"sequences": [], "tokens": 1, "digest": "x"}', b'{"more": 1}'],
    ids=range(7),
)
def test_what_does_not_say_what_was_read_is_told_in_a_line(told: bytes, tmp_path: Path) -> None:
    assert "what it has read cannot be read" in lied_to(tmp_path, "read", packet_of(told), "refuse_other_data")


def weights(folder: Path, number: int = 1) -> dict[str, torch.Tensor]:
    """Those of a router, as its machine tells them."""
    router = Routers(settings(folder), Bytes(), SimulatedNetwork.alone()).own[number]
    return {f"{number}/{name}": tensor.clone() for name, tensor in router.state_dict().items()}


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ("garbage", "what it sends as weights cannot be read"),
        ("a long header", "what it sends as weights cannot be read"),
        ("nothing", "of other routers, or of other shapes"),
        ("shapes", "of other routers, or of other shapes"),
        ("type", "of other routers, or of other shapes"),
        ("another's router", "of other routers, or of other shapes"),
        ("one more", "of other routers, or of other shapes"),
        ("infinite", "no finite numbers"),
    ],
)
def test_weights_that_are_none_are_told_in_a_line(lie: str, says: str, tmp_path: Path) -> None:
    own = weights(tmp_path)
    name, tensor = next(iter(own.items()))
    lies: dict[str, bytes] = {
        "garbage": b"garbage" * 100,
        "a long header": (1 << 62).to_bytes(8, "little") + b"{}",
        "nothing": save({}),
        "shapes": save({**own, name: tensor[:1].clone()}),
        "type": save({**own, name: tensor.half()}),
        "another's router": save(weights(tmp_path, 0)),
        "one more": save({**own, "0/more": tensor.clone()}),
        "infinite": save({**own, name: tensor / 0}),
    }
    assert says in lied_to(tmp_path, "weights", packet_of(lies[lie]), "all")


def test_no_packet_is_larger_than_what_is_taken(tmp_path: Path) -> None:
    wanted = settings(tmp_path, experts=5)
    routers = Routers(wanted, Bytes(), SimulatedNetwork.alone()).own
    for machines in (1, 2, 5):
        most = -(-5 // machines)
        largest = packets.weights_packet({number: routers[number] for number in range(most)}).numel()
        assert largest <= largest_packet(wanted, machines) < 1.1 * largest


def test_a_ticket_tells_all_settings_but_what_is_each_machines_own(tmp_path: Path) -> None:
    wanted = settings(tmp_path, experts=5, lr=3e-5, max_tokens=50_000)
    ticket_to(wanted, 3).at((f"/ip4/127.0.0.1/tcp/5/p2p/{PEER}",)).write(tmp_path / "t")
    own = settings(tmp_path, out="elsewhere", data=("other.txt",), deadline=5.0)
    read = read_ticket(tmp_path / "t")
    found = settings_of(read, own, {"data", "out", "join", "deadline"})
    assert found.shared == wanted.shared and (found.out, found.data) == (own.out, ("other.txt",))
    assert found.deadline == 5.0
    assert read.settings_hash == ticket_to(wanted, 3).settings_hash


def test_a_ticket_to_a_split_is_no_ticket_to_a_run(tmp_path: Path) -> None:
    ticket_to(settings(tmp_path, experts=3), 3).write(tmp_path / "t")
    with pytest.raises(UserError) as error:
        ticket_settings(read_ticket(tmp_path / "t"))
    assert str(error.value) == (
        "the ticket leads to a mixture split of 3 machines, which is no run; take part with: "
        "farflung mixture split --join TICKET"
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--join t --experts 2", "--experts is 2 here, and 5 on the machines of the ticket; leave it out"),
        ("--join t --router-sequences 9", "--router-sequences is 9 here, and 256 on the machines of the ticket"),
        ("--join t --tokenizer gpt2", "--tokenizer is 'gpt2' here, and 'bytes' on the machines of the ticket"),
        ("--join t --machines 3", "are for the first machine; the others give --join TICKET alone"),
        ("--join run", "the ticket leads to a run, which is no split"),
        ("--join edited", "there is no setting 'expert'; did you mean 'experts'?"),
        ("--join none", "cannot read the ticket none"),
        ("--invite t", "the first machine gives both: --invite TICKET"),
        ("--machines 3", "the first machine gives both: --invite TICKET"),
        ("--invite t --machines 1", "--machines is 1; it must be at least 2"),
        ("--invite t --machines 3 --experts 2", "--machines is 3, for 2 routers; start at most one for each"),
        ("--join t --out .", "give another folder with --out"),
        ("--invite words.txt --machines 2", "words.txt exists, and is no ticket; give another place for the ticket"),
        ("--invite . --machines 2", ". exists, and is no file; give another place for the ticket"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(
    flags: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = (f"/ip4/127.0.0.1/tcp/5/p2p/{PEER}",)
    ticket_to(settings(tmp_path, experts=5), 3).at(at).write(tmp_path / "t")
    Ticket.new("a run", {"every": 5}).at(at).write(tmp_path / "run")
    (tmp_path / "words.txt").write_text("words")
    Ticket.new("edited", {"expert": 5, "machines": 3}).at(at).write(tmp_path / "edited")
    arguments = ["--data", "words.txt", "--out", "mix", *flags.split()]
    assert run_here(monkeypatch, tmp_path, "mixture", "split", *arguments) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (tmp_path / "mix").exists()
