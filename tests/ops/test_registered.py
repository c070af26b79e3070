"""The kernels as operators of PyTorch: what tracing and derivatives see of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import close, inputs
from torch import Tensor

from vir import ops

pytest.importorskip("triton")
from vir.ops.triton import operators

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


def test_registered_with_pytorch() -> None:
    """Schema, fake tensors, gradients and tracing of every operator, by PyTorch's own check."""
    q, k, v = (torch.randn(1, 11, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    gamma = ops.decay(2, device=DEVICE)
    state = torch.randn(1, 2, 16, 16, device=DEVICE, requires_grad=True)
    columns = torch.randn(1, 2, 11, 16, 16, device=DEVICE, requires_grad=True)
    for start, final in ((None, False), (state, True)):
        torch.library.opcheck(operators.sequence, (q, k, v, gamma, 0.25, start, final, torch.float32))
    torch.library.opcheck(operators.grid, (q, k, v, gamma, 0.25, 2, 5, torch.float32))
    torch.library.opcheck(operators.column_states, (k, v, gamma, 1.0, 11, False))
    torch.library.opcheck(operators.see_columns, (q, columns, gamma, 0.25, False, False, torch.float32))


def test_traced_without_a_break() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
        out = ops.retention_1d(q, k, v, gamma, form="kernel") + ops.retention_2d(q, k, v, gamma, (2, 5), form="kernel")
        return out.square().sum()

    q, k, v = (torch.randn(2, 11, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    gamma = ops.decay(2, device=DEVICE)
    traced = torch.compile(both, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(both(q, k, v, gamma), (q, k, v))
    got = torch.autograd.grad(traced(q, k, v, gamma), (q, k, v))
    for a, b in zip(got, want, strict=True):
        close("grad", a, b, 1e-6)


def test_registered_where_heads_of_v_have_another_size() -> None:
    q, k = torch.randn(2, 1, 10, 2, 16, device=DEVICE).unbind(0)
    v, gamma = torch.randn(1, 10, 2, 24, device=DEVICE), ops.decay(2, device=DEVICE)
    columns, only = torch.randn(1, 2, 5, 16, 24, device=DEVICE), {"test_utils": "test_faketensor"}
    torch.library.opcheck(operators.sequence, (q, k, v, gamma, 0.25, None, True, torch.float32), **only)
    torch.library.opcheck(operators.grid, (q, k, v, gamma, 0.25, 2, 5, torch.float32), **only)
    torch.library.opcheck(operators.grid_backward, (v, q, k, v, gamma, 0.25, 2, 5), **only)
    torch.library.opcheck(operators.sequence_backward, (v, None, q, k, v, gamma, 0.25, None), **only)
    torch.library.opcheck(operators.column_states, (k, v, gamma, 1.0, 5, False), **only)
    torch.library.opcheck(operators.see_columns, (q, columns, gamma, 0.25, False, False, torch.float32), **only)
    torch.library.opcheck(operators.see_columns, (v, columns, gamma, 0.25, False, True, torch.float32), **only)


def test_second_derivatives_of_column_states() -> None:
    _, k, v, gamma = inputs(20, 16, 24)

    def twice(of: Any, *tensors: Tensor) -> Any:
        first = torch.autograd.grad(of(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    here = [x.to(DEVICE, torch.float32).requires_grad_() for x in (k, v)]
    got = twice(lambda k, v: operators.column_states(k, v, gamma.to(DEVICE).float(), 1.0, 5, False), *here)
    fades = gamma[:, None] ** torch.arange(3, -1, -1)
    want = twice(
        lambda k, v: torch.einsum("byxhk,byxhv,hy->bhxkv", k.unflatten(1, (4, 5)), v.unflatten(1, (4, 5)), fades),
        *(x.requires_grad_() for x in (k, v)),
    )
    for a, b in zip(got, want, strict=True):
        close("second", a, b, 1e-4)
