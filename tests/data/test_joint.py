"""Images with what is known of them on the way to a model: pixels, boxes, masks and label maps stay together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vir.data.dense import DenseBatch, DenseExamples
from vir.data.joint import (
    AS_THEY_ARE,
    ForDetection,
    ForJudgingDetection,
    ForJudgingSegmentation,
    ForSegmentation,
    fitted,
)
from vir.data.loading import Share, judging_batches, seeded, training_batches
from vir.data.objects import open_objects
from vir.data.scenes import VOID
from vir.data.truth import Target, Truth, masks_of

SMALL = ForDetection(short=(40, 56, 72), longest=150, crop=(20, 45), before_crop=(40, 60), jitter=(0.1, 0.1, 0.1, 0.02))


def bright_objects(
    count: int = 6, width: int = 90, height: int = 60, crowd: bool = False
) -> tuple[Image.Image, Target]:
    """Bright rectangles on black, each in its own grey, so that pixels tell where objects are."""
    place = np.random.default_rng(1)
    pixels = np.zeros((height, width, 3), np.uint8)
    masks = np.zeros((count, height, width), bool)
    boxes = []
    for i in range(count):
        left, top = i * width // count, int(place.integers(0, height // 2))
        right, bottom = left + width // count - 3, top + int(place.integers(height // 7, height // 2))
        masks[i, top:bottom, left:right] = True
        pixels[masks[i]] = 100 + 20 * i
        boxes.append([left, top, right, bottom])
    target = Target(
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.arange(1, count + 1),
        masks=torch.from_numpy(masks),
        iscrowd=torch.full((count,), int(crowd)),
        area=torch.from_numpy(masks.sum((1, 2))).float(),
        image_id=3,
    )
    return Image.fromarray(pixels), target


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1067)), ((100, 1000), (133, 1333)), ((1, 1), (800, 800)), ((1, 8000), (1, 1333))],
)
def test_sizes_that_fit(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fitted(*size, 800, 1333) == expected


def test_boxes_and_masks_stay_on_their_objects() -> None:
    image, known = bright_objects(6, 270, 180)
    plain = ForDetection(short=(120, 168, 216), longest=450, crop=(60, 135), before_crop=(120, 180))
    lost = checked = 0
    for seed in range(40):
        with seeded(seed):
            pixels, target = plain(image, known)
        assert target["masks"].shape[1:] == pixels.shape[1:]
        assert target["masks"].dtype == torch.bool
        lost += 6 - len(target["labels"])
        for label, mask, box in zip(target["labels"], target["masks"], target["boxes"], strict=True):
            grey = (100 + 20 * (int(label) - 1)) / 255
            rows, columns = mask.nonzero().T
            outside = torch.nn.functional.pad((~mask).float(), (10, 10, 10, 10), value=1.0)
            inside = torch.nn.functional.max_pool2d(outside[None], 21, 1)[0] == 0  # not near its edge, nor the image's
            assert ((pixels[0] - grey).abs()[inside] < 0.01).all()
            checked += int(inside.any())
            around = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
            assert (box - around).abs().max() <= 2.5  # a pixel before the last resizing, which is up to 216 / 60 fold
            assert (box[2:] - box[:2]).min() >= 1
    assert checked > 50
    assert lost > 20  # crops did cut objects away


def test_a_flip_mirrors_all() -> None:
    image, known = bright_objects()
    pixels, target = ForDetection(short=(60,), longest=90, flip=1.0)(image, known)
    assert torch.equal(target["masks"], known["masks"].flip(2))
    assert torch.equal(target["boxes"], torch.stack([90 - known["boxes"][:, 2], known["boxes"][:, 1],
                                                     90 - known["boxes"][:, 0], known["boxes"][:, 3]], 1))  # fmt: skip
    assert torch.equal((pixels * 255).round().byte()[0], torch.from_numpy(np.array(image))[..., 0].flip(1))


def test_what_a_crop_leaves_nothing_of_is_gone() -> None:
    """An object whose box reaches into the crop while none of its pixels does."""
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    mask[0, 0, :] = mask[0, :, 0] = True  # an L along two edges, with a box as large as the image
    known = Target(
        boxes=torch.tensor([[0.0, 0, 40, 40]]), labels=torch.ones(1, dtype=torch.int64), masks=mask,
        iscrowd=torch.zeros(1), area=torch.tensor([79.0]), image_id=0,
    )  # fmt: skip
    transform = ForDetection(short=(40,), longest=40, crop=(10, 10), before_crop=(40,), flip=0.0)
    sizes = set()
    for seed in range(30):
        with seeded(seed):
            _, target = transform(Image.new("RGB", (40, 40)), known)
        assert len(target["boxes"]) == len(target["masks"]) == len(target["labels"]) == len(target["area"])
        assert target["masks"].flatten(1).any(1).all()
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = mask.nonzero().T
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        sizes.add(len(target["boxes"]))
    assert sizes == {0, 1}


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1)])
def test_odd_sizes_and_no_objects(size: tuple[int, int]) -> None:
    _, nothing = bright_objects(0, *size) if min(size) > 20 else (None, None)
    nothing = nothing or Target(
        boxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.int64), iscrowd=torch.zeros(0), area=torch.zeros(0),
        masks=torch.zeros(0, size[1], size[0], dtype=torch.bool), image_id=0,
    )  # fmt: skip
    for seed in range(6):
        with seeded(seed):
            pixels, target = SMALL(Image.new("RGB", size), nothing)
        assert target["boxes"].shape == (0, 4)
        assert target["masks"].shape == (0, *pixels.shape[1:])


def test_an_object_without_a_pixel_is_left_out_whatever_its_box() -> None:
    masks = torch.zeros(2, 20, 30, dtype=torch.bool)
    masks[1, 4:9, 5:12] = True
    target = Target(
        boxes=torch.tensor([[1.0, 1.0, 9.0, 9.0], [5.0, 4.0, 12.0, 9.0]]),
        labels=torch.tensor([1, 2]),
        masks=masks,
        iscrowd=torch.zeros(2, dtype=torch.int64),
        area=torch.tensor([0.0, 35.0]),
        image_id=0,
    )
    _, left = ForDetection(flip=0.0)(Image.new("RGB", (30, 20)), target)
    assert left["labels"].tolist() == [2]
    assert left["area"].tolist() == [35.0]
    assert left["masks"].dtype == torch.bool
    assert torch.equal(left["masks"], masks[1:])


@pytest.mark.parametrize("seed", range(6))
def test_one_map_of_numbers_goes_the_way_of_its_masks(seed: int) -> None:
    """Flips, crops, sizes, and what they leave nothing of, for objects with holes and in several parts."""
    image, target = bright_objects(7)
    holes = torch.rand(7, 60, 90, generator=torch.Generator().manual_seed(seed)) < 0.7
    target["masks"] = target["masks"] & holes
    target["iscrowd"][2] = 1
    numbers = (target["masks"] * torch.arange(1, 8)[:, None, None]).sum(0).to(torch.int32)
    transform = ForDetection(short=(40, 56), longest=150, crop=(9, 25), before_crop=(40, 60), upside_down=0.5)
    with seeded(seed):
        pixels, want = transform(image, target)
    with seeded(seed):
        same, got = transform(image, {**target, "masks": numbers})
    assert torch.equal(pixels, same)
    assert got["masks"].shape == pixels.shape[1:]
    for name in ("boxes", "labels", "area"):
        assert torch.equal(got[name], want[name])
    assert torch.equal(masks_of(got), want["masks"])


def test_crowds_are_not_learned_as_objects() -> None:
    assert len(SMALL(*bright_objects(crowd=True))[1]["boxes"]) == 0


@pytest.mark.parametrize("task", ["detection", "segmentation"])
def test_the_same_seed_gives_the_same_crop(task: str) -> None:
    image, known = bright_objects()
    labels = np.random.default_rng(0).integers(0, 5, (60, 90)).astype(np.uint8)
    scenes = ForSegmentation(crop=(32, 32), short=48, jitter=(0.2, 0.2, 0.2, 0.1))

    def made(*seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        with seeded(*seed):
            if task == "detection":
                pixels, target = SMALL(image, known)
                return pixels, target["masks"]
            return scenes(image, labels)

    first, again, other = made(1, 2, 3), made(1, 2, 3), made(1, 2, 4)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])


def coloured_scene(height: int = 30, width: int = 50) -> tuple[Image.Image, np.ndarray]:
    labels = np.random.default_rng(0).integers(0, 8, (height // 10, width // 10)).repeat(10, 0).repeat(10, 1)
    return Image.fromarray((labels * 30 + 20).astype(np.uint8)).convert("RGB"), labels.astype(np.uint8)


def test_label_maps_stay_on_their_pixels_and_what_is_missing_is_void() -> None:
    image, labels = coloured_scene()
    transform = ForSegmentation(crop=(40, 40), short=None, scales=(0.5, 2.0), colours=AS_THEY_ARE)
    padded = 0
    for seed in range(30):
        with seeded(seed):
            pixels, target = transform(image, labels)
        assert pixels.shape == (3, 40, 40)
        assert target.shape == (40, 40)
        known = target != VOID
        padded += int((~known).any())
        assert (pixels[0][~known] == 0).all()
        off = (pixels[0][known] * 255 - (target[known] * 30 + 20)).abs()
        assert off.median() < 4  # resized colours run into each other at the edges of classes
    assert 5 < padded < 30


def test_resizing_favours_no_side() -> None:
    """A mirrored label map becomes the mirror of the label map, which torchvision's way for masks does not give."""
    labels = np.tile(np.arange(41, dtype=np.uint8), (30, 1))  # of 29 places none is between two pixels
    transform = ForSegmentation(crop=(21, 29), short=None, scales=(0.7, 0.7), flip=0.0)
    image = Image.new("RGB", (41, 30))
    _, there = transform(image, labels)
    _, back = transform(image, np.ascontiguousarray(labels[:, ::-1]))
    assert torch.equal(there, back.flip(1))


def test_a_crop_of_one_class_alone_is_tried_again() -> None:
    labels = np.zeros((40, 200), np.uint8)
    labels[:, 150:] = 1
    image = Image.fromarray(labels * 255).convert("RGB")
    shares = {}
    for most in (0.75, 1.1):
        transform = ForSegmentation(crop=(40, 40), short=None, scales=(1.0, 1.0), most_of_one=most)
        mixed = 0
        for seed in range(60):
            with seeded(seed):
                mixed += len(transform(image, labels)[1].unique()) > 1
        shares[most] = mixed
    assert shares[0.75] > 1.5 * shares[1.1]


def test_void_is_no_class_that_fills_a_crop() -> None:
    labels = np.full((20, 20), VOID, np.uint8)
    _, target = ForSegmentation(crop=(8, 8), short=None)(Image.new("RGB", (20, 20)), labels)
    assert (target == VOID).all()


def test_judging_keeps_what_is_known_in_its_own_size() -> None:
    image, labels = coloured_scene()
    pixels, target = ForJudgingSegmentation(short=60)(image, labels)
    assert pixels.shape == (3, 60, 100)
    assert target.tolist() == labels.tolist()
    pixels, _ = ForJudgingSegmentation(short=None)(image, labels)
    assert pixels.shape == (3, 30, 50)
    truth = Truth(0, 50, 30, ())
    pixels, passed = ForJudgingDetection(short=15, longest=20)(image, truth)
    assert pixels.shape == (3, 12, 20)
    assert passed is truth


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, count in (("train", 10), ("val", 5)):
        (tmp_path / part / "images").mkdir(parents=True)
        (tmp_path / part / "masks").mkdir()
        for i in range(count):
            image, known = bright_objects(3, 60 + i, 40)
            numbers = sum((k + 1) * mask.numpy().astype(np.uint8) for k, mask in enumerate(known["masks"]))
            image.save(tmp_path / part / "images" / f"{i}.png")
            Image.fromarray(numbers).save(tmp_path / part / "masks" / f"{i}.png")
    return tmp_path


def same(one: DenseBatch, other: DenseBatch) -> bool:
    pixels = all(torch.equal(a, b) for a, b in zip(one.images, other.images, strict=True))
    return pixels and all(
        torch.equal(a[name], b[name])
        for a, b in zip(one.targets, other.targets, strict=True)
        for name in ("boxes", "masks")
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_in_the_middle_with_the_same_examples(folder: Path, workers: int) -> None:
    examples = DenseExamples(open_objects(folder)["train"], SMALL, seed=5)
    whole = list(training_batches(examples, 4, 3, Share(), 0))
    rest = list(training_batches(examples, 4, 3, Share(), workers, first_epoch=1, first_step=1))
    assert len(whole) == 6
    assert len(rest) == 3
    for a, b in zip(whole[3:], rest, strict=True):
        assert same(a, b)
    assert not same(whole[0], whole[2])
    assert len({tuple(examples[(epoch, 0)][0].shape) for epoch in range(8)}) > 1  # another crop in every epoch


def test_processes_share_the_very_batches(folder: Path) -> None:
    examples = DenseExamples(open_objects(folder)["train"], SMALL, seed=5)
    (whole, *_) = training_batches(examples, 4, 1, Share(), 0)
    parts = [next(training_batches(examples, 4, 1, Share(rank, 2), 0)) for rank in range(2)]
    assert torch.equal(torch.cat([part.indices for part in parts]), whole.indices)


def test_batches_are_lists_and_move_as_a_whole(folder: Path) -> None:
    objects = open_objects(folder)["val"]
    examples = DenseExamples(objects, ForJudgingDetection(40, 80), stand_in=False, read=objects.read_truth)
    first, second = judging_batches(examples, 3, Share(), 0)
    assert [tuple(image.shape) for image in first.images] == [(3, 40, 60), (3, 40, 61), (3, 40, 62)]
    assert first.sizes == [(40, 60), (40, 61), (40, 62)]
    assert [truth.image_id for truth in second.targets] == second.indices.tolist() == [3, 4]
    moved = DenseBatch([torch.zeros(1)], [{"boxes": torch.zeros(1), "image_id": 3}], [], torch.zeros(1), []).to("meta")
    assert moved.images[0].is_meta
    assert moved.targets[0]["boxes"].is_meta
    assert moved.targets[0]["image_id"] == 3


def test_an_image_that_cannot_be_read_is_stood_in_for_or_judged_as_none(folder: Path) -> None:
    (folder / "val" / "masks" / "1.png").write_bytes(b"")
    objects = open_objects(folder)["val"]
    (batch,) = judging_batches(DenseExamples(objects, SMALL), 5, Share(), 0)
    assert batch.indices.tolist() == [0, 2, 2, 3, 4]
    assert "1.png" in batch.unreadable[0]
    examples = DenseExamples(objects, ForJudgingDetection(40, 80), stand_in=False, read=objects.read_truth)
    (batch,) = judging_batches(examples, 5, Share(), 0)
    assert [target is None for target in batch.targets] == [False, True, False, False, False]
