"""Features inside boxes, beside torchvision's pooler."""

import torch
from torchvision.ops import MultiScaleRoIAlign

from vir.heads.align import PyramidAlign
from vir.heads.batch import joined

STRIDES = (4, 8, 16, 32)
ROWS, COLS = 512, 768


def some(count: int) -> torch.Tensor:
    corner = torch.rand(count, 2) * torch.tensor([COLS, ROWS]) * 0.7
    side = 2 ** (torch.rand(count, 2) * 8 + 1)  # from 2 to 512 px: all levels
    return torch.cat([corner, (corner + side).minimum(torch.tensor([COLS, ROWS]))], 1)


def test_it_is_that_of_torchvision_and_so_are_gradients() -> None:
    torch.manual_seed(0)
    maps = [torch.randn(2, 5, ROWS // s, COLS // s, dtype=torch.float64, requires_grad=True) for s in STRIDES]
    whole = torch.tensor([[0.0, 0, COLS, ROWS]])
    boxes = [some(37).double(), torch.cat([some(21), whole]).double()]
    theirs = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 2)
    want = theirs({str(i): x for i, x in enumerate(maps)}, boxes, [(ROWS, COLS)] * 2)
    every, image, _ = joined(boxes)
    ours = PyramidAlign(7, STRIDES)
    assert ours.level(every).unique().tolist() == [0, 1, 2, 3]
    got = ours(maps, every, image)
    assert torch.allclose(got, want)
    weight = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, maps, weight), torch.autograd.grad(want, maps, weight), strict=True):
        assert torch.allclose(a, b)


def test_no_boxes() -> None:
    maps = [torch.randn(1, 3, 64 // s, 64 // s) for s in STRIDES]
    assert PyramidAlign(14, STRIDES)(maps, torch.zeros(0, 4), torch.zeros(0).long()).shape == (0, 3, 14, 14)
