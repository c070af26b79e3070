"""A norm folded into the layer and the sum after it equals the three in float64: on a GPU as it is, elsewhere by
Triton's interpreter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bounds import poisoned_and_fenced
from compare import relative_error
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")
from vir.layers import residual
from vir.layers.blocks import RetentionBlock
from vir.ops import kernels
from vir.ops.triton import folded

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
EPS = 1e-6


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, mean: float = 0.0) -> list[Tensor]:
    """x, rows, and weights of a layer, a norm and a scale; what is added to x is as large as x."""
    width = shape[-1]
    x, rows = torch.randn(2, *shape, device=DEVICE)
    weight, bias = torch.randn(width, width, device=DEVICE) * width**-0.5, torch.randn(width, device=DEVICE)
    norm_weight, norm_bias, scale = 1 + 0.3 * torch.randn(3, width, device=DEVICE)
    return [given.to(dtype) for given in (x, mean + rows, weight, bias, norm_weight, norm_bias, scale)]


def defined(*given: Tensor) -> Tensor:
    x, rows, weight, bias, norm_weight, norm_bias, scale = (each.double() for each in given)
    return x + scale * F.linear(F.layer_norm(rows, norm_weight.shape, norm_weight, norm_bias, EPS), weight, bias)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (2, 13, 40), (1, 5, 147), (3, 7, 320), (1, 3, 768), (1, 2, 1100)], ids=str
)
def test_equals_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = made(shape, dtype, mean=0.5)
    got = kernels.normed_sum(*given, eps=EPS)
    assert got.dtype == dtype
    assert relative_error(got, defined(*given)) < ROUNDING[dtype]


@pytest.mark.parametrize("at", range(7))
def test_every_part_counts(at: int) -> None:
    given = made((1, 4, 48))
    before = defined(*given)
    given[at] = given[at] + torch.randn_like(given[at])
    got, want = kernels.normed_sum(*given, eps=EPS), defined(*given)
    assert relative_error(got, want) < 1e-5
    assert relative_error(before, want) > 1e-2


def test_a_large_mean_does_not_hide_the_rest() -> None:
    given = made((2, 3, 96), mean=300.0)
    assert relative_error(kernels.normed_sum(*given, eps=EPS), defined(*given)) < 1e-3


@pytest.mark.parametrize("mean", [0.0, 3.0, 30.0])
def test_what_rounded_weights_make_of_a_mean_is_taken_out(mean: float) -> None:
    """Rounding takes from weights that they have no mean, by which a large one of rows would come in. Beside rows that
    bf16 holds as they are, what is left is what PyTorch makes of the same."""
    given = made((2, 24, 320), torch.bfloat16)
    given[0].zero_()  # nothing but what is added
    given[1] = (mean + torch.randint(-4, 5, (2, 24, 320), device=DEVICE) / 4).to(torch.bfloat16)
    x, rows, weight, bias, norm_weight, norm_bias, scale = given
    by_pytorch = x + scale * F.linear(F.layer_norm(rows, (320,), norm_weight, norm_bias, EPS), weight, bias)
    want = defined(*given)
    ours, theirs = relative_error(kernels.normed_sum(*given, eps=EPS), want), relative_error(by_pytorch, want)
    assert ours < 2 * theirs  # a GPU rounds; Triton's interpreter cuts off, which loses twice as much


def test_rows_of_nothing_are_the_bias_of_the_norm() -> None:
    given = made((1, 3, 40))
    given[1].zero_()
    got = kernels.normed_sum(*given, eps=EPS)
    assert got.isfinite().all()
    assert relative_error(got, defined(*given)) < 1e-5


def test_views_and_nothing() -> None:
    x, rows, weight, *others = made((2, 18, 64))
    given = [x[:, ::2], rows[:, ::2], weight.t(), *(torch.stack([each, each], 1)[:, 0] for each in others)]
    assert not any(each.is_contiguous() for each in given)
    assert relative_error(kernels.normed_sum(*given, eps=EPS), defined(*given)) < 1e-5
    assert kernels.normed_sum(x[:0], rows[:0], weight, *others, eps=EPS).shape == (0, 18, 64)


@pytest.mark.parametrize("moved", range(7))
def test_numbers_that_begin_anywhere(moved: int) -> None:
    """After others of that shape which begin where wide loads can: those loads must not be taken for these."""
    for at in (0, 3):
        given = made((1, 5, 96), torch.bfloat16)
        store = torch.empty(given[moved].numel() + at, device=DEVICE, dtype=torch.bfloat16)
        given[moved] = store[at:].view_as(given[moved]).copy_(given[moved])
        assert relative_error(kernels.normed_sum(*given, eps=EPS), defined(*given)) < ROUNDING[torch.bfloat16]


def test_same_bits_twice() -> None:
    given = made((1, 33, 64))
    assert torch.equal(kernels.normed_sum(*given, eps=EPS), kernels.normed_sum(*given, eps=EPS))


def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)  # a CPU's are served by the interpreter
    given = made((2, 4, 48))
    assert kernels.normed_sum_serves(*given)
    for at, wrong in enumerate(given):
        assert not kernels.normed_sum_serves(*given[:at], wrong.bfloat16(), *given[at + 1 :])
        assert not kernels.normed_sum_serves(*given[:at], wrong.clone().requires_grad_(), *given[at + 1 :])
        assert not kernels.normed_sum_serves(*given[:at], wrong[..., :47], *given[at + 1 :])


def nothing(block: RetentionBlock) -> None:
    pass


class Wrapped(nn.Module):
    """As parallel and other wrappers: without the attributes of what is in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Tensor:
        return 2 * self.inner(*given)


def wrapped(name: str) -> Callable[[RetentionBlock], None]:
    def change(block: RetentionBlock) -> None:
        *of, last = name.split(".")
        parent = block.get_submodule(".".join(of))
        setattr(parent, last, Wrapped(getattr(parent, last)))

    return change


def hooked(part: Callable[[RetentionBlock], nn.Module]) -> Callable[[RetentionBlock], None]:
    return lambda block: (part(block).register_forward_hook(lambda module, given, out: 2 * out), None)[1]


@pytest.mark.parametrize(
    ("change", "folds"),
    [
        (nothing, True),
        (hooked(lambda block: block.retention), False),
        (hooked(lambda block: block.retention.norm), False),
        (hooked(lambda block: block.retention.proj), False),
        (lambda block: nn.utils.parametrizations.weight_norm(block.retention.proj), False),
        (lambda block: setattr(block.retention.proj, "bias", None), False),
        (lambda block: setattr(block.retention.norm, "bias", None), False),
        (lambda block: setattr(block.retention, "norm", nn.Identity()), False),
        (lambda block: setattr(block.retention, "forward", lambda x, grid, scale=1.0: scale * x), False),
        (lambda block: setattr(block, "ls1", nn.Identity()), False),
        (wrapped("retention"), False),
        (wrapped("retention.norm"), False),
        (lambda block: block.retention.compile(backend="eager"), False),
        (lambda block: setattr(block.retention.norm, "forward", torch.tanh), False),
    ],
    ids=[
        "bare",
        "hooked",
        "norm hooked",
        "layer hooked",
        "parametrized",
        "no bias",
        "no bias of the norm",
        "no norm",
        "another retention",
        "no scale",
        "wrapped",
        "norm wrapped",
        "compiled",
        "another norm",
    ],
)
@pytest.mark.parametrize("many", [True, False])
def test_blocks_fold_where_tokens_are_many_and_nothing_is_added_to_a_layer(
    change: Callable[[RetentionBlock], None], folds: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = RetentionBlock(32, 2, "2d", init_values=0.5).to(DEVICE).eval()
    with torch.no_grad():
        for weights in (block.retention.norm, block.retention.proj):
            for weight in weights.parameters():
                weight += 0.3 * torch.randn_like(weight)
    change(block)
    x = torch.randn(2, 64, 32, device=DEVICE)
    with torch.no_grad():
        want = block(x, (8, 8))
        monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
        monkeypatch.setattr(residual, "MANY", x.numel() + (not many))
        used, usual = [], folded.normed_sum
        monkeypatch.setattr(folded, "normed_sum", lambda *given: used.append(1) or usual(*given))
        got = block(x, (8, 8))
    assert relative_error(got, want.double()) < 1e-5
    assert bool(used) == (folds and many)
    used.clear()
    assert relative_error(block(x, (8, 8)), want.double()) < 1e-5  # with gradients
    assert not used


def test_who_counts_in_all_modules_is_called_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = RetentionBlock(32, 2, "2d").to(DEVICE).eval(), torch.randn(2, 64, 32, device=DEVICE)
    monkeypatch.setattr(kernels, "norm_serves", lambda x, *_: True)
    monkeypatch.setattr(residual, "MANY", 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        block(x, (8, 8))
    seen = counted.get_flop_counts()
    assert {f"RetentionBlock.retention{part}" for part in ("", ".qkv", ".proj")} <= seen.keys()


def test_the_norm_says_what_eps_is() -> None:
    given = made((1, 4, 48))
    x, rows, weight, bias, norm_weight, norm_bias, scale = (each.double() for each in given)
    want = x + scale * F.linear(F.layer_norm(rows, (48,), norm_weight, norm_bias, 0.5), weight, bias)
    assert relative_error(kernels.normed_sum(*given, eps=0.5), want) < 1e-5


@pytest.mark.parametrize("moved", range(2, 7))
def test_every_weight_decides_which_binary_is_taken(moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, usual = [], folded._plan_of_weights
    monkeypatch.setattr(folded, "_plan_of_weights", lambda *of: plans.append(of) or usual(*of))
    for at in (0, 3):
        given = made((1, 5, 96), torch.bfloat16)
        store = torch.empty(given[moved].numel() + at, device=DEVICE, dtype=torch.bfloat16)
        given[moved] = store[at:].view_as(given[moved]).copy_(given[moved])
        kernels.normed_sum(*given, eps=EPS)
    assert plans[0] != plans[1]
