"""What the paper promises of retention, as tests."""

import pytest
import torch
from compare import PLAIN_1D, PLAIN_2D, inputs, relative_error
from torch import Tensor

from vir import ops

FORMS_1D, FORMS_2D = PLAIN_1D[1:], PLAIN_2D[1:]


def changed_tokens(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).any(dim=(0, 2, 3)).nonzero().flatten().tolist())


@pytest.mark.parametrize("form", FORMS_1D)
@pytest.mark.parametrize("changed", ["k", "v"])
def test_1d_is_causal(form: ops.Form, changed: str) -> None:
    q, k, v, gamma = inputs(40, 8, 8)
    before = ops.retention_1d(q, k, v, gamma, form=form, chunk=16)
    (k if changed == "k" else v)[:, 17] += 1
    assert changed_tokens(before, ops.retention_1d(q, k, v, gamma, form=form, chunk=16)) == set(range(17, 40))


@pytest.mark.parametrize("form", FORMS_2D)
@pytest.mark.parametrize("changed", ["k", "v"])
def test_2d_is_causal_on_both_axes(form: ops.Form, changed: str) -> None:
    rows, cols = 6, 20  # two tiles wide
    q, k, v, gamma = inputs(rows * cols + 1, 8, 8)
    before = ops.retention_2d(q, k, v, gamma, (rows, cols), form=form, chunk=4)
    y, x = 2, 7
    (k if changed == "k" else v)[:, y * cols + x] += 1
    after = ops.retention_2d(q, k, v, gamma, (rows, cols), form=form, chunk=4)
    below_right = {g * cols + f for g in range(y, rows) for f in range(x, cols)}
    assert changed_tokens(before, after) == below_right | {rows * cols}  # and the class token


@pytest.mark.parametrize("form", FORMS_2D)
def test_no_patch_sees_the_class_token(form: ops.Form) -> None:
    q, k, v, gamma = inputs(36, 8, 8)
    before = ops.retention_2d(q, k, v, gamma, (5, 7), form=form, chunk=2)
    k[:, -1] += 1
    v[:, -1] += 1
    assert changed_tokens(before, ops.retention_2d(q, k, v, gamma, (5, 7), form=form, chunk=2)) == {35}


def shifted(x: Tensor, grid: tuple[int, int], down: int, right: int) -> Tensor:
    """Move the content of a grid by whole patches; what enters is zero."""
    image = x.unflatten(1, grid)
    moved = torch.zeros_like(image)
    moved[:, down:, right:] = image[:, : grid[0] - down, : grid[1] - right]
    return moved.flatten(1, 2)


@pytest.mark.parametrize("form", FORMS_2D)
@pytest.mark.parametrize(("down", "right"), [(0, 1), (1, 0), (3, 2)])
def test_2d_is_shift_equivariant(form: ops.Form, down: int, right: int) -> None:
    grid = (9, 8)
    q, k, v, gamma = inputs(72, 8, 8)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.retention_2d(q, k, v, gamma, grid, form=form, chunk=4)

    of_the_shifted = run(*(shifted(x, grid, down, right) for x in (q, k, v)))
    assert relative_error(of_the_shifted, shifted(run(q, k, v), grid, down, right)) < 1e-12


def test_1d_is_not_shift_equivariant() -> None:
    """A row is `cols` steps long in 1D, and content that leaves at the right comes back at the left."""
    grid = (9, 8)
    q, k, v, gamma = inputs(72, 8, 8)
    of_the_shifted = ops.retention_1d(*(shifted(x, grid, 0, 2) for x in (q, k, v)), gamma)
    assert relative_error(of_the_shifted, shifted(ops.retention_1d(q, k, v, gamma), grid, 0, 2)) > 0.1


def test_2d_decay_is_equal_along_rows_and_columns() -> None:
    rows, cols = 4, 6
    mask = ops.mask_2d(ops.decay(4), (rows, cols)).unflatten(1, (rows, cols)).unflatten(3, (rows, cols))
    step_down, step_right = mask[:, 3, 3, 2, 3], mask[:, 3, 3, 3, 2]
    assert torch.equal(step_down, step_right)
    assert torch.allclose(step_down, ops.decay(4))


@pytest.mark.parametrize("form", FORMS_2D)
def test_linear_in_v(form: ops.Form) -> None:
    q, k, v, gamma = inputs(36, 8, 8)
    w = torch.randn_like(v)

    def run(v: Tensor) -> list[Tensor]:
        out = [ops.retention_2d(q, k, v, gamma, (5, 7), form=form, chunk=2)]
        return out if form == "scan" else [*out, ops.retention_1d(q, k, v, gamma, form=form, chunk=8)]

    for mixed, of_v, of_w in zip(run(2 * v - 3 * w), run(v), run(w), strict=True):
        assert relative_error(mixed, 2 * of_v - 3 * of_w) < 1e-12


@pytest.mark.parametrize("form", FORMS_2D)
def test_strong_and_absent_decay_stay_finite(form: ops.Form) -> None:
    """gamma^n underflows, and gamma = 1 forgets nothing: neither may give inf or NaN."""
    q, k, v, _ = (x.float() for x in inputs(401, 8, 8))
    gamma = torch.tensor([1e-6, 0.1, 1.0])
    assert ops.retention_2d(q, k, v, gamma, (20, 20), form=form).isfinite().all()
    if form != "scan":
        assert ops.retention_1d(q, k, v, gamma, form=form).isfinite().all()
