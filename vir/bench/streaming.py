"""Images of growing height: streamed, in tiles, and at once. Megapixels a second and peak memory."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import nn

from vir.bench.gpu import peak_gpu_memory
from vir.bench.measure import in_a_fresh_process, peak_memory, timing
from vir.layers.retention import set_form
from vir.streaming import Streamer
from vir.streaming.engine import bands, default_rows, rows_ahead

TILE = 1024  # pixels of a side, the usual way with large images
TILES = {"cpu": 2, "cuda": 32}  # at a time
CLASSES = 10  # of the map that is made: as many as of land use, so that the model is measured and not the copying
PERIOD, AT_A_TIME = 997, 4096  # rows of pixels that are made, and that are read without a copy
KINDS = {"S": "small", "B": "base", "L": "large"}


@dataclass(frozen=True)
class Row:
    contender: str
    height: int
    width: int
    megapixels_per_second: float | None
    peak_bytes: int | None  # beyond the weights
    spread: float | None = None
    missing: str = ""  # why there is no figure

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MadePixels:
    """An image of any height that is nowhere: its rows come again and again, and reading some of them costs nothing."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = height, width, 3
        rows = np.random.default_rng(0).integers(0, 255, (PERIOD, width, 3), dtype=np.uint8)
        self.rows = np.resize(rows, (PERIOD + min(height, AT_A_TIME), width, 3))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        if stop - start <= len(self.rows) - PERIOD:
            return self.rows[start % PERIOD :][: stop - start]
        return self.rows[np.arange(start, stop) % PERIOD]


Run = Callable[[nn.Module, MadePixels, torch.device, torch.dtype], None]


def streamed(
    model: nn.Module, image: MadePixels, device: torch.device, dtype: torch.dtype, rows: int | None = None
) -> None:
    streamer = Streamer(model, *image.shape[:2])
    for band in bands(streamer, image, rows or default_rows(streamer.grid[1], device.type)):
        band.scores.float().cpu()
        del band  # else it is held while the next one passes
    streamer.answer().cpu()


@torch.inference_mode()
def in_tiles(model: nn.Module, image: MadePixels, device: torch.device, dtype: torch.dtype) -> None:
    """Each tile for itself: nothing is seen beyond its border. Rows are read ahead, and cut where the model is."""
    height, width, _ = image.shape
    waiting: list[torch.Tensor] = []
    for i, rows in enumerate(rows_ahead(image, 0, TILE, device)):
        last = (i + 1) * TILE >= height
        missing = _to_a_tile(width), _to_a_tile(height) if last else 0
        waiting += F.pad(rows, (0, 0, 0, missing[0], 0, missing[1])).split(TILE, 1)
        while waiting and (last or len(waiting) >= TILES[device.type]):
            some, waiting = waiting[: TILES[device.type]], waiting[TILES[device.type] :]
            x = _normalized(torch.stack(some), dtype)
            model.head(model.forward_features(x)).float().cpu()  # type: ignore[operator]


def _to_a_tile(side: int) -> int:
    """What is missing to whole tiles; an image that is smaller than a tile stays as it is."""
    return -side % TILE if side > TILE else 0


@torch.inference_mode()
def at_once(model: nn.Module, image: MadePixels, device: torch.device, dtype: torch.dtype) -> None:
    pixels = torch.from_numpy(image.read_rows(0, image.shape[0]))[None].to(device)
    model(_normalized(pixels, dtype)).cpu()


def _normalized(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return ((pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).to(dtype)


def contenders(kind: str, band_rows: int | None = None) -> dict[str, tuple[Callable[[], nn.Module], Run]]:
    """Models and ways to show them an image; bands have so many rows of patches, or as many as they usually have."""
    name = KINDS[kind]
    in_bands = partial(streamed, rows=band_rows)

    def vir(**options: Any) -> nn.Module:
        return timm.create_model(f"vir_{name}_patch16_224", num_classes=CLASSES, **options)

    def parallel() -> nn.Module:
        model = vir()
        set_form(model, "parallel")
        return model

    label = f"{kind}/16"
    vit = f"vit_{name}_patch16_224"
    return {
        f"ViR-{label} 1D streamed": (vir, in_bands),
        f"ViR-{label} 2D streamed": (lambda: vir(retention="2d"), in_bands),
        f"ViR-{label} 1D in tiles": (lambda: vir(img_size=TILE), in_tiles),
        f"ViR-{label} 2D in tiles": (lambda: vir(img_size=TILE, retention="2d"), in_tiles),
        f"ViR-{label} 1D parallel, at once": (parallel, at_once),
        f"ViT-{label} at once": (lambda: timm.create_model(vit, num_classes=CLASSES, dynamic_img_size=True), at_once),
    }


class Racer:
    """A contender on its way from the lowest image to the highest, until one is too large or takes too long."""

    def __init__(self, name: str, call: Callable[[MadePixels], None], quadratic: bool) -> None:
        self.name, self.call, self.quadratic = name, call, quadratic
        self.last: tuple[int, float] | None = None  # height and seconds
        self.missing = ""

    def foretell(self, height: int, patience: float) -> None:
        if self.last is not None and self.last[1] * (height / self.last[0]) ** (2 if self.quadratic else 1) > patience:
            self.missing = self.missing or "too slow"

    def run(self, image: MadePixels) -> float:
        start = perf_counter()
        try:
            self.call(image)
        except (torch.OutOfMemoryError, MemoryError):
            self.missing = "out of memory"
        except RuntimeError as error:
            if "alloc" not in str(error):  # a CPU's allocator has no error of its own
                raise
            self.missing = "out of memory"
        self.last = image.shape[0], perf_counter() - start
        return self.last[1]


def compare(
    kind: str,
    heights: list[int],
    width: int,
    device: torch.device,
    patience: float,
    repeats: int = 3,
    band_rows: int | None = None,
    say: Callable[[str], None] = lambda step: None,
) -> Iterator[Row]:
    """Image by image from the lowest; all contenders in turn, so that a busy machine slows them alike."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    measure = peak_of if device.type == "cuda" else partial(in_a_fresh_process, peak_of)
    racers = []
    for name, (make, run) in contenders(kind, band_rows).items():
        call = partial(_run, run, make().to(device, dtype).eval(), device, dtype)
        call(MadePixels(min(TILE, *heights), width))  # warms up
        racers.append(Racer(name, call, run is at_once))
    for height in sorted(heights):
        image = MadePixels(height, width)
        seconds: dict[str, list[float]] = {racer.name: [] for racer in racers}
        for racer in racers:
            racer.foretell(height, patience)
        warm_up = -1 if device.type == "cuda" else 0  # a turn that compiles kernels for bands of this height
        for turn in range(warm_up, repeats):
            first = turn % len(racers)
            for racer in racers[first:] + racers[:first]:
                slow = bool(seconds[racer.name]) and seconds[racer.name][-1] > patience  # once is enough
                if not racer.missing and not slow:
                    say(f"{racer.name}, {height:,} x {width:,} px, {turn + 1} of {repeats}")
                    took = racer.run(image)
                    if turn >= 0 or took > patience:
                        seconds[racer.name].append(took)
        for racer in racers:
            if racer.missing:
                yield Row(racer.name, height, width, None, None, missing=racer.missing)
                continue
            time = timing(seconds[racer.name])
            say(f"memory of {racer.name}, {height:,} x {width:,} px")
            peak = measure(kind, racer.name, height, width, device, band_rows)
            yield Row(racer.name, height, width, height * width / 1e6 / time.median, peak, time.spread)


def _run(run: Run, model: nn.Module, device: torch.device, dtype: torch.dtype, image: MadePixels) -> None:
    run(model, image, device, dtype)


def peak_of(
    kind: str, name: str, height: int, width: int, device: torch.device, band_rows: int | None = None
) -> int | None:
    make, run = contenders(kind, band_rows)[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make().to(device, dtype).eval()
    run(model, MadePixels(TILE, width), device, dtype)  # libraries take their memory
    call = partial(run, model, MadePixels(height, width), device, dtype)
    return peak_gpu_memory(call) if device.type == "cuda" else peak_memory(call)
