"""Mixtures of pictures: flows that add up, parts that k-means finds, and experts that are judged and joined."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_pictures import EACH, expert, make, split_settings, write_pictures
from patience import patience
from PIL import Image
from processes import farflung, run_here
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.mixtures.folder import workload_of
from farflung.mixtures.pictures.clusters import two_levels
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.joined import evaluate, join
from farflung.mixtures.pictures.modeling import MOMENTS, PictureMixture
from farflung.mixtures.pictures.split import split
from farflung.mixtures.pictures.student import Student, StudentSettings
from farflung.workloads.images import network
from farflung.workloads.images.settings import ImagesSettings
from farflung.workloads.images.workload import Images

# The flow of a mixture


class Exact(nn.Module):
    """The flow of a finite set of points (k, d), and the logarithm of its density, in closed form."""

    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.points = points

    def log_chances(self, noisy: Tensor, share: Tensor) -> Tensor:
        """(n, k): that of x = (1 - s) x_k + s ε, but for what all points have in common."""
        away = noisy[:, None] - (1 - share[:, None, None]) * self.points
        return -away.square().sum(dim=2) / (2 * share[:, None] ** 2)

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Any:
        share, flat = timestep / MOMENTS, sample.flatten(1)
        chances = self.log_chances(flat, share).softmax(dim=1)
        noise = (flat[:, None] - (1 - share[:, None, None]) * self.points) / share[:, None, None]
        flow = (chances[:, :, None] * (noise - self.points)).sum(dim=1)
        return SimpleNamespace(sample=flow.view_as(sample))


class ExactRouter(nn.Module):
    def __init__(self, parts: list[Exact]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor) -> Any:
        each = [one.log_chances(sample.flatten(1), timestep / MOMENTS).logsumexp(dim=1) for one in self.parts]
        return SimpleNamespace(sample=torch.stack(each, dim=1)[:, :, None, None])


def test_the_flow_of_all_data_is_that_of_its_parts_weighed_by_the_router() -> None:
    random = torch.Generator().manual_seed(0)
    points = torch.randn(512, 4, generator=random, dtype=torch.float64)
    own = torch.randint(5, (512,), generator=random)
    parts = [Exact(points[own == number]) for number in range(5)]
    shares = torch.rand(300, generator=random, dtype=torch.float64) * 0.98 + 0.01
    noise = torch.randn(300, 4, generator=random, dtype=torch.float64)
    noisy = torch.lerp(points[:300], noise, shares[:, None]).view(300, 1, 2, 2)
    asked = noisy, shares * MOMENTS, torch.zeros(300, dtype=torch.int64)
    whole = Exact(points)(*asked).sample
    mixture = PictureMixture(ExactRouter(parts), dict(enumerate(parts)), top=5)
    error = (mixture(*asked).sample - whole).abs().amax(dim=(1, 2, 3)) / whole.abs().amax(dim=(1, 2, 3))
    assert float(error.max()) < 1e-12
    mixture.top = 1
    assert float((mixture(*asked).sample - whole).abs().max()) > 0.1, "one expert is not all"


@settings(max_examples=60)
@given(
    scores=st.lists(st.lists(st.floats(-9, 9), min_size=5, max_size=5), min_size=1, max_size=6),
    there=st.sets(st.integers(0, 4), min_size=1),
    top=st.integers(1, 6),
    above=st.floats(0, 1),
    share=st.floats(0, 1),
)
def test_weights_are_those_of_the_likeliest_experts_there_are(
    scores: list[list[float]], there: set[int], top: int, above: float, share: float
) -> None:
    mixture = PictureMixture(nn.Identity(), {number: nn.Identity() for number in there}, top, above)
    moments = torch.full((len(scores),), share * MOMENTS, dtype=torch.float64)
    found = mixture.weights(torch.tensor(scores, dtype=torch.float64), moments)
    for row, weights in zip(scores, found.tolist(), strict=True):
        left = sorted(there, key=lambda number: (-row[number], number))
        working = left if share * MOMENTS > above * MOMENTS else left[:top]
        total = sum(np.exp(row[number]) for number in working)
        expected = [np.exp(row[number]) / total if number in working else 0.0 for number in sorted(there)]
        assert weights == pytest.approx(expected, abs=1e-12)


# Parts


def test_k_means_finds_groups_of_groups() -> None:
    random = torch.Generator().manual_seed(1)
    centres = torch.tensor([[0.0, 0], [100, 0], [0, 100], [100, 100]], dtype=torch.float64)
    small = torch.tensor([[0.0, 0], [9, 0], [0, 9]], dtype=torch.float64)
    own = torch.randint(4, (400,), generator=random)
    place = centres[own] + small[torch.randint(3, (400,), generator=random)]
    points = place + torch.randn(400, 2, generator=random, dtype=torch.float64) / 4
    clusters = two_levels(points, fine=12, coarse=4, seed=0)
    assert len(clusters.fine) == 12
    found = clusters.of(points)
    assert len({*zip(own.tolist(), found.tolist(), strict=True)}) == 4 and len(found.unique()) == 4
    assert torch.equal(clusters.of(centres[own]), found), "what was not there before goes to its own, too"
    assert len(two_levels(points[:1].expand(50, 2), 12, 4, 0).fine) == 1, "all points are equal"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PictureSplit:
    """Red, green and blue pictures."""
    return make(tmp_path_factory.mktemp("mixture"))


def rows_of(pixels: Tensor) -> list[bytes]:
    return sorted(one.numpy().tobytes() for one in pixels)


def test_each_picture_has_one_expert_which_knows_all_classes(mixture: PictureSplit) -> None:
    whole = Images(ImagesSettings(data=str(mixture.folder.parent / "pictures"), eval_pictures=10**6))
    parts = [mixture.part(number) for number in range(3)]
    assert {part.form for part in parts} == {whole.form} and whole.form.classes == ("0", "1", "2")
    for kind in ("training", "held_out"):
        each = torch.cat([getattr(part, kind).pixels for part in parts])
        together = getattr(mixture.whole(), kind)
        assert torch.equal(together.pixels, each) and rows_of(each) == rows_of(getattr(whole, kind).pixels)
    assert mixture.numbers().tolist() == [n for n, part in enumerate(parts) for _ in part.training.labels]
    assert mixture.purity == 1.0 and all(len({*part.training.labels.tolist()}) == 1 for part in parts)
    assert [part.available for part in parts] == [sum(row) for row in mixture.dealt]
    assert mixture.hits["0"] == 1.0 and [len(part.held_out.labels) for part in parts] == mixture.held_out
    with Image.open(mixture.examples) as shown:
        assert shown.width > 3 * shown.height
    assert PictureSplit.read(mixture.folder) == mixture and workload_of(mixture.folder) == "images"


def test_a_split_is_the_same_again(mixture: PictureSplit, tmp_path: Path) -> None:
    again = make(tmp_path)
    files = [path.relative_to(again.folder) for path in again.folder.rglob("*") if path.is_file()]
    assert len(files) > 3 * EACH and all(
        (again.folder / one).read_bytes() == (mixture.folder / one).read_bytes() for one in files
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"experts": 500}, "would have no picture to train on, of .*; give more pictures, fewer --experts"),
        ({"experts": 1}, "experts is 1; it must be at least 2"),
        ({"router_steps": 1}, "the router has collapsed: .* give more --router-steps"),
        ({"lr": 1e30}, "diverged with --lr 1e"),
        ({"data": "nosuch"}, "no such folder"),
        ({"router_width": 12}, "router_width is 12; it must be a multiple of 8"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused_in_a_line(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told) as error:
        make(tmp_path, **changed)
    assert "\n" not in str(error.value) and not (tmp_path / "mix").exists()


def test_pictures_of_unlike_sizes_or_of_one_class_are_told(tmp_path: Path) -> None:
    data = write_pictures(tmp_path, classes=1)
    with pytest.raises(UserError, match="the pictures are of one class; give pixels"):
        split(split_settings(data, features="classifier"), print)
    Image.new("RGB", (9, 12)).save(data / "0" / "other.png")
    with pytest.raises(UserError, match="scale all of them: --resize 8"):
        split(split_settings(data), print)


@pytest.mark.parametrize("table", ["{", "[]", '{"classes": 3}'])
def test_a_damaged_table_of_classes_is_told_in_a_line(table: str, mixture: PictureSplit, tmp_path: Path) -> None:
    shutil.copytree(mixture.store(0), tmp_path / "part")
    (tmp_path / "part" / "pictures.json").write_text(table)
    with pytest.raises(UserError, match=r"pictures\.json is damaged .*; make that part again") as error:
        Images(ImagesSettings(data=str(tmp_path / "part"))).check()
    assert "\n" not in str(error.value)


# Experts together


@pytest.fixture(scope="module")
def experts(mixture: PictureSplit, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("experts")
    return {number: expert(mixture, number, folder / str(number)) for number in range(3)}


WAYS = {"top 1": (1, 1.0), "top 2": (2, 1.0), "all": (3, 1.0), "all above 0.4, then one": (1, 0.4)}


@torch.no_grad()
def by_hand(mixture: PictureSplit, experts: dict[int, Path]) -> dict[str, float]:
    """The loss of each way, and of expert 0 alone, picture by picture."""
    whole, load = mixture.whole(), network.library().UNet2DModel.from_pretrained
    models, router = {number: load(path).eval() for number, path in experts.items()}, load(mixture.router).eval()
    count = len(whole.held_out.labels)
    noise = torch.randn(count, *whole.form.shape, generator=torch.Generator().manual_seed(0))
    losses: dict[str, list[float]] = {way: [] for way in (*WAYS, "dense")}
    for number in range(count):
        share = (number * 0.6180339887) % 1
        picture, label = whole.held_out.values()[number : number + 1], whole.held_out.labels[number : number + 1]
        asked = (1 - share) * picture + share * noise[number], torch.tensor([share * 1000]), label
        scores = router(*asked).sample[0].mean(dim=(1, 2)).tolist()
        flows = {number: model(*asked).sample for number, model in models.items()}
        for way, (top, all_above) in WAYS.items():
            working = sorted(models, key=lambda one: -scores[one])[: len(models) if share > all_above else top]
            total = sum(np.exp(scores[one]) for one in working)
            flow = sum(flows[one] * (np.exp(scores[one]) / total) for one in working)
            losses[way].append(float((flow - (noise[number] - picture)).square().mean()))
        losses["dense"].append(float((flows[0] - (noise[number] - picture)).square().mean()))
    return {way: float(np.mean(found)) for way, found in losses.items()}


@pytest.mark.parametrize("there", [(0, 1, 2), (0, 2)], ids=str)
def test_each_way_to_mix_is_judged_as_by_hand(
    there: tuple[int, ...], mixture: PictureSplit, experts: dict[int, Path]
) -> None:
    some = {number: experts[number] for number in there}
    found = evaluate(mixture, some, experts[0], top=2, all_above=0.4, drawn=0)
    expected = by_hand(mixture, some)
    assert {name: score.value for name, score in found.ways.items()} == pytest.approx(expected, rel=1e-4)
    assert found.instead == (0 if len(there) == 3 else mixture.held_out[1]) and found.own.keys() == {*there}
    with torch.no_grad():
        model = network.library().UNet2DModel.from_pretrained(experts[0]).eval()
        own = mixture.part(0).evaluate(model, 7, torch.device("cpu")).value
    assert found.own[0] == pytest.approx(own, rel=1e-4)


def test_an_expert_of_other_pictures_is_refused(
    mixture: PictureSplit, experts: dict[int, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(experts[0], other)
    (other / "classes.json").write_text(json.dumps(["0", "1", "x"]))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for folder, told in (
        (other, "other draws 3×8×8 pixels of 3 classes, and"),
        (tmp_path / "text", "holds no network"),
    ):
        with pytest.raises(UserError, match=told) as error:
            evaluate(mixture, {**experts, 1: folder}, None, top=2, all_above=0.5, drawn=0)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="has no expert that is trained; first: farflung train --workload images"):
        join(mixture, {}, tmp_path / "out")


@pytest.fixture(scope="module")
def exported(mixture: PictureSplit, experts: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    join(mixture, experts, folder)
    return folder


@pytest.mark.slow
def test_what_is_exported_draws_without_farflung_what_is_drawn_here(
    exported: Path, mixture: PictureSplit, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    (code,) = re.findall(r"```python\n(.*?)```", (copy / "README.md").read_text(), re.DOTALL)
    alone = "import sys; assert not any(name.startswith('farflung') for name in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + alone], cwd=copy, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    model = PictureMixture.from_pretrained(exported)
    drawn = network.draw(model, torch.arange(3), mixture.whole().form, 0, 3)
    assert torch.allclose(model.draw(torch.arange(3), 0), drawn, atol=1e-5)
    for number, picture in enumerate(drawn):
        with Image.open(copy / f"{number}.png") as found:
            values = torch.from_numpy(np.asarray(found).copy()).permute(2, 0, 1).float() / 127.5 - 1
        assert torch.allclose(values, picture, atol=0.02)


def test_a_mixture_draws_in_half_the_memory(exported: Path) -> None:
    """What is drawn is summed up in 32 bits all the same."""
    whole = PictureMixture.from_pretrained(exported)
    drawn = whole.draw(torch.arange(3))
    half = whole.to(torch.bfloat16).draw(torch.arange(3))
    assert half.dtype == torch.float32 and torch.allclose(half, drawn, atol=0.1)


def test_a_student_is_taught_by_the_expert_of_each_pictures_own_part(
    exported: Path, mixture: PictureSplit, experts: dict[int, Path], tmp_path: Path
) -> None:
    student = Student(StudentSettings(data=str(mixture.folder), teacher=str(exported), width=8, drawn_pictures=0))
    student.check()
    ids = student.sample_ids(0, 0, 0, 16)
    batch, plain = student.batch(ids), mixture.whole().batch(ids)
    assert all(torch.equal(batch[name], plain[name]) for name in plain)
    classes = torch.tensor([int(mixture.part(number).training.labels.unique()) for number in range(3)])
    assert torch.equal(classes[batch["experts"]], batch["labels"]), "each part is of one class"
    model = student.build(0)
    losses = []
    for number in range(16):
        row = {name: tensor[number : number + 1] for name, tensor in batch.items()}
        teacher = network.library().UNet2DModel.from_pretrained(experts[int(row["experts"])]).eval()
        with torch.no_grad():
            flows = [network.flow(one, row["noisy"], row["shares"], row["labels"]) for one in (model, teacher)]
        losses.append(float((flows[0] - flows[1]).square().mean()))
    assert float(student.loss(model, batch).detach()) == pytest.approx(np.mean(losses), rel=1e-4)
    with torch.no_grad():
        judged = [one.evaluate(model, 9, torch.device("cpu")).value for one in (student, mixture.whole())]
    assert judged[0] == pytest.approx(judged[1]), "by the true flow"
    join(mixture, {number: experts[number] for number in (0, 2)}, tmp_path / "out")
    for teacher_folder, told in ((tmp_path / "out", "expert 1 is missing"), (tmp_path, "holds no mixture of pictures")):
        with pytest.raises(UserError, match=told):
            Student(StudentSettings(data=str(mixture.folder), teacher=str(teacher_folder), width=8)).check()


# Commands


def test_the_commands_split_show_judge_and_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path)
    flags = ("--experts", "3", "--router-width", "8", "--router-steps", "60", "--batch-size", "32")
    split_pictures = ("mixture", "split", "--workload", "images", "--data", "pictures", "--out", "mix", *flags)
    assert run_here(monkeypatch, tmp_path, *split_pictures) == 0
    said = capsys.readouterr().out
    assert "k-means: " in said and "purity: 1.000" in said and "farflung train --workload images --data mix/" in said
    page = (tmp_path / "mix" / "report.html").read_text()
    assert "purity: 1.000" in page and "data:image/png;base64," in page
    mixture = PictureSplit.read(tmp_path / "mix")
    for number in (0, 2):
        expert(mixture, number, mixture.run(number))
    assert run_here(monkeypatch, tmp_path, "mixture", "router", "mix") == 0
    assert "knows the part of 100% of the pictures held out, where noise has 0%" in capsys.readouterr().out
    judge = ("mixture", "evaluate", "mix", "--drawn-pictures", "0", "--grid", "grid.png", "--top", "2")
    assert run_here(monkeypatch, tmp_path, *judge) == 0
    told = capsys.readouterr()
    assert "expert 1 is missing: there is no mix/runs/1; its pictures go to the next best" in told.err
    assert f"of missing experts: {mixture.held_out[1]} pictures" in told.out
    with Image.open(tmp_path / "grid.png") as shown:
        assert shown.size == (200, 150), "three classes, in four ways"
    assert run_here(monkeypatch, tmp_path, "mixture", "export", "mix", "out") == 0
    assert PictureMixture.from_pretrained(tmp_path / "out").numbers == [0, 2]
    capsys.readouterr()
    for arguments, line in {
        ("router", "mix", "--text", "a"): "--text is not for mixtures of pictures, as mix is; leave it out",
        ("evaluate", "mix", "--prefix", "3"): "--prefix is not for mixtures of pictures, as mix is; leave it out",
        ("split", "--workload", "imags", "--out", "x"): "no mixtures of 'imags'; did you mean 'images'?",
        ("split", "--data", "pictures", "--out", "x"): "the file is binary; give text",
        split_pictures[1:]: "mix exists already; give another folder with --out",
    }.items():
        assert run_here(monkeypatch, tmp_path, "mixture", *arguments) == 2
        found = capsys.readouterr().err
        assert line in found and found.count("\n") == 1, found


FEW = ("--workload", "images", "--width", "8", "--inner", "adamw", "--lr", "1e-3", "--batch-size", "8", "--steps", "6")
FEW += ("--replicas", "2", "--every", "3", "--network", "simulated", "--warmup", "1", "--drawn-pictures", "0")


@pytest.mark.slow
def test_experts_that_never_meet_are_those_of_one_host(
    mixture: PictureSplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is trained in a process and a folder of its own, which have its part alone; and all again, in one place."""
    apart, together = tmp_path / "apart", tmp_path / "together"
    for number in range(2):
        shutil.copytree(mixture.store(number), tmp_path / f"host-{number}" / "part")
        done = farflung("train", *FEW, "--data", "part", "--out", "run", cwd=tmp_path / f"host-{number}")
        assert done.returncode == 0, done.stderr
        assert run_here(monkeypatch, tmp_path / f"host-{number}", "export", "run", "model") == 0
    for folder in (apart, together):
        shutil.copytree(mixture.folder, folder)
    for number in range(2):
        shutil.copytree(tmp_path / f"host-{number}" / "model", apart / "runs" / str(number))
        here = ("--data", f"together/expert-{number}", "--out", f"together/runs/{number}")
        assert run_here(monkeypatch, tmp_path, "train", *FEW, *here) == 0
    for folder in (apart, together):
        assert run_here(monkeypatch, tmp_path, "mixture", "export", str(folder), f"{folder.name}-out") == 0
    files = [path.relative_to(tmp_path / "apart-out") for path in (tmp_path / "apart-out").rglob("*") if path.is_file()]
    assert len(files) > 8
    for one in files:
        assert (tmp_path / "apart-out" / one).read_bytes() == (tmp_path / "together-out" / one).read_bytes(), one
    weights = [(tmp_path / "apart-out" / f"expert-{number}").glob("*.safetensors") for number in range(2)]
    assert len({path.read_bytes() for each in weights for path in each}) == 2
