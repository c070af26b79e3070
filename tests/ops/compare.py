"""One helper for every equality: output, state and all gradients against the float64 definition."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

import pytest
import torch
from torch import Tensor

from vir import ops
from vir.ops import kernels, naive

# Largest relative error ||a - b|| / ||b||; for half precision it is the rounding of what goes in and comes out.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-3, torch.float16: 5e-4}
DTYPES = list(TOLERANCE)
# Kernels round scores and states to the tokens' dtype before each product, as every GPU library does.
KERNEL_TOLERANCE = {**TOLERANCE, torch.bfloat16: 5e-3, torch.float16: 1e-3}
PLAIN_1D, PLAIN_2D = (tuple(f for f in forms if f != "kernel") for forms in (ops.FORMS_1D, ops.FORMS_2D))
HEAD_SIZES = [(16, 16), (40, 40), (49, 64), (64, 64)]  # of k and of v
GAMMA = (0.5, 0.97, 0.998)  # one head that forgets at once, two of the models'
MANY = 400  # tokens of a grid: too many for loops

Run = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Case:
    """Inputs, and what the definition makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: Tensor
    grad_out: Tensor
    out: Tensor
    grads: tuple[Tensor, ...]  # of q, k, v through the output
    define_state: Callable

    @cached_property
    def with_state(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The state, a gradient of it, and those of q, k, v through output and state: made for tests that compare them,
        because most do not, and it takes longer than all else."""
        k, v = (x.clone().requires_grad_() for x in (self.k, self.v))
        state = self.define_state(k, v, self.gamma)
        grad_state = _exact(torch.randn_like(state))
        dk, dv = torch.autograd.grad(state, (k, v), grad_state)
        return state.detach(), grad_state, (self.grads[0], self.grads[1] + dk, self.grads[2] + dv)


def inputs(n: int, d: int, e: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, gamma in float64, of values that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, n, len(GAMMA))
    q, k, v = (_exact(torch.randn(*shape, size, generator=generator)) for size in (d, d, e))
    return q, k, v, torch.tensor(GAMMA, dtype=torch.float64)


@cache
def case_1d(n: int, d: int, e: int) -> Case:
    return _case(n, d, e, naive.retention_1d, naive.state_1d)


@cache
def case_2d(grid: tuple[int, int], class_token: bool, d: int, e: int) -> Case:
    """Of many tokens, for which loops with gradients take minutes, by the parallel form in float64: at smaller sizes it
    agrees with the definition to 1e-10."""
    n = grid[0] * grid[1] + class_token
    define = partial(ops.retention_2d, form="parallel") if n > MANY else naive.retention_2d
    return _case(n, d, e, partial(define, grid=grid), partial(naive.state_2d, grid=grid))


def _case(n: int, d: int, e: int, define_out: Callable, define_state: Callable) -> Case:
    *qkv, gamma = inputs(n, d, e)
    qkv = [x.requires_grad_() for x in qkv]
    out = define_out(*qkv, gamma)
    grad_out = _exact(torch.randn_like(out))
    grads = torch.autograd.grad(out, qkv, grad_out)
    q, k, v = (x.detach() for x in qkv)
    return Case(q, k, v, gamma, grad_out, out.detach(), grads, define_state)


def check(run: Run, case: Case, dtype: torch.dtype, device: str = "cpu", kernel: bool = False) -> None:
    """`run(q, k, v, gamma) -> out, state` agrees with the definition; a state of None is not compared."""
    q, k, v = (x.to(device, dtype).requires_grad_() for x in (case.q, case.k, case.v))
    gamma = case.gamma.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    out, state = run(q, k, v, gamma)
    assert out.dtype == dtype
    tolerance = (KERNEL_TOLERANCE if kernel or device == "cuda" else TOLERANCE)[dtype]
    close("out", out, case.out, tolerance)
    if state is None:
        grads = torch.autograd.grad(out, (q, k, v), case.grad_out.to(out))
        expected = case.grads
    else:
        assert state.dtype == gamma.dtype, "a state is kept in full precision"
        want, grad_state, expected = case.with_state
        close("state", state, want, tolerance)
        grads = torch.autograd.grad([out, state], (q, k, v), [case.grad_out.to(out), grad_state.to(state)])
    for name, grad, want in zip("qkv", grads, expected, strict=True):
        close(f"d{name}", grad, want, tolerance)


def close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative_error(got, want)
    assert error <= tolerance, f"{name}: relative error {error:.2e} in {got.dtype}"  # NaN fails as well


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return ((got - want).norm() / want.norm()).item()


def _exact(x: Tensor) -> Tensor:
    """Round to what bf16 and fp16 both hold."""
    return x.bfloat16().half().double()


def served(d: int, dtype: torch.dtype) -> None:
    """Else the test is left out."""
    if not kernels.serve(d, dtype):
        pytest.skip(f"heads of {d} in {dtype} do not fit on this GPU")
