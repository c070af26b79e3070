"""What a run tells: a live bar for people, plain lines for files, CSV and TensorBoard for later."""

import csv
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

COLUMNS = ("epoch", "step", "lr", "loss", "train_top1")
LAST_COLUMNS = ("images_per_second", "seconds")
QUIET_SECONDS = 60.0  # between plain lines inside an epoch


class Log:
    """Writes one row per epoch; rows of epochs that a resumed run does again are dropped first."""

    def __init__(self, folder: Path, first_epoch: int, measures: tuple[str, ...]) -> None:
        self.columns = (*COLUMNS, *measures, *LAST_COLUMNS)
        self.file = folder / "log.csv"
        self.rows = [row for row in self._known() if int(row["epoch"]) <= first_epoch]
        self._write_all()
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_epoch + 1)

    def _known(self) -> list[dict[str, str]]:
        if not self.file.exists():
            return []
        with self.file.open(newline="") as lines:
            return [row for row in csv.DictReader(lines) if None not in row.values() and row["epoch"].isdigit()]

    def _write_all(self) -> None:
        with self.file.open("w", newline="") as out:
            writer = csv.DictWriter(out, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def add(self, row: dict[str, float | int | None]) -> None:
        written = {name: "" if row.get(name) is None else row[name] for name in self.columns}
        with self.file.open("a", newline="") as out:
            csv.DictWriter(out, self.columns).writerow(written)
        for name, value in row.items():
            if value is not None and name != "epoch":
                self.board.add_scalar(name, value, int(row["epoch"] or 0))
        self.board.flush()

    def close(self) -> None:
        self.board.close()


class Told:
    """Progress of a run: a live bar on a terminal, lines in a file; nothing on any process but the first."""

    def __init__(self, console: Console, steps: int, silent: bool) -> None:
        self.console = console
        self.silent = silent
        self.live = console.is_terminal and not silent
        self.last_line = time.monotonic()
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self.progress = Progress(*columns, console=console, disable=not self.live)
        self.task = self.progress.add_task("", total=steps, state="")

    def __enter__(self) -> "Told":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def step(self, done: int, epoch: str, state: str) -> None:
        self.progress.update(self.task, completed=done, description=epoch, state=state)
        if not self.live and not self.silent and time.monotonic() - self.last_line > QUIET_SECONDS:
            self.line(f"{epoch}: {state}")

    def line(self, text: str) -> None:
        """A line that stays."""
        if not self.silent:
            self.last_line = time.monotonic()
            self.progress.console.print(text, highlight=False, markup=False)
