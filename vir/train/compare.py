"""Several trainings in one picture: do they learn the same, and which learns better?"""

from pathlib import Path

from vir.train.history import SCORES, Row, points_of, read_log
from vir.viz.style import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION, CannotDraw, caption, figure_to

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, SKY, GREY)
LINES = ("-", "--", ":", "-.")  # runs that lie on each other are still seen, and more runs than colours told apart


def draw_curves(file: Path, runs: list[Path]) -> dict[str, float]:
    """Losses and scores by epoch; returns the best score of every run, by its name."""
    named = {name: _read(run) for name, run in zip(_names(runs), runs, strict=True)}
    score = _common_score(named)
    with figure_to(file, 10, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        for number, (name, rows) in enumerate(named.items()):
            look = {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)], "label": name}
            for panel, column in ((left, "loss"), (right, score)):
                if points := points_of(rows, column):
                    marker = "o" if len(points) <= 30 else ""
                    panel.plot(*zip(*points, strict=True), **look, marker=marker, markersize=3)
        left.set(xlabel="epoch", ylabel="training loss")
        right.set(xlabel="epoch", ylabel=f"{SCORES[score]} (%)")
        for panel in (left, right):
            panel.grid()
            panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        left.legend()
        caption(figure, "Every run by its own log; scores are seen in the epochs that were judged.")
    return {name: max(y for _, y in points_of(rows, score)) for name, rows in named.items()}


def _read(run: Path) -> list[Row]:
    log = run / "log.csv" if run.is_dir() else run
    if not log.is_file():
        raise CannotDraw(f"{run} holds no log: expected the folder of a training, with its log.csv, or such a file.")
    rows = read_log(log)
    if not rows:
        raise CannotDraw(f"{log} has no complete epoch of a training: wait for the first, or leave it out.")
    return rows


def _names(runs: list[Path]) -> list[str]:
    """Short ones: of the folder or the file, with as much of the path as it takes to tell them apart."""
    for parts in range(1, max(len(run.parts) for run in runs) + 1):
        names = ["/".join(run.with_suffix("").parts[-parts:]) for run in runs]
        if len(set(names)) == len(runs):
            return names
    raise CannotDraw("a run is named twice: name each once.")


def _common_score(named: dict[str, list[Row]]) -> str:
    for score in SCORES:
        if all(points_of(rows, score) for rows in named.values()):
            return score
    raise CannotDraw(
        f"{', '.join(named)} have no score in common: expected runs of one task, each judged at least once."
    )
