"""Tiles that are loaded in boxes equal the definition: on a GPU as they are, elsewhere by Triton's interpreter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import case_2d, check
from torch import Tensor

from vir import ops

pytest.importorskip("triton")
from triton.tools.tensor_descriptor import TensorDescriptor

from vir.ops.triton import launch, settings
from vir.ops.triton.launch import tiles
from vir.ops.triton.runner import Step

HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in settings.LIKE_HOPPER
pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.skipif(not HOPPER, reason="only GPUs like Hopper copy boxes"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MORE = pytest.mark.gpu
HEADS = 3


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


@pytest.fixture
def boxed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """All tensors that go in boxes, of which even the smallest grids have enough."""
    usual, found = tiles.Box, []

    def box(x: Tensor, *sides: list[int]) -> TensorDescriptor:
        found.append(tuple(x.shape))
        return usual(x, *sides)

    monkeypatch.setattr(tiles, "Box", box)
    monkeypatch.setattr(settings, "MANY_TILES", 0)
    monkeypatch.setattr(settings, "MOST_TILES", 0)
    return found


def qkv(grid: tuple[int, int], d: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    made = torch.randn(2, grid[0] * grid[1], 3, HEADS, d, generator=torch.Generator().manual_seed(0))
    return made.to(DEVICE, dtype).unbind(2)


def retained(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, back: bool = False) -> Tensor:
    gamma = ops.decay(HEADS, device=DEVICE)[: q.shape[2]]
    return launch.grid(q, k, v, gamma, 1.0, *grid, back=back, dtype=q.dtype, out_dtype=q.dtype)


@pytest.mark.parametrize(("d", "e"), [(16, 16), (40, 40), (48, 64), pytest.param(80, 128, marks=MORE)])
@pytest.mark.parametrize("class_token", [False, True], ids=["patches", "class"])
@pytest.mark.parametrize("grid", [(1, 3), (9, 20), (17, 8), pytest.param((50, 81), marks=MORE)], ids=str)
def test_equals_definition(
    grid: tuple[int, int], class_token: bool, d: int, e: int, boxed: list[tuple[int, ...]]
) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, None]:
        out = ops.retention_2d(q, k, v, gamma, grid, form="kernel")
        out.register_hook(Tensor.contiguous)  # as those of models are, and those of large cases are not
        return out, None

    check(run, case_2d(grid, class_token, d, e), torch.bfloat16, DEVICE, kernel=True)
    assert len(boxed) == 3 * 4  # the output, and the gradients of q, k, v


@pytest.mark.parametrize("back", [False, True], ids=["forward", "turned"])
@pytest.mark.parametrize(("d", "heads"), [(24, 3), (40, 3), (40, 2), (40, 1), (64, 3)])
def test_same_bits_as_without(
    d: int, heads: int, back: bool, boxed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an image's answer does not depend on how many others come with it. Boxes of two heads begin before the
    second, and what is beside a box of one head is beside all of them."""
    grid = (11, 19)
    q, k, v = (x[:, :, :heads] for x in qkv(grid, d))
    with_boxes = retained(q, k, v, grid, back=back)
    assert len(boxed) == 3
    monkeypatch.setattr(settings, "MANY_TILES", 10**9)
    launch.forget()
    assert torch.equal(retained(q, k, v, grid, back=back), with_boxes)
    assert len(boxed) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float(),
        lambda x: x[..., :16],  # heads with a gap between them
        lambda x: x.flatten(2)[..., 4 : 4 + HEADS * 32].unflatten(2, (HEADS, 32)),  # 8 bytes too far
        lambda x: x.flatten(2)[..., : HEADS * 12].unflatten(2, (HEADS, 12)),  # heads of 24 bytes
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
    ids=["float32", "gap", "begin", "width", "expanded"],
)
def test_not_what_the_hardware_cannot_copy(change: Callable[[Tensor], Tensor], boxed: list[tuple[int, ...]]) -> None:
    grid = (9, 20)
    q, k, v = (change(x) for x in qkv(grid, 40))
    out = retained(q, k, v, grid)
    assert not boxed
    gamma = ops.decay(HEADS, device=DEVICE)
    want = ops.retention_2d(q.double(), k.double(), v.double(), gamma.double(), grid, scale=1.0, form="parallel")
    assert (out.double() - want).norm() < 5e-3 * want.norm()


def test_not_for_few_tiles_or_other_gpus(boxed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    grid = (9, 20)  # six tiles a head
    many = 2 * HEADS * 6
    for most, other in ((many + 1, False), (1, True)):
        monkeypatch.setattr(settings, "MANY_TILES", most)
        monkeypatch.setattr(settings, "processors", lambda device: 1)
        monkeypatch.setattr(settings, "like_hopper", lambda device, other=other: not other)
        launch.forget()
        retained(*qkv(grid, 40), grid)
        assert not boxed
    monkeypatch.setattr(settings, "MANY_TILES", many)
    monkeypatch.setattr(settings, "like_hopper", lambda device: True)
    launch.forget()
    retained(*qkv(grid, 40), grid)
    assert boxed


def test_forward_and_the_gradient_of_q_share_a_binary(
    boxed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gradients would have two to compile, which takes more than two seconds."""
    grid, binaries = (9, 20), []

    def run(step: Step, *tensors: Any) -> None:
        kinds = [x.block_shape if isinstance(x, TensorDescriptor) else (x.dtype, x.data_ptr() % 16) for x in tensors]
        binaries.append((step.constants, step.schedule, kinds, [(x == 1, x % 16 == 0) for x in step.numbers]))

    monkeypatch.setattr(Step, "run", run)
    q, k, v = qkv(grid, 40)
    retained(q, k, v, grid)
    retained(torch.empty_like(q).contiguous(), v, k, grid)
    assert len(boxed) == 2 * 3
    assert binaries[0] == binaries[1]
