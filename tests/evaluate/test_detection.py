"""Average precision: by hand where it is known, else against pycocotools reading files of its own format."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from tests.heads.small import detector
from vir.data import rle
from vir.data.dense import DenseBatch, DenseExamples
from vir.data.joint import ForJudgingDetection
from vir.data.loading import Share, judging_batches
from vir.data.objects import open_objects
from vir.data.truth import TrueObject, Truth, truth_of_numbers
from vir.evaluate.detection import DetectionJudgement, coco_results, in_own_size, judge_detection

SIZE = 120


def true_object(left: int, top: int, side: int, label: int = 1, crowd: int = 0) -> TrueObject:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[top : top + side, left : left + side] = True
    box = [float(left), float(top), float(side), float(side)]
    return TrueObject(bbox=box, label=label, area=float(side**2), iscrowd=crowd, segmentation=rle.encode(mask))


def truth(image_id: int, *objects: TrueObject) -> Truth:
    return Truth(image_id, SIZE, SIZE, objects)


def perfect(known: Truth, shift: int = 0) -> dict[str, Tensor]:
    """The objects themselves as answers, or moved to the right."""
    target = known.target()
    single = target["iscrowd"] == 0
    boxes = target["boxes"][single] + torch.tensor([shift, 0, shift, 0])
    masks = target["masks"][single].roll(shift, 2)
    return {"boxes": boxes, "labels": target["labels"][single], "masks": masks, "scores": torch.ones(len(boxes))}


def nothing() -> dict[str, Tensor]:
    return {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}


TWO = truth(1, true_object(10, 10, 20), true_object(50, 60, 40, 2))


def judged(*pairs: tuple[Truth, dict[str, Tensor]], most: int = 100) -> DetectionJudgement:
    seen = DetectionJudgement(("cat", "dog"), most)
    for known, output in pairs:
        seen.add(known, output)
    return seen


def test_perfect_answers(capsys: pytest.CaptureFixture[str]) -> None:
    seen = judged((TWO, perfect(TWO)))
    metrics = seen.metrics()
    assert metrics["box_ap"] == metrics["mask_ap"] == metrics["box_ar"] == metrics["box_ap_small"] == 1
    assert metrics["box_ap_large"] == -1  # none is larger than 96 x 96
    assert seen.per_class("mask") == {"cat": 1, "dog": 1}
    assert capsys.readouterr().out == ""


def test_an_overlap_of_two_thirds_counts_at_four_of_ten_thresholds() -> None:
    known = truth(1, true_object(10, 10, 20))
    metrics = judged((known, perfect(known, 4))).metrics()  # 16 of 24 columns: at 0.5, 0.55, 0.6 and 0.65
    assert metrics["box_ap"] == metrics["mask_ap"] == pytest.approx(0.4)
    assert metrics["box_ap50"] == 1
    assert metrics["box_ap75"] == 0


def test_a_false_alarm_that_is_surer_halves_the_precision() -> None:
    known = truth(1, true_object(10, 10, 20))
    output = {
        "boxes": torch.tensor([[60.0, 60, 90, 90], [10, 10, 30, 30]]),
        "labels": torch.tensor([1, 1]),
        "scores": torch.tensor([0.9, 0.8]),
    }
    seen = judged((known, output))
    metrics = seen.metrics()
    assert metrics["box_ap"] == pytest.approx(0.5)
    assert "mask_ap" not in metrics
    assert seen.per_class() == {"cat": pytest.approx(0.5), "dog": -1}


def test_the_wrong_name_is_wrong() -> None:
    assert judged((TWO, perfect(TWO) | {"labels": torch.tensor([2, 1])})).metrics()["box_ap"] == 0


def test_no_answers_and_nothing_to_find() -> None:
    assert judged((TWO, nothing())).metrics()["box_ap"] == 0
    assert judged((truth(1), nothing())).metrics()["box_ap"] == -1
    assert judged((truth(1), perfect(TWO))).metrics()["box_ap"] == -1
    mixed = judged((TWO, perfect(TWO)), (truth(2), perfect(TWO) | {"scores": torch.full((2,), 2.0)})).metrics()
    assert mixed["box_ap"] == pytest.approx(0.5)  # false alarms in an empty image count
    assert DetectionJudgement(("cat",)).metrics()["box_ap"] == -1


def test_answers_within_a_crowd_are_no_false_alarms() -> None:
    crowd = truth(1, true_object(10, 10, 20), true_object(60, 60, 50, crowd=1))
    within = {"boxes": torch.tensor([[70.0, 70, 80, 80], [10, 10, 30, 30]]), "labels": torch.tensor([1, 1])}
    assert judged((crowd, within | {"scores": torch.tensor([0.9, 0.8])})).metrics()["box_ap"] == 1


def test_more_than_a_hundred_objects_count_if_wanted() -> None:
    numbers = np.zeros((SIZE, SIZE), np.uint16)
    for i in range(144):
        row, column = divmod(i, 12)
        numbers[10 * row : 10 * row + 6, 10 * column : 10 * column + 6] = i + 1
    known = truth_of_numbers(numbers, 1)
    assert judged((known, perfect(known))).metrics()["box_ap"] < 0.8
    assert judged((known, perfect(known)), most=200).metrics()["mask_ap"] == 1


def test_processes_join_and_count_an_image_once() -> None:
    other = truth(2, true_object(30, 30, 20))
    one, two = judged((TWO, perfect(TWO))), judged((other, nothing()), (TWO, perfect(TWO)))
    one.join(two)
    assert one.images == 2
    both = judged((TWO, perfect(TWO)), (other, nothing()))
    assert one.metrics() == both.metrics()


def random_file(folder: Path) -> Path:
    """Forty images in COCO's own format, with gaps in the ids, polygons, crowds and images without objects."""
    place = np.random.default_rng(0)
    images, annotations = [], []
    for number in range(40):
        images.append({"id": 3 * number, "file_name": f"{number}.png", "width": SIZE, "height": SIZE})
        for _ in range(int(place.integers(0, 7))):
            x, y, w, h = (place.uniform((0, 0, 5, 5), (80, 80, 110, 110))).tolist()
            outline: object = [[x, y, x + w, y, x + 0.7 * w, y + h, x, y + 0.8 * h]]
            crowd = int(place.random() < 0.15)
            if crowd:
                mask = np.zeros((SIZE, SIZE), bool)
                mask[int(y) : int(y + h), int(x) : int(x + w)] = True
                outline = dict(rle.encode(mask))
            annotations.append({
                "id": 7 * len(annotations) + 1, "image_id": 3 * number, "category_id": int(place.choice([2, 5, 11])),
                "bbox": [x, y, w, h], "area": 0.7 * w * h, "iscrowd": crowd, "segmentation": outline,
            })  # fmt: skip
    (folder / "val").mkdir()
    for image in images:
        Image.new("RGB", (SIZE, SIZE)).save(folder / "val" / image["file_name"])
    categories = [{"id": number, "name": f"class {number}"} for number in (11, 2, 5)]
    (folder / "annotations").mkdir()
    file = folder / "annotations" / "instances_val.json"
    file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return file


def test_numbers_are_those_of_pycocotools_on_files(tmp_path: Path) -> None:
    file = random_file(tmp_path)
    objects = open_objects(tmp_path)["val"]
    seen = DetectionJudgement(objects.classes)
    results = []
    for index in range(len(objects)):
        known = objects.truth(index)
        output = perfect(known, shift=index % 5)
        count = len(output["boxes"])
        output["boxes"] = output["boxes"] + torch.randn(count, 4) * 3
        output["labels"][torch.rand(count) < 0.2] = 1
        output["scores"] = torch.rand(count)
        output["masks"] = output["masks"][:, None].float() * 0.8  # as torchvision gives them
        seen.add(known, output)
        results += coco_results(output, known.image_id)
    metrics = seen.metrics()
    for result in results:
        result["category_id"] = objects.category_ids[result["category_id"] - 1]
    for kind, coco_kind, part in (("box", "bbox", "bbox"), ("mask", "segm", "segmentation")):
        wanted = ("image_id", "category_id", "score", part)
        answers = tmp_path / f"{kind}.json"
        answers.write_text(json.dumps([{name: result[name] for name in wanted} for result in results]))
        with contextlib.redirect_stdout(io.StringIO()):
            official = COCO(str(file))
            counted = COCOeval(official, official.loadRes(str(answers)), coco_kind)
            counted.evaluate()
            counted.accumulate()
            counted.summarize()
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        names += ("ar", "ar_small", "ar_medium", "ar_large")
        expected = [*counted.stats[:6], *counted.stats[8:]]
        assert [metrics[f"{kind}_{name}"] for name in names] == pytest.approx(expected, abs=2e-6)
        assert 0.05 < metrics[f"{kind}_ap"] < 0.95


def test_answers_come_back_to_the_image_as_it_was() -> None:
    masks = torch.zeros(1, 1, 20, 40)
    masks[..., 5:10, 10:30] = 1
    output = {"boxes": torch.tensor([[10.0, 5, 30, 10]]), "masks": masks}
    back = in_own_size(output, (20, 40), (40, 120))
    assert back["boxes"].tolist() == [[30, 10, 90, 20]]
    assert back["masks"].shape == (1, 40, 120)
    rows, columns = back["masks"][0].nonzero().T
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (10, 20, 30, 90)
    empty = in_own_size({"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 1, 20, 40)}, (20, 40), (40, 120))
    assert empty["masks"].shape == (0, 40, 120)


class FindsBright(nn.Module):
    """A detector that finds the one bright rectangle in an image."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        outputs = []
        for image in images:
            mask = image[0] > 0.5
            rows, columns = mask.nonzero().T
            box = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()
            outputs.append({
                "boxes": box[None], "labels": torch.ones(1, dtype=torch.int64), "scores": torch.ones(1),
                "masks": mask[None, None].float(),
            })  # fmt: skip
        return outputs


def test_a_model_is_asked_about_a_whole_set_at_another_size(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / "val" / folder).mkdir(parents=True)
    for number in range(5):
        mask = np.zeros((40, 60 + number), np.uint8)
        mask[8:28, 8 : 40 + number] = 255
        Image.fromarray(mask).convert("RGB").save(tmp_path / "val" / "images" / f"{number}.png")
        Image.fromarray(mask // 255 * 7).save(tmp_path / "val" / "masks" / f"{number}.png")
    objects = open_objects(tmp_path)["val"]
    (tmp_path / "val" / "images" / "3.png").write_bytes(b"")
    examples = DenseExamples(objects, ForJudgingDetection(120, 400), stand_in=False, read=objects.read_truth)
    batches = judging_batches(examples, 3, Share(), 0)
    asked: list[int] = []
    seen = judge_detection(FindsBright(), batches, objects.classes, torch.device("cpu"), asked.append)
    assert sum(asked) == 5
    assert seen.images == 4
    assert "3.png" in seen.unreadable[0]
    assert seen.metrics()["box_ap"] == seen.metrics()["mask_ap"] == 1


def test_an_image_too_long_for_a_model_is_told_and_the_others_judged() -> None:
    known = [Truth(i, height, 60, ()) for i, height in enumerate((60, 1, 50))]
    images = [torch.rand(3, 60, 60), torch.rand(3, 1, 3000), torch.rand(3, 50, 60)]
    batch = DenseBatch(images, known, [(x.shape[1], x.shape[2]) for x in images], torch.arange(3), [])
    seen = judge_detection(detector(), [batch], ("cat", "dog"), torch.device("cpu"))
    assert [one.image_id for one in seen.truths] == [0, 2]
    (told,) = seen.unreadable
    assert told.startswith("image 1 has 1 x 3000 pixels: ")
