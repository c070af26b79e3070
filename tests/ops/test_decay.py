import pytest
import torch

from vir import ops
from vir.ops import naive
from vir.ops.decay import remembered_mask_2d


def test_log_decay_spreads_from_a_32nd_to_a_512th() -> None:
    gamma = ops.decay(8, dtype=torch.float64)
    assert gamma[0].item() == pytest.approx(1 - 1 / 32)
    assert gamma[-1].item() == pytest.approx(1 - 1 / 512)
    steps = (1 - gamma)[1:] / (1 - gamma)[:-1]
    assert torch.allclose(steps, steps[0].expand(7)), "equal steps on a logarithmic scale"


def test_retnet_decay() -> None:
    assert ops.decay(3, "retnet").tolist() == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]


@pytest.mark.parametrize("heads", [1, 3, 32])
def test_one_decay_per_head_below_one(heads: int) -> None:
    gamma = ops.decay(heads)
    assert gamma.shape == (heads,)
    assert ((gamma > 0.9) & (gamma < 1)).all()


def test_masks_are_the_weights_of_the_definition() -> None:
    gamma = torch.tensor([0.5, 0.9], dtype=torch.float64)
    mask = ops.mask_1d(gamma, 6)
    for i in range(6):
        for j in range(6):
            power = naive.weight_1d(i, j)
            assert mask[:, i, j].tolist() == pytest.approx([0, 0] if power is None else (gamma**power).tolist())
    grid = (3, 4)
    mask = ops.mask_2d(gamma, grid, class_token=True)
    assert mask.shape == (2, 13, 13)
    assert torch.equal(mask[:, :12, :12], ops.mask_2d(gamma, grid))
    for i in range(13):
        for j in range(13):
            power = naive.weight_2d(i, j, grid)
            assert mask[:, i, j].tolist() == pytest.approx([0, 0] if power is None else (gamma**power).tolist())


@pytest.mark.parametrize(("heads", "kind"), [(0, "log"), (4, "linear")])
def test_mistakes_are_explained(heads: int, kind: str) -> None:
    with pytest.raises(ValueError, match=r"decay: got .* expected"):
        ops.decay(heads, kind)  # type: ignore[arg-type]


def test_a_kept_mask_does_not_depend_on_the_device_that_is_default() -> None:
    gamma = torch.tensor([0.123, 0.456])
    with torch.device("meta"):
        kept = remembered_mask_2d(gamma, (3, 4))
    assert torch.equal(kept, ops.mask_2d(gamma, (3, 4)))
