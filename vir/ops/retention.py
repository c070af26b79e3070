"""The operators: check the arguments, choose a form, compute in full precision, return the caller's dtype."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import torch
from torch import Tensor

from vir.ops import checks, forms_1d, forms_2d, kernels
from vir.ops.dispatch import Form, Plan, plan_1d, plan_2d, stateful_1d, stateful_2d
from vir.ops.parts import concatenate

MOST_PLANS = 4096  # kept: a server may see images of any size
_PLANS: dict[tuple, Plan] = {}


class Where(TypedDict):
    device: str
    gradients: bool
    dtype: torch.dtype
    head_dim: int


def retention_1d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    form: Form = "auto",
    chunk: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Retention over a sequence: a token sees itself and those before it, fading by gamma with each step.

    Layout `b n h d`; `scale` multiplies the query and is head_dim ** -0.5 by default; `dtype` is that of the output,
    v's by default. Every form gives the same numbers; `plan_1d` tells which one runs.
    """

    def checked() -> Plan:
        checks.check_qkv("retention_1d", q, k, v, gamma)
        return plan_1d(q.shape[1], form=form, chunk=chunk, **_where(q, k, v))

    plan = _once(checked, q, k, v, gamma, form, chunk, None)
    if plan.form == "kernel":
        return kernels.sequence(q, k, v, gamma, _scale(q, scale), dtype or v.dtype, None, final=False)[0]
    with _no_autocast(q):
        qkv = _heads_first(q, k, v)
        decay = gamma.to(qkv[0].dtype), _scale(q, scale)
        if plan.form == "parallel":
            out = forms_1d.parallel(*qkv, *decay)
        else:
            out, _ = stateful_1d(plan)(*qkv, *decay, _no_state(*qkv))
        return out.transpose(1, 2).to(dtype or v.dtype)


def retention_1d_stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    state: Tensor | None = None,
    *,
    chunk: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention over a sequence that comes in pieces: pass the returned state on with the next piece.

    The state is `b h k v` in float32 (float64 for float64 tokens): what the last token sees. `dtype` is that of the
    output, v's by default.
    """
    op = "retention_1d_stream"
    checks.check_qkv(op, q, k, v, gamma)
    if state is not None:
        checks.check_state(op, state, (q.shape[0], q.shape[2], q.shape[3], v.shape[3]), like=q)
    plan = plan_1d(q.shape[1], chunk=chunk, **_where(q, k, v))
    if plan.form == "kernel":
        return kernels.sequence(q, k, v, gamma, _scale(q, scale), dtype or v.dtype, state, final=True)
    plan = plan_1d(q.shape[1], form="recurrent" if q.shape[1] == 1 else "chunkwise", chunk=chunk)
    with _no_autocast(q):
        qkv = _heads_first(q, k, v)
        state = _no_state(*qkv) if state is None else state
        out, state = stateful_1d(plan)(*qkv, gamma.to(state.dtype), _scale(q, scale), state)
        return out.transpose(1, 2).to(dtype or v.dtype), state


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Retention on a grid (rows, cols): a token sees what is neither below nor right of it, fading by L1 distance.

    One token more than rows * cols is the class token: it stands a row under the last patch and sees them all.
    `chunk` counts rows; `dtype` is that of the output, v's by default. Every form gives the same numbers; `plan_2d`
    tells which one runs.
    """

    def checked() -> Plan:
        checks.check_qkv("retention_2d", q, k, v, gamma)
        checks.check_grid("retention_2d", q.shape[1], grid)
        return plan_2d(grid, form=form, chunk=chunk, **_where(q, k, v))

    plan = _once(checked, q, k, v, gamma, form, chunk, grid)
    if plan.form == "kernel":
        return kernels.grid(q, k, v, gamma, _scale(q, scale), dtype or v.dtype, *grid)
    with _no_autocast(q):
        qkv = _heads_first(q, k, v)
        decay = gamma.to(qkv[0].dtype), _scale(q, scale)
        if plan.form == "parallel":
            out = forms_2d.parallel(*qkv, *decay, grid)
        else:
            out, _ = _rows_then_class_token(*qkv, *decay, _no_state(*qkv, cols=grid[1]), plan)
        return out.transpose(1, 2).to(dtype or v.dtype)


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
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention on a grid that comes in bands of whole rows, the class token last of all, with a band or alone.

    The state is `b h cols k v` in float32 (float64 for float64 tokens): what each column of the last row sees.
    `dtype` is that of the output, v's by default.
    """
    op = "retention_2d_stream"
    checks.check_qkv(op, q, k, v, gamma)
    checks.check_cols(op, q.shape[1], cols)
    if state is not None:
        checks.check_state(op, state, (q.shape[0], q.shape[2], cols, q.shape[3], v.shape[3]), like=q)
    grid = q.shape[1] // cols, cols
    patches = grid[0] * cols
    plan = plan_2d(grid, chunk=chunk, **_where(q, k, v))
    if plan.form == "kernel" and patches:
        rows = q[:, :patches], k[:, :patches], v[:, :patches]
        with _no_autocast(q):
            out, state = kernels.rows(*rows, gamma, _scale(q, scale), dtype or v.dtype, cols, state)
        if patches == q.shape[1]:
            return out, state
        token = q[:, patches:], k[:, patches:], v[:, patches:]
        last, state = retention_2d_stream(*token, gamma, cols, state, scale=scale, dtype=dtype)
        return torch.cat([out, last], 1), state
    plan = plan_2d(grid, form="chunkwise", chunk=chunk)
    with _no_autocast(q):
        qkv = _heads_first(q, k, v)
        state = _no_state(*qkv, cols=cols) if state is None else state
        out, state = _rows_then_class_token(*qkv, gamma.to(state.dtype), _scale(q, scale), state, plan)
        return out.transpose(1, 2).to(dtype or v.dtype), state


def _once(
    checked: Callable[[], Plan],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    form: Form,
    chunk: int | None,
    grid: tuple[int, int] | None,
) -> Plan:
    """The plan of a call, checked when its like first comes: where a GPU computes, the host's microseconds count."""
    if torch.compiler.is_compiling():
        return checked()
    kinds = None if grid is None else (*map(type, grid),)  # 3.0 is as good a key as 3
    key = (
        q.shape, k.shape, v.shape, gamma.shape, q.dtype, k.dtype, v.dtype, gamma.dtype,
        q.device, k.device, v.device, gamma.device, form, chunk, type(chunk), grid, kinds,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        gamma.requires_grad,
    )  # fmt: skip
    try:
        return _PLANS[key]
    except TypeError:  # something that cannot be a key, such as a list
        return checked()
    except KeyError:
        plan = checked()
        if len(_PLANS) >= MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
        return plan


def _rows_then_class_token(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    n, cols = q.shape[2], state.shape[2]
    patches = n - n % cols  # in a single column the class token is one more row
    out = []
    if patches:
        rows = q[:, :, :patches], k[:, :, :patches], v[:, :, :patches]
        out_rows, state = stateful_2d(plan, cols)(*rows, gamma, scale, state)
        out.append(out_rows)
    if patches < n:
        token = q[:, :, patches:], k[:, :, patches:], v[:, :, patches:]
        out_class, state = forms_2d.class_token(*token, gamma, scale, state)
        out.append(out_class)
    return concatenate(out, dim=2), state


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`b n h d` in any dtype to `b h n d` in the accumulator's."""
    dtype = checks.accumulator(q.dtype)
    return q.transpose(1, 2).to(dtype), k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype)


def _where(q: Tensor, k: Tensor, v: Tensor) -> Where:
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    return {
        "device": q.device.type,
        "gradients": torch.is_grad_enabled() and needs,
        "dtype": q.dtype,
        "head_dim": max(q.shape[3], v.shape[3]),
    }


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)  # numpy's numbers are not Triton's


def _no_state(q: Tensor, k: Tensor, v: Tensor, cols: int | None = None) -> Tensor:
    return k.new_zeros(*k.shape[:2], *([] if cols is None else [cols]), k.shape[3], v.shape[3])


def _no_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast would round the sums to half precision."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
