"""The kernels as operators of PyTorch: with shapes for tracing and with gradients, which are retention again.

Retention is linear in q, in k and in v, so its backward pass is the same map: dq is retention of (grad, v, k), and dk,
dv are retention from the last token to the first of (v, grad, q) and (k, q, grad).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vir.ops.triton import launch


def traced(x: Tensor | None) -> bool:
    """Whether PyTorch looks on and must find registered operators; else kernels start at once, which is much faster."""
    return type(x) is not Tensor or torch.compiler.is_compiling()


def registered(name: str, function: Callable) -> Any:
    """An operator for tracing. `torch.library.custom_op` makes one in a line, but looks at the results of each call for
    tensors that went in, about a third of what it takes the host: compiled models call these in every layer."""
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    namespace, operator = name.split("::")
    return getattr(getattr(torch.ops, namespace), operator).default


def differentiable(now: Callable, saves: Callable, gradients: Callable) -> Callable:
    """An operator with its gradients, where nothing is traced."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = now(*inputs)
            saves(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradients(ctx, *grads)

    return Eager.apply


def only_first(gradients: Callable) -> Callable:
    """Of an operator whose gradients have none of their own: an error where they are asked for, not zeros."""

    def checked(ctx: Any, *grads: Any) -> tuple:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "kernels have no second derivatives, which create_graph=True asks for. Use form='parallel' or "
                "'chunkwise', for a model set_form('chunkwise')."
            )
        return gradients(ctx, *grads)

    return checked


def sequence_now(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor | None, final: bool, out: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """1D retention and, if `final`, its last state."""
    return launch.walk(q, k, v, gamma, scale, state, final, dtype=q.dtype, out_dtype=out)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor | None, final: bool, out: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same; an operator's results are tensors, so that the last state is one of no numbers if not `final`."""
    made, end = sequence_now(q, k, v, gamma, scale, state, final, out)
    return made, gamma.new_empty(0) if end is None else end


sequence = registered("vir::sequence", _sequence)


@torch.library.register_fake("vir::sequence")
def _(q, k, v, gamma, scale, state, final, out):  # type: ignore[no-untyped-def]
    b, n, h, d = q.shape
    return q.new_empty(b, n, h, v.shape[3], dtype=out), gamma.new_empty((b, h, d, v.shape[3]) if final else 0)


def _sequence_backward(
    grad: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, if there is one, of the first state."""
    dq, _ = launch.walk(grad, v, k, gamma, scale, state, False, transposed=True, dtype=q.dtype, out_dtype=q.dtype)
    dk, dv, first = launch.walk_back(grad, q, k, v, gamma, scale, grad_state, state is not None, dtype=q.dtype)
    return dq, dk, dv, first


sequence_backward = torch.library.custom_op("vir::sequence_backward", _sequence_backward, mutates_args=())


@sequence_backward.register_fake
def _(grad, grad_state, q, k, v, gamma, scale, state):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), gamma.new_empty(_shape_or_none(state))


def _shape_or_none(state: Tensor | None) -> tuple[int, ...]:
    return (0,) if state is None else tuple(state.shape)


def _sequence_saves(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, gamma, ctx.scale, state, ctx.final, _ = inputs
    ctx.save_for_backward(q, k, v, gamma, state)


@only_first
def _sequence_gradients(ctx: Any, grad: Tensor, grad_state: Tensor | None) -> tuple:
    q, k, v, gamma, state = ctx.saved_tensors
    grad_final = grad_state.contiguous() if ctx.final and grad_state is not None else None
    backward = sequence_backward if traced(grad) else _sequence_backward
    dq, dk, dv, first = backward(grad, grad_final, q, k, v, gamma, ctx.scale, state)
    return dq, dk, dv, None, None, None if state is None else first, None, None


torch.library.register_autograd("vir::sequence", _sequence_gradients, setup_context=_sequence_saves)


sequence_eager = differentiable(sequence_now, _sequence_saves, _sequence_gradients)


def grid_now(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, rows: int, cols: int, out: torch.dtype
) -> Tensor:
    """2D retention, with or without a class token."""
    return launch.grid(q, k, v, gamma, scale, rows, cols, dtype=q.dtype, out_dtype=out)


grid = registered("vir::grid", grid_now)


@torch.library.register_fake("vir::grid")
def _(q, k, v, gamma, scale, rows, cols, out):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=out)


def _grid_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, rows: int, cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    retain = partial(launch.grid, gamma=gamma, scale=scale, rows=rows, cols=cols, dtype=q.dtype, out_dtype=q.dtype)
    return retain(grad, v, k), retain(v, grad, q, back=True), retain(k, q, grad, back=True)


grid_backward = torch.library.custom_op("vir::grid_backward", _grid_backward, mutates_args=())


@grid_backward.register_fake
def _(grad, q, k, v, gamma, scale, rows, cols):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _grid_saves(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *qkv, ctx.scale, ctx.rows, ctx.cols, _ = inputs
    ctx.save_for_backward(*qkv)


@only_first
def _grid_gradients(ctx: Any, grad: Tensor) -> tuple:
    q, k, v, gamma = ctx.saved_tensors
    backward = grid_backward if traced(grad) else _grid_backward
    return *backward(grad, q, k, v, gamma, ctx.scale, ctx.rows, ctx.cols), None, None, None, None, None


torch.library.register_autograd("vir::grid", _grid_gradients, setup_context=_grid_saves)


grid_eager = differentiable(grid_now, _grid_saves, _grid_gradients)


rows_now = launch.rows


@torch.library.custom_op("vir::column_states", mutates_args=())
def column_states(k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, back: bool) -> Tensor:
    """The sum of scale gamma^(steps) k^T v of each column, `b h x k v`: steps to its last row or from above it."""
    return launch.line_states(k, v, gamma, scale, cols, k.shape[1] // cols, back=back, dtype=k.dtype)


@column_states.register_fake
def _(k, v, gamma, scale, cols, back):  # type: ignore[no-untyped-def]
    return gamma.new_empty(k.shape[0], k.shape[2], cols, k.shape[3], v.shape[3])


@torch.library.custom_op("vir::see_columns", mutates_args=())
def see_columns(
    q: Tensor, states: Tensor, gamma: Tensor, scale: float, back: bool, transposed: bool, out: torch.dtype
) -> Tensor:
    """scale gamma^(steps) q . state of its column: steps from above the first row, or to the last."""
    return launch.apply_states(q, states, gamma, scale, back=back, transposed=transposed, dtype=q.dtype, out_dtype=out)


@see_columns.register_fake
def _(q, states, gamma, scale, back, transposed, out):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], states.shape[3 if transposed else 4], dtype=out)


def _column_states_saves(ctx: Any, inputs: tuple, output: Tensor) -> None:
    k, v, gamma, ctx.scale, _, ctx.back = inputs
    ctx.save_for_backward(k, v, gamma)


def _column_states_gradients(ctx: Any, grad: Tensor) -> tuple:
    k, v, gamma = ctx.saved_tensors
    # A token's weight in the sum is its weight when it looks at the sum.
    dk = see_columns(v, grad, gamma, ctx.scale, not ctx.back, True, k.dtype)
    dv = see_columns(k, grad, gamma, ctx.scale, not ctx.back, False, v.dtype)
    return dk, dv, None, None, None, None


def _see_columns_saves(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, states, gamma, ctx.scale, ctx.back, ctx.transposed, _ = inputs
    ctx.save_for_backward(q, states, gamma)


def _see_columns_gradients(ctx: Any, grad: Tensor) -> tuple:
    q, states, gamma = ctx.saved_tensors
    dq = see_columns(grad, states, gamma, ctx.scale, ctx.back, not ctx.transposed, q.dtype)
    grad = grad.to(q.dtype)
    pair = (grad, q) if ctx.transposed else (q, grad)
    dstates = column_states(*pair, gamma, ctx.scale, states.shape[2], not ctx.back)
    return dq, dstates, None, None, None, None, None


column_states.register_autograd(_column_states_gradients, setup_context=_column_states_saves)
see_columns.register_autograd(_see_columns_gradients, setup_context=_see_columns_saves)
