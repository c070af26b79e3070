"""The LayerNorm of joined heads equals PyTorch's in float64: on a GPU as it is, elsewhere by Triton's interpreter."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.nn.functional as F
from bounds import fenced
from compare import relative_error

pytest.importorskip("triton")
from vir.layers import norm as layer
from vir.layers.norm import TokenNorm
from vir.layers.retention import HeadsNorm
from vir.ops import kernels
from vir.ops.triton import launch

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
