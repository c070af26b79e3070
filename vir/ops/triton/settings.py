"""Launch settings, so that no search runs at the first call. They were measured on an H200, nearly all of them by
`python -m vir.bench.tune`: those with a limit of registers, or with four stages, by hand, among the candidates
that it has now, and those of NUMBER_BY_NUMBER by hand as well."""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

Schedule = tuple[int, int, int | None]  # warps, stages of the pipeline of loads, limit of registers

MOST_SEGMENTS = 64  # of a sequence: joining them is work that grows with their number
LEAST_CHUNKS = 2  # of a segment
MANY_CHUNKS = 8  # of a segment: from there on a multiprocessor has two at a time
MOST_TILES = 4  # of a grid that does without states at corners
MANY_GRIDS = 4  # for each multiprocessor: from there on a program has several tiles
MANY_TILES = 16  # for each multiprocessor: fewer do not take as long as the host needs to describe boxes
AHEAD = 256  # programs, by which states of tiles are made before they are seen; twice as many before they are joined
MOST_ADDED = 12  # pieces of states: a walk adds them up where it begins, without a launch in between
STATES_AT_ONCE = 3  # programs to a multiprocessor that make states
WORTHWHILE = 750  # tokens of a walk that segments must save: they cost a launch or two


@dataclass(frozen=True)
class Launch:
    """Tokens of a chunk; warps of a program; stages of the pipeline of loads; limit of registers; how many programs a
    multiprocessor holds, where each has several images or tiles (that takes registers which some sizes do not have)."""

    chunk: int
    warps: int
    stages: int
    registers: int | None = None
    programs: int | None = None

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
    (16, 2): Launch(64, 4, 3, programs=3),
    (32, 2): Launch(64, 4, 3, programs=2),
    (64, 2): Launch(64, 4, 3, programs=2),
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
    (64, 2): Launch(64, 4, 4),
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
    (32, 2): Tile(8, 8, 8, 4, 3, registers=96),
    (64, 2): Tile(8, 8, 8, 4, 3, registers=128),
    (128, 2): Tile(8, 8, 8, 4, 3),
    (32, 4): Tile(8, 8, 8, 4, 1),
    (64, 4): Tile(4, 8, 4, 4, 2),
    (128, 4): Tile(4, 8, 4, 4, 2),
}
QUADRANT = {  # chunks are tiles of 8 x 8 patches
    (32, 2): Launch(64, 4, 2, registers=128, programs=4),
    (64, 2): Launch(64, 4, 3, registers=168, programs=2),
}

# Instead of lines above for heads that begin where no wide load can (HViR-4's of 49): what is loaded number by number
# takes registers, which the others spill by the kilobyte.
NUMBER_BY_NUMBER: dict[tuple[str, int, int], Launch | Tile] = {
    ("WALK", 64, 2): Launch(64, 8, 2),
    ("WALK", 64, 4): Launch(16, 4, 2),
    ("WALK_BACK", 64, 2): Launch(16, 4, 2),
    ("WIDE", 64, 2): Tile(8, 8, 8, 4, 3),
    ("WIDE", 64, 4): Tile(4, 8, 4, 4, 1),
}
WIDE_LOAD = 8  # numbers, in half precision

# On GPUs of other kinds products hold their operands in registers, and some have 99 KB of shared memory: there, instead
# of lines above that spill hundreds of bytes or do not fit. `vir.bench.offline` shows both; none of these was measured.
LIKE_HOPPER = (9, 10)  # compute capabilities, without what stands after the point
ELSEWHERE: dict[tuple[str, int, int], Launch | Tile] = {
    ("WALK", 16, 2): Launch(64, 4, 3),
    ("WALK", 32, 2): Launch(64, 4, 3),
    ("WALK", 64, 2): Launch(64, 4, 3),
    ("WALK", 128, 2): Launch(32, 8, 1),
    ("WALK", 32, 4): Launch(32, 4, 2),
    ("WALK", 64, 4): Launch(16, 8, 2),
    ("WALK_BACK", 64, 2): Launch(32, 8, 2),
    ("WALK_BACK", 128, 2): Launch(16, 8, 1),
    ("WALK_BACK", 32, 4): Launch(16, 4, 2),
    ("WALK_BACK", 64, 4): Launch(16, 8, 2),
    ("LINES", 64, 4): Launch(32, 4, 2),
    ("LINES", 128, 2): Launch(64, 8, 3),
    ("WIDE", 32, 2): Tile(8, 8, 8, 4, 3),
    ("WIDE", 64, 2): Tile(8, 8, 8, 4, 3),
    ("WIDE", 128, 2): Tile(8, 8, 8, 8, 2),
    ("WIDE", 32, 4): Tile(8, 8, 4, 4, 2),
    ("WIDE", 64, 4): Tile(4, 8, 4, 8, 2),
}
LARGEST_ELSEWHERE = 64  # head size in float32 and float16: a larger state does not fit

TABLES: dict[str, dict] = {
    "WALK": WALK,
    "WALK_BACK": WALK_BACK,
    "LINES": LINES,
    "NARROW": NARROW,
    "WIDE": WIDE,
    "QUADRANT": QUADRANT,
}


@cache
def like_hopper(device: torch.device) -> bool:
    """Whether products read shared memory by themselves, as on the GPU of the tables. The interpreter takes those."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in LIKE_HOPPER


def sized(table: str, block: int, operand_bytes: int, device: torch.device, wide_loads: bool = True) -> Any:
    """The line of a table, Launch or Tile; none where it has no such line."""
    of = min((of for of in TABLES[table] if of[0] >= block and of[1] == operand_bytes), default=None)
    if of is None:
        return None
    usual = TABLES[table][of]
    if not like_hopper(device):
        return ELSEWHERE.get((table, *of), usual)
    return usual if wide_loads else NUMBER_BY_NUMBER.get((table, *of), usual)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; Triton's interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def segments(tokens: int, walks: int, chunk: int, multiprocessors: int) -> tuple[int, int]:
    """Tokens of a segment: the whole sequence if there are walks enough, else so many that the GPU is full. And in how
    many pieces its state is made, each by a program, while a walk can add them up.

    Never more segments than run at once: the time of those left over would be that of all. Making the states of
    segments takes half as long as walking them.
    """
    if walks >= multiprocessors:
        return tokens, 1
    count = 2 * multiprocessors // walks
    if tokens < count * MANY_CHUNKS * chunk:
        count = multiprocessors // walks
    count = min(count, MOST_SEGMENTS, tokens // (LEAST_CHUNKS * chunk))
    if count < 2 or tokens * (1 - 1.5 / count) < WORTHWHILE:
        return tokens, 1
    made = count - 1  # no segment follows the last
    pieces = min(MOST_ADDED // made, STATES_AT_ONCE * multiprocessors // (made * walks))
    pieces = max(1, min(pieces, tokens // (count * MANY_CHUNKS * chunk)))
    return -(-tokens // (count * chunk)) * chunk, pieces


def images_at_once(images: int, heads: int, programs: int, device: torch.device) -> int:
    """Images whose heads have a program each, `programs` to a multiprocessor: the others come after them."""
    return min(images, max(1, programs * processors(device) // heads))


def of_many_tiles(
    tiles: int, images: int, heads: int, block: int, operand_bytes: int, device: torch.device
) -> tuple[Launch, int] | None:
    """For small grids with many tiles in all: the setting, and how many programs share those of a head."""
    set_: Launch | None = sized("QUADRANT", block, operand_bytes, device) if like_hopper(device) else None
    if set_ is None or tiles > MOST_TILES:
        return None
    if images * heads < MANY_GRIDS * processors(device):
        return None
    # Tiles of one place take equally long: without a divisor in common each program comes to all places.
    programs = max(1, (set_.programs or 1) * processors(device) // heads)
    while gcd(programs, tiles) > 1:
        programs -= 1
    return set_, programs


def grid_tile(cols: int, block: int, operand_bytes: int, device: torch.device, wide_loads: bool = True) -> Tile:
    """The tile for a grid: one as wide as the grid, if there is such a tile, needs no corners."""
    wide: Tile = sized("WIDE", block, operand_bytes, device, wide_loads)
    narrow: Tile = sized("NARROW", block, operand_bytes, device, wide_loads)
    return narrow if wide.cols < cols <= narrow.cols else wide
