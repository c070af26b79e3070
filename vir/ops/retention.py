"""The operators: check the arguments, choose a form, compute in full precision, return the caller's dtype."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vir.ops import checks, forms_1d, forms_2d
from vir.ops.dispatch import Form, Plan, plan_1d, plan_2d

# Forms that carry a state: (q, k, v, gamma, state, plan) -> out, state.
Stateful = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def retention_1d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    form: Form = "auto",
    chunk: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Retention over a sequence: a token sees itself and those before it, fading by gamma with each step.

    Layout `b n h d`; `scale` multiplies the query and is head_dim ** -0.5 by default. Every form gives the same
    numbers; `plan_1d` tells which one runs.
    """
    checks.check_qkv("retention_1d", q, k, v, gamma)
    plan = plan_1d(q.shape[1], form, chunk)
    with _no_autocast(q):
        qh, kh, vh, gamma = _heads_first(q, k, v, gamma, scale)
        if plan.form == "parallel":
            out = forms_1d.parallel(qh, kh, vh, gamma)
        else:
            out, _ = _run_1d(qh, kh, vh, gamma, _no_state(kh, vh), plan)
        return out.transpose(1, 2).to(v.dtype)


def retention_1d_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention over a sequence that comes in pieces: feed the returned state back with the next piece.

    The state is `b h k v`, float32 (float64 for float64 tokens): what the last token sees.
    """
    op = "retention_1d_stream"
    checks.check_qkv(op, q, k, v, gamma)
    plan = plan_1d(q.shape[1], "recurrent" if q.shape[1] == 1 else "chunkwise", chunk)
    if state is not None:
        checks.check_state(op, state, (q.shape[0], q.shape[2], q.shape[3], v.shape[3]), like=q)
    with _no_autocast(q):
        qh, kh, vh, gamma = _heads_first(q, k, v, gamma, scale)
        out, state = _run_1d(qh, kh, vh, gamma, _no_state(kh, vh) if state is None else state, plan)
        return out.transpose(1, 2).to(v.dtype), state


def retention_2d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    grid: tuple[int, int],
    *,
    form: Form = "auto",
    chunk: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Retention on a grid (rows, cols): a token sees what is neither below nor right of it, fading by L1 distance.

    One token more than rows * cols is the class token: it stands a row under the last patch and sees them all.
    `chunk` counts rows. Every form gives the same numbers; `plan_2d` tells which one runs.
    """
    checks.check_qkv("retention_2d", q, k, v, gamma)
    checks.check_grid("retention_2d", q.shape[1], grid)
    plan = plan_2d(grid, form, chunk)
    with _no_autocast(q):
        qh, kh, vh, gamma = _heads_first(q, k, v, gamma, scale)
        if plan.form == "parallel":
            out = forms_2d.parallel(qh, kh, vh, gamma, grid)
        else:
            out, _ = _run_2d(qh, kh, vh, gamma, _no_state(kh, vh, grid[1]), plan)
        return out.transpose(1, 2).to(v.dtype)


def retention_2d_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    cols: int,
    state: Tensor | None = None,
    *,
    chunk: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention on a grid that comes in bands of whole rows, the class token last of all, with or without a band.

    The state is `b h cols k v`, float32 (float64 for float64 tokens): what each column of the last row sees.
    """
    op = "retention_2d_stream"
    checks.check_qkv(op, q, k, v, gamma)
    checks.check_cols(op, q.shape[1], cols)
    plan = plan_2d((max(1, q.shape[1] // cols), cols), "chunkwise", chunk)
    if state is not None:
        checks.check_state(op, state, (q.shape[0], q.shape[2], cols, q.shape[3], v.shape[3]), like=q)
    with _no_autocast(q):
        qh, kh, vh, gamma = _heads_first(q, k, v, gamma, scale)
        out, state = _run_2d(qh, kh, vh, gamma, _no_state(kh, vh, cols) if state is None else state, plan)
        return out.transpose(1, 2).to(v.dtype), state


def _run_1d(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    if plan.chunk is None:
        return forms_1d.recurrent(q, k, v, gamma, state)
    return forms_1d.chunkwise(q, k, v, gamma, state, plan.chunk)


def _run_2d(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Whole rows by the planned form, then the class token if one is left."""
    n, cols = q.shape[2], state.shape[2]
    patches = n - n % cols if cols > 1 else n  # in a single column the class token is one more row
    out = []
    if patches:
        rows = (x[:, :, :patches] for x in (q, k, v))
        if plan.form == "recurrent":
            out_rows, state = forms_2d.recurrent(*rows, gamma, state)
        elif plan.form == "scan":
            out_rows, state = forms_2d.scan(*rows, gamma, state)
        else:
            out_rows, state = forms_2d.chunkwise(*rows, gamma, state, plan.chunk)
        out.append(out_rows)
    if patches < n:
        out_class, state = forms_2d.class_token(*(x[:, :, patches:] for x in (q, k, v)), gamma, state)
        out.append(out_class)
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)), state


def _heads_first(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    """`b n h d` in any dtype to `b h n d` in the accumulator's, the query scaled."""
    dtype = checks.accumulator(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(1, 2).to(dtype).contiguous() for x in (q, k, v))
    return q * scale, k, v, gamma.to(dtype)


def _no_state(k: Tensor, v: Tensor, *cols: int) -> Tensor:
    return k.new_zeros(*k.shape[:2], *cols, k.shape[3], v.shape[3])


def _no_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast would round the sums to half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
