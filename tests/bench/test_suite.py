"""All benchmarks in one command: each run is a command that exists, is kept, and is told."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
import typer
from typer.testing import CliRunner

from vir.bench import suite
from vir.bench.models import HIERARCHICAL, SIZES
from vir.cli import app

run = CliRunner().invoke
KEPT = Path(__file__).parent.parent.parent / "results"


@pytest.fixture
def of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suite.RUNS, "wrong", suite.Run("ops --shape 3", "nothing"))
    monkeypatch.setattr("vir.cli.bench_suite.need_gpu", lambda command: None)
    monkeypatch.setattr("vir.cli.bench_suite.origin_of", lambda device, dtype: {"hardware": "some CPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", suite.RUNS)
def test_runs_are_commands_that_exist(name: str, tmp_path: Path) -> None:
    _, kind, *arguments = suite.command(name, tmp_path)
    group = typer.main.get_command(app)
    command = group.commands["bench"].commands[kind]
    given = command.make_context(kind, list(arguments)).params
    known = HIERARCHICAL if kind == "hvir" else tuple(SIZES)
    asked = [given.get("kind"), *(given.get("kinds") or ()), *(given.get("names") or ())]
    assert set(asked) - {None} <= set(known)
    assert all(map(timm.is_model, given.get("peers") or ()))
    assert {given["out"].parent, given["plot"].parent} == {tmp_path}


def test_runs_are_listed() -> None:
    shown = run(app, ["bench", "all", "--dry-run"], terminal_width=200).stdout
    assert all(name in shown for name in suite.RUNS)
    result = run(app, ["bench", "all", "--only", "speed"])
    assert result.exit_code == 2
    assert "expected one of operators" in " ".join(result.output.split())


@pytest.mark.usefixtures("of_a_cpu")
def test_a_run_is_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that draws what was measured before: to measure takes minutes, or a GPU."""
    folder = tmp_path / "figures"
    folder.mkdir()
    shutil.copy(KEPT / "stream_gpu.json", folder / "stream.unfinished.json")
    drawn = ["bench", "draw", str(KEPT / "stream_gpu.json"), "--out", str(folder / "stream.png")]
    monkeypatch.setattr(suite, "command", lambda name, folder: drawn)
    result = run(app, ["bench", "all", "--only", "stream", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in folder.iterdir()) == ["report.md", "stream.json", "stream.png"]
    told = (folder / "report.md").read_text()
    assert "`vir bench stream --patience 4`" in told
    assert "![streams against tiles and whole images](stream.png)" in told


@pytest.mark.usefixtures("of_a_cpu")
def test_what_is_of_this_machine_and_code_is_left(tmp_path: Path) -> None:
    figures = tmp_path / "stream.json"
    for theirs, kept in (({"hardware": "some CPU", "date": "long ago"}, True), ({"hardware": "another"}, False)):
        figures.write_text(json.dumps({"origin": theirs, "rows": []}))
        assert suite.finished("stream", tmp_path, {"hardware": "some CPU", "date": "today"}) is kept
    figures.write_text("{")
    assert not suite.finished("stream", tmp_path, {})
    figures.write_text(json.dumps({"origin": {"hardware": "some CPU"}, "rows": []}))
    shown = run(app, ["bench", "all", "--only", "stream", "--out", str(tmp_path)])
    assert "stream: is there already" in shown.stdout
    assert json.loads(figures.read_text())["rows"] == []
    assert "## stream" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("of_a_cpu")
def test_a_run_that_fails_is_told_and_leaves_the_figures(tmp_path: Path) -> None:
    result = run(app, ["bench", "all", "--only", "wrong", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "did not end well: wrong" in result.output
    assert not (tmp_path / "wrong.json").exists()


def test_figures_of_another_version_cost_their_table_alone(tmp_path: Path) -> None:
    shutil.copy(KEPT / "models_L_128.json", tmp_path / "models_L.json")
    (tmp_path / "operators.json").write_text("{")
    (tmp_path / "models_S.json").write_text(json.dumps({"origin": {}, "rows": [{"family": "S", "compiled": False}]}))
    told = suite.report(suite.RUNS, tmp_path)
    assert "[models_L.json](models_L.json): inference" in told
    for name in ("operators", "models_S"):
        assert f"{name}.json is not what vir bench" in told
        assert f"`--only {name} --again`" in told


def test_a_report_has_tables_and_pictures(tmp_path: Path) -> None:
    for name, file in (
        ("operators", "operators.json"),
        ("models_L", "models_L_128.json"),
        ("stream", "stream_gpu.json"),
    ):
        (tmp_path / f"{name}.json").write_text((KEPT / file).read_text())
    (tmp_path / "operators.png").touch()
    told = suite.report(suite.RUNS, tmp_path)
    assert [line for line in told.splitlines() if line.startswith("## ")] == [
        "## operators",
        "## models_L",
        "## stream",
    ]
    assert "| 65,536 | 1 |" in told
    assert "[models_L.json](models_L.json): inference, eager, hardware NVIDIA H200" in told
    assert told.count("![") == 1
