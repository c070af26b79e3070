"""Which form runs: one rule and one table for each kind of retention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vir.ops import checks, forms_1d, forms_2d

Form = Literal["auto", "parallel", "recurrent", "scan", "chunkwise"]
FORMS_1D: tuple[Form, ...] = ("auto", "parallel", "recurrent", "chunkwise")
FORMS_2D: tuple[Form, ...] = ("auto", "parallel", "recurrent", "scan", "chunkwise")

CHUNK_TOKENS = 64  # of a chunk in 1D, unless the caller says otherwise
CHUNK_ROWS = 8  # of a band in 2D


@dataclass(frozen=True)
class Plan:
    """What a call runs: its form and, if that is chunkwise, the tokens (1D) or rows (2D) of a chunk."""

    form: Form
    chunk: int | None = None


def plan_1d(n: int, form: Form = "auto", chunk: int | None = None) -> Plan:
    """Which form `retention_1d` runs for n tokens."""
    checks.check_form("retention_1d", form, FORMS_1D)
    checks.check_chunk("retention_1d", chunk)
    if form == "auto":
        form = "parallel" if n <= 2 * CHUNK_TOKENS else "chunkwise"
    return Plan(form, (chunk or CHUNK_TOKENS) if form == "chunkwise" else None)


def plan_2d(grid: tuple[int, int], form: Form = "auto", chunk: int | None = None) -> Plan:
    """Which form `retention_2d` runs on a grid of patches."""
    checks.check_form("retention_2d", form, FORMS_2D)
    checks.check_chunk("retention_2d", chunk)
    if form == "auto":
        form = "parallel" if grid[0] * grid[1] <= 256 else "chunkwise"
    return Plan(form, (chunk or CHUNK_ROWS) if form == "chunkwise" else None)
