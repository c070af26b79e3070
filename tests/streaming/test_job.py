"""A streamed run on the disk: killed, it goes on to the same bytes; too little memory or disk is told in words."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from PIL import Image
from typer.testing import CliRunner

import vir  # noqa: F401  (registers the models)
from vir.checkpoint import Card, load_model, save_model
from vir.cli import app
from vir.streaming import CannotStream, Streamer
from vir.streaming.budget import memory_in_use, parse_bytes, row_bytes, rows_within, state_bytes
from vir.streaming.engine import Band
from vir.streaming.horizon import sights
from vir.streaming.job import Job
from vir.streaming.maps import OTHERS, PALETTE, draw_map
from vir.streaming.readers import ArrayReader

ARGS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "heads": 3, "init_values": 0.5, "retention": "2d"}
CARD = Card("vir_tiny_patch16_224", ("field", "forest", "town"), 32, ARGS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    file = tmp_path / "model.safetensors"
    save_model(CARD.build(), CARD, file)
    return file


@pytest.fixture
def image(tmp_path: Path) -> Path:
    file = tmp_path / "scene.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (330, 100, 3), dtype=np.uint8)).save(file)
    return file


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["stream", *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def test_the_answer_the_map_and_the_scores(model: Path, image: Path, tmp_path: Path) -> None:
    code, told = run(image, "--checkpoint", model, "--out", tmp_path / "out", "--band", 5, "--features", "--json")
    assert code == 0, told
    answer = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert json.loads(told) == answer
    whole, card = load_model(model)
    pixels = torch.from_numpy(np.array(Image.open(image))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        logits = whole((pixels - 0.5) / 0.5)[0]
    shares = dict(zip(card.classes, logits.softmax(0).tolist(), strict=True))
    assert answer["answer"] == pytest.approx(shares, abs=1e-4)
    assert sum(answer["answer"].values()) == pytest.approx(1)
    scores, features = np.load(tmp_path / "out" / "scores.npy"), np.load(tmp_path / "out" / "features.npy")
    assert scores.shape == (42, 13, 3)
    assert features.shape == (42, 13, 48)
    with torch.no_grad():
        np.testing.assert_allclose(scores, whole.head(torch.from_numpy(features).float()), atol=2e-2)
    with Image.open(tmp_path / "out" / "map.png") as picture:
        assert min(picture.size) > 100
    assert not (tmp_path / "out" / "progress.npz").exists()


def test_a_band_is_let_go_before_the_next_one_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref] = []
    usual = Streamer.pass_band

    def pass_band(streamer: Streamer, pixels: torch.Tensor) -> Band:
        assert all(band() is None for band in held)
        band = usual(streamer, pixels)
        held.append(weakref.ref(band))
        return band

    monkeypatch.setattr(Streamer, "pass_band", pass_band)
    trained, _ = load_model(model)
    reader = ArrayReader(np.zeros((330, 100, 3), dtype=np.uint8))
    Job(Streamer(trained, 330, 100), reader, 5, tmp_path / "out", {"image": "x"}).run()
    assert len(held) == 9


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_interrupted_and_resumed_to_the_same_bits(pool: str, model: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (330, 100, 3), dtype=np.uint8)
    trained, _ = load_model(model)

    def job(name: str, reader: ArrayReader, resume: bool = False, rows: int = 3) -> Job:
        streamer = Streamer(trained, *reader.shape[:2], pool=pool)
        return Job(streamer, reader, rows, tmp_path / name, {"image": "x"}, resume=resume)

    want = job("whole", ArrayReader(pixels)).run()
    broken = job("broken", ArrayReader(pixels))
    assert broken.run(stop=lambda: broken.streamer.row >= 21) is None
    with pytest.raises(CannotStream, match="--resume"):
        job("broken", ArrayReader(pixels))
    again = job("broken", ArrayReader(pixels), resume=True, rows=7)
    assert again.streamer.row == 21
    assert torch.equal(again.run(), want)
    assert (tmp_path / "broken" / "scores.npy").read_bytes() == (tmp_path / "whole" / "scores.npy").read_bytes()
    with pytest.raises(CannotStream, match="no unfinished run"):
        job("broken", ArrayReader(pixels), resume=True)


def test_another_image_or_model_is_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    pixels = np.zeros((330, 100, 3), np.uint8)
    trained, _ = load_model(model)
    broken = Job(Streamer(trained, 330, 100), ArrayReader(pixels), 3, tmp_path, {"image": "x"})
    assert broken.run(stop=lambda: True) is None
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "progress.npz").write_bytes(b"PK spoilt")
    with pytest.raises(CannotStream, match="not a saved run"):
        Job(Streamer(trained, 330, 100), ArrayReader(pixels), 3, tmp_path / "spoilt", {"image": "x"}, resume=True)
    with pytest.raises(CannotStream, match="another image"):
        Job(Streamer(trained, 330, 100), ArrayReader(pixels), 3, tmp_path, {"image": "y"}, resume=True)
    Job(Streamer(trained, 330, 100), ArrayReader(pixels), 3, tmp_path, {"image": "y"}, restart=True).run()


def test_results_of_another_image_or_settings_are_not_lost(model: Path, image: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other.png"
    Image.new("RGB", (64, 64)).save(other)
    common = "--checkpoint", model, "--out", out
    assert run(image, *common)[0] == 0
    assert run(image, *common, "--features", "--band", 3)[0] == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    for arguments, says in (
        ((other,), "another image"),
        ((image, "--features", "--pool", "avg"), "another pool"),
        ((image,), "another features"),
    ):
        code, told = run(*arguments, *common)
        assert code == 2, told
        assert says in told
        assert "--out" in told
        assert "--restart" in told
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (out / "mine.txt").write_text("kept")
    assert run(other, *common, "--restart")[0] == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "answer.json", "map.png", "mine.txt", "run.json", "scores.npy",
    ]  # fmt: skip
    assert np.load(out / "scores.npy").shape == (8, 8, 3)
    (out / "run.json").write_text("{")
    code, told = run(other, *common)
    assert (code, "not readable" in told, "--restart" in told) == (2, True, True)
    assert run(other, *common, "--restart")[0] == 0


@pytest.mark.parametrize("name", ["map.png", "scores.npy"])
@pytest.mark.parametrize("more", [(), ("--restart",)], ids=str)
def test_what_is_of_no_run_is_never_removed(
    more: tuple[str, ...], name: str, model: Path, image: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(image, "--checkpoint", model, "--out", out)[0] == 0
    np.save(tmp_path / "scores.npy", np.array(Image.open(image)))
    shutil.copy(image, tmp_path / "map.png")
    before = (tmp_path / name).read_bytes()
    for given in (tmp_path / name, image):  # the image itself; and another, beside which there is one of that name
        code, told = run(given, "--checkpoint", model, "--out", tmp_path, *more)
        assert (code, "another --out" in told, "--restart" in told) == (2, True, False), told
        assert (tmp_path / name).read_bytes() == before
    shutil.copy(tmp_path / name, out / name)  # in place of a run's
    code, told = run(out / name, "--checkpoint", model, "--out", out, *more)
    assert (code, "another --out" in told) == (2, True), told
    assert (out / name).read_bytes() == before


def test_an_unfinished_run_that_lost_its_map_is_told(model: Path, tmp_path: Path) -> None:
    trained, _ = load_model(model)
    streamer, reader = Streamer(trained, 330, 100), ArrayReader(np.zeros((330, 100, 3), np.uint8))
    assert Job(streamer, reader, 3, tmp_path, {}).run(stop=lambda: True) is None
    for spoil in (lambda: (tmp_path / "scores.npy").write_bytes(b""), (tmp_path / "scores.npy").unlink):
        spoil()
        with pytest.raises(CannotStream, match="files are not whole"):
            Job(Streamer(trained, 330, 100), reader, 3, tmp_path, {}, resume=True)


def test_where_results_cannot_be_written_is_told(model: Path, image: Path) -> None:
    for out, says in ((image, "is a file"), (image / "deeper", "Not a directory")):
        code, told = run(image, "--checkpoint", model, "--out", out)
        assert (code, says in told, "another --out" in told) == (2, True, True), told


def test_what_is_doubtful_is_told_before_and_kept_beside_the_answer(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "dark.npy", np.full((64, 64, 3), 2000, np.uint16))
    common = tmp_path / "dark.npy", "--checkpoint", model, "--out", tmp_path / "out"
    code, told = run(*common)
    assert code == 0, told
    assert told.count("nearly black") == 1
    (warning,) = json.loads(run(*common, "--json")[1])["warnings"]
    assert "nearly black" in warning


def test_colours_are_of_the_number_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [f"class {number}" for number in range(25)]
    drawn = []
    usual = Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda panel, x, **options: drawn.append(x) or usual(panel, x, **options))
    for best in ([[1, 1, 2]], [[2, 2, 1]], [[0, 20, 20]]):  # class 20 has the colour of class 0
        draw_map(np.array(best), classes, tmp_path / "map.png")
    one, other, crowded = (colours[0].tolist() for colours in drawn)
    assert one == [list(to_rgb(PALETTE[1]))] * 2 + [list(to_rgb(PALETTE[2]))]
    assert other == [one[2], one[2], one[0]]
    assert crowded == [list(to_rgb(OTHERS))] + [list(to_rgb(PALETTE[0]))] * 2


def test_a_full_disk_is_told_and_what_was_saved_is_kept(model: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (330, 100, 3), dtype=np.uint8)
    trained, _ = load_model(model)
    job = Job(Streamer(trained, 330, 100), ArrayReader(pixels), 3, tmp_path, {}, save_seconds=0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        size = (tmp_path / "scores.npy").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
        job.maps["scores.npy"].row_bytes, job.maps["scores.npy"].first = 40_000, size  # the file grows fast
        with pytest.raises(CannotStream, match="--resume"):
            job.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, usual)
    assert (tmp_path / "progress.npz").exists()


SLOW = """
import sys, time
from vir.streaming import job
usual = job.RowFile.write
def write(self, top, rows):
    time.sleep(0.1)
    usual(self, top, rows)
job.RowFile.write = write
job.Job.__init__.__kwdefaults__["save_seconds"] = 0.0
from vir.cli import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_it_goes_on_to_the_same_bytes(how: int, model: Path, image: Path, tmp_path: Path) -> None:
    common = ["stream", str(image), "--checkpoint", str(model), "--band", "2"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *common, "--out", str(tmp_path / "killed")])
    progress = tmp_path / "killed" / "progress.npz"
    for _ in range(600):
        if progress.exists():
            break
        time.sleep(0.1)
    process.send_signal(how)
    assert process.wait() == (-how if how == signal.SIGKILL else 130)
    assert progress.exists()
    for name, more in (("killed", ["--resume"]), ("whole", [])):
        done = CliRunner().invoke(app, [*common, "--out", str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
    for name in ("scores.npy", "answer.json", "map.png"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_mistakes_are_answered_in_words(model: Path, image: Path, tmp_path: Path) -> None:
    hybrid = tmp_path / "hvir.safetensors"
    card = Card("hvir_tiny", ("a", "b"), 64)
    save_model(card.build(), card, hybrid)
    for arguments, says in (
        ((image, "--checkpoint", hybrid), "vir_small_patch16_224"),
        ((tmp_path / "nothing.tif", "--checkpoint", model), "does not exist"),
        ((image, "--checkpoint", tmp_path / "no.safetensors"), "does not exist"),
        ((image, "--checkpoint", model, "--memory", "lots"), "expected a size"),
        ((image, "--checkpoint", model, "--memory", "1MB"), "too little"),
    ):
        code, told = run(*arguments, "--out", tmp_path / "out")
        assert code == 2, told
        assert says in told


def test_explained(model: Path, image: Path) -> None:
    code, told = run(image, "--checkpoint", model, "--explain")
    assert code == 0
    assert "330 x 100 px" in told
    assert "mostly its end" in told
    _, stretched = run(image, "--checkpoint", model, "--explain", "--decay", "rescale")
    assert stretched != told


def test_sight_is_where_a_patch_counts_a_hundredth() -> None:
    for kind in ("1d", "2d"):
        seen = sights(timm.create_model("vir_tiny_patch16_224", retention=kind), cols=100)
        for one in seen:
            assert one.gamma**one.patches == pytest.approx(0.01)
            assert one.down == pytest.approx(16 * one.patches / (100 if kind == "1d" else 1))
        assert [one.gamma for one in seen] == sorted(one.gamma for one in seen)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 10**9), ("1.5 gb", 1_500_000_000), ("800M", 8 * 10**8), ("12345", 12345), ("2GiB", 2 * 10**9)],
)
def test_sizes_in_words(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-2GB", "0", "2 apples", "nan", "inf GB x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(CannotStream, match="expected a size"):
        parse_bytes(text)


def test_more_memory_makes_higher_bands() -> None:
    model = timm.create_model("vir_tiny_patch16_224", retention="2d")
    device = torch.device("cpu")
    assert state_bytes(model, 100) == 4 * 100 * 3 * 64 * 64
    rows = [rows_within(model, 256, memory_in_use(device) + extra, 1000) for extra in (4 * 10**8, 7 * 10**8, 10**10)]
    assert rows[0] < rows[1] < rows[2] == 1000
    assert rows[1] - rows[0] == pytest.approx(3 * 10**8 / row_bytes(model, 256), abs=2)


LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from vir.cli import app
app(sys.argv[1:])
"""


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_a_large_image_in_little_memory(retention: str, tmp_path: Path) -> None:
    """19 megapixels with ViR-T/16 in a process that may hold 1.5 GB: its tokens alone, at once, would take more."""
    import pyvips

    card = Card("vir_tiny_patch16_224", ("a", "b"), 224, {"img_size": 224, "retention": retention, "depth": 2})
    save_model(card.build(), card, tmp_path / "model.safetensors")
    pyvips.Image.xyz(3200, 6000).bandmean().cast("uchar").bandjoin([128, 0]).jpegsave(str(tmp_path / "x.jpg"))
    stream = ["stream", str(tmp_path / "x.jpg"), "--checkpoint", str(tmp_path / "model.safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "1500000000", *stream, "--memory", "1.4GB", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert np.load(tmp_path / "out" / "scores.npy").shape == (375, 200, 2)
