"""The kernels equal the definition: on a GPU as they are, elsewhere by Triton's interpreter at small sizes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import KERNEL_TOLERANCE, case_1d, case_2d, check, close, inputs, served
from torch import Tensor

from vir import ops

pytest.importorskip("triton")
from triton.runtime.errors import InterpreterError

from vir.ops import kernels
from vir.ops.triton import launch, runner, settings
from vir.ops.triton.launch import tiles
from vir.ops.triton.settings import Tile

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDED = DTYPES[:2] if torch.cuda.is_available() else DTYPES[:1]  # the interpreter rounds no operands
HEAD_SIZES = [(16, 16), (40, 40), (49, 64)]
GRIDS = [(1, 1), (1, 9), (9, 1), (7, 5), (6, 19)]  # the last is wider than a tile
MORE = pytest.mark.gpu  # sizes for which the interpreter is too slow
LARGER_GRIDS = [pytest.param(grid, marks=MORE) for grid in ((14, 14), (3, 37), (37, 29), (40, 16))]
LARGER_HEADS = [
    pytest.param(d, e, marks=MORE) for d, e in ((32, 32), (48, 48), (64, 64), (80, 80), (128, 128), (64, 128))
]


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


@pytest.mark.skipif(not launch.INTERPRETED, reason="the fence stands in Triton's interpreter")
def test_the_fence_holds() -> None:
    k = torch.zeros(1, 5, 1, 16, device=DEVICE)
    short = k[:, :4].clone()  # one token less than the kernel is told of
    with pytest.raises(InterpreterError, match="outside the tensors"):
        launch.line_states(k, short, torch.ones(1), 1.0, 1, 5, back=False, dtype=k.dtype)


def run_1d(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
    return ops.retention_1d(q, k, v, gamma, form="kernel"), None


def run_1d_with_state(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.sequence(q, k, v, gamma, q.shape[3] ** -0.5, q.dtype, None, final=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 63, 100, pytest.param(197, marks=MORE)])
@pytest.mark.parametrize(("d", "e"), HEAD_SIZES + LARGER_HEADS)
def test_1d_equals_definition(n: int, d: int, e: int, dtype: torch.dtype) -> None:
    served(max(d, e), dtype)
    check(run_1d, case_1d(n, d, e), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [1, 64, 65, 150])
def test_1d_images_one_after_another(n: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program; none sees what came before it, not even what is not a number."""
    monkeypatch.setattr(settings, "images_at_once", lambda *_: at_once)
    *qkv, gamma = inputs(n, 16, 16, batch=5)
    qkv = [x.requires_grad_() for x in qkv]
    grad = torch.randn(qkv[2].shape).bfloat16()
    want = ops.retention_1d(*qkv, gamma, form="parallel")
    dq, _, _ = torch.autograd.grad(want, qkv, grad.double())
    here = [x.detach().to(DEVICE, torch.bfloat16).requires_grad_() for x in qkv]
    here[2].data[1, -1], here[1].data[3, 0] = torch.nan, torch.inf
    out = ops.retention_1d(*here, gamma.to(DEVICE).float(), form="kernel")
    got, _, _ = torch.autograd.grad(out, here, grad.to(DEVICE))
    for image in (0, 2, 4):
        close("out", out[image], want[image], KERNEL_TOLERANCE[torch.bfloat16])
        close("dq", got[image], dq[image], KERNEL_TOLERANCE[torch.bfloat16])
    assert out[1, -1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("class_token", [False, True], ids=["patches", "class"])
@pytest.mark.parametrize("grid", GRIDS + LARGER_GRIDS, ids=str)
def test_2d_equals_definition(grid: tuple[int, int], class_token: bool, dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, grid, form="kernel"), None

    check(run, case_2d(grid, class_token, 16, 16), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize(("d", "e"), [(40, 40), (49, 64), *LARGER_HEADS])
@pytest.mark.parametrize("grid", [(7, 5), pytest.param((9, 20), marks=MORE)], ids=str)
def test_2d_head_sizes(grid: tuple[int, int], d: int, e: int) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, grid, form="kernel"), None

    for dtype in ROUNDED:
        served(max(d, e), dtype)
        check(run, case_2d(grid, True, d, e), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize("tile", [Tile(4, 4, 4, 4, 1), Tile(8, 2, 8, 4, 1), Tile(2, 16, 2, 4, 1)], ids=str)
def test_2d_does_not_depend_on_the_tile(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "grid_tile", lambda *_: tile)

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, (7, 5), form="kernel"), None

    check(run, case_2d((7, 5), True, 16, 16), torch.float32, DEVICE, kernel=True)


@pytest.mark.parametrize("ahead", [1, 256])
@pytest.mark.parametrize("few", [0, 1, 9])
@pytest.mark.parametrize(("grid", "tile"), [((9, 10), Tile(4, 4, 4, 4, 1)), pytest.param((30, 50), None, marks=MORE)])
def test_2d_corners_added_up_before_and_where_they_are_seen(
    few: int, ahead: int, grid: tuple[int, int], tile: Tile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states are made one head ahead, or those of all heads first."""
    monkeypatch.setattr(tiles, "FEW_ROWS", few)
    monkeypatch.setattr(settings, "AHEAD", ahead)
    if tile is not None:
        monkeypatch.setattr(settings, "grid_tile", lambda *_: tile)

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, grid, form="kernel"), None

    for dtype in ROUNDED:
        check(run, case_2d(grid, True, 40, 40), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize(
    "tile", [Tile(8, 4, 4, 4, 1), Tile(4, 8, 2, 4, 1), Tile(8, 8, 2, 4, 1), Tile(16, 2, 8, 4, 1)], ids=str
)
def test_2d_tiles_of_several_blocks_of_keys(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "grid_tile", lambda *_: tile)

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, (10, 11), form="kernel"), None

    check(run, case_2d((10, 11), True, 16, 16), torch.float32, DEVICE, kernel=True)


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize(
    ("grid", "class_token"),
    [((7, 5), True), ((7, 8), True), ((9, 10), True), ((9, 10), False), ((16, 8), False), ((5, 17), True)],
)
def test_2d_tiles_one_after_another(
    grid: tuple[int, int], class_token: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one program, of one image and the next."""
    usual, used = settings.of_many_tiles, []
    monkeypatch.setattr(settings, "MANY_GRIDS", 0)
    monkeypatch.setattr(settings, "MOST_TILES", 9)

    def some(*given: Any) -> Any:
        used.append(usual(*given))
        return used[-1][0], programs

    monkeypatch.setattr(settings, "of_many_tiles", some)

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, grid, form="kernel"), None

    for d, e in ((16, 16), (40, 40), (48, 64)):
        check(run, case_2d(grid, class_token, d, e), torch.bfloat16, DEVICE, kernel=True)
    assert used


@pytest.mark.parametrize(("d", "kernel"), [(48, "quadrant"), (49, "grid")])
def test_2d_heads_that_are_loaded_number_by_number_are_loaded_once(
    d: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop over tiles loads q with every block: of heads of 49 numbers that took five times as long."""
    started = []
    monkeypatch.setattr(settings, "MANY_GRIDS", 0)
    monkeypatch.setattr(runner.Step, "run", lambda step, *_: started.append(step.kernel.fn.__name__))
    q, k, v = torch.empty(2, 9 * 10, 3, 2, d, device=DEVICE, dtype=torch.bfloat16).unbind(2)
    launch.grid(q, k, v, ops.decay(2, device=DEVICE), 1.0, 9, 10, dtype=q.dtype, out_dtype=q.dtype)
    assert started[-1] == kernel


@pytest.mark.parametrize("rows", [[7], [1, 6], [3, 3, 1]], ids=str)
def test_2d_stream_passes_states_and_their_gradients(rows: list[int]) -> None:
    sizes = [5 * r for r in rows]

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor | None]:
        outs, state = [], None
        for piece in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
            out, state = kernels.rows(*piece, gamma, q.shape[3] ** -0.5, q.dtype, 5, state)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    for dtype in ROUNDED:
        for d, e in ((16, 16), (16, 40)):
            check(run, case_2d((7, 5), False, d, e), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize(("rows", "cols"), [([7], 5), ([3, 3, 1], 5), ([2, 1], 37)], ids=str)
def test_2d_stream_without_gradients(rows: list[int], cols: int) -> None:
    """It has kernels of its own; columns are joined 16 at a time."""
    sizes = [cols * r for r in rows]
    q, k, v, gamma = inputs(sum(sizes), 16, 40, batch=1)
    want, last = ops.retention_2d_stream(q, k, v, gamma, cols)
    for dtype in ROUNDED:
        outs, state = [], None
        for piece in zip(*(x.to(DEVICE, dtype).split(sizes, dim=1) for x in (q, k, v)), strict=True):
            out, state = kernels.rows(*piece, gamma.to(DEVICE), 16**-0.5, dtype, cols, state)
            outs.append(out)
        assert outs[0].dtype == dtype
        close("out", torch.cat(outs, dim=1), want, KERNEL_TOLERANCE[dtype])
        close("state", state, last, KERNEL_TOLERANCE[dtype])


def test_the_kernels_of_a_band_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a first band takes as long as the slowest of them: they come together, in their order. What a band makes
    of itself is not rounded before what it sees above is added."""
    together: list[tuple[torch.dtype, list[str]]] = []

    def noted(*calls: runner.Call) -> None:
        (_, (_, _, _, inside, *_)), *_ = calls
        together.append((inside.dtype, [step.kernel.fn.__name__ for step, _ in calls]))

    monkeypatch.setattr(tiles, "run_in_turn", noted)
    q, k, v, gamma = (x.to(DEVICE) for x in inputs(3 * 5, 16, 16, batch=1))
    q, k, v = q.half(), k.half(), v.half()
    launch.rows(q, k, v, gamma, 1.0, 5, None, q.dtype)
    launch.rows(q, k, v, gamma, 1.0, 5, torch.zeros(1, q.shape[2], 5, 16, 16, device=DEVICE), q.dtype)
    last = ["line_states", "join_columns"]
    assert together == [(torch.float16, ["grid", *last]), (torch.float32, ["grid", "apply_states", *last])]


@pytest.mark.parametrize(("d", "dtype"), [(16, torch.float32), (40, torch.float32), (80, torch.bfloat16)])
def test_settings_of_other_gpus_give_the_same_numbers(
    d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_2d(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        return ops.retention_2d(q, k, v, gamma, (5, 17), form="kernel"), None

    monkeypatch.setattr(settings, "like_hopper", lambda device: False)
    launch.forget()
    check(run_1d_with_state, case_1d(35, d, d), dtype, DEVICE, kernel=True)
    check(run_2d, case_2d((5, 17), True, d, d), dtype, DEVICE, kernel=True)
    launch.forget()


@pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.49, 1.0])
def test_any_decay(gamma: float) -> None:
    """From one that forgets at once to one that never does; no power of it leaves the range of numbers."""
    q, k, v, _ = inputs(40, 16, 16)
    gammas = torch.full((3,), gamma, dtype=torch.float64)
    here = [x.to(DEVICE, torch.float32) for x in (q, k, v, gammas)]
    want = ops.retention_1d(q, k, v, gammas, form="parallel")
    close("1d", ops.retention_1d(*here, form="kernel"), want, 1e-4)
    for grid in ((8, 5), (2, 20)):
        want = ops.retention_2d(q, k, v, gammas, grid, form="parallel")
        close("2d", ops.retention_2d(*here, grid, form="kernel"), want, 1e-4)


def test_batches_beyond_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 5, 10, 3, 16, device=DEVICE).unbind(0)
    gamma = ops.decay(3, device=DEVICE)
    state, columns = torch.randn(5, 3, 16, 16, device=DEVICE), torch.randn(5, 3, 5, 16, 16, device=DEVICE)
    calls = [
        lambda: kernels.sequence(q, k, v, gamma, 1.0, q.dtype, state, final=True),
        lambda: [kernels.grid(q, k, v, gamma, 1.0, q.dtype, 2, 5)],
        lambda: kernels.rows(q, k, v, gamma, 1.0, q.dtype, 5, columns),
    ]
    whole = [call() for call in calls]
    monkeypatch.setattr(kernels, "MOST_HEADS", 7)  # two images of three heads
    for call, want in zip(calls, whole, strict=True):
        for a, b in zip(call(), want, strict=True):
            close("parts", a, b, 1e-6)


def test_views_of_one_qkv_tensor_and_expanded_gradients() -> None:
    qkv = torch.randn(2, 36, 3, 3, 24, device=DEVICE, requires_grad=True)
    gamma = torch.tensor([0.5, 0.9, 0.99], device=DEVICE)
    for form in ("kernel", "parallel"):
        qkv.grad = None
        q, k, v = qkv.unbind(2)
        out = ops.retention_1d(q, k, v, gamma, form=form) + ops.retention_2d(q, k, v, gamma, (7, 5), form=form)
        out.sum().backward()
        if form == "kernel":
            got, grad = out.detach(), qkv.grad
    close("out", got, out, 1e-5)
    close("grad", grad, qkv.grad, 1e-5)


def test_states_and_tokens_wherever_they_lie_in_memory() -> None:
    """A state that is a transposed view; tokens of one shape at addresses that loads of 16 bytes can take or not."""
    q, k, v = torch.randn(3, 2, 9, 3, 16, device=DEVICE).unbind(0)
    gamma, state = ops.decay(3, device=DEVICE), torch.randn(2, 3, 16, 16, device=DEVICE)
    want = kernels.sequence(q, k, v, gamma, 1.0, q.dtype, state, final=True)
    turned = state.mT.contiguous().mT
    assert not turned.is_contiguous()
    for offset in (0, 1, 0, 3):
        here = [torch.randn(x.numel() + offset, device=DEVICE)[offset:].view(x.shape).copy_(x) for x in (q, k, v)]
        got = kernels.sequence(*here, gamma, 1.0, q.dtype, turned, final=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_same_bits_twice() -> None:
    q, k, v = (torch.randn(1, 101, 2, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    gamma = ops.decay(2, device=DEVICE)
    grad = torch.randn_like(v)
    runs = []
    for _ in range(2):
        both = ops.retention_1d(q, k, v, gamma, form="kernel"), ops.retention_2d(q, k, v, gamma, (4, 25), form="kernel")
        runs.append([*both, *(g for out in both for g in torch.autograd.grad(out, (q, k, v), grad))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_output_in_full_precision() -> None:
    """fp16 tokens whose sums leave fp16's range: the output can be asked for in float32, from every form."""
    q = torch.full((1, 70, 1, 16), 60.0, device=DEVICE, dtype=torch.float16)
    gamma = torch.ones(1, device=DEVICE)
    for form in ("kernel", "parallel", "chunkwise"):
        for out in (
            ops.retention_1d(q, q, q, gamma, form=form, dtype=torch.float32),
            ops.retention_2d(q, q, q, gamma, (7, 10), form=form, dtype=torch.float32),
        ):
            assert out.dtype == torch.float32
            assert out[0, -1, 0, 0].item() == pytest.approx(70 * 60.0**3 * 4, rel=1e-3)


def test_gradients_of_a_first_state_alone() -> None:
    q, k, v, gamma = inputs(20, 16, 24)
    states = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    grads = []
    for of in (torch.float32, torch.float64):
        here, state = [x.to(DEVICE, of) for x in (q, k, v, gamma)], states.to(DEVICE, of).requires_grad_()
        if of == torch.float32:
            out, _ = kernels.sequence(*here, 0.25, of, state, final=False)
        else:
            out, _ = ops.retention_1d_stream(*here, state, scale=0.25)
        grads.append(torch.autograd.grad(out.sum(), state)[0])
    close("state", *grads, 1e-5)


@pytest.mark.parametrize("gamma", [0.51, 0.6, 0.75, 0.9])
def test_powers_of_any_decay(gamma: float) -> None:
    """Each by itself: beside nearer tokens their error is not seen."""
    q, first = torch.ones(1, 40, 1, 16, device=DEVICE), torch.zeros(1, 40, 1, 16, device=DEVICE)
    first[:, 0] = 1
    gammas = torch.tensor([gamma], device=DEVICE)
    out, _ = kernels.sequence(q, first, first, gammas, 1 / 16, torch.float32, None, final=False)
    want = gammas.double() ** torch.arange(40, device=DEVICE)
    assert (out[0, :, 0, 0] / want - 1).abs().max() < 2e-5


def test_tf32_is_rounded_to_the_nearest() -> None:
    q, k, v = torch.zeros(3, 1, 1, 1, 16, device=DEVICE, dtype=torch.float16).unbind(0)
    q[..., 0], q[..., 1], k[..., :2], v[..., 0] = 1, 0.625 * 2**-10, 1, 1
    out, _ = kernels.sequence(q, k, v, torch.ones(1, device=DEVICE), 1.0, torch.float32, None, final=False)
    assert out[0, 0, 0, 0] == 1 + 2**-10


@pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.49, 1.0])
def test_states_of_any_decay(gamma: float) -> None:
    q, k, v, _ = inputs(40, 16, 16)
    gammas = torch.full((3,), gamma, dtype=torch.float64)
    _, want = ops.retention_2d_stream(q, k, v, gammas, 5)
    here = [x.to(DEVICE, torch.float32) for x in (q, k, v, gammas)]
    close("state", kernels.rows(*here, 0.25, torch.float32, 5, None)[1], want, 1e-4)


def test_rows_with_gradients_in_full_precision() -> None:
    q = torch.full((1, 50, 1, 16), 60.0, device=DEVICE, dtype=torch.float16, requires_grad=True)
    out, _ = kernels.rows(q, q, q, torch.ones(1, device=DEVICE), 0.25, torch.float32, 5, None)
    assert out[0, -1, 0, 0].item() == pytest.approx(50 * 60.0**3 * 4, rel=1e-3)
