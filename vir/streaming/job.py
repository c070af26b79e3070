"""One image from the first row to the last, written as it comes; killed at any moment, it goes on."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from vir.streaming.engine import CannotStream, Streamer, bands
from vir.streaming.maps import RowFile
from vir.streaming.readers import Reader

PROGRESS = "progress.npz"
RECORD = "run.json"  # of what the results are
ANSWER, MAP = "answer.json", "map.png"
SCORES, FEATURES = "scores.npy", "features.npy"
RESULTS = (ANSWER, MAP, SCORES, FEATURES)
SAVE_SECONDS = 10.0


@dataclass(frozen=True)
class Done:
    """How far a run has come."""

    rows: int  # of pixels
    pixels: int  # since it was started
    seconds: float


class Job:
    def __init__(
        self,
        streamer: Streamer,
        reader: Reader,
        rows: int,
        out: Path,
        identity: dict[str, Any],
        *,
        resume: bool = False,
        restart: bool = False,
        features: bool = False,
        image: Path | None = None,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self.streamer, self.reader, self.out = streamer, reader, out
        self.save_seconds = save_seconds
        self.identity = {**identity, "rows": rows, "features": features, "pool": streamer.pool}
        self.file = out / PROGRESS
        if not out.is_dir() and (out.exists() or out.is_symlink()):
            raise CannotStream(f"{out} is a file, expected a folder for the results: choose another --out.")
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._check_strangers(image)
            unfinished = self._prepare(resume, restart)
            self.rows = self.identity["rows"]
            # Told before it is written: what a kill leaves is known to be ours.
            (out / RECORD).write_text(json.dumps(self.identity))
            self.maps = self._open_maps(again=unfinished)
        except OSError as error:
            raise CannotStream(f"{error}. Results cannot be written to {out}: choose another --out.") from error

    def _prepare(self, resume: bool, restart: bool) -> bool:
        """Whether to go on with an unfinished run; if not, the folder is made ready for results of one image alone."""
        unfinished = self.file.exists() and not restart
        if unfinished and not resume:
            raise CannotStream(f"{self.out} holds an unfinished run: --resume goes on with it, --restart begins again.")
        if resume and not self.file.exists():
            raise CannotStream(f"{self.out} holds no unfinished run to go on with: leave --resume out.")
        if unfinished:
            self._restore()
            return True
        if not restart:
            self._check_earlier()
        for name in RESULTS if restart else (ANSWER,):
            (self.out / name).unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)
        return False

    def _check_strangers(self, image: Path | None) -> None:
        """The image itself, and files that have the name of a result and are of no run, are never overwritten."""
        there = [name for name in RESULTS if (self.out / name).exists()]
        if image is not None and any(image.samefile(self.out / name) for name in there):
            raise CannotStream(f"a result would take the place of {image} itself: choose another --out.")
        if there and not (self.out / RECORD).exists() and not self.file.exists():
            raise CannotStream(
                f"{self.out} holds {' and '.join(there)} and no {RECORD}, which every run leaves beside its results: "
                "they may be something else. Choose another --out."
            )

    def _check_earlier(self) -> None:
        """Results of the same image and settings may be written again; others are neither lost nor mixed with these."""
        if not any((self.out / name).exists() for name in RESULTS):
            return
        try:
            theirs = json.loads((self.out / RECORD).read_text())
            # Other bands only round otherwise, and features may be added, but old ones would stay beside the new map.
            alike = ("rows", "features") if self.identity["features"] else ("rows",)
            different = [name for name in self._different(theirs) if name not in alike]
            whose = f"with another {' and '.join(different)}" if different else ""
        except (ValueError, AttributeError):
            whose = f"whose {RECORD} is not readable"
        if whose:
            raise CannotStream(
                f"{self.out} holds results of a run {whose}: choose another --out, or remove them by --restart."
            )

    def _different(self, theirs: dict[str, Any]) -> list[str]:
        return [name for name, value in self.identity.items() if json.loads(json.dumps(value)) != theirs.get(name)]

    def _open_maps(self, again: bool) -> dict[str, RowFile]:
        rows, cols = self.streamer.grid
        sizes = {SCORES: self.streamer.model.num_classes}
        if self.identity["features"]:
            sizes[FEATURES] = self.streamer.model.embed_dim
        try:
            return {name: RowFile(self.out / name, (rows, cols, size), again) for name, size in sizes.items() if size}
        except (FileNotFoundError, ValueError) as error:
            raise CannotStream(
                f"{self.out} holds an unfinished run whose files are not whole ({error}): begin again with --restart."
            ) from None

    def run(
        self, say: Callable[[Done], None] = lambda done: None, stop: Callable[[], bool] = lambda: False
    ) -> Tensor | None:
        """The logits of the whole image; everything else is in files by then. None if `stop` ended it between bands.

        An error in the middle of a band leaves the states of some layers ahead of the others: nothing is saved then,
        and the last save holds.
        """
        began, saved, first = time.monotonic(), time.monotonic(), self.streamer.row
        try:
            for band in bands(self.streamer, self.reader, self.rows):
                made = {SCORES: band.scores, FEATURES: band.features}
                for name, map_ in self.maps.items():
                    map_.write(band.top, made[name].float().cpu().numpy())
                del band, made  # else they are held while the next band passes
                height = min(self.streamer.row * self.streamer.patch, self.streamer.height)
                pixels = (height - first * self.streamer.patch) * self.streamer.width
                say(Done(height, pixels, time.monotonic() - began))
                stopped = stop() and height < self.streamer.height
                if stopped or time.monotonic() - saved >= self.save_seconds:
                    self._save()
                    saved = time.monotonic()
                if stopped:
                    return None
        except OSError as error:
            raise CannotStream(
                f"{error}. What was written and saved before is kept in {self.out}: make room and go on with --resume."
            ) from error
        finally:
            for map_ in self.maps.values():
                map_.close()
        logits = self.streamer.answer()
        self.streamer.states = [None] * len(self.streamer.states)  # what follows has the memory to itself
        self.file.unlink(missing_ok=True)
        return logits

    def _save(self) -> None:
        """What the maps hold by now lies in their files already, so that the place never runs ahead of them."""
        header = json.dumps({"row": self.streamer.row, "identity": self.identity})
        arrays: dict[str, Any] = {
            f"state_{i}": x.cpu().numpy() for i, x in enumerate(self.streamer.states) if x is not None
        }  # fmt: skip
        arrays |= {"header": np.array(header), "sum": self.streamer.sum.cpu().numpy()}
        beside = self.file.with_name(f".{self.file.name}")
        with beside.open("wb") as out:  # one array after the other: no second copy of all states in memory
            np.savez(out, **arrays)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, self.file)

    def _restore(self) -> None:
        try:
            saved = np.load(self.file, allow_pickle=False)
            header = json.loads(str(saved["header"]))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise CannotStream(f"{self.file} is not a saved run ({error}): begin again with --restart.") from None
        theirs = header["identity"]
        self.identity["rows"] = theirs["rows"]  # other bands would round otherwise
        if different := self._different(theirs):
            raise CannotStream(
                f"{self.out} holds an unfinished run with another {' and '.join(different)}: choose another --out, or "
                "begin again with --restart."
            )
        device = self.streamer.device
        self.streamer.row = header["row"]
        self.streamer.sum = torch.from_numpy(saved["sum"]).to(device)
        for i in range(len(self.streamer.states)):
            self.streamer.states[i] = torch.from_numpy(saved[f"state_{i}"]).to(device)


def identity_of(image: Path, model: torch.nn.Module, name: str, stretch: float) -> dict[str, Any]:
    """What must not change between a run and the one that goes on with it."""
    state = image.stat()
    weight = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
    return {
        "image": [image.name, state.st_size, state.st_mtime_ns], "model": [name, weight], "decay": stretch,
        "device": next(model.parameters()).device.type,
    }  # fmt: skip
