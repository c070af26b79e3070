"""Kernels among other parts of PyTorch: views of any kind, autocast, other defaults, derivatives they do not have."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bounds import poisoned_and_fenced
from compare import close
from torch import Tensor
from torch.autograd import forward_ad

from vir import ops

pytest.importorskip("triton")
from vir.ops import kernels, retention
from vir.ops.triton import norm

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAR = 2**30 + 16  # numbers: twice as many are more than 32 bits hold


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


def qkv(n: int, heads: int = 3, d: int = 16, gradients: bool = False) -> list[Tensor]:
    return list(torch.randn(3, 1, n, heads, d, device=DEVICE, requires_grad=gradients).unbind(0))


def both(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, form: ops.Form) -> Tensor:
    return ops.retention_1d(q, k, v, gamma, form=form) + ops.retention_2d(q, k, v, gamma, (4, 5), form=form)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.tensor([0.5, 0.0, 0.9, 0.0, 0.99], device=DEVICE)[::2],
        lambda: torch.tensor([0.97, 0.1, 0.2], device=DEVICE)[:1].expand(3),
        lambda: torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64, device=DEVICE),
    ],
    ids=["every second", "expanded", "float64"],
)
def test_decays_of_any_strides(made: Callable[[], Tensor]) -> None:
    tensors, gamma = qkv(20), made()
    close("out", both(*tensors, gamma, "kernel"), both(*tensors, gamma, "parallel"), 1e-4)
    got = kernels.rows(*tensors, gamma, 0.25, torch.float32, 5, None)
    want = ops.retention_2d_stream(*tensors, gamma, 5, chunk=2, scale=0.25)
    for a, b in zip(got, want, strict=True):
        close("band", a, b, 1e-4)


def test_what_is_no_decay_gives_no_number() -> None:
    for gamma in (torch.nan, -0.5):
        assert both(*qkv(20), torch.full((3,), gamma, device=DEVICE), "kernel")[:, 1:].isnan().any()


def test_scales_of_other_kinds() -> None:
    """A plan that was made for one must serve the others: they are equal, and so are keys."""
    tensors, gamma = qkv(20), ops.decay(3, device=DEVICE)
    want = ops.retention_1d(*tensors, gamma, form="kernel")
    for scale in (np.float32(0.25), np.float64(0.25), torch.tensor(0.25), 0.25):
        assert torch.equal(ops.retention_1d(*tensors, gamma, form="kernel", scale=scale), want)
    assert torch.equal(ops.retention_1d(*tensors, gamma, form="kernel", scale=np.int64(1)), 4 * want)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_streams_keep_full_precision_under_autocast(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    tensors, gamma = qkv(21, gradients=not traced), ops.decay(3, device=DEVICE)
    stream = ops.retention_2d_stream
    if traced:
        stream = torch.compile(stream, fullgraph=True, backend="aot_eager")
    want, last = ops.retention_2d_stream(*tensors, gamma, 5)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, state = stream(*(x[:, :10] for x in tensors), gamma, 5)
        assert state.dtype == torch.float32
        rest, state = stream(*(x[:, 10:] for x in tensors), gamma, 5, state)
    close("out", torch.cat([out, rest], 1), want, 1e-6)
    close("state", state, last, 1e-6)


def test_sums_are_kept_in_full_precision_whatever_the_default() -> None:
    tensors, gamma = qkv(20), ops.decay(3, device=DEVICE)
    x, weight = torch.randn(7, 40, device=DEVICE), torch.randn(40, device=DEVICE)
    calls: list[Callable] = [
        lambda: kernels.rows(*tensors, gamma, 0.25, torch.float32, 5, None),
        lambda: norm.layer_norm_back(x, weight, x, 1e-6),
    ]
    want = [call() for call in calls]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = [call() for call in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    for some, others in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_second_derivatives_are_refused(kind: type) -> None:
    """Without them a gradient of gradients would be wrong without a word."""
    tensors, gamma = [kind(x.detach()).requires_grad_() for x in qkv(20)], ops.decay(3, device=DEVICE)
    for call in (
        lambda: ops.retention_1d(*tensors, gamma, form="kernel"),
        lambda: ops.retention_2d(*tensors, gamma, (4, 5), form="kernel"),
    ):
        with pytest.raises(NotImplementedError, match=r"second derivatives.*form='parallel'"):
            torch.autograd.grad(call().sum(), tensors, create_graph=True)
        assert len(torch.autograd.grad(call().sum(), tensors)) == 3


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "gamma"])
def test_derivatives_in_forward_mode_are_refused(which: int) -> None:
    q, k, v, gamma = plain = [*qkv(20), ops.decay(3, device=DEVICE)]
    calls: list[Callable] = [
        lambda *given: ops.retention_1d(*given, form="kernel"),
        lambda *given: ops.retention_2d(*given, (4, 5), form="kernel"),
        lambda *given: kernels.rows(*given, 0.25, torch.float32, 5, None),
    ]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain[which], torch.ones_like(plain[which]))
        given = [dual if at == which else x for at, x in enumerate(plain)]
        for call in calls:
            with pytest.raises(NotImplementedError, match=r"forward mode.*form='parallel'"):
                call(*given)
    with forward_ad.dual_level():
        out = ops.retention_1d(q, forward_ad.make_dual(k, torch.ones_like(k)), v, gamma, form="parallel")
        assert forward_ad.unpack_dual(out).tangent is not None


def test_no_number_stays_none_where_half_precision_is_rounded() -> None:
    """The bits of NaN may be anything: those of GPUs are all set."""
    q, k, v = (x.half() for x in qkv(3))
    state = torch.full((1, 3, 16, 16), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    out, _ = kernels.sequence(q, k, v, ops.decay(3, device=DEVICE), 1.0, torch.float32, state, final=False)
    assert out.isnan().all()


def test_heads_and_tokens_further_apart_than_32_bits_tell() -> None:
    numbers = 3 * FAR
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 3 * numbers:
        pytest.skip("needs 10 GB of GPU memory")
    if DEVICE == "cpu":  # memory that nobody touches is not taken
        store = torch.from_numpy(np.zeros(numbers, np.float16))
    else:
        store = torch.zeros(numbers, dtype=torch.float16, device=DEVICE)
    gamma = ops.decay(3, device=DEVICE)
    heads_apart = store.as_strided((1, 4, 3, 16), (0, 16, FAR, 1))
    tokens_apart = store.as_strided((1, 136, 3, 16), (0, 2**31 // 100, 16, 1))
    for far, grid in ((heads_apart, (2, 2)), (tokens_apart, (8, 17))):
        far.copy_(torch.randn(far.shape))
        near = far.contiguous()
        for form in (
            lambda x: ops.retention_1d(x, x, x, gamma, form="kernel"),
            lambda x, grid=grid: ops.retention_2d(x, x, x, gamma, grid, form="kernel"),
        ):
            assert torch.equal(form(far), form(near))


def test_grids_wider_than_32_bits_tell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vir.ops.triton.launch import tiles

    monkeypatch.setattr(tiles, "REACH", 200)
    with pytest.raises(ValueError, match=r"5 columns of 3 heads of 16, expected at most 200.*chunkwise"):
        ops.retention_2d(*qkv(20), ops.decay(3, device=DEVICE), (4, 5), form="kernel")


def test_more_heads_than_a_launch_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_HEADS", 2)
    with pytest.raises(ValueError, match="3 heads, expected at most 2"):
        ops.retention_1d(*qkv(20), ops.decay(3, device=DEVICE), form="kernel")


def test_norms_and_sums_in_full_precision_are_left_to_pytorch() -> None:
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64, device=DEVICE)
    scale = torch.ones(4, dtype=torch.float64, device=DEVICE)
    assert not kernels.norm_serves(x)
    assert not kernels.scaled_sum_serves(x, x, scale)
    assert not kernels.group_norm_serves(x, scale, scale, 2)


def test_what_is_kept_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST_PLANS", 3)
    monkeypatch.setattr(retention, "_PLANS", {})
    for n in range(1, 9):
        ops.retention_1d(*qkv(n), ops.decay(3, device=DEVICE))
        assert 1 <= len(retention._PLANS) <= 3
