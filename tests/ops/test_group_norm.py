"""Our GroupNorm of small maps equals PyTorch's in float64: on a GPU as it is, elsewhere by Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from bounds import poisoned_and_fenced
from compare import relative_error

pytest.importorskip("triton")
from vir.heads.box_heads import MapNorm
from vir.ops import kernels
from vir.ops.triton import group_norm

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((5, 256, 7, 7), 32), ((3, 24, 3, 5), 3), ((2, 80, 7, 7), 10), ((4, 6, 1, 1), 3), ((2, 12, 4, 4), 12),
        ((1, 32, 2, 9), 1), ((2, 48, 14, 14), 6),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_groups_equal_pytorch(shape: tuple, groups: int, layout: torch.memory_format, dtype: torch.dtype) -> None:
    x = (3 + torch.randn(shape, device=DEVICE)).to(dtype).contiguous(memory_format=layout)
    weight, bias = torch.randn(2, shape[1], device=DEVICE)
    got = kernels.group_norm(x, weight, bias, groups, 1e-5)
    want = F.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-5)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(got, want) < ROUNDING[dtype]


def test_a_large_mean_of_groups_does_not_hide_their_variance() -> None:
    x = 1000 + torch.randn(2, 32, 7, 7, device=DEVICE)
    ones, zeros = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    assert relative_error(kernels.group_norm(x, ones, zeros, 4, 1e-5), F.group_norm(x.double(), 4)) < 1e-4


def test_no_maps_in_none_out() -> None:
    ones = torch.ones(32, device=DEVICE)
    assert kernels.group_norm(torch.empty(0, 32, 7, 7, device=DEVICE), ones, ones, 4, 1e-5).shape == (0, 32, 7, 7)


def test_groups_that_it_does_not_know_are_left_to_pytorch() -> None:
    assert group_norm.serves(256, 49, 32)
    assert group_norm.serves(80, 49, 10)
    assert not group_norm.serves(96, 49, 32)  # groups of three
    assert not group_norm.serves(256, 100 * 100, 32)  # too large for the registers


def test_groups_that_need_gradients_are_pytorchs() -> None:
    norm, x = MapNorm(4, 32).to(DEVICE), torch.randn(3, 32, 7, 7, device=DEVICE)
    assert not kernels.group_norm_serves(x, norm.weight, norm.bias, 4)
    with torch.no_grad():
        assert kernels.group_norm_serves(x, norm.weight, norm.bias, 4) == (DEVICE == "cuda")
        assert relative_error(norm(x), F.group_norm(x.double(), 4)) < 1e-6


@pytest.mark.gpu
def test_groups_under_autocast_stay_in_half_precision() -> None:
    norm, x = MapNorm(4, 32).cuda(), torch.randn(3, 32, 7, 7, device="cuda").bfloat16()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
        assert relative_error(norm(x), F.group_norm(x.double(), 4)) < ROUNDING[torch.bfloat16]


def test_groups_larger_than_a_program_usually_takes() -> None:
    x, (weight, bias) = torch.randn(2, 64, 8, 16, device=DEVICE), torch.randn(2, 64, device=DEVICE)
    assert group_norm.serves(64, 128, 1)
    want = F.group_norm(x.double(), 1, weight.double(), bias.double())
    assert relative_error(kernels.group_norm(x, weight, bias, 1, 1e-5), want) < 1e-5


def test_the_caller_says_what_the_eps_of_groups_is() -> None:
    weight, bias = torch.randn(2, 48, device=DEVICE)
    maps = torch.randn(2, 48, 3, 5, device=DEVICE)
    of_groups = F.group_norm(maps.double(), 6, weight.double(), bias.double(), 0.5)
    assert relative_error(kernels.group_norm(maps, weight, bias, 6, 0.5), of_groups) < 1e-5
