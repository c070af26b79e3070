"""Our norms of tokens equal PyTorch's in float64: on a GPU as they are, elsewhere by Triton's interpreter."""

from collections.abc import Callable, Iterator

import pytest
import timm
import torch
import torch.nn.functional as F
from bounds import poisoned_and_fenced
from compare import relative_error
from timm.layers import LayerNorm2d
from torch.autograd import forward_ad

pytest.importorskip("triton")
from vir.layers import norm as layer
from vir.layers.norm import ChannelNorm, HeadsNorm, InnerChannelNorm, InnerNorm, TokenNorm
from vir.ops import kernels
from vir.ops.triton.runner import looks_of

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


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


@pytest.mark.parametrize("moved", [(1, 0, 0), (0, 3, 0), (0, 0, 5), (4, 4, 4), (8, 8, 8)], ids=str)
def test_numbers_that_begin_anywhere(moved: tuple[int, int, int]) -> None:
    """After others of that shape which begin where wide loads can: those loads must not be taken for these."""
    for places in ((0, 0, 0), moved):
        store = torch.randn(3, 8 + 5 * 96, device=DEVICE).to(torch.bfloat16)
        x, weight, bias = (row[at : at + n] for row, at, n in zip(store, places, (5 * 96, 96, 96), strict=True))
        want = F.layer_norm(x.reshape(5, 96).double(), (96,), weight.double(), bias.double(), 1e-6)
        got = kernels.layer_norm(x.reshape(5, 96), weight, bias, 1e-6, x.dtype)
        assert relative_error(got, want) < ROUNDING[x.dtype]
    x, weight, bias = (torch.zeros(96 + 8, dtype=torch.bfloat16)[at : at + 96] for at in (*moved,))
    whole = torch.zeros(96, dtype=torch.bfloat16)
    alike = all(at % 8 == 0 for at in moved)
    assert (looks_of(x, weight, bias) == looks_of(whole, whole, whole)) == alike


def test_nothing_in_nothing_out() -> None:
    ones = torch.ones(8, device=DEVICE)
    assert kernels.layer_norm(torch.empty(0, 3, 8, device=DEVICE), ones, ones, 1e-6, torch.float32).shape == (0, 3, 8)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 16), (5, 40), (700, 16), (37, 147), (300, 320), (21, 768), (7, 2100), (3, 4100)]
)
def test_gradients_equal_pytorch(tokens: int, width: int, dtype: torch.dtype) -> None:
    """In one block and in several, of which a program has some."""
    x, grad = (3 + torch.randn(1, tokens, width, device=DEVICE)).to(dtype), torch.randn(1, tokens, width, device=DEVICE)
    inputs = [x, *torch.randn(2, width, device=DEVICE).to(dtype)]
    got = torch.autograd.grad(normed(inputs, dtype), inputs, grad.to(dtype))
    assert [g.dtype for g in got] == 3 * [dtype]
    for ours, theirs in zip(got, gradients_in_double(inputs, grad.to(dtype)), strict=True):
        assert relative_error(ours, theirs) < ROUNDING[dtype] * (10 if dtype == torch.float32 else 1)


def normed(inputs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    x, weight, bias = (y.requires_grad_() for y in inputs)
    return kernels.layer_norm(x, weight, bias, 1e-6, dtype)


def gradients_in_double(inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight, bias = (y.detach().double().requires_grad_() for y in inputs)
    return torch.autograd.grad(F.layer_norm(x, weight.shape, weight, bias, 1e-6), (x, weight, bias), grad.double())


def test_gradients_of_numbers_of_two_kinds_and_of_views() -> None:
    """As under autocast: x and weights in float32, the output and its gradient in half precision; and both as views."""
    x, grad = (
        torch.randn(2, 18, 96, device=DEVICE)[:, ::2],
        torch.randn(2, 1, 96, device=DEVICE).half().expand(2, 9, 96),
    )
    inputs = [x, *torch.randn(2, 96, device=DEVICE)]
    out = normed(inputs, torch.float16)
    assert out.dtype == torch.float16
    got = torch.autograd.grad(out, inputs, grad)
    for ours, theirs in zip(got, gradients_in_double(inputs, grad), strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, theirs) < 1e-5


def test_gradients_have_the_same_bits_twice() -> None:
    inputs, grad = [torch.randn(1, 333, 64, device=DEVICE), *torch.randn(2, 64, device=DEVICE)], torch.randn(1, 333, 64)
    first, second = (torch.autograd.grad(normed(inputs, torch.float32), inputs, grad.to(DEVICE)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_nothing_are_nothing() -> None:
    inputs = [torch.empty(0, 3, 8, device=DEVICE), *torch.ones(2, 8, device=DEVICE)]
    dx, dweight, dbias = torch.autograd.grad(normed(inputs, torch.float32).sum(), inputs)
    assert dx.shape == (0, 3, 8)
    assert not dweight.any()
    assert not dbias.any()


def test_few_tokens_are_pytorchs_but_those_that_it_would_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    used, usual = [], kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda *args: used.append(1) or usual(*args))
    norm, x = HeadsNorm(96).to(DEVICE), torch.randn(1, 4, 96, device=DEVICE)
    with torch.no_grad():
        norm(x)
    halved = norm.half()
    halved(x)
    assert not used
    with torch.no_grad():
        halved(x)
    assert used


def served_from(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of at least so many are the kernel's."""
    for many in ("MANY", "MANY_LEARNED"):
        monkeypatch.setattr(layer, many, numbers)


@pytest.mark.parametrize("kind", [TokenNorm, InnerNorm, HeadsNorm])
@pytest.mark.parametrize("tokens", [3, 4])
def test_what_autocast_would_round_is_rounded_at_once(
    kind: type[TokenNorm], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside blocks; a model's last norm gives float32, as PyTorch's does."""
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    served_from(4 * 48, monkeypatch)
    norm, x = kind(48).to(DEVICE), torch.randn(1, tokens, 48, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = norm(x)
    assert out.dtype == (torch.bfloat16 if tokens == 4 and kind is not TokenNorm else torch.float32)
    assert relative_error(out, F.layer_norm(x.double(), (48,))) < 5e-3
    assert norm(x).dtype == torch.float32


@pytest.mark.parametrize(("kind", "dtype"), [(ChannelNorm, torch.float32), (InnerChannelNorm, torch.bfloat16)])
def test_maps_under_autocast(kind: type[TokenNorm], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a backbone are float32, however large they are; what a convolution takes is rounded at once."""
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    served_from(4 * 48, monkeypatch)
    norm, x = kind(48).to(DEVICE), torch.randn(1, 48, 2, 2, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert norm(x).dtype == dtype
        assert norm(x[..., 1:]).dtype == torch.float32


def test_weights_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    served_from(1, monkeypatch)
    with pytest.raises(RuntimeError, match="48"):
        TokenNorm(48).to(DEVICE)(torch.randn(1, 4, 96, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norms_without_a_bias_are_pytorchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    served_from(1, monkeypatch)
    norm, x = HeadsNorm(48, bias=False).to(DEVICE, dtype), torch.randn(1, 4, 48, device=DEVICE)
    assert relative_error(norm(x), F.layer_norm(x.double(), (48,), eps=norm.eps)) < 1e-6


def test_gradients_of_gradients_are_pytorchs() -> None:
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((2, 5, 40), (40,), (40,))
    )
    weights = torch.randn(2, 5, 40, dtype=torch.float64)

    def twice(run: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad((run(*tensors) * weights.to(tensors[0])).square().sum(), tensors, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    want = twice(lambda x, weight, bias: F.layer_norm(x, (40,), weight, bias, 1e-6), x, weight, bias)
    here = [tensor.detach().to(DEVICE, torch.float32).requires_grad_() for tensor in (x, weight, bias)]
    got = twice(lambda *tensors: kernels.layer_norm(*tensors, 1e-6, torch.float32), *here)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-5


def test_derivatives_in_forward_mode_are_left_to_pytorch() -> None:
    x = torch.randn(2, 4, 48, device=DEVICE)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for given in ((dual,), (x, dual)):
            assert not kernels.norm_serves(*given)
            assert kernels.carry_derivatives(*given)
    assert not kernels.carry_derivatives(x, None)
    assert kernels.norm_serves(x) == (DEVICE == "cuda")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_derivatives_of_weights_in_forward_mode_are_left_to_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x: True)
    served_from(1, monkeypatch)
    ours, x = TokenNorm(20).to(DEVICE), torch.randn(3, 20, device=DEVICE)
    weights = {key: value.detach() for key, value in ours.named_parameters()}

    def answer(given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(ours, weights | {name: given}, (x,))

    moved = torch.randn(20, device=DEVICE)
    _, got = torch.func.jvp(answer, (weights[name],), (moved,))
    normed = torch.nn.functional.layer_norm(x, (20,), eps=ours.eps)
    assert relative_error(got, moved * normed if name == "weight" else moved.expand_as(x)) < 1e-6


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("kept", [torch.contiguous_format, torch.channels_last], ids=str)
def test_of_channels_equals_timms(kept: torch.memory_format, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: by_kernel)
    served_from(1, monkeypatch)
    ours, timms = ChannelNorm(20).to(DEVICE), LayerNorm2d(20).to(DEVICE).double()
    ours.load_state_dict({"weight": torch.randn(20), "bias": torch.randn(20)})
    timms.load_state_dict(ours.state_dict())
    x = (3 + torch.randn(2, 20, 3, 5, device=DEVICE)).contiguous(memory_format=kept).requires_grad_()
    doubled = x.detach().double().requires_grad_()
    got, want = ours(x), timms(doubled)
    assert got.stride() == want.stride()
    assert relative_error(got, want) < 1e-6
    grad = torch.randn(2, 20, 3, 5, device=DEVICE)
    of_ours = torch.autograd.grad(got, [x, *ours.parameters()], grad)
    of_timms = torch.autograd.grad(want, [doubled, *timms.parameters()], grad.double())
    for dx, dwant in zip(of_ours, of_timms, strict=True):
        assert relative_error(dx, dwant) < 1e-5


@pytest.mark.parametrize("rounded", [False, True])
def test_models_learn_the_same_by_kernel(rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("vir_tiny_patch16_224", img_size=32, depth=2, num_classes=3, init_values=0.5).to(DEVICE)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)

    def gradients() -> list[torch.Tensor]:
        # Rounded to tf32, as a GPU's convolutions do, gradients that differ in their last bits differ by more.
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with exact, torch.autocast(DEVICE, torch.bfloat16, enabled=rounded):
            loss = F.cross_entropy(model(images), torch.tensor([0, 2], device=DEVICE))
            return list(torch.autograd.grad(loss, list(model.parameters())))

    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: False)
    wanted = gradients()
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    served_from(1, monkeypatch)
    for got, want in zip(gradients(), wanted, strict=True):
        assert relative_error(got, want) < (5e-2 if rounded else 1e-5)


@pytest.mark.parametrize("of_x", ROUNDING, ids=str)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
def test_of_many_tokens_by_the_kernel(
    of_x: torch.dtype, of_weight: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)  # a CPU's are served by the interpreter
    served_from(4 * 48, monkeypatch)
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


def test_gradients_by_the_kernel_want_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost the host more than PyTorch's."""
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    monkeypatch.setattr(layer, "MANY", 2 * 48)
    monkeypatch.setattr(layer, "MANY_LEARNED", 4 * 48)
    used, usual = [], kernels.layer_norm
    monkeypatch.setattr(kernels, "layer_norm", lambda *args: used.append(args[0].shape[1]) or usual(*args))
    norm, x = TokenNorm(48).to(DEVICE), torch.randn(1, 4, 48, device=DEVICE)
    for tokens in (1, 2, 3, 4):
        norm(x[:, :tokens])
    assert used == [4]
    with torch.no_grad():
        norm(x[:, :1]), norm(x[:, :2])
    assert used == [4, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_models_answer_the_same_with_and_without_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    served_from(1, monkeypatch)
    model = timm.create_model("vir_tiny_patch16_224", img_size=64)
    with torch.no_grad():  # as trained: fp16 holds a scale of 1e-5 and a class token of 1e-6 to two digits
        model.cls_token.normal_()
        for name, parameter in model.named_parameters():
            if name.endswith((".ls1.gamma", ".ls2.gamma")):
                parameter.fill_(0.1)
    model.to("cuda", dtype).eval()
    images = torch.randn(2, 3, 64, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        answers = model(images)
    assert relative_error(answers, model(images)) < 3 * ROUNDING[dtype]


def test_the_caller_says_what_eps_is() -> None:
    x, weight, bias = torch.randn(1, 5, 48, device=DEVICE), *torch.randn(2, 48, device=DEVICE)
    given, double = ([y.detach().to(of).requires_grad_() for y in (x, weight, bias)] for of in (x.dtype, torch.float64))
    got, want = kernels.layer_norm(*given, 0.5, x.dtype), F.layer_norm(double[0], (48,), *double[1:], 0.5)
    assert relative_error(got, want) < 1e-5
    grad = torch.randn_like(x)
    wanted = torch.autograd.grad(want, double, grad.double())
    for ours, theirs in zip(torch.autograd.grad(got, given, grad), wanted, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_gradients_of_weights_in_full_precision_beside_tokens_in_half() -> None:
    x, grad = torch.randn(2, 1, 300, 48, device=DEVICE).bfloat16()
    inputs = [x, *torch.randn(2, 48, device=DEVICE)]
    got = torch.autograd.grad(normed(inputs, torch.bfloat16), inputs, grad)
    for ours, theirs in zip(got[1:], gradients_in_double(inputs, grad)[1:], strict=True):
        assert relative_error(ours, theirs) < 1e-5
