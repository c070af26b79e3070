"""Mistakes in the arguments of an operator, answered in words: what came, what was expected, what to do."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> None:
    """q and k are `b n h d`, v is `b n h e`, gamma holds one decay per head."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{op}: {name} has shape {_shape(x)}, expected 4 axes: batch, tokens, heads, head size. "
                "Split the channels into heads first, for example x.unflatten(-1, (heads, -1))."
            )
        if x.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} is {x.dtype}, expected one of {_names(FLOATS)}. Convert it with .to().")
    if q.shape != k.shape:
        raise ValueError(f"{op}: q has shape {_shape(q)} but k has {_shape(k)}: they must be equal.")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"{op}: v has shape {_shape(v)}, expected {_shape(q)[:-1]}, any): only its head size may differ from "
            "that of q and k. The layout is batch, tokens, heads, head size: was an axis transposed?"
        )
    if min(q.shape) < 1 or v.shape[3] < 1:
        raise ValueError(f"{op}: q has shape {_shape(q)}, v has {_shape(v)}: every axis needs at least one entry.")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"{op}: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: convert them to one dtype.")
    if not (q.device == k.device == v.device == gamma.device):
        raise ValueError(
            f"{op}: q, k, v, gamma are on {q.device}, {k.device}, {v.device}, {gamma.device}: "
            "move them to one device with .to()."
        )
    if gamma.shape != q.shape[2:3]:
        raise ValueError(
            f"{op}: gamma has shape {_shape(gamma)}, expected ({q.shape[2]},): one decay for each of the "
            f"{q.shape[2]} heads, for example vir.ops.decay({q.shape[2]})."
        )
    if gamma.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{op}: gamma is {gamma.dtype}, expected float32 or float64: half precision rounds a decay of "
            "0.998 to 1. Make it with vir.ops.decay(heads)."
        )
    if gamma.requires_grad:
        raise ValueError(f"{op}: gamma requires a gradient, but the decay is a constant here: pass gamma.detach().")


def check_chunk(op: str, chunk: int | None) -> None:
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"{op}: chunk={chunk!r}, expected a whole number of at least 1, or None for the default.")


def check_form(op: str, form: str, forms: Sequence[str]) -> None:
    if form not in forms:
        raise ValueError(f"{op}: form={form!r}, expected one of {', '.join(map(repr, forms))}.")


def check_grid(op: str, n: int, grid: tuple[int, int]) -> None:
    if len(grid) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in grid):
        raise ValueError(f"{op}: grid={grid!r}, expected (rows, cols), two whole numbers of at least 1.")
    patches = grid[0] * grid[1]
    if n not in (patches, patches + 1):
        raise ValueError(
            f"{op}: {n} tokens do not fit grid (rows={grid[0]}, cols={grid[1]}): expected {patches} patches, "
            f"or {patches + 1} with the class token last. Pass the grid of patches as (rows, cols), not pixels."
        )


def check_cols(op: str, n: int, cols: int) -> None:
    if isinstance(cols, bool) or not isinstance(cols, int) or cols < 1:
        raise ValueError(f"{op}: cols={cols!r}, expected a whole number of at least 1.")
    if n % cols not in (0, 1):
        raise ValueError(
            f"{op}: {n} tokens are not whole rows of {cols}: expected a multiple of {cols}, or one more with the "
            "class token last. Feed whole rows."
        )


def check_state(op: str, state: Tensor, expected: tuple[int, ...], like: Tensor) -> None:
    if tuple(state.shape) != expected:
        raise ValueError(
            f"{op}: state has shape {_shape(state)}, expected {expected}. Pass the state that the previous call "
            "returned, or None at the start."
        )
    if state.dtype != accumulator(like.dtype) or state.device != like.device:
        raise TypeError(
            f"{op}: state is {state.dtype} on {state.device}, expected {accumulator(like.dtype)} on {like.device}: "
            "states are kept in full precision, beside the tokens."
        )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and states are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def carry_derivatives(*tensors: Tensor | None) -> bool:
    """Whether derivatives come along with one of them, in forward mode: a kernel would lose them without a word, and so
    would what is kept from call to call."""
    if torch.is_inference_mode_enabled():
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
