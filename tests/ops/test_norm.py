"""Our norms, of tokens and of small maps, equal PyTorch's in float64: on a GPU as they are, elsewhere by Triton's
interpreter."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.nn.functional as F
from bounds import fenced
from compare import relative_error

pytest.importorskip("triton")
from vir.heads.box_heads import MapNorm
from vir.layers import norm as layer
from vir.layers.norm import HeadsNorm, TokenNorm
from vir.ops import kernels
from vir.ops.triton import group_norm, launch

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def _poisoned_and_fenced_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with fenced() if launch.INTERPRETED else nullcontext():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 40), (37, 147), (3, 320), (2, 768), (1, 2100)])
def test_equals_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = (3 + torch.randn(1, tokens, width, device=DEVICE)).to(dtype)
    weight, bias = torch.randn(2, width, device=DEVICE).to(dtype)
    got = kernels.layer_norm(x, weight, bias, 1e-6, dtype)
    want = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert relative_error(got, want) < ROUNDING[dtype]


def test_a_large_mean_does_not_hide_the_variance() -> None:
    x = 1000 + torch.randn(2, 3, 96, device=DEVICE)
    ones, zeros = torch.ones(96, device=DEVICE), torch.zeros(96, device=DEVICE)
    want = F.layer_norm(x.double(), (96,), eps=1e-6)
    assert relative_error(kernels.layer_norm(x, ones, zeros, 1e-6, x.dtype), want) < 1e-4


def test_numbers_of_two_kinds_and_views() -> None:
    x = torch.randn(2, 5, 96, device=DEVICE)[:, ::2]
    weight, bias = torch.randn(2, 96, device=DEVICE).half()
    want = F.layer_norm(x.double(), (96,), weight.double(), bias.double(), 1e-6)
    assert relative_error(kernels.layer_norm(x, weight, bias, 1e-6, torch.float32), want) < 1e-6


def test_nothing_in_nothing_out() -> None:
    ones = torch.ones(8, device=DEVICE)
    assert kernels.layer_norm(torch.empty(0, 3, 8, device=DEVICE), ones, ones, 1e-6, torch.float32).shape == (0, 3, 8)


def test_pytorch_keeps_what_needs_gradients() -> None:
    norm, x = HeadsNorm(96).to(DEVICE), torch.randn(1, 4, 96, device=DEVICE)
    assert not kernels.norm_serves(x, norm.weight)
    with torch.no_grad():
        assert kernels.norm_serves(x, norm.weight) == (DEVICE == "cuda")


@pytest.mark.parametrize("of_x", ROUNDING, ids=str)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
def test_of_many_tokens_by_the_kernel(
    of_x: torch.dtype, of_weight: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, weight: True)  # a CPU's are served by the interpreter
    monkeypatch.setattr(layer, "MANY", 4 * 48)
    used, usual = [], kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda *args: used.append(1) or usual(*args))
    norm, x = TokenNorm(48, eps=1e-6).to(DEVICE, of_weight), torch.randn(1, 4, 48, device=DEVICE, dtype=of_x)
    got = norm(x)
    assert used
    assert got.dtype == torch.promote_types(of_x, of_weight)
    assert relative_error(got, F.layer_norm(x.double(), (48,), eps=1e-6)) < ROUNDING[got.dtype]
    used.clear()
    assert relative_error(norm(x[:, :3].to(of_weight)), F.layer_norm(x[:, :3].to(of_weight).double(), (48,))) < 5e-3
    assert not used


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_models_answer_the_same_with_and_without_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MANY", 1)
    model = timm.create_model("vir_tiny_patch16_224", img_size=64).to("cuda", dtype).eval()
    images = torch.randn(2, 3, 64, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        answers = model(images)
    assert relative_error(answers, model(images)) < 3 * ROUNDING[dtype]


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
    assert not kernels.group_norm_serves(x, norm.weight, 4)
    with torch.no_grad():
        assert kernels.group_norm_serves(x, norm.weight, 4) == (DEVICE == "cuda")
        assert relative_error(norm(x), F.group_norm(x.double(), 4)) < 1e-6


@pytest.mark.gpu
def test_groups_under_autocast_stay_in_half_precision() -> None:
    norm, x = MapNorm(4, 32).cuda(), torch.randn(3, 32, 7, 7, device="cuda").bfloat16()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
        assert relative_error(norm(x), F.group_norm(x.double(), 4)) < ROUNDING[torch.bfloat16]
