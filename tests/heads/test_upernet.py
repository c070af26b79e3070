"""UPerNet: a label for every pixel at any size, learned by heart, and ignored where it says nothing."""

import json

import pytest
import torch

from tests.heads.small import COLOURS, SEGMENTOR, THIN_HVIR, segmentor
from vir.heads import build_segmentor
from vir.heads.upernet import IGNORE, BatchNorm, overlap_loss, pixel_loss
from vir.layers.retention import MultiHeadRetention


def scene() -> tuple[torch.Tensor, torch.Tensor]:
    """An image of odd size with two coloured parts on a dim ground, and its labels."""
    labels = torch.zeros(1, 61, 83, dtype=torch.long)
    labels[:, 10:41, 5:33] = 1
    labels[:, 20:61, 50:83] = 2
    colours = torch.cat([torch.full((1, 3), 0.3), COLOURS])
    return colours[labels].permute(0, 3, 1, 2).contiguous(), labels


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_it_learns_an_image_by_heart(retention: str) -> None:
    """A single image of odd size, whose pooled map is one pixel."""
    image, labels = scene()
    model = segmentor(retention=retention).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        sum(model(image, labels).values()).backward()
        optimizer.step()
    with torch.inference_mode():
        right = (model.eval()(image).argmax(1) == labels).float().mean()
    assert right > 0.95


@pytest.mark.parametrize("name", ["hvir_tiny", "vir_tiny_patch16_224", "resnet18"])
@pytest.mark.parametrize("size", [(133, 57), (1, 1)])
def test_logits_have_the_size_of_the_image(name: str, size: tuple[int, int]) -> None:
    with torch.inference_mode():
        assert segmentor(name).eval()(torch.rand(1, 3, *size)).shape == (1, 3, *size)


def test_no_pixel_moves_where_an_image_is_filled_up() -> None:
    """The logits of an image are those of the same image with the mean colour at its right and below."""
    model = segmentor(mean=[0.0] * 3).eval()
    image = torch.rand(1, 3, 45, 71)
    filled = torch.zeros(1, 3, 64, 96)
    filled[..., :45, :71] = image
    with torch.inference_mode():
        assert torch.equal(model(image), model(filled)[..., :45, :71])


@pytest.mark.parametrize("name", ["hvir_tiny", "vir_tiny_patch16_224", "resnet18"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(45, 71), (32, 32)])
def test_losses_are_finite_and_reach_everything(name: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """A single image of 32 pixels is a single pixel at the last level; BatchNorm has nothing to average there."""
    model = segmentor(name).train()
    if name == "resnet18" and size == (32, 32):
        model = segmentor(name, batch_norm="frozen").train()  # its own BatchNorm cannot do it either
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        losses = model(torch.rand(1, 3, *size), torch.randint(0, 3, (1, *size)))
    assert sorted(losses) == ["loss_auxiliary", "loss_pixels"]
    assert all(loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values())
    sum(losses.values()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)


def test_a_single_value_is_normed_by_running_statistics() -> None:
    norm = BatchNorm(2).train()
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 9.0]))
    x = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    assert torch.allclose(norm(x).flatten(), torch.ones(2), atol=1e-4)
    assert norm.running_mean.tolist() == [1, 2]
    norm(torch.randn(1, 2, 3, 3))
    assert norm.running_mean.tolist() != [1, 2]


def test_every_level_is_told_of_the_smaller_ones() -> None:
    head = segmentor().eval().head
    maps = [torch.randn(1, dim, 32 // 2**i, 32 // 2**i) for i, dim in enumerate(THIN_HVIR["dims"])]
    seen: list[torch.Tensor] = []
    for smooth in head.smooth:
        smooth.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with torch.inference_mode():
        head(maps)
        head([*maps[:-1], maps[-1] + 1])
    assert [x.shape[-1] for x in seen] == 2 * [8, 16, 32]
    assert not any(torch.equal(before, after) for before, after in zip(seen[:3], seen[3:], strict=True))


def test_ignored_pixels_teach_nothing() -> None:
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    labels = torch.randint(0, 3, (1, 4, 4))
    labels[:, :2] = IGNORE
    loss = pixel_loss(logits, labels)
    loss.backward()
    assert (logits.grad[:, :, :2] == 0).all()
    assert (logits.grad[:, :, 2:] != 0).all()
    assert torch.allclose(loss, pixel_loss(logits[:, :, 2:], labels[:, 2:]))
    assert pixel_loss(logits, torch.full_like(labels, IGNORE)) == 0


def test_only_the_hardest_pixels_teach() -> None:
    logits = torch.zeros(1, 2, 2, 4, requires_grad=True)
    with torch.no_grad():
        logits[0, 1] = torch.tensor([[3.0, -1, 0, 2], [-3, 1, 5, 9]])
    labels = torch.zeros(1, 2, 4, dtype=torch.long)
    labels[0, 1, 3] = IGNORE  # the hardest of all
    loss = pixel_loss(logits, labels, hardest=3 / 8)
    loss.backward()
    taught = logits.grad.abs().sum(1)[0] > 0
    assert taught.tolist() == [[True, False, False, True], [False, False, True, False]]
    assert torch.allclose(loss, torch.log1p(torch.tensor([3.0, 2, 5]).exp()).mean())
    assert torch.allclose(pixel_loss(logits, labels, hardest=0.999), pixel_loss(logits, labels))
    with pytest.raises(ValueError, match="hardest=0"):
        segmentor(hardest=0.0)


def test_every_class_counts_alike_in_the_overlap() -> None:
    """Eight pixels of three classes, the third never shown; sure answers have the IoU that one counts by hand."""
    labels = torch.tensor([[[0, 0, 0, 0], [0, 1, IGNORE, 1]]])
    answers = torch.tensor([[[0, 0, 0, 1], [2, 1, 1, 1]]])
    sure = 50.0 * torch.nn.functional.one_hot(answers, 3).permute(0, 3, 1, 2).float()
    assert torch.allclose(overlap_loss(sure, labels), 1 - (torch.tensor(3 / 5) + 2 / 3) / 2)
    logits = torch.randn(1, 3, 2, 4, requires_grad=True)
    overlap_loss(logits, labels).backward()
    assert (logits.grad[0, :, 1, 2] == 0).all()
    assert logits.grad[0, :2].abs().sum(0).count_nonzero() == 7
    assert overlap_loss(logits, torch.full_like(labels, IGNORE)) == 0
    images, labels = torch.rand(1, 3, 64, 64), torch.randint(0, 2, (1, 64, 64))
    model = segmentor(overlap_weight=0.5).train()
    losses = model(images, labels)
    assert 0 < losses["loss_overlap"] < 0.5
    assert "loss_overlap" not in segmentor().train()(images, labels)
    with pytest.raises(ValueError, match="overlap_weight=-1"):
        segmentor(overlap_weight=-1.0)


def test_the_auxiliary_head_reads_stride_16_and_weighs_less() -> None:
    model = segmentor().train()
    for head in (model.classifier, model.auxiliary):
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.zeros_(head[-1].bias)
    losses = model(torch.rand(1, 3, 64, 96), torch.zeros(1, 64, 96, dtype=torch.long))
    assert torch.allclose(losses["loss_pixels"], torch.tensor(3.0).log())
    assert torch.allclose(losses["loss_auxiliary"], 0.4 * torch.tensor(3.0).log())
    assert model.auxiliary[0][0].in_channels == THIN_HVIR["dims"][2]


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_arguments_are_json_and_weights_come_back(retention: str) -> None:
    arguments = {"name": "hvir_tiny", "classes": 3, "retention": retention, **THIN_HVIR, **SEGMENTOR}
    model = build_segmentor(**arguments).eval()
    again = build_segmentor(**json.loads(json.dumps(arguments))).eval()
    again.load_state_dict(model.state_dict())
    assert {m.retention for m in again.modules() if isinstance(m, MultiHeadRetention)} == {retention}
    image = torch.rand(1, 3, 50, 70)
    with torch.inference_mode():
        assert torch.equal(model(image), again(image))


def test_images_are_normed_inside() -> None:
    usual, other = segmentor().eval(), segmentor(mean=[0.0] * 3, std=[1.0] * 3).eval()
    other.load_state_dict(usual.state_dict())
    image = torch.rand(1, 3, 32, 32)
    by_hand = (image - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[
        :, None, None
    ]
    with torch.inference_mode():
        assert torch.allclose(usual(image), other(by_hand), atol=1e-5)
        assert not torch.allclose(usual(image), other(image), atol=1e-2)


def test_mistakes_are_answered_in_words() -> None:
    model = segmentor().train()
    image, labels = torch.rand(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long)
    with pytest.raises(ValueError, match="no labels"):
        model(image)
    with pytest.raises(ValueError, match=r"labels of shape \(1, 16, 16\), expected \(1, 32, 32\)"):
        model(image, labels[:, :16, :16])
    with pytest.raises(ValueError, match=r"labels \[3\] are none of the 3 classes: expected 0 to 2, or 255"):
        model(image, labels + 3)
    with pytest.raises(ValueError, match=r"expected floats in 0\.\.1"):
        model((255 * image).byte(), labels)
    with pytest.raises(ValueError, match="classes=0"):
        segmentor(classes=0)
