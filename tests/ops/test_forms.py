"""Every form of both retentions equals the definition: outputs, states, gradients."""

from typing import Any

import pytest
import torch
from compare import (
    DTYPES,
    HEAD_SIZES,
    PLAIN_1D,
    PLAIN_2D,
    TOLERANCE,
    case_1d,
    case_2d,
    check,
    close,
    inputs,
    relative_error,
)
from torch import Tensor

from vir import ops
from vir.ops import naive
from vir.ops.dispatch import Plan, stateful_1d, stateful_2d

LENGTHS = [1, 63, 100, 131]  # of chunks of 64: less than one, one and a bit, two and a bit
GRIDS = [(1, 1), (1, 9), (9, 1), (7, 5), (14, 14), (3, 37)]  # the last is wider than two tiles
FORMS_1D = [("auto", None), ("parallel", None), ("recurrent", None)]
FORMS_1D += [("chunkwise", chunk) for chunk in (None, 1, 7, 300)]
FORMS_2D = [("auto", None), ("parallel", None), ("recurrent", None), ("scan", None)]
FORMS_2D += [("chunkwise", chunk) for chunk in (None, 1, 3, 50)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "chunk"), FORMS_1D)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("d", "e"), HEAD_SIZES)
def test_1d_equals_definition(
    n: int, d: int, e: int, form: ops.Form, chunk: int | None, dtype: torch.dtype, device: str
) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_1d(q, k, v, gamma, form=form, chunk=chunk), None

    check(run, case_1d(n, d, e), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "chunk"), FORMS_2D)
@pytest.mark.parametrize("class_token", [False, True], ids=["patches", "class"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_2d_equals_definition(
    grid: tuple[int, int],
    class_token: bool,
    form: ops.Form,
    chunk: int | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, grid, form=form, chunk=chunk), None

    d, e = HEAD_SIZES[GRIDS.index(grid) % len(HEAD_SIZES)]
    check(run, case_2d(grid, class_token, d, e), dtype, device)


@pytest.mark.parametrize(("form", "chunk"), FORMS_2D)
@pytest.mark.parametrize(("d", "e"), HEAD_SIZES)
def test_2d_head_sizes(d: int, e: int, form: ops.Form, chunk: int | None, device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, (7, 5), form=form, chunk=chunk), None

    check(run, case_2d((7, 5), True, d, e), torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("plan", [Plan("recurrent"), Plan("chunkwise", 7), Plan("chunkwise", 64)], ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_1d_state_of_every_form(n: int, plan: Plan, dtype: torch.dtype, device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        start = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out, state = stateful_1d(plan)(*qkv, gamma, q.shape[-1] ** -0.5, start)
        return out.transpose(1, 2), state

    check(run, case_1d(n, 49, 64), dtype, device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "plan", [Plan("recurrent"), Plan("scan"), Plan("chunkwise", 3), Plan("chunkwise", 16)], ids=str
)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_2d_state_of_every_form(grid: tuple[int, int], plan: Plan, dtype: torch.dtype, device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        start = q.new_zeros(q.shape[0], q.shape[2], grid[1], q.shape[3], v.shape[3])
        out, state = stateful_2d(plan, grid[1])(*qkv, gamma, q.shape[-1] ** -0.5, start)
        return out.transpose(1, 2), state

    check(run, case_2d(grid, False, 16, 16), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_1d_stream_equals_definition(n: int, dtype: torch.dtype, device: str) -> None:
    check(ops.retention_1d_stream, case_1d(n, 49, 64), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("class_token", [False, True], ids=["patches", "class"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_2d_stream_equals_definition(grid: tuple[int, int], class_token: bool, dtype: torch.dtype, device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return ops.retention_2d_stream(q, k, v, gamma, grid[1])

    check(run, case_2d(grid, class_token, 16, 16), dtype, device)


@pytest.mark.parametrize("sizes", [[1] * 100, [99, 1], [1, 99], [33, 2, 65], [64, 36]], ids=lambda s: f"{len(s)}x")
def test_1d_stream_split_anywhere_equals_whole(sizes: list[int], device: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        outs, state = [], None
        for piece in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
            out, state = ops.retention_1d_stream(*piece, gamma, state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check(run, case_1d(100, 16, 16), dtype, device)


@pytest.mark.parametrize("rows", [[1] * 14, [13, 1], [5, 9], [14]], ids=str)
@pytest.mark.parametrize("ending", ["none", "with the last rows", "alone"])
def test_2d_stream_split_at_any_row_equals_whole(rows: list[int], ending: str, device: str) -> None:
    sizes = [r * 14 for r in rows]
    if ending == "with the last rows":
        sizes[-1] += 1
    elif ending == "alone":
        sizes.append(1)

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        outs, state = [], None
        for piece in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
            out, state = ops.retention_2d_stream(*piece, gamma, 14, state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    d, e = HEAD_SIZES[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check(run, case_2d((14, 14), ending != "none", d, e), dtype, device)


@pytest.mark.parametrize("form", [*PLAIN_2D[1:], "definition"])
@pytest.mark.parametrize("grid", [None, (2, 3)], ids=["1d", "2d"])
def test_gradients_are_those_of_finite_differences(form: str, grid: tuple[int, int] | None) -> None:
    if grid is None and form == "scan":
        pytest.skip("1D has no scan")
    *qkv, gamma = inputs(7 if grid else 6, 3, 4, batch=1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if grid is None:
            return naive.retention_1d(q, k, v, gamma) if form == "definition" else ops.retention_1d(
                q, k, v, gamma, form=form, chunk=4
            )  # fmt: skip
        if form == "definition":
            return naive.retention_2d(q, k, v, gamma, grid)
        return ops.retention_2d(q, k, v, gamma, grid, form=form, chunk=1)

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in qkv])


def test_scale_multiplies_the_query(device: str) -> None:
    q, k, v, gamma = (x.to(device) for x in inputs(20, 8, 8))
    for form in PLAIN_1D:
        want = naive.retention_1d(q, k, v, gamma, 3.0)
        close("1d", ops.retention_1d(q, k, v, gamma, form=form, scale=3.0), want, 1e-10)
    for form in PLAIN_2D:
        want = naive.retention_2d(q, k, v, gamma, (4, 5), 3.0)
        close("2d", ops.retention_2d(q, k, v, gamma, (4, 5), form=form, scale=3.0), want, 1e-10)


def test_views_of_one_qkv_tensor(device: str) -> None:
    """q, k, v as a layer makes them: strided views, nothing contiguous."""
    qkv = torch.randn(2, 35, 3, 3, 8, dtype=torch.float64, device=device)
    q, k, v = qkv.unbind(2)
    gamma = torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64, device=device)
    for form in PLAIN_1D:
        close("1d", ops.retention_1d(q, k, v, gamma, form=form), naive.retention_1d(q, k, v, gamma), 1e-10)
    for form in PLAIN_2D:
        want = naive.retention_2d(q, k, v, gamma, (7, 5))
        close("2d", ops.retention_2d(q, k, v, gamma, (7, 5), form=form), want, 1e-10)


@pytest.mark.parametrize("n", [1500, 4097])
def test_batches_that_the_cpu_takes_in_parts(n: int) -> None:
    """Beyond 1,024 tokens a CPU works sample by sample: the numbers must not show it."""
    q, k, v = torch.randn(3, 3, n, 2, 8, dtype=torch.float64).unbind(0)
    gamma = torch.tensor([0.9, 0.998], dtype=torch.float64)
    whole = ops.retention_1d(q, k, v, gamma, form="parallel")
    assert relative_error(ops.retention_1d(q, k, v, gamma, form="chunkwise"), whole) < 1e-10


def test_autocast_does_not_round_the_sums() -> None:
    q, k, v, gamma = inputs(131, 16, 16)
    q, k, v, gamma = q.float(), k.float(), v.float(), gamma.float()
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.retention_1d(q, k, v, gamma)
    close("out", out, case_1d(131, 16, 16).out, TOLERANCE[torch.float32])


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "scan", "auto"])
def test_derivatives_of_the_decay_in_forward_mode(form: Any) -> None:
    q, gamma = torch.randn(1, 16, 2, 4, dtype=torch.float64), ops.decay(2).double()

    def of(gamma: Tensor) -> Tensor:
        return ops.retention_2d(q, q, q, gamma, (4, 4), form=form).square().sum()

    _, got = torch.func.jvp(of, (gamma,), (torch.ones_like(gamma),))
    want = (of(gamma + 1e-6) - of(gamma - 1e-6)) / 2e-6
    assert got.item() == pytest.approx(want.item(), rel=1e-5)
