"""The tables of the documents are those of their figures, and say what the figures say."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vir.bench.tables import MARKED, NoTable, parser, refreshed, told

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = ("README.md", "RESULTS.md", "results/earlier/README.md")
BASE = "results/models_B.json results/models_B_large.json"
ALL = ()  # lines of a table
ORIGIN = {"hardware": "some GPU", "commit": "abc1234"}


def run_of(**speeds: float | None) -> list[dict[str, Any]]:
    return [
        {
            "family": "B", "model": {"ViT": "ViT-B/16", "ceiling": "ceiling B/16"}.get(name, f"ViR-B/16 {name[-2:]}"),
            "size": [1024, 1024], "batch": 16, "mode": "inference", "how": "eager", "images_per_second": speed,
            "spread": 0.01, "repeats": 5, "peak_bytes": 2 * 10**9 if speed else None,
            "missing": "" if speed else "out of memory",
        }
        for name, speed in speeds.items()
    ]  # fmt: skip


def table_of(rows: list[dict[str, Any]], folder: Path, *arguments: str) -> str:
    file = folder / "figures.json"
    file.write_text(json.dumps({"origin": ORIGIN, "rows": rows}))
    return told(parser().parse_args([str(file), *arguments]))


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n\n")[0].splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_those_of_the_figures(document: str) -> None:
    """If not: python -m vir.bench.tables --into README.md --into RESULTS.md --into results/earlier/README.md."""
    text = (ROOT / document).read_text()
    assert text.count("<!-- tables ") == text.count("<!-- end -->") == len(MARKED.findall(text)) > 0
    assert refreshed(ROOT / document) == text


@pytest.mark.parametrize(
    ("asked", "arguments", "head", "lines"),
    [
        ("1D forward, six", "results/operators.json --only 1D", "1D", ALL),
        ("1D forward, each", "results/operators.json --only 1D", "best of fla / 1D", ALL),
        ("2D forward, six", "results/operators.json --only 2D", "2D", ALL),
        ("ViR-B/16 in 1D, times", BASE, "1D / ViT", (0, 2, 3, 4)),
        ("ViR-B/16 of its ceiling", BASE, "1D / ceiling", ALL),
        ("the same in 2D", BASE, "2D / ceiling", ALL),
        ("HViR-0, -1, -2", "results/hvir_224.json", "of its ceiling", (0, 1, 2)),
        ("512 px", "results/hvir_512.json", "of its ceiling", (0, 1, 2)),
        ("800 x 1280", "results/hvir_800x1280.json", "of its ceiling", (0, 1, 2)),
    ],
)
def test_targets_are_compared_with_the_figures(asked: str, arguments: str, head: str, lines: Sequence[int]) -> None:
    (line,) = re.findall(rf"^\| {re.escape(asked)}.*? \| (.*?) \|", (ROOT / "RESULTS.md").read_text(), re.M)
    heads, _, *table = cells(told(parser().parse_args(arguments.split()), ROOT))
    want = [row[heads.index(head)].strip("*") for row in table]
    assert line.replace("*", "").split(", ") == [want[at] for at in lines or range(len(want))]


def test_a_changed_number_is_made_right(tmp_path: Path) -> None:
    """By figures that lie beside the document, wherever the command runs."""
    text = (ROOT / "README.md").read_text()
    (tmp_path / "results").symlink_to(ROOT / "results")
    changed = tmp_path / "README.md"
    changed.write_text(re.sub(r"\| \d+\.\d\d times \|", "| 99.99 times |", text, count=1))
    assert "99.99" in changed.read_text()
    assert refreshed(changed) == text


def test_models(tmp_path: Path) -> None:
    table = table_of(run_of(ViT=100.0, k1D=180.0, k2D=150.0, ceiling=200.0), tmp_path)
    heads, _, line = cells(table)
    assert dict(zip(heads, line, strict=True)) == {
        "px": "1024", "batch": "16", "ViT, images/s": "100.0", "1D": "180.0", "2D": "150.0", "1D / ViT": "1.80",
        "2D / ViT": "1.50", "1D / ceiling": "0.900", "2D / ceiling": "0.750",
        "peak memory: ViT, 1D, 2D": "2.00, 2.00, 2.00 GB",
    }  # fmt: skip
    assert table.endswith(": inference, eager, hardware some GPU, commit abc1234.")


@pytest.mark.parametrize("unsure", [{"spread": 0.06}, {"repeats": 1}])
def test_what_is_unsure_is_marked(unsure: dict[str, Any], tmp_path: Path) -> None:
    rows = run_of(ViT=100.0, k1D=180.0, ceiling=200.0)
    rows[0] |= unsure
    table = table_of(rows, tmp_path)
    assert cells(table)[2][2:6] == ["~100.0", "180.0", "~1.80", "0.900"]
    assert "spread above 5 %" in table


def test_hierarchical_models_stand_beside_those_of_their_size(tmp_path: Path) -> None:
    rows = [
        {**run_of(k1D=speed)[0], "family": "HViR", "model": name, "size": [px, 2 * px]}
        for px, speeds in ((64, (300.0, 400.0, 200.0)), (128, (60.0, 100.0, 50.0)))
        for name, speed in zip(("hvir_0", "hvir_0 ceiling", "convnext_tiny"), speeds, strict=True)
    ]
    heads, _, *lines = cells(table_of(rows, tmp_path))
    assert heads == ["model", "px", "batch", "images/s", "times ConvNeXt-T", "of its ceiling", "peak memory"]
    assert [line[:2] + line[3:6] for line in lines] == [
        ["hvir_0", "64 x 128", "300.0", "1.50", "0.750"],
        ["convnext_tiny", "64 x 128", "200.0", "1.00", ""],
        ["hvir_0", "128 x 256", "60.0", "1.20", "0.600"],
        ["convnext_tiny", "128 x 256", "50.0", "1.00", ""],
    ]


def test_what_did_not_fit_is_told(tmp_path: Path) -> None:
    line = cells(table_of(run_of(ViT=None, k1D=180.0, ceiling=200.0), tmp_path))[2]
    assert line[2:6] == ["out of memory", "180.0", "", "0.900"]
    assert cells(table_of(run_of(ViT=None, k1D=None), tmp_path))[2][2:] == ["out of memory"] * 2 + [""] * 3


def test_the_best_of_fla_counts(tmp_path: Path) -> None:
    times = {"attention": 4.0, "fla chunk": 0.5, "fla parallel": 0.3, "kernel 1D": 0.2, "kernel 2D": 0.25}
    row = {"tokens": 4096, "batch": 1, "limit": 0.1, "spread": 0.0, "forward": times, "backward": times}
    assert cells(table_of([row], tmp_path, "--only", "1D"))[2][3:6] == ["0.300", "**0.200**", "1.50"]
    assert cells(table_of([row], tmp_path, "--only", "2D"))[2][3:6] == ["4.00", "**0.250**", "16.00"]


def test_what_is_not_one_kind_of_figures_is_refused(tmp_path: Path) -> None:
    rows = run_of(ViT=100.0, k1D=180.0)
    with pytest.raises(NoTable, match="inference, compiled, inference, eager"):
        table_of([rows[0], rows[1] | {"how": "compiled"}], tmp_path)
    with pytest.raises(NoTable, match="nothing"):
        table_of(rows, tmp_path, "--px", "3")
    command = [sys.executable, "-m", "vir.bench.tables", str(tmp_path / "none.json")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "none.json is not what vir bench" in run.stderr


def test_every_file_of_results_is_named() -> None:
    told = "".join((ROOT / name).read_text() for name in (*DOCUMENTS, "results/README.md", "results/LIMITS.md"))
    files = [file.name for file in (ROOT / "results").rglob("*") if file.suffix != ".md" and file.is_file()]
    assert [name for name in files if name not in told] == []
