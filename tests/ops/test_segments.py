"""Sequences in segments equal the definition: on a GPU as they are, elsewhere by Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import KERNEL_TOLERANCE, case_1d, check, close, inputs
from torch import Tensor

from vir import ops

pytest.importorskip("triton")
from vir.ops import kernels
from vir.ops.triton import settings
from vir.ops.triton.launch import plans

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDED = DTYPES[:2] if torch.cuda.is_available() else DTYPES[:1]  # the interpreter rounds no operands
CUT = {  # tokens of a segment and pieces of its state, by tokens and walks
    (1024, 768): (1024, 1),
    (1600, 66): (1600, 1),
    (65536, 132): (65536, 1),
    (4096, 12): (384, 1),
    (16384, 48): (3328, 2),
    (16384, 96): (8192, 4),
    (65536, 12): (3008, 1),
}


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


@pytest.fixture
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sequences into so many segments, with states in so many pieces, however many walks there are."""
    count, pieces = request.param if isinstance(request.param, tuple) else (request.param, 1)
    monkeypatch.setattr(settings, "segments", lambda tokens, *_: (-(-tokens // count), pieces))


def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
    return ops.retention_1d(q, k, v, gamma, form="kernel"), None


def run_with_state(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.sequence(q, k, v, gamma, q.shape[3] ** -0.5, q.dtype, None, final=True)


@pytest.mark.parametrize("segments", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_final_state(segments: None, dtype: torch.dtype) -> None:
    check(run_with_state, case_1d(100, 16, 40), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize("segments", [2, 3, 13, 14], indirect=True)
def test_without_states(segments: None) -> None:
    """What up to twelve make is added up where a walk begins, of more before it."""
    for dtype in ROUNDED:
        check(run, case_1d(100, 16, 40), dtype, DEVICE, kernel=True)


@pytest.mark.parametrize("segments", [20], indirect=True)
def test_many(segments: None) -> None:
    """They are joined 16 at a time."""
    q, k, v, gamma = inputs(39, 16, 16, batch=1)
    first = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    want, last = ops.retention_1d_stream(q, k, v, gamma, first)
    there = [x.to(DEVICE, torch.float32) for x in (q, k, v)]
    out, state = kernels.sequence(*there, gamma.to(DEVICE), 16**-0.5, torch.float32, first.float().to(DEVICE), True)
    close("out", out, want, 1e-5)
    close("state", state, last, 1e-5)


def test_they_fill_the_gpu() -> None:
    """One with 132 multiprocessors: no segments, few, long ones whose states are made in pieces, many."""
    cut = {(tokens, walks): settings.segments(tokens, walks, 64, 132) for tokens, walks in CUT}
    assert cut == CUT


@pytest.mark.parametrize("segments", [(2, 2), (2, 3), (3, 5), (3, 7)], indirect=True, ids=str)
@pytest.mark.parametrize("n", [500, 640])
def test_states_in_pieces(n: int, segments: None) -> None:
    """Of segments with several chunks: with as many pieces or fewer, with more, and with more than a walk adds up; the
    last piece may have fewer chunks than the others."""
    *qkv, gamma = inputs(n, 16, 16, batch=1)
    qkv = [x.requires_grad_() for x in qkv]
    grad = torch.randn(qkv[2].shape, dtype=torch.float64)
    want = ops.retention_1d(*qkv, gamma, form="parallel")
    grads = torch.autograd.grad(want, qkv, grad)
    for dtype in ROUNDED:
        here = [x.detach().to(DEVICE, dtype).requires_grad_() for x in qkv]
        out = ops.retention_1d(*here, gamma.to(DEVICE), form="kernel")
        close("out", out, want, KERNEL_TOLERANCE[dtype])
        for name, got, wanted in zip("qkv", torch.autograd.grad(out, here, grad.to(DEVICE, dtype)), grads, strict=True):
            close(f"d{name}", got, wanted, KERNEL_TOLERANCE[dtype])


@pytest.mark.parametrize("segments", [2, (2, 2), (2, 3)], indirect=True, ids=str)
def test_tokens_that_have_faded_are_not_missed(segments: None) -> None:
    """Segments longer than a head remembers, after tokens a thousand times larger."""
    q, k, v, _ = inputs(700, 16, 16, batch=1)
    v = torch.cat((v[:, :100] * 1024, v[:, 100:]), dim=1)
    gamma = torch.tensor([0.7, 0.9, 0.95], dtype=torch.float64)
    want = ops.retention_1d(q, k, v, gamma, form="parallel")
    for dtype in ROUNDED:
        got = ops.retention_1d(*(x.to(DEVICE, dtype) for x in (q, k, v)), gamma.to(DEVICE), form="kernel")
        close("after", got[:, 350:], want[:, 350:], KERNEL_TOLERANCE[dtype])


@pytest.mark.parametrize("segments", [2], indirect=True)
def test_in_full_precision_less_is_forgotten(segments: None) -> None:
    """What would be lost in the rounding of other tokens, but is so much larger that it counts."""
    q, k, v, _ = inputs(1600, 16, 16, batch=1)
    v[:, 80:150] *= 2**18
    gamma = torch.tensor([0.96, 0.97, 0.98], dtype=torch.float64)
    want = ops.retention_1d(q, k, v, gamma, form="parallel")
    got = ops.retention_1d(*(x.to(DEVICE, torch.float32) for x in (q, k, v)), gamma.to(DEVICE), form="kernel")
    for head in range(3):
        close(f"head {head}", got[:, 800:810, head], want[:, 800:810, head], KERNEL_TOLERANCE[torch.float32])


@pytest.mark.parametrize("segments", [1, 3], indirect=True)
@pytest.mark.parametrize("sizes", [[99, 1], [1, 99], [33, 67]], ids=str)
def test_a_stream_passes_states_and_their_gradients(segments: None, sizes: list[int]) -> None:
    def stream(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor | None]:
        outs, state = [], None
        for piece in zip(*(x.split(sizes, dim=1) for x in (q, k, v)), strict=True):
            out, state = kernels.sequence(*piece, gamma, q.shape[3] ** -0.5, q.dtype, state, final=True)
            outs.append(out)
        return torch.cat(outs, dim=1), state

    for dtype in ROUNDED:
        check(stream, case_1d(100, 16, 40), dtype, DEVICE, kernel=True)


def test_tiles_are_shared_and_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """By programs of which each comes to all places of tiles; with one tile where one is as wide as the grid."""
    monkeypatch.setattr(settings, "processors", lambda device: 132)
    here = torch.device("cpu")
    found = [settings.of_many_tiles(tiles, 1000, 12, 64, 2, here) for tiles in (1, 2, 3, 4, 5)]
    assert [of and of[1] for of in found] == [22, 21, 22, 21, None]
    assert [settings.grid_tile(cols, 64, 2, here).cols for cols in (8, 9, 16, 17)] == [8, 16, 16, 8]


@pytest.mark.parametrize(("dk", "dv", "wide"), [(64, 64, True), (48, 40, True), (49, 49, False), (64, 49, False)])
def test_heads_that_are_loaded_number_by_number_have_settings_of_their_own(dk: int, dv: int, wide: bool) -> None:
    key = plans.key(dk, dv, torch.bfloat16, torch.device("cpu"))
    own = settings.NUMBER_BY_NUMBER["WALK", 64, 2], settings.NUMBER_BY_NUMBER["WIDE", 64, 2]
    usual = settings.WALK[64, 2], settings.WIDE[64, 2]
    assert (settings.sized("WALK", *key), settings.grid_tile(30, *key)) == (usual if wide else own)
    assert usual != own
