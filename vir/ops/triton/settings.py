"""Launch settings, so that no search runs at the first call: `python -m vir.bench.tune` measured them on an H200."""

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Schedule = tuple[int, int, int | None]  # warps, stages of the pipeline of loads, limit of registers

MOST_SEGMENTS = 64  # of a sequence: joining them is work that grows with their number
LEAST_CHUNKS = 2  # of a segment
MANY_CHUNKS = 8  # of a segment: from there on a multiprocessor has two at a time
WORTHWHILE = 750  # tokens of a walk that segments must save: they cost two more launches


@dataclass(frozen=True)
class Launch:
    """Tokens of a chunk; warps of a program; stages of the pipeline of loads; limit of registers."""

    chunk: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def schedule(self) -> Schedule:
        return self.warps, self.stages, self.registers


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile of queries; rows of a block of keys, which is as wide."""

    rows: int
    cols: int
    height: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def schedule(self) -> Schedule:
        return self.warps, self.stages, self.registers


# (head size, bytes of an operand): a head size stands for those up to it.
WALK = {
    (32, 2): Launch(64, 4, 3),
    (64, 2): Launch(64, 4, 3),
    (128, 2): Launch(32, 4, 3),
    (32, 4): Launch(64, 4, 1),
    (64, 4): Launch(64, 4, 1),
    (128, 4): Launch(16, 8, 2),
}
WALK_BACK = {
    (32, 2): Launch(64, 4, 3),
    (64, 2): Launch(64, 4, 3),
    (128, 2): Launch(64, 8, 3),
    (32, 4): Launch(64, 4, 2),
    (64, 4): Launch(16, 4, 2),
    (128, 4): Launch(16, 8, 2),
}
LINES = {
    (32, 2): Launch(64, 4, 3),
    (64, 2): Launch(64, 4, 3),
    (128, 2): Launch(64, 4, 3),
    (32, 4): Launch(64, 4, 2),
    (64, 4): Launch(64, 4, 2),
    (128, 4): Launch(64, 8, 1),
}
NARROW = {
    (32, 2): Tile(4, 16, 2, 4, 3),
    (64, 2): Tile(4, 16, 2, 4, 3),
    (128, 2): Tile(4, 16, 4, 4, 2),
    (32, 4): Tile(4, 16, 2, 4, 1),
    (64, 4): Tile(2, 16, 2, 4, 2),
    (128, 4): Tile(2, 16, 2, 4, 2),
}
WIDE = {
    (32, 2): Tile(8, 8, 8, 4, 3),
    (64, 2): Tile(8, 8, 8, 4, 3),
    (128, 2): Tile(8, 8, 8, 4, 3),
    (32, 4): Tile(8, 8, 8, 4, 1),
    (64, 4): Tile(4, 8, 4, 4, 2),
    (128, 4): Tile(4, 8, 4, 4, 2),
}


def sized(table: dict[tuple[int, int], T], block: int, operand_bytes: int) -> T:
    return table[max(block, 32), operand_bytes]


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; Triton's interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def segment_length(tokens: int, walks: int, chunk: int, multiprocessors: int) -> int:
    """Tokens of a segment: the whole sequence if there are walks enough, else so many that the GPU is full.

    Never more segments than run at once: the time of those left over would be that of all. Making the states of
    segments takes half as long as walking them.
    """
    if walks >= multiprocessors:
        return tokens
    segments = 2 * multiprocessors // walks
    if tokens < segments * MANY_CHUNKS * chunk:
        segments = multiprocessors // walks
    segments = min(segments, MOST_SEGMENTS, tokens // (LEAST_CHUNKS * chunk))
    if segments < 2 or tokens * (1 - 1.5 / segments) < WORTHWHILE:
        return tokens
    return -(-tokens // (segments * chunk)) * chunk


def grid_tile(cols: int, block: int, operand_bytes: int) -> Tile:
    """The tile for a grid: one as wide as the grid, if there is such a tile, needs no corners."""
    wide = sized(WIDE, block, operand_bytes)
    narrow = sized(NARROW, block, operand_bytes)
    return narrow if wide.cols < cols <= narrow.cols else wide
