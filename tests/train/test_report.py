"""The pictures of a training run, drawn from logs, counts and images like those of a run."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vir.train import report

HEADER = "epoch,step,lr,loss,train_top1,val_loss,val_top1,images_per_second,seconds\n"
FULL = "{e},{s},{lr:.6f},{loss:.4f},{train:.2f},{val:.4f},{top1:.2f},812.3,{t:.1f}\n"
MIXUP = "{e},{s},{lr:.6f},{loss:.4f},,{val:.4f},{top1:.2f},812.3,{t:.1f}\n"
NO_ACCURACY = "{e},{s},{lr:.6f},{loss:.4f},,,,812.3,{t:.1f}\n"
ONLY_LOSS = "{e},{s},,{loss:.4f},,,,,\n"
WHITE = (255, 255, 255)


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def looks_drawn(file: Path, least: int = 300) -> bool:
    picture = pixels(file)
    height, width, _ = picture.shape
    return least <= min(height, width) and max(height, width) < 2500 and picture.std() > 5


def drawn_twice(draw: Callable[[Path], None], folder: Path) -> Path:
    first, second = folder / "first.png", folder / "second.png"
    draw(first)
    draw(second)
    assert first.read_bytes() == second.read_bytes()
    return first


def lines(number: int, form: str = FULL) -> str:
    return "".join(
        form.format(
            e=e, s=100 * e, lr=1e-3 * (1 - e / 100), loss=0.5 + 4 * math.exp(-e / 9), train=96 - 90 * math.exp(-e / 9),
            val=0.9 + 3 * math.exp(-e / 9), top1=82 - 80 * math.exp(-e / 9), t=30.5 * e,
        )
        for e in range(1, number + 1)
    )  # fmt: skip


def curves(folder: Path, text: str, name: str = "log") -> Path:
    log = folder / f"{name}.csv"
    log.write_text(text)
    report.curves(log, folder / f"{name}.png")
    return folder / f"{name}.png"


@pytest.mark.parametrize("number", [1, 90])
@pytest.mark.parametrize("form", [FULL, MIXUP, NO_ACCURACY, ONLY_LOSS])
def test_curves(tmp_path: Path, form: str, number: int) -> None:
    assert looks_drawn(curves(tmp_path, HEADER + lines(number, form)))


def test_curves_give_the_same_bytes_twice(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(HEADER + lines(40))
    drawn_twice(lambda file: report.curves(log, file), tmp_path)


@pytest.mark.parametrize(
    "cut", ["6", "6,600,0.0", "6,600,0.000940,2.5537,49", "6,600,0.000940,2.5537,49.79,2.4,40.9,8-"]
)
def test_a_line_cut_off_by_a_kill_is_ignored(tmp_path: Path, cut: str) -> None:
    whole, killed = curves(tmp_path, HEADER + lines(5), "whole"), curves(tmp_path, HEADER + lines(5) + cut, "killed")
    assert whole.read_bytes() == killed.read_bytes()


def test_a_line_glued_to_the_next_by_a_restart_is_ignored(tmp_path: Path) -> None:
    whole = curves(tmp_path, HEADER + lines(5), "whole")
    glued = curves(tmp_path, HEADER + lines(4) + "5,500,0.00" + lines(5), "glued")
    assert whole.read_bytes() == glued.read_bytes()


def test_epochs_repeated_after_a_restart_count_once(tmp_path: Path) -> None:
    whole = curves(tmp_path, HEADER + lines(5), "whole")
    again = curves(tmp_path, HEADER + lines(4).replace("812.3", "99.9") + lines(5), "again")
    assert whole.read_bytes() == again.read_bytes()


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    whole, bare = curves(tmp_path, HEADER + lines(5), "whole"), curves(tmp_path, (HEADER + lines(5)).strip(), "bare")
    assert whole.read_bytes() == bare.read_bytes()


def test_validation_now_and_then(tmp_path: Path) -> None:
    without, measured = lines(50, NO_ACCURACY).splitlines(), lines(50).splitlines()
    rows = [measured[e] if e % 5 == 4 else without[e] for e in range(50)]
    assert looks_drawn(curves(tmp_path, HEADER + "\n".join(rows) + "\n"))


def test_a_run_that_diverged_is_still_drawn(tmp_path: Path) -> None:
    assert looks_drawn(curves(tmp_path, HEADER + lines(5) + "6,600,0.001,nan,0.1,inf,0.1,812.3,9.0\n"))


def test_a_log_without_an_epoch_says_so(tmp_path: Path) -> None:
    nothing, header = curves(tmp_path, "", "nothing"), curves(tmp_path, HEADER, "header")
    assert looks_drawn(header)
    assert nothing.read_bytes() == header.read_bytes()


def test_the_best_epoch_is_marked_where_it_is(tmp_path: Path) -> None:
    def mark(best: int) -> float:
        rows = [f"{e},{e},0.001,2.0,,2.0,{80 if e == best else 40},1,1" for e in range(1, 41)]
        orange = np.all(pixels(curves(tmp_path, HEADER + "\n".join(rows))) == (0xE6, 0x9F, 0x00), axis=-1)
        return float(np.nonzero(orange)[1].mean()) / orange.shape[1]

    assert 0.5 < mark(2) < mark(20) < mark(39)


def counts(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return rng.poisson(2, (size, size)) + np.diag(rng.poisson(80, size))


@pytest.mark.parametrize("size", [1, 2, 10, 21, 100])
def test_confusion(tmp_path: Path, size: int) -> None:
    names = [f"{i} a class with quite a long $name$" if i % 2 else f"class {i}" for i in range(size)]
    assert looks_drawn(drawn_twice(lambda file: report.confusion(counts(size), names, file), tmp_path))


def matrix(file: Path) -> np.ndarray:
    """The inside of the frame around the matrix, whose dark lines are the longest of the picture."""
    picture = pixels(file)
    dark = np.all(picture < 100, axis=-1)
    rows = np.flatnonzero(dark.sum(axis=1) > 0.5 * picture.shape[1])
    top, bottom = rows[0], rows[-1]
    columns = np.flatnonzero(dark[top : bottom + 1].mean(axis=0) > 0.95)
    left = columns[0]
    right = columns[columns > left + 50][0]  # further to the right stands the frame of the scale
    return picture[top + 4 : bottom - 3, left + 4 : right - 3]


@pytest.mark.parametrize("size", [4, 40, 100])
def test_a_class_without_examples_stays_white(tmp_path: Path, size: int) -> None:
    some = counts(size)
    some[size // 2] = 0
    report.confusion(some, [str(i) for i in range(size)], tmp_path / "c.png")
    inside = matrix(tmp_path / "c.png")
    middle = round((size // 2 + 0.5) / size * len(inside))
    assert np.all(inside[middle] == WHITE)
    # A row of examples without hits is pale, not white.
    other = round((size // 2 - 0.85) / size * len(inside))
    assert not np.any(np.all(inside[other] == WHITE, axis=-1))


def test_nothing_but_empty_classes(tmp_path: Path) -> None:
    report.confusion(np.zeros((3, 3), dtype=int), ["a", "b", "c"], tmp_path / "c.png")
    assert looks_drawn(tmp_path / "c.png")


def test_rows_are_the_truth(tmp_path: Path) -> None:
    report.confusion(np.array([[0, 9], [5, 5]]), ["a", "b"], tmp_path / "c.png")
    inside = matrix(tmp_path / "c.png").mean(axis=-1)
    h, w = inside.shape
    corner = {(r, c): inside[h // 8 + r * h // 2, w // 8 + c * w // 2] for r in (0, 1) for c in (0, 1)}
    assert corner[0, 1] < corner[1, 0] == corner[1, 1] < corner[0, 0]


def test_counts_must_fit_the_classes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 classes"):
        report.confusion(np.zeros((2, 2)), ["a", "b", "c"], tmp_path / "c.png")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Noise in several shapes and modes: wide, tall, tiny, grey, with transparency."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    files = []
    for i in range(30):
        size, mode = [(90, 60), (40, 120), (8, 8)][i % 3], ["RGB", "L", "RGBA", "P"][i % 4]
        noise = Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)
        noise.save(folder / f"{i}.png")
        files.append(folder / f"{i}.png")
    return files


def made(files: list[Path]) -> list[report.Mistake]:
    return [report.Mistake(f, f"truth of {f.stem}", "a long answer " * 4, 0.97 - i / 99) for i, f in enumerate(files)]


@pytest.mark.parametrize("number", [1, 7])
def test_mistakes(tmp_path: Path, photographs: list[Path], number: int) -> None:
    some = made(photographs[:number])
    file = drawn_twice(lambda file: report.mistakes(some, Image.open, file), tmp_path)
    assert looks_drawn(file, least=250)
    height, width, _ = pixels(file).shape
    assert 250 * min(number, 6) < width < 300 * min(number, 6)
    assert 290 * math.ceil(number / 6) < height < 360 * math.ceil(number / 6)


def test_only_the_first_24_mistakes_are_shown(tmp_path: Path, photographs: list[Path]) -> None:
    opened = []

    def open_image(path: Path) -> Image.Image:
        opened.append(path)
        return Image.open(path)

    report.mistakes(made(photographs), open_image, tmp_path / "all.png")
    report.mistakes(made(photographs)[:24], Image.open, tmp_path / "first.png")
    assert opened == photographs[:24]
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "first.png").read_bytes()


def test_no_mistakes(tmp_path: Path) -> None:
    assert looks_drawn(drawn_twice(lambda file: report.mistakes([], Image.open, file), tmp_path))


def test_images_that_do_not_open_are_grey(tmp_path: Path, photographs: list[Path]) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(photographs[0].read_bytes()[:300])
    report.mistakes(made([tmp_path / "gone.jpg", broken]), Image.open, tmp_path / "m.png")
    assert looks_drawn(tmp_path / "m.png", least=250)
    grey = np.all(pixels(tmp_path / "m.png") == 0xD0, axis=-1)
    assert grey.sum() > 2 * 0.8 * 240**2


def test_the_middle_of_an_image_is_shown(tmp_path: Path) -> None:
    wide = Image.new("RGB", (300, 100), (255, 0, 0))
    wide.paste((0, 0, 255), (100, 0, 200, 100))
    report.mistakes([report.Mistake("wide.png", "a", "b", 0.5)], lambda _: wide, tmp_path / "m.png")
    picture = pixels(tmp_path / "m.png")
    assert np.all(picture == (0, 0, 255), axis=-1).sum() > 0.9 * 240**2
    assert not np.any(np.all(picture == (255, 0, 0), axis=-1))


def test_names_may_hold_anything(tmp_path: Path) -> None:
    odd = [report.Mistake("no\nfile \udce9.png", name, "W" * 80, 1.0) for name in ("$x_{", "two\nlines", "\udcff", "")]
    report.mistakes(odd, Image.open, tmp_path / "m.png")
    report.confusion(np.eye(4, dtype=int), [mistake.truth for mistake in odd], tmp_path / "c.png")
    assert looks_drawn(tmp_path / "m.png")
    assert looks_drawn(tmp_path / "c.png")


@pytest.mark.parametrize(
    ("name", "short"),
    [("tabby", "tabby"), ("x" * 24, "x" * 24), ("x" * 25, "x" * 23 + "…"), ("a\nb", "a?b")],
)
def test_names_are_shortened_above_24_letters(name: str, short: str) -> None:
    assert report._shorten(name) == short


def test_no_figure_stays_open(tmp_path: Path, photographs: list[Path]) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    curves(tmp_path, HEADER + lines(3))
    report.confusion(counts(3), ["a", "b", "c"], tmp_path / "c.png")
    report.mistakes(made(photographs[:1]), Image.open, tmp_path / "m.png")
    report.mistakes([], Image.open, tmp_path / "n.png")
    assert plt.get_fignums() == before
