"""Depth first: a band of patch rows goes through all layers before the next one is read.

A layer remembers a state and nothing else: in 1D one for the whole image, in 2D one for each column. So memory does not
grow with the rows of an image, and the numbers are those of the whole image at once.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir.layers.retention import MultiHeadRetention, stretch_decay
from vir.models.vir import SIZES, VisionRetention
from vir.streaming.doubts import doubts
from vir.streaming.positions import Positions
from vir.streaming.readers import Reader, open_reader

Pool = Literal["token", "avg"]
# Of a band, if nobody says how many rows it has: more gains nothing on a CPU, and some speed for as much more memory on
# a GPU, which waits for its host where bands are low.
BAND_TOKENS = {"cpu": 4096, "cuda": 49152}


class CannotStream(ValueError):
    """The model or the image cannot be streamed: why, and what can be done."""


@dataclass(frozen=True)
class Band:
    """Some rows of patches: where they begin, and what the model makes of each patch."""

    top: int
    features: Tensor  # rows cols channels, after the last norm
    scores: Tensor  # rows cols classes, by the model's own head

    @property
    def rows(self) -> int:
        return self.features.shape[0]


class Streamer:
    """A model on its way down one image: bands go in, features and scores come out, states stay."""

    def __init__(
        self,
        model: nn.Module,
        height: int,
        width: int,
        *,
        mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        std: tuple[float, ...] = (0.5, 0.5, 0.5),
        pool: Pool | None = None,
        stretch: float | None = None,
    ) -> None:
        check_model(model)
        assert isinstance(model, VisionRetention)
        if height < 1 or width < 1:
            raise CannotStream(f"the image is {height} x {width} px: expected at least one pixel.")
        self.model, self.stretch = model.eval(), stretch
        self.layers = [layer for layer in model.modules() if isinstance(layer, MultiHeadRetention)]
        weight = model.patch_embed.proj.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.patch = model.patch_embed.patch_size[0]
        self.height, self.width = int(height), int(width)
        self.grid = -(-self.height // self.patch), -(-self.width // self.patch)
        self.pool = _check_pool(model, pool)
        self.positions = None
        if model.pos_embed is not None:
            self.positions = Positions(model.pos_embed, model.patch_embed.grid_size, self.grid)
        self.mean, self.std = (torch.tensor(x, device=self.device) for x in (mean, std))
        self.row = 0  # of patches: how far it has come
        self.states: list[Tensor | None] = [None] * len(model.blocks)
        self.sum = torch.zeros(model.embed_dim, dtype=torch.float64, device=self.device)  # of all patches' features
        with self._own_decay():  # refused here if it cannot be
            pass

    @torch.no_grad()
    def pass_band(self, pixels: np.ndarray | Tensor) -> Band:
        """The next rows of pixels, `height width 3`: a multiple of the patch size, but for the last band."""
        pixels = _as_tensor(pixels) if isinstance(pixels, np.ndarray) else pixels
        top = self.row
        rows = -(-pixels.shape[0] // self.patch)
        self._check_band(pixels, rows)
        x = self._embedded(self._normalized(pixels))
        if self.positions is not None:
            x = x + self.positions.of_rows(top, top + rows)
        with self._own_decay():
            for i, block in enumerate(self.model.blocks):
                x, self.states[i] = block.stream(x, self.grid[1], self.states[i])  # type: ignore[operator]
        x = self.model.norm(x)[0]
        self.sum += x.sum(0, dtype=torch.float64)
        self.row += rows
        features = x.unflatten(0, (rows, self.grid[1]))
        return Band(top, features, self.model.head(features))

    @torch.no_grad()
    def answer(self) -> Tensor:
        """The logits of the whole image, once all of it has passed."""
        if self.row < self.grid[0]:
            raise CannotStream(f"{self.row} of {self.grid[0]} rows of patches have passed: pass the others first.")
        if self.pool == "avg":
            pooled = (self.sum / (self.grid[0] * self.grid[1])).to(self.dtype)
        else:
            x = self.model.cls_token
            with self._own_decay():
                for block, state in zip(self.model.blocks, self.states, strict=True):
                    # In 2D it stands under the last column and sees what that column's state holds.
                    seen = state[:, :, -1:] if state is not None and state.ndim == 5 else state
                    x, _ = block.stream(x, 1, seen)  # type: ignore[operator]
            pooled = self.model.norm(x)[0, 0]
        return self.model.head(pooled)

    @contextmanager
    def _own_decay(self) -> Iterator[None]:
        """As this stream was asked for; between its bands the model has its own again, or another stream's."""
        before = [layer.stretch for layer in self.layers]
        if self.stretch is not None:
            stretch_decay(self.model, self.stretch)
        try:
            yield
        finally:
            for layer, stretch in zip(self.layers, before, strict=True):
                layer.stretch = stretch

    def _normalized(self, pixels: Tensor) -> Tensor:
        largest = 255 if pixels.dtype == torch.uint8 else 65535
        return ((pixels.to(self.device).float() / largest - self.mean) / self.std).to(self.dtype)

    def _embedded(self, image: Tensor) -> Tensor:
        """Patches of `height width 3` by one product: a convolution takes twice as long over a single wide image."""
        patch, proj = self.patch, self.model.patch_embed.proj
        image = F.pad(image, (0, 0, 0, -image.shape[1] % patch, 0, -image.shape[0] % patch))
        patches = image.unflatten(1, (-1, patch)).unflatten(0, (-1, patch)).permute(0, 2, 4, 1, 3)  # y x 3 patch patch
        tokens = F.linear(patches.reshape(1, -1, 3 * patch**2), proj.weight.flatten(1), proj.bias)
        return self.model.patch_embed.norm(tokens)

    def _check_band(self, pixels: Tensor, rows: int) -> None:
        if pixels.ndim != 3 or pixels.shape[2] != 3:
            raise CannotStream(f"a band has shape {tuple(pixels.shape)}, expected rows x {self.width} x 3.")
        if pixels.dtype not in (torch.uint8, torch.uint16):
            raise CannotStream(f"a band has numbers of {pixels.dtype}, expected uint8 or uint16, as files have them.")
        if pixels.shape[1] != self.width:
            raise CannotStream(f"a band is {pixels.shape[1]} px wide, expected {self.width} px, the image's width.")
        end = self.row * self.patch + pixels.shape[0]
        if end > self.height or (end < self.height and pixels.shape[0] % self.patch):
            raise CannotStream(
                f"a band of {pixels.shape[0]} rows of pixels ends at row {end} of {self.height}: expected a multiple "
                f"of {self.patch} rows, and at the end as many as are left."
            )


def check_model(model: nn.Module) -> None:
    names = ", ".join(SIZES)
    if not isinstance(model, VisionRetention):
        raise CannotStream(
            f"{type(model).__name__} cannot stream: expected a ViR as it is, not compiled or wrapped ({names}). HViR's "
            "convolutions and every attention look below a row as well as above it."
        )
    if model.patch_embed.proj.in_channels != 3:
        raise CannotStream(f"a model of {model.patch_embed.proj.in_channels} channels cannot stream: expected 3, RGB.")
    if model.multipass:
        raise CannotStream("ablation='multipass' reads an image backwards as well and cannot stream. Leave it out.")
    size = model.patch_embed.patch_size
    if size[0] != size[1]:
        raise CannotStream(f"patches of {size[0]} x {size[1]} px: expected square ones.")


def _check_pool(model: VisionRetention, pool: Pool | None) -> Pool:
    if pool not in (None, *get_args(Pool)):
        raise CannotStream(f"pool={pool!r}, expected 'token', 'avg', or None for the model's own.")
    if pool == "token" and model.cls_token is None:
        raise CannotStream("pool='token', but this model has no class token: use pool='avg'.")
    if pool is not None:
        return pool
    return "avg" if model.global_pool == "avg" or model.cls_token is None else "token"


def stream(
    model: nn.Module,
    image: Path | str | np.ndarray | Reader,
    *,
    band_rows: int | None = None,
    **options: object,
) -> Iterator[Band | Tensor]:
    """All bands of an image, one after the other, and at the end the logits of the whole.

    `image` is a path, an array of height x width x 3, or a reader: it has `shape` (height, width, ...) and
    `read_rows(start, stop)`. Options are those of `Streamer`; its `stretch` is a power of the decay: old / new patches
    of a side keep what a head sees in proportion to the image. The model is put into evaluation mode.
    """
    if band_rows is not None and band_rows < 1:
        raise CannotStream(f"band_rows={band_rows}, expected at least one row of patches, or None.")
    if isinstance(image, Reader):
        reader = image
    else:
        reader = open_reader(image)
        for doubt in doubts(image):
            warnings.warn(doubt, stacklevel=2)
    streamer = Streamer(model, *reader.shape[:2], **options)  # type: ignore[arg-type]
    rows = band_rows or default_rows(streamer.grid[1], streamer.device.type)
    yield from bands(streamer, reader, rows)
    yield streamer.answer()


def default_rows(cols: int, device: str) -> int:
    return max(1, BAND_TOKENS.get(device, 16384) // cols)


def bands(streamer: Streamer, reader: Reader, rows: int) -> Iterator[Band]:
    """From where the streamer stands to the end. While a band passes, the next one is read."""
    start, step = streamer.row * streamer.patch, rows * streamer.patch
    for pixels in rows_ahead(reader, start, step, streamer.device):
        yield streamer.pass_band(pixels)


def rows_ahead(reader: Reader, start: int, step: int, device: torch.device) -> Iterator[Tensor]:
    """The rows of an image from `start` on, on the device, some at a time: the next ones come while these are used."""
    height = reader.shape[0]
    move = _mover(device)

    def read(top: int) -> Tensor:
        return move(_as_tensor(reader.read_rows(top, min(top + step, height))))

    with ThreadPoolExecutor(1) as ahead:
        waiting = ahead.submit(read, start) if start < height else None
        while waiting is not None:
            pixels, start = waiting.result(), start + step
            waiting = ahead.submit(read, start) if start < height else None
            yield pixels


def _as_tensor(pixels: np.ndarray) -> Tensor:
    if pixels.dtype not in (np.uint8, np.uint16):
        raise CannotStream(f"a band has numbers of {pixels.dtype}, expected uint8 or uint16.")
    # What may not be written to, such as rows of a mapped file, torch would warn of: those few rows are copied. Mapping
    # files for writing instead would count them as memory, however large they are.
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"]))


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    """To a device, from another thread, beside the work that goes on there."""
    if device.type != "cuda":
        return lambda pixels: pixels.to(device)
    work, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def move(pixels: Tensor) -> Tensor:
        held = pixels.pin_memory()  # from where the device fetches it by itself
        with torch.cuda.stream(beside):
            moved = held.to(device, non_blocking=True)
        beside.synchronize()
        moved.record_stream(work)  # so that its memory is not used again too soon
        return moved

    return move
