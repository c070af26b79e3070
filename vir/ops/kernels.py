"""The GPU kernels, where Triton and a GPU that it knows are present; elsewhere PyTorch gives the same numbers."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vir.ops.checks import carry_derivatives
from vir.ops.decay import mask_1d

INSTALLED = find_spec("triton") is not None
if INSTALLED:
    from vir.ops.triton import folded, norm, operators, plus, settings
    from vir.ops.triton import group_norm as maps

LARGEST_HEAD = 128
OLDEST_GPU = (8, 0)  # compute capability that Triton supports
MOST_HEADS = 65535  # of a whole batch, in one launch: CUDA's limit


_USABLE: dict[str, bool] = {}  # by hand, because torch.compile warns of functools.cache


@torch.compiler.assume_constant_result
def usable(device: str) -> bool:
    """Whether kernels run on this kind of device here, and fast."""
    if device not in _USABLE:
        _USABLE[device] = _is_usable(device)
    return _USABLE[device]


def _is_usable(device: str) -> bool:
    return (
        INSTALLED
        and device == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= OLDEST_GPU
    )


def possible(device: str) -> bool:
    """Whether kernels run here at all: Triton's interpreter (TRITON_INTERPRET=1) runs them on a CPU, to test them."""
    return usable(device) or (INSTALLED and operators.launch.INTERPRETED)


@torch.compiler.assume_constant_result
def largest_head(dtype: torch.dtype) -> int:
    """Of those that the kernels know and that fit on the GPU here."""
    if not INSTALLED or dtype == torch.bfloat16 or not torch.cuda.is_available():
        return LARGEST_HEAD
    here = torch.device("cuda", torch.cuda.current_device())
    return LARGEST_HEAD if settings.like_hopper(here) else settings.LARGEST_ELSEWHERE


def serve(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels know such heads and numbers."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and head_dim <= largest_head(dtype)


def sequence(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, dtype: torch.dtype, state: Tensor | None, final: bool
) -> tuple[Tensor, Any]:
    """1D retention, `b n h d`, from a state; the second result is the final state, if it is asked for."""
    run = _way(operators.sequence, operators.sequence_now, operators.sequence_eager, q, k, v, gamma, state)
    gamma = _decays(gamma)
    if _fits_a_launch(q):
        return run(q, k, v, gamma, scale, state, final, dtype)
    return _joined(run(*part, gamma, scale, some, final, dtype) for *part, some in _launches(q, k, v, state))


def grid(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, dtype: torch.dtype, rows: int, cols: int
) -> Tensor:
    """2D retention, `b n h d`, the class token included."""
    run = _way(operators.grid, operators.grid_now, operators.grid_eager, q, k, v, gamma)
    gamma = _decays(gamma)
    if _fits_a_launch(q):
        return run(q, k, v, gamma, scale, rows, cols, dtype)
    return torch.cat([run(*part, gamma, scale, rows, cols, dtype) for *part, _ in _launches(q, k, v, None)])


def rows(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, dtype: torch.dtype, cols: int, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """2D retention of whole rows, `b n h d`, from the state of each column above them to that of the last row."""
    run = _way(_rows, operators.rows_now, _rows, q, k, v, gamma, state)
    gamma = _decays(gamma)
    return _joined(run(*part, gamma, scale, cols, some, dtype) for *part, some in _launches(q, k, v, state))


def _rows(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, state: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of parts that have gradients and can be traced."""
    height = q.shape[1] // cols
    out = operators.grid(q, k, v, gamma, scale, height, cols, torch.float32)
    made = operators.column_states(k, v, gamma, 1.0, cols, False)  # b h x k v
    final = torch.einsum("hxw,bhwkv->bhxkv", mask_1d(gamma, cols), made)  # a column sees those left of it
    if state is not None:
        out = out + operators.see_columns(q, state, gamma, scale, False, False, torch.float32)
        final = final + gamma[:, None, None, None] ** height * state
    return out.to(dtype), final


def _decays(gamma: Tensor) -> Tensor:
    """As kernels read them: one after another."""
    return gamma.float().contiguous()


def norm_serves(x: Tensor, *others: Tensor) -> bool:
    """Whether `layer_norm` may stand in for PyTorch's: on a GPU, with nothing traced; it computes in float32."""
    serves = x.is_cuda and usable("cuda") and x.dtype != torch.float64 and not operators.traced(x)
    return serves and not carry_derivatives(x, *others)


def learns(*tensors: Tensor) -> bool:
    """Whether gradients will be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    run = norm.layer_norm_eager if learns(x, weight, bias) else norm.layer_norm
    return run(x, weight, bias, eps, dtype)


def scaled_sum_serves(x: Tensor, part: Tensor, scale: Tensor) -> bool:
    """Whether `scaled_sum` may stand in for PyTorch's: it has no gradients, and one dtype."""
    alike = x.shape == part.shape and x.dtype == part.dtype == scale.dtype
    return norm_serves(x, part, scale) and alike and not learns(x, part, scale) and plus.serves(x.shape[-1])


def scaled_sum(x: Tensor, part: Tensor, scale: Tensor) -> Tensor:
    """x + scale * part, with a scale for each channel."""
    return plus.scaled_sum(x, part, scale)


def normed_sum_serves(x: Tensor, rows: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether `normed_sum` may stand in for PyTorch's: it has no gradients, one dtype, and one number of channels."""
    alike = x.shape == rows.shape and all(given.dtype == x.dtype for given in (rows, weight, *others))
    width = x.shape[-1:]
    fits = weight.shape == 2 * width and all(other.shape == width for other in others)
    return alike and fits and norm_serves(x, rows, weight, *others) and not learns(x, rows, weight, *others)


def normed_sum(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    scale: Tensor,
    *,
    eps: float,
) -> Tensor:
    """x + scale * linear(norm(rows)), with a scale for each channel."""
    return folded.normed_sum(x, rows, weight, bias, norm_weight, norm_bias, scale, eps)


def group_norm_serves(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> bool:
    """Whether `group_norm` may stand in for PyTorch's: it has no gradients."""
    return (
        norm_serves(x, weight, bias)
        and not learns(x, weight, bias)
        and maps.serves(x.shape[1], x.shape[2] * x.shape[3], groups)
    )


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    return maps.group_norm(x, weight, bias, groups, eps)


def _way(traced: Callable, now: Callable, differentiable: Callable, *inputs: Tensor | None) -> Callable:
    """PyTorch's registered operators cost the host as much as the kernels cost the GPU: they are for tracing alone."""
    if operators.traced(inputs[0]):
        return traced
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return differentiable
    if carry_derivatives(*inputs):
        raise NotImplementedError(
            "form='kernel' has no derivatives in forward mode (dual numbers, jvp). Use form='parallel' or 'chunkwise'."
        )
    return now


def _launches(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The batch in parts that one launch holds: nearly always one."""
    if _fits_a_launch(q):
        return [(q, k, v, state)]
    most = MOST_HEADS // q.shape[2]
    if not most:
        raise ValueError(f"form='kernel' with {q.shape[2]} heads, expected at most {MOST_HEADS}. Use form='chunkwise'.")
    parts = [slice(start, start + most) for start in range(0, len(q), most)]
    return [(q[some], k[some], v[some], None if state is None else state[some]) for some in parts]


def _fits_a_launch(q: Tensor) -> bool:
    return q.shape[0] * q.shape[2] <= MOST_HEADS


def _joined(parts: Iterable[tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """Outputs and final states of the parts; the latter are None, or tensors of no numbers, if not asked for."""
    outputs, states = zip(*parts, strict=True)
    if len(outputs) == 1:
        return outputs[0], states[0]
    return torch.cat(outputs), None if states[0] is None else torch.cat(states)
