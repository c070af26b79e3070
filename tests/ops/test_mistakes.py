"""A wrong argument gets an error that says what was given, what was expected, and what to do."""

import pytest
import torch
from torch import Tensor

from vir import ops
from vir.ops import kernels


def qkv(n: int = 12, h: int = 2, d: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(3, 1, n, h, d).to(dtype).unbind(0))


GAMMA = ops.decay(2)


def seen_before() -> None:
    """Calls of the same looks that are right: what is kept of them must not let mistakes pass."""
    ops.retention_1d(*qkv(), GAMMA, chunk=1)
    ops.retention_1d(*qkv(), GAMMA)
    ops.retention_2d(*qkv(), GAMMA, (3, 4))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda q, k, v, g: (q[0], k, v, g), ValueError, r"q has shape \(12, 2, 4\), expected 4 axes"),
        (lambda q, k, v, g: (q, k[:, :5], v, g), ValueError, r"q has shape .* k has \(1, 5, 2, 4\)"),
        (lambda q, k, v, g: (q, k, v[:, :5], g), ValueError, r"v has shape \(1, 5, 2, 4\)"),
        (lambda q, k, v, g: (q, k, v.transpose(1, 2), g), ValueError, "was an axis transposed"),
        (lambda q, k, v, g: (q[:, :0], k[:, :0], v[:, :0], g), ValueError, "at least one entry"),
        (lambda q, k, v, g: (q, k, v.half(), g), TypeError, "convert them to one dtype"),
        (lambda q, k, v, g: (q.int(), k, v, g), TypeError, "q is torch.int32, expected one of float64"),
        (lambda q, k, v, g: (q, k, v.to("meta"), g), ValueError, "move them to one device"),
        (lambda q, k, v, g: (q, k, v, ops.decay(3)), ValueError, r"gamma has shape \(3,\), expected \(2,\)"),
        (lambda q, k, v, g: (q, k, v, g.bfloat16()), TypeError, "gamma is torch.bfloat16"),
        (lambda q, k, v, g: (q, k, v, g.clone().requires_grad_()), ValueError, r"gamma.detach\(\)"),
    ],
)
def test_tensors(change, error: type[Exception], says: str) -> None:  # type: ignore[no-untyped-def]
    seen_before()
    arguments = change(*qkv(), GAMMA)
    for call in (
        lambda: ops.retention_1d(*arguments),
        lambda: ops.retention_1d_stream(*arguments),
        lambda: ops.retention_2d(*arguments, (3, 4)),
        lambda: ops.retention_2d_stream(*arguments, 4),
    ):
        with pytest.raises(error, match=says):
            call()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"form": "fast"}, "form='fast', expected one of 'auto', 'parallel', 'recurrent', 'chunkwise'"),
        ({"form": "scan"}, "form='scan', expected one of"),
        ({"chunk": 0}, "chunk=0, expected a whole number of at least 1"),
        ({"chunk": 2.5}, "chunk=2.5, expected"),
        ({"chunk": True}, "chunk=True, expected"),
    ],
)
def test_options(options: dict, says: str) -> None:
    seen_before()
    with pytest.raises(ValueError, match=says):
        ops.retention_1d(*qkv(), GAMMA, **options)


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        (
            (3, 5),
            r"12 tokens do not fit grid \(rows=3, cols=5\): expected 15 patches, or 16 with the class token",
        ),
        ((12,), "expected \\(rows, cols\\)"),
        ((0, 12), "at least 1"),
        ((3.0, 4), "whole numbers"),
        ((3, torch.tensor(4)), "whole numbers"),
    ],
)
def test_grid(grid: tuple, says: str) -> None:
    seen_before()
    with pytest.raises(ValueError, match=says):
        ops.retention_2d(*qkv(), GAMMA, grid)


def test_rows_of_a_stream() -> None:
    with pytest.raises(ValueError, match="12 tokens are not whole rows of 5"):
        ops.retention_2d_stream(*qkv(), GAMMA, 5)
    with pytest.raises(ValueError, match="cols=0"):
        ops.retention_2d_stream(*qkv(), GAMMA, 0)


def test_state_of_a_stream() -> None:
    _, state = ops.retention_1d_stream(*qkv(), GAMMA)
    with pytest.raises(ValueError, match=r"state has shape \(1, 2, 4\), expected \(1, 2, 4, 4\)"):
        ops.retention_1d_stream(*qkv(), GAMMA, state[..., 0])
    with pytest.raises(TypeError, match="states are kept in full precision"):
        ops.retention_1d_stream(*qkv(), GAMMA, state.half())
    with pytest.raises(ValueError, match=r"expected \(1, 2, 3, 4, 4\)"):
        ops.retention_2d_stream(*qkv(), GAMMA, 3, state)


def test_kernel_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "possible", lambda device: False)
    with pytest.raises(ValueError, match=r"form='kernel' on cpu, expected a CUDA GPU .* leave form='auto'"):
        ops.retention_1d(*qkv(), GAMMA, form="kernel")


@pytest.mark.parametrize(
    ("dtype", "d", "chunk", "says"),
    [
        (torch.float64, 4, None, "float64 and head size 4, expected float32"),
        (torch.float32, 129, None, "head size 129, expected .* at most 128"),
        (torch.float32, 4, 3, "chunk=3, expected None"),
    ],
)
def test_kernel_beyond_what_it_serves(
    dtype: torch.dtype, d: int, chunk: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "possible", lambda device: True)
    with pytest.raises(ValueError, match=says):
        ops.retention_2d(*qkv(d=d, dtype=dtype), GAMMA, (3, 4), form="kernel", chunk=chunk)
