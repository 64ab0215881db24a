"""Pictures that a network learns to draw: what is read and drawn, flow matching, and whole runs."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processes import run_here, same, same_weights, trained

from farflung.errors import UserError
from farflung.training import checkpoint
from farflung.training.agreement import refuse_changed_data
from farflung.workloads.dealing import Deal
from farflung.workloads.images import frechet, network
from farflung.workloads.images.folder import Folder
from farflung.workloads.images.glyphs import EACH, Glyphs, font_folders
from farflung.workloads.images.pictures import Form, Pictures, grid
from farflung.workloads.images.settings import ImagesSettings
from farflung.workloads.images.workload import Images

CPU = torch.device("cpu")
TINY = ImagesSettings(letters="AOX", resize=8, width=8, eval_pictures=16, drawn_pictures=12)


def workload(deal: Deal | None = None) -> Images:
    """Three letters, in whatever fonts there are."""
    return Images(TINY, deal or Deal(2))


def save(path: Path, mode: str, size: tuple[int, int], colour: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


# What is read


def test_sub_folders_are_classes_and_what_is_transparent_is_white(tmp_path: Path) -> None:
    save(tmp_path / "sea" / "clear.png", "RGBA", (8, 6), (0, 0, 255, 0))
    save(tmp_path / "sea" / "half.png", "RGBA", (8, 6), (0, 0, 0, 51))
    save(tmp_path / "land" / "deep" / "green.bmp", "RGB", (8, 6), (0, 200, 0))
    save(tmp_path / "land" / "grey.png", "L", (8, 6), 77)
    (tmp_path / "land" / "notes.txt").write_text("no picture")
    (tmp_path / "empty").mkdir()
    folder = Folder(tmp_path, None)
    assert folder.form == Form(("land", "sea"), 3, 6, 8)
    pixels, labels = folder.read()
    assert labels.tolist() == [0, 0, 1, 1] and pixels.dtype == torch.uint8
    colours = [(0, 200, 0), (77, 77, 77), (255, 255, 255), (204, 204, 204)]
    assert torch.equal(pixels, torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(4, 3, 6, 8))


def test_pictures_without_colours_have_one_channel_and_are_of_one_class_without_sub_folders(tmp_path: Path) -> None:
    save(tmp_path / "a.png", "L", (9, 9), 5)
    save(tmp_path / "b.png", "1", (9, 9), 1)
    Image.fromarray(np.full((9, 9), 77 * 257, np.uint16)).save(tmp_path / "c.png")  # of 16 bits
    folder = Folder(tmp_path, None)
    assert folder.form == Form((tmp_path.name,), 1, 9, 9)
    assert folder.read().pixels.flatten(1).unique(dim=1).tolist() == [[5], [255], [77]]


def test_pictures_of_unlike_sizes_are_told_and_can_be_scaled(tmp_path: Path) -> None:
    save(tmp_path / "a.png", "L", (16, 16), 5)
    save(tmp_path / "b.png", "L", (12, 20), 9)
    told = rf"data {tmp_path}: {tmp_path}/a.png is 16×16 pixels and {tmp_path}/b.png 12×20; .*: --resize 12$"
    with pytest.raises(UserError, match=told):
        Images(ImagesSettings(data=str(tmp_path))).check()
    folder = Folder(tmp_path, resize=12)
    assert folder.form.shape == (1, 12, 12) and folder.read().pixels[:, 0, 6, 6].tolist() == [5, 9]


def test_a_picture_is_cut_to_a_square_in_its_middle(tmp_path: Path) -> None:
    striped = np.repeat(np.repeat(np.array([[0, 100, 200]], np.uint8), 8, axis=0), 8, axis=1)
    Image.fromarray(striped).save(tmp_path / "a.png")
    assert (Folder(tmp_path, resize=8).read().pixels == 100).all()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, b"", "holds no picture; give a folder of PNG"),
        ("a.png", b"no picture", r"a\.png: cannot be read as a picture \(.*\); mend it, or remove it"),
        ("a.txt", b"text", "holds no picture; give a folder of PNG"),
    ],
)
def test_what_is_no_picture_is_told_in_a_line(name: str | None, content: bytes, words: str, tmp_path: Path) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        Images(ImagesSettings(data=str(tmp_path))).check()
    assert "\n" not in str(error.value)


def test_pixels_that_are_no_whole_numbers_are_told(tmp_path: Path) -> None:
    save(tmp_path / "a.tiff", "F", (8, 8), 0.5)
    with pytest.raises(UserError, match=r"a\.tiff: cannot be read as a picture \(its pixels are no whole numbers\)"):
        Folder(tmp_path, None).read()


def test_a_picture_that_ends_too_soon_is_told_when_it_is_read(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.png: cannot be read"):
        Folder(tmp_path, None).read()


def test_a_picture_beside_folders_of_classes_is_told(tmp_path: Path) -> None:
    """It would be of no class, and be left out unheard."""
    (tmp_path / "a").mkdir()
    save(tmp_path / "a" / "one.png", "L", (8, 8), 5)
    save(tmp_path / "cover.png", "L", (8, 8), 5)
    with pytest.raises(UserError, match=r"cover\.png: lies beside folders of classes; move it"):
        Images(ImagesSettings(data=str(tmp_path))).check()


def test_small_pictures_of_unlike_sizes_are_told_a_size_that_can_be_had(tmp_path: Path) -> None:
    save(tmp_path / "a.png", "L", (4, 4), 5)
    save(tmp_path / "b.png", "L", (5, 5), 9)
    with pytest.raises(UserError, match=r"--resize 8$"):
        Images(ImagesSettings(data=str(tmp_path))).check()


@pytest.mark.parametrize("side", [1, 3])
def test_the_classifier_takes_pictures_of_any_size(side: int) -> None:
    assert frechet.Classifier(1, 2).features(torch.zeros(5, 1, side, side)).shape == (5, frechet.FEATURES)


def test_a_distance_needs_numbers_and_two_pictures_of_each() -> None:
    made = workload()
    model = made.build(0).eval()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    with torch.no_grad():
        score = made.evaluate(model, 16, CPU)
    assert np.isnan([score.value, score.others["Frechet distance"]]).all()
    for alone in ({"eval_pictures": 1}, {"drawn_pictures": 1}):
        made = Images(dataclasses.replace(TINY, **alone), Deal(2))
        with torch.no_grad():
            assert not made.evaluate(model, 16, CPU).others


def test_other_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'nowhere': there is no such folder; give glyphs, or a folder"):
        Images(ImagesSettings(data="nowhere")).check()
    with pytest.raises(UserError, match="width is 12; it must be a multiple of 8"):
        ImagesSettings(width=12)
    with pytest.raises(UserError, match="letters is 'ABA'; give one letter or more, and each once"):
        ImagesSettings(letters="ABA")
    (tmp_path / "dot").mkdir()
    save(tmp_path / "dot" / "a.png", "L", (1, 1), 5)
    with pytest.raises(UserError, match=r"a\.png': there is no such folder; give glyphs, or a folder of pictures"):
        Images(ImagesSettings(data=str(tmp_path / "dot" / "a.png"))).check()
    with pytest.raises(UserError, match=r"dot: pictures are of one pixel; give larger ones, or --resize 8"):
        Images(ImagesSettings(data=str(tmp_path / "dot"))).check()
    shutil.rmtree(tmp_path / "dot")
    save(tmp_path / "a.png", "L", (8, 8), 5)
    with pytest.raises(
        UserError, match=r"holds 1 picture, too few to hold .*, where those that are the same count once"
    ):
        Images(ImagesSettings(data=str(tmp_path))).digest()


# What is drawn for want of pictures


@pytest.mark.parametrize("folders", [(), tuple(font_folders())], ids=["no fonts", "the machine's fonts"])
def test_letters_are_drawn_unlike_each_other_and_the_same_ones_again(folders: tuple[Path, ...]) -> None:
    drawn, again = (Glyphs("AOX", 16, folders).read() for _ in range(2))
    assert torch.equal(drawn.pixels, again.pixels) and drawn.labels.bincount().tolist() == [EACH] * 3
    assert len(drawn.pixels.flatten(1).unique(dim=0)) > 0.9 * len(drawn.pixels)
    values = drawn.values().flatten(1)
    assert (values.amax(1) > 0.9).all() and (values.amin(1) < 0).all()  # dark on white
    means = torch.stack([values[drawn.labels == label].mean(0) for label in range(3)])
    nearest = torch.cdist(values, means).argmin(1)
    assert (nearest == drawn.labels).float().mean() > 0.7


def test_fonts_are_found_by_their_files_and_broken_ones_left_out(tmp_path: Path) -> None:
    own = Glyphs("AOX", 16, ()).fonts()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "broken.ttf").write_bytes(b"no font")
    (still,) = Glyphs("AOX", 16, (tmp_path, tmp_path / "none")).fonts()
    assert still.getname() == own[0].getname()
    own[0].path.seek(0)  # Pillow's own font, as a file
    (tmp_path / "deep" / "whole.ttf").write_bytes(own[0].path.read())
    (found,) = Glyphs("AOX", 16, (tmp_path,)).fonts()
    assert Path(found.path).name == "whole.ttf"


def test_letters_that_no_font_has_are_told() -> None:
    with pytest.raises(UserError, match="no font of this machine has them all; install one"):
        Glyphs("A\ue123\ue124", 16, ()).read()


# Batches


def test_each_picture_comes_once_in_an_epoch_and_each_time_with_another_noise() -> None:
    images = workload()
    count, steps = images.available, -(-2 * images.available // 20)
    each = [[images.sample_ids(3, replica, step, 10) for replica in (0, 1)] for step in range(steps)]
    ids = np.array(each).transpose(0, 2, 1).flatten()  # as they are dealt out: to both replicas in turn
    for epoch in (ids[:count], ids[count : 2 * count]):
        assert sorted(epoch % count) == list(range(count))
    assert len(set(ids)) == len(ids)
    assert (images.sample_ids(3, 1, 4, 10) == each[4][1]).all()
    assert (images.sample_ids(4, 1, 4, 10) != each[4][1]).any()


def test_a_batch_is_its_samples_and_the_flow_leads_to_picture_and_noise() -> None:
    images = workload()
    ids = images.sample_ids(0, 0, 7, 64)
    whole = images.batch(ids)
    for number in (0, 63):
        one = images.batch(ids[number : number + 1])
        assert all(torch.equal(one[name][0], whole[name][number]) for name in whole)
    share = whole["shares"][:, None, None, None]
    pictures = whole["noisy"] - share * whole["flow"]
    pixels = ((pictures + 1) * 127.5).round().to(torch.uint8)
    assert torch.equal(pixels, images.training.pixels[ids % images.available])
    assert torch.equal(whole["labels"], images.training.labels[ids % images.available])
    noise = (whole["noisy"] + (1 - share) * whole["flow"]).flatten()
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1
    assert ((share >= 0) & (share < 1)).all() and 0.4 < share.mean() < 0.6


def test_a_run_does_not_go_on_with_other_pictures(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(40):
        Image.fromarray(random.integers(0, 255, (8, 8), np.uint8)).save(tmp_path / f"{number}.png")

    def known() -> dict[str, str]:
        return Images(ImagesSettings(data=str(tmp_path))).known

    before = known()
    refuse_changed_data(before, known())
    (tmp_path / "7.png").unlink()
    with pytest.raises(UserError, match="has changed since this run began"):
        refuse_changed_data(before, known())


def test_what_is_held_out_follows_from_the_pixels_alone() -> None:
    drawn = Glyphs("AOX", 8, ()).read()
    order = torch.randperm(len(drawn.labels))
    sets = []
    for pictures in (drawn, drawn.at(order)):
        training, held_out = ({tuple(p.flatten().tolist()) for p in part.pixels} for part in pictures.split())
        assert not training & held_out and held_out
        sets.append(held_out)
    assert sets[0] == sets[1]


# The network, and what it draws


def test_weights_follow_from_the_seed_and_their_names() -> None:
    one, same, other = (workload().build(seed).state_dict() for seed in (1, 1, 2))
    wider = Images(ImagesSettings(letters="AOXY", resize=16, width=8)).build(1).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if ".conv" in name)
    assert torch.equal(one["conv_in.weight"], wider["conv_in.weight"])
    assert all(weight.isfinite().all() for weight in one.values())
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in workload().outline().state_dict().items()
    }


def test_operations_are_those_of_all_convolutions_and_matrices() -> None:
    counted: list[int] = []

    def count(layer: torch.nn.Module, _: Any, out: torch.Tensor) -> None:
        each = layer.weight[0].numel()  # of one number of the output
        counted.append(2 * each * out.numel())

    images = Images(ImagesSettings(letters="AOX", resize=16, width=8))
    model = images.build(0)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(count)
    network.flow(model, torch.zeros(1, 1, 16, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    attention = 2 * 2 * (4 * 4) ** 2 * 32  # places, and channels, at the smallest size
    assert images.operations(recompute=False) == pytest.approx(3 * (sum(counted) + attention))
    assert images.operations(recompute=True) == pytest.approx(4 * (sum(counted) + attention))


class Knows:
    """Stands for a network that knows the one picture of each class: it says exactly which way the noise lies."""

    device = CPU

    def __init__(self, pictures: torch.Tensor) -> None:
        self._pictures = pictures

    def __call__(self, noisy: torch.Tensor, moment: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        share = (moment / 1000)[:, None, None, None]
        return SimpleNamespace(sample=(noisy - self._pictures[labels]) / share)


def test_a_network_that_knows_the_flow_draws_the_pictures() -> None:
    pictures = torch.rand(3, 1, 8, 8) * 2 - 1
    labels = torch.tensor([2, 0, 1, 1, 2])
    drawn = network.draw(Knows(pictures), labels, Form(("a", "b", "c"), 1, 8, 8), seed=0, size=2)
    torch.testing.assert_close(drawn, pictures[labels], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_score_depends_on_no_batch_size_and_who_knows_the_flow_has_no_loss() -> None:
    images = workload()
    model = images.build(0).eval()
    with torch.no_grad():
        one, other = (images.evaluate(model, size, CPU) for size in (3, 16))
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one.others == pytest.approx(other.others, rel=1e-3)
    held_out = images.held_out.at(torch.tensor([0]))
    batch = noisy_batch(held_out)
    assert float(images.loss(Knows(held_out.values()), batch | {"labels": torch.tensor([0])})) < 1e-8


def noisy_batch(pictures: Pictures) -> dict[str, torch.Tensor]:
    values, noise = pictures.values(), torch.randn(len(pictures.labels), *pictures.pixels.shape[1:])
    return {"noisy": 0.5 * values + 0.5 * noise, "shares": torch.full((len(values),), 0.5), "flow": noise - values}


def test_a_grid_shows_each_picture_in_its_place(tmp_path: Path) -> None:
    colours = torch.linspace(-1, 1, 2 * 3 * 3).view(2, 3, 3)
    (tmp_path / "grid.png").write_bytes(grid(colours[..., None, None].expand(2, 3, 3, 8, 8)))
    shown = np.asarray(Image.open(tmp_path / "grid.png"))
    cell = len(shown) // 2
    for row in range(2):
        for column in range(3):
            middle = shown[cell * row + cell // 2, cell * column + cell // 2]
            assert np.abs(middle / 127.5 - 1 - colours[row, column].numpy()).max() < 0.01


# The Frechet distance


@given(seed=st.integers(0, 99), shift=st.floats(-3, 3), rank=st.integers(1, 6))
@settings(max_examples=20)
def test_the_distance_is_that_of_gaussians(seed: int, shift: float, rank: int) -> None:
    random = torch.Generator().manual_seed(seed)
    one, other = (
        torch.randn(40, rank, generator=random, dtype=torch.float64)
        @ torch.randn(rank, 6, generator=random, dtype=torch.float64)
        for _ in range(2)
    )
    first, second = (np.cov(features.numpy(), rowvar=False) for features in (one, other))
    root = scipy.linalg.sqrtm(first @ second + 1e-12 * np.eye(6)).real  # scipy's does not like singular matrices
    means = (one.mean(0) - other.mean(0)).numpy()
    expected = means @ means + np.trace(first + second - 2 * root)
    assert frechet.distance(one, other) == pytest.approx(expected, abs=1e-3, rel=1e-3)
    assert frechet.distance(one, one + shift) == pytest.approx(6 * shift**2, abs=1e-6)


@pytest.mark.slow
def test_the_classifier_is_kept_and_made_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path))
    pictures = Glyphs("AOX", 8, ()).read()
    values = pictures.values()
    first = frechet.classifier_of(pictures, 3)
    assert (first(values).argmax(1) == pictures.labels).float().mean() > 0.9
    (path,) = tmp_path.rglob("*.pt")
    written = path.stat().st_mtime_ns
    assert torch.equal(frechet.classifier_of(pictures, 3).features(values), first.features(values))
    assert path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(frechet.classifier_of(pictures, 3).features(values), first.features(values))
    assert path.stat().st_size > 100 and list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_what_is_drawn_worse_is_farther_from_what_is_held_out() -> None:
    images = workload()
    values = images.training.at(torch.arange(0, images.available, 20)).values()
    noise = torch.randn(values.shape)
    near, farther, far = (images.distance(torch.lerp(values, noise, share)) for share in (0.0, 0.5, 1.0))
    assert near < farther < far


# Whole runs

SMALL = (
    *("--workload", "images", "--letters", "AOX", "--resize", "8", "--width", "8", "--eval-pictures", "16"),
    *("--drawn-pictures", "12", "--batch-size", "8", "--replicas", "2", "--every", "4", "--steps", "12"),
    *("--warmup", "2", "--checkpoint-every", "4", "--eval-every", "6", "--log-every", "4", "--network", "simulated"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory, *SMALL)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000012")
    checkpoint.average_of(tmp_path / "run").unlink()
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run") == 0
    assert same_weights(run, tmp_path / "run", 12)


@pytest.mark.slow
def test_an_exported_network_draws_with_diffusers_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_here(monkeypatch, tmp_path, "export", str(run), "model") == 0
    monkeypatch.chdir(tmp_path / "model")
    code = re.search(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    averaged = checkpoint.read(checkpoint.average_of(run))["model"]
    assert same(names["model"].state_dict(), averaged)
    assert json.loads(Path("classes.json").read_text()) == ["A", "O", "X"]
    drawn = {path.name: Image.open(path).size for path in Path().glob("*.png")}
    assert drawn == {"A.png": (8, 8), "O.png": (8, 8), "X.png": (8, 8)}


@pytest.mark.slow
def test_the_report_shows_what_was_drawn_and_how_far_it_is(run: Path) -> None:
    page = (run / "report.html").read_text()
    (shown,) = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert base64.b64decode(shown).startswith(b"\x89PNG")
    assert "Frechet distance" in page and "pictures" in page
