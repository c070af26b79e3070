"""The sum of tokens and a scaled part equals PyTorch's: on a GPU as it is, elsewhere by Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import relative_error

pytest.importorskip("triton")
from vir.layers import residual
from vir.ops import kernels
from vir.ops.triton import plus

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (2, 13, 48), (3, 300, 16), (2, 9, 320), (2, 5, 768), (1, 3, 2048)], ids=str
)
def test_equals_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, part = torch.randn(2, *shape, device=DEVICE, dtype=dtype)
    scale = torch.randn(shape[-1], device=DEVICE, dtype=dtype)
    got = kernels.scaled_sum(x, part, scale)
    assert got.dtype == dtype
    assert relative_error(got, x.double() + scale.double() * part.double()) < ROUNDING[dtype]


def test_views_and_nothing() -> None:
    x, part = torch.randn(2, 18, 64, device=DEVICE)[:, ::2], torch.randn(1, 9, 1, device=DEVICE).expand(2, 9, 64)
    scale = torch.randn(128, device=DEVICE)[::2]
    assert relative_error(kernels.scaled_sum(x, part, scale), x + scale * part) < 1e-6
    assert kernels.scaled_sum(x[:0], part[:0], scale).shape == (0, 9, 64)


def test_same_bits_twice() -> None:
    x, part = torch.randn(2, 1, 333, 64, device=DEVICE)
    first, second = (kernels.scaled_sum(x, part, part[0, 0]) for _ in range(2))
    assert torch.equal(first, second)


def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)  # a CPU's are served by the interpreter
    x, part, scale = (torch.randn(*shape, device=DEVICE) for shape in ((2, 4, 48), (2, 4, 48), (48,)))
    assert kernels.scaled_sum_serves(x, part, scale)
    assert not kernels.scaled_sum_serves(x, part[:1], scale)
    assert not kernels.scaled_sum_serves(x, part, scale.half())
    assert not kernels.scaled_sum_serves(x, part, scale.requires_grad_())
    assert not plus.serves(147)


@pytest.mark.parametrize("many", [True, False])
def test_blocks_take_it_where_tokens_are_many(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    x, part, scale = (torch.randn(*shape, device=DEVICE) for shape in ((2, 4, 48), (2, 4, 48), (48,)))
    monkeypatch.setattr(residual, "MANY", x.numel() + (not many))
    used, usual = [], plus.scaled_sum
    monkeypatch.setattr(plus, "scaled_sum", lambda *args: used.append(1) or usual(*args))
    assert relative_error(residual.plus(x, part, scale), x + scale * part) < 1e-6
    assert bool(used) == many
    assert torch.equal(residual.plus(x, part, None), x + part)


def test_derivatives_in_forward_mode_of_each_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda *given: not kernels.carry_derivatives(*given))
    given = [torch.randn(*shape, device=DEVICE) for shape in ((2, 4, 48), (2, 4, 48), (48,))]
    assert kernels.scaled_sum_serves(*given)
    with torch.autograd.forward_ad.dual_level():
        for at, x in enumerate(given):
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            assert not kernels.scaled_sum_serves(*given[:at], dual, *given[at + 1 :])
