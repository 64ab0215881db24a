"""Splitting a text: routers find its sources, machines agree on it, and every sequence has one expert."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixed_texts import LENGTH, PREFIX, make, settings
from processes import farflung, run_together
from transformers import LlamaConfig, LlamaForCausalLM

from farflung.errors import UserError
from farflung.files import beside
from farflung.mixtures import folder as folders
from farflung.mixtures.corpus import Corpus
from farflung.mixtures.folder import Mixture
from farflung.mixtures.modeling import log_likelihoods, prefixes
from farflung.mixtures.routers import RouterRound, Routers, learn
from farflung.mixtures.split import split
from farflung.networks import SimulatedNetwork, Simulation
from farflung.workloads import data, store
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.tokenizers import Bytes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make(tmp_path_factory.mktemp("mixture"))


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20)).eval()


def filled(rows: list[list[int]], left: bool, length: int = 6) -> torch.Tensor:
    zeros = [[0] * (length - len(row)) for row in rows]
    return torch.tensor([zero + row if left else row + zero for row, zero in zip(rows, zeros, strict=True)])


def test_a_likelihood_is_the_product_of_each_next_tokens_chance() -> None:
    model = small_model()
    texts = [[3, 5, 7, 9], [4], [11, 2]]
    one_by_one = []
    for text in texts:
        chance = 1.0
        for place, token in enumerate(text):
            with torch.no_grad():
                scores = model(torch.tensor([[1, *text[:place]]])).logits[0, -1].double()
            chance *= float(scores.softmax(0)[token])
        one_by_one.append(math.log(chance))
    for left in (False, True):
        padded = [[0] * (6 - len(text)) + text if left else text + [0] * (6 - len(text)) for text in texts]
        mask = [
            [int(left == (place >= (6 - len(text) if left else len(text)))) for place in range(6)] for text in texts
        ]
        tokens, known = prefixes(torch.tensor(padded), torch.tensor(mask), most=5)
        with torch.no_grad():
            found = log_likelihoods(model, tokens, known, start=1)
        assert found.tolist() == pytest.approx(one_by_one, rel=1e-5)


def test_routers_find_the_sources_and_say_so_round_by_round(tmp_path: Path) -> None:
    told: list[RouterRound] = []
    made = split(settings(tmp_path), SimulatedNetwork.alone(), told.append)
    assert [one.number for one in told] == [1, 2, 3]
    pure = [one.purity or 0.0 for one in told]
    assert pure[-1] > max(0.9, pure[0]) and told[-1].loss < told[0].loss
    assert made.rounds[-1]["purity"] == pure[-1]
    assert json.loads((made.folder / "mixture.json").read_text())["format"] == 1
    assert Mixture.read(made.folder).dealt == made.dealt


def rows_of(tokens: np.ndarray) -> list[bytes]:
    return sorted(row.tobytes() for row in tokens.reshape(-1, LENGTH))


def test_each_sequence_has_one_expert_whose_run_trains_on_it(mixture: Mixture) -> None:
    corpora = [data.load(LanguageSettings(data=source, sequence_length=LENGTH), Bytes()) for source in mixture.data]
    experts = [
        data.load(LanguageSettings(data=str(mixture.store(one)), sequence_length=LENGTH), Bytes()) for one in (0, 1)
    ]
    whole = torch.cat([one.batch(np.arange(one.available)) for one in corpora])
    dealt = torch.cat([one.batch(np.arange(one.available)) for one in experts])
    assert rows_of(dealt.numpy()) == rows_of(whole.numpy())
    assert rows_of(torch.cat([one.held_out(10**6) for one in experts]).numpy()) == rows_of(
        torch.cat([one.held_out(10**6) for one in corpora]).numpy()
    )
    assert [one.available for one in experts] == [sum(row) for row in mixture.dealt]
    assert abs(experts[0].available - experts[1].available) <= 1
    who = torch.from_numpy(np.load(mixture.who_got_what))
    assert all(
        torch.equal(whole[who == number], one.batch(np.arange(one.available))) for number, one in enumerate(experts)
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """All but the page, which only the command writes."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert {"mixture.json", "expert-1/store.json", "router-1/model.safetensors", "router-0/config.json"} <= found.keys()
    return found


def test_machines_that_train_a_router_each_come_to_the_same_folder(mixture: Mixture, tmp_path: Path) -> None:
    def machine(network: SimulatedNetwork) -> None:
        make(mixture.folder.parent, network, out=str(tmp_path / f"machine-{network.rank}"))

    Simulation(2).run(machine)
    alone = files_of(mixture.folder)
    assert files_of(tmp_path / "machine-0") == files_of(tmp_path / "machine-1") == alone


def test_machines_send_two_bytes_for_each_sequence_and_router_of_theirs(tmp_path: Path) -> None:
    wanted = settings(tmp_path, experts=5)

    def sent(network: SimulatedNetwork) -> int:
        learn(Routers(wanted, Bytes(), network), Corpus(wanted, Bytes()), wanted, lambda _: None)
        return network.traffic.bytes_sent

    # Of five routers, the first two of three machines have two; each tells the two others.
    per_router = 2 * wanted.rounds * wanted.round_sequences * 2
    assert Simulation(3).run(sent) == [2 * per_router, 2 * per_router, per_router]


def test_each_router_gets_equally_many_sequences(tmp_path: Path) -> None:
    told: list[RouterRound] = []
    wanted = settings(tmp_path, experts=5, router_sequences=1)
    learn(Routers(wanted, Bytes(), SimulatedNetwork.alone()), Corpus(wanted, Bytes()), wanted, told.append)
    assert all(math.isfinite(one.loss) for one in told) and len(told) == wanted.rounds


@pytest.mark.slow
def test_processes_come_to_what_one_comes_to(mixture: Mixture, tmp_path: Path) -> None:
    there = mixture.folder.parent
    flags = [*("--data", *mixture.data, "--out", tmp_path / "mix", "--experts", 2, "--sequence-length", LENGTH)]
    flags += ["--prefix", PREFIX, "--rounds", 3, "--router-sequences", 256]
    run_together(2, "-m", "farflung", "mixture", "split", *flags)
    assert files_of(tmp_path / "mix") == files_of(there / "mix")
    assert [path.name for path in tmp_path.iterdir()] == ["mix"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"experts": 3000}, "so one would have no data; give more text, or fewer --experts"),
        ({"experts": 1}, "experts is 1; it must be at least 2"),
        ({"prefix": LENGTH + 1}, "a prefix is a part of a sequence"),
        ({"data": ()}, "no data is given"),
        ({"data": ("a.txt", "a.txt")}, "given twice"),
        ({"data": ("0.5*a.txt + 0.5*b.txt",)}, "no weights here"),
        ({"data": ("nosuch.txt",)}, "no such file"),
        ({"router_sequences": 0}, "router_sequences is 0; it must be at least 1"),
        ({"lr": 1e30}, "diverged with --lr 1e"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_in_a_line(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told) as error:
        make(tmp_path, **changed)
    assert "\n" not in str(error.value) and not (tmp_path / "mix").exists()


def test_an_expert_without_data_to_be_judged_by_is_refused(tmp_path: Path) -> None:
    """One document is held out of a text of few: of two sources, then, the end of the first is of one expert only."""
    words = write_lines(tmp_path / "words.txt", lambda number: "a mouse and a mole ")
    mixed = tmp_path / "mixed.txt"
    # Its end, which is held out, is as the other text; what comes before is not.
    mixed.write_text("0123456789;" * 3000 + Path(words).read_text()[:3500])
    with pytest.raises(UserError, match=r"no data to be judged by: none of the .* sequences held out goes to it"):
        make(tmp_path, data=(words, str(mixed)))


def write_lines(path: Path, line: Callable[[int], str]) -> str:
    path.write_text("".join(line(number) for number in range(1500)))
    return str(path)


def test_more_machines_than_routers_are_refused(tmp_path: Path) -> None:
    wanted = settings(tmp_path)

    def machine(network: SimulatedNetwork) -> None:
        with pytest.raises(UserError, match="3 machines for 2 routers"):
            split(wanted, network, lambda _: None)

    Simulation(3).run(machine)


def test_a_folder_that_is_taken_is_refused_and_stays(mixture: Mixture) -> None:
    before = files_of(mixture.folder)
    with pytest.raises(UserError, match="mix exists already; give another folder with --out"):
        make(mixture.folder.parent)
    assert files_of(mixture.folder) == before


def test_what_a_killed_process_has_left_is_written_over(tmp_path: Path) -> None:
    """In a container that is started again, processes have the numbers of those before."""
    left = beside(tmp_path / "new")
    left.mkdir()
    (left / "half").write_text("x")
    with folders.written_beside(tmp_path / "new") as there:
        (there / "whole").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "whole"]


def test_the_current_folder_cannot_be_taken(mixture: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"\. is a place without a name.*; give another folder with --out"):
        split(replace(settings(mixture.folder.parent), out=Path()), SimulatedNetwork.alone(), lambda _: None)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folders.written_beside(tmp_path / "new") as there:
        (there / "file").write_text("x")
        _ = 1 / 0
    assert not [*tmp_path.iterdir()]
    with folders.written_beside(tmp_path / "new") as there:
        assert there == beside(tmp_path / "new")
        (there / "file").write_text("mine")
        (tmp_path / "new").mkdir()  # another process is first
        (tmp_path / "new" / "file").write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "file").read_text() == "theirs"


def test_a_disk_that_fills_up_is_told_in_a_line(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fills_up(_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))

    wanted = settings(tmp_path, rounds=1)
    try:
        with pytest.raises(
            UserError, match=r"^cannot write to \S+: .*File too large.*; give another folder, or make room$"
        ):
            split(wanted, SimulatedNetwork.alone(), fills_up)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not wanted.out.exists()
    assert not beside(wanted.out).exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "holds no mixture"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"format": 99}', "newer"),
        ('{"format": 1}', "is damaged"),
    ],
)
def test_what_is_no_mixture_is_refused_in_a_line(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mixture.json").write_text(text)
    with pytest.raises(UserError, match=told) as error:
        Mixture.read(tmp_path)
    assert "\n" not in str(error.value)


def test_a_store_of_sequences_is_as_others_are(mixture: Mixture) -> None:
    found = store.read(mixture.store(0))
    assert found.manifest.tokenizer == "bytes" and found.manifest.documents * LENGTH == len(found.training) + len(
        found.held_out
    )


@pytest.mark.slow
def test_the_command_splits_and_shows(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    flags = ("--experts", 2, "--sequence-length", LENGTH, "--prefix", PREFIX, "--rounds", 2, "--router-sequences", 128)
    done = farflung("mixture", "split", "--data", *wanted.data, "--out", wanted.out, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("round 1: ") and "farflung train --sequence-length 32 --data" in done.stdout
    assert "round 2: " in (wanted.out / "report.html").read_text()
    shown = farflung("mixture", "router", wanted.out)
    assert shown.returncode == 0 and "round 2: " in shown.stdout and "held out" in shown.stdout, shown.stderr
    which = [farflung("mixture", "router", wanted.out, "--text", text).stdout[-30:] for text in ("12+3", "koa")]
    assert which[0] != which[1] and all(one.endswith("continues this text\n") for one in which)
    for arguments, told in {
        ("splt",): "mixture does not know 'splt'; did you mean 'split'?",
        ("split",): "split needs --data and --out",
        ("evaluate", wanted.out): "has no expert that is trained; first: farflung train --data",
        ("router", wanted.out, "--text", ""): "the text is empty",
        ("evaluate", wanted.out, "--prefix", 0): "--prefix is 0; it must be at least 1",
    }.items():
        refused = farflung("mixture", *arguments)
        assert refused.returncode == 2 and told in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
