"""Which form runs: one rule and one table for each kind of retention."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from vir.ops import checks, forms_1d, forms_2d, kernels
from vir.ops.parts import Stateful, in_parts

Form = Literal["auto", "parallel", "recurrent", "scan", "chunkwise", "kernel"]
FORMS_1D: tuple[Form, ...] = ("auto", "parallel", "recurrent", "chunkwise", "kernel")
FORMS_2D: tuple[Form, ...] = ("auto", "parallel", "recurrent", "scan", "chunkwise", "kernel")

CHUNK_TOKENS = 64  # of a chunk in 1D, unless the caller says otherwise
CHUNK_ROWS = 16  # of a band in 2D

# Tokens up to which the parallel form is the fastest: (retention, device, with gradients). `vir bench forms`
# measures them; the head size moves them too little to matter.
_PARALLEL_UP_TO = {
    ("1d", "cpu", False): 320,
    ("1d", "cpu", True): 400,
    ("2d", "cpu", False): 600,
    ("2d", "cpu", True): 600,
    ("1d", "gpu", False): 800,
    ("1d", "gpu", True): 800,
    ("2d", "gpu", False): 1100,
    ("2d", "gpu", True): 1100,
}


@dataclass(frozen=True)
class Plan:
    """What a call runs: its form and, if that is chunkwise, the tokens (1D) or rows (2D) of a chunk."""

    form: Form
    chunk: int | None = None


def plan_1d(
    n: int,
    *,
    form: Form = "auto",
    chunk: int | None = None,
    device: str = "cpu",
    gradients: bool = False,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> Plan:
    """Which form `retention_1d` runs for n tokens.

    On a GPU the kernel; elsewhere parallel while its n x n scores are cheap, then chunkwise.
    """
    checks.check_form("retention_1d", form, FORMS_1D)
    checks.check_chunk("retention_1d", chunk)
    if form == "auto":
        small = n <= _PARALLEL_UP_TO["1d", _kind(device), gradients]
        form = _automatic(small, device, dtype, head_dim, chunk)
    if form == "kernel":
        check_kernel("retention_1d", device, dtype, head_dim, chunk)
    return Plan(form, (chunk or CHUNK_TOKENS) if form == "chunkwise" else None)


def plan_2d(
    grid: tuple[int, int],
    *,
    form: Form = "auto",
    chunk: int | None = None,
    device: str = "cpu",
    gradients: bool = False,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
) -> Plan:
    """Which form `retention_2d` runs on a grid of patches.

    On a GPU the kernel; elsewhere parallel while the grid is small, then bands of rows.
    """
    checks.check_form("retention_2d", form, FORMS_2D)
    checks.check_chunk("retention_2d", chunk)
    if form == "auto":
        small = grid[0] * grid[1] <= _PARALLEL_UP_TO["2d", _kind(device), gradients]
        form = _automatic(small, device, dtype, head_dim, chunk)
    if form == "kernel":
        check_kernel("retention_2d", device, dtype, head_dim, chunk)
    return Plan(form, (chunk or CHUNK_ROWS) if form == "chunkwise" else None)


def _automatic(small: bool, device: str, dtype: torch.dtype, head_dim: int, chunk: int | None) -> Form:
    if chunk is None and kernels.usable(device) and kernels.serve(head_dim, dtype):
        return "kernel"
    return "parallel" if small else "chunkwise"


def check_kernel(op: str, device: str, dtype: torch.dtype, head_dim: int, chunk: int | None) -> None:
    if not kernels.possible(device):
        raise ValueError(
            f"{op}: form='kernel' on {device}, expected a CUDA GPU of compute capability 8.0 or newer, with Triton "
            "installed. Move the tensors to one, or leave form='auto': it takes the kernel where there is one."
        )
    if not kernels.serve(head_dim, dtype):
        raise ValueError(
            f"{op}: form='kernel' with {dtype} and head size {head_dim}, expected float32, bfloat16 or float16 and "
            f"at most {kernels.largest_head(dtype)}. Use form='chunkwise' or 'auto'."
        )
    if chunk is not None:
        raise ValueError(f"{op}: form='kernel' with chunk={chunk}, expected None: a kernel has its own tiles.")


def _kind(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def stateful_1d(plan: Plan) -> Stateful:
    """The planned form with a state in and out."""
    chunkwise = partial(forms_1d.chunkwise, chunk=plan.chunk or CHUNK_TOKENS)
    forms: dict[str, Stateful] = {
        "recurrent": forms_1d.recurrent,
        "chunkwise": in_parts(chunkwise, states=forms_1d.CHUNKS_AT_ONCE),
    }
    return forms[plan.form]


def stateful_2d(plan: Plan, cols: int) -> Stateful:
    """The planned form on whole rows, with a state in and out."""
    chunkwise = partial(forms_2d.chunkwise, chunk=plan.chunk or CHUNK_ROWS)
    forms: dict[str, Stateful] = {
        "recurrent": forms_2d.recurrent,
        "scan": forms_2d.scan,
        "chunkwise": in_parts(chunkwise, states=cols),
    }
    return forms[plan.form]
