"""Further models of the page, a detector and a segmentor: right answers and pictures, clear errors, nothing kept."""

import weakref
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the page is an extra: pip install fastapi uvicorn")
from fastapi.testclient import TestClient

from tests.serve.others import saved
from tests.serve.photographs import CAT, PAVILION
from tests.serve.writing import opened_for_writing
from vir import weights
from vir.answers import Detections, Segmentation
from vir.checkpoint import load_model
from vir.data.images import open_image
from vir.predict import Answer, predict
from vir.serve.app import create_app
from vir.serve.further import MOST_PIXELS, Further, WrongTask, load_further
from vir.viz.answers import COLOURS, draw

LEAST = 0.335  # what the detector says by chance has scores around a third


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    return [saved("detector", folder), saved("segmentor", folder)]


def given(files: list[str]) -> list[Further]:
    """Without those that ship, which come after them."""
    return load_further(files, "cpu")[: len(files)]


@pytest.fixture(scope="module")
def client(files: list[str]) -> Iterator[TestClient]:
    model, card = load_model(weights.DEFAULT)
    app = create_app(model, card, given(files))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def image(client: TestClient) -> str:
    return client.post("/answer", content=PAVILION.read_bytes()).json()["image"]


def right(file: str, photograph: Path = PAVILION) -> Answer:
    (answer,) = predict([photograph], file, least=LEAST, device="cpu")
    assert isinstance(answer, Detections | Segmentation)
    return answer


def same_picture(told: dict[str, Any], answer: Answer) -> bool:
    """But for rounding."""
    assert isinstance(answer, Detections | Segmentation)
    kind, _, content = told["picture"].partition(",")
    assert kind == "data:image/jpeg;base64"
    file = BytesIO()
    draw(open_image(PAVILION), answer).save(file, "JPEG", quality=90, subsampling=0)  # what JPEG loses, on both sides
    shown, drawn = (np.asarray(open_image(one), dtype=float) for one in (b64decode(content), file.getvalue()))
    return shown.shape == drawn.shape and abs(shown - drawn).mean() < 0.5


def test_objects_are_those_of_predict(client: TestClient, image: str, files: list[str]) -> None:
    told = client.get("/objects", params={"image": image, "model": 0, "least": LEAST}).json()
    answer = right(files[0])
    assert isinstance(answer, Detections)
    assert len(answer) > 0
    assert [one["name"] for one in told["found"]] == list(answer.names)
    assert [one["share"] for one in told["found"]] == pytest.approx(answer.scores, abs=1e-5)
    assert same_picture(told, answer)
    every = client.get("/objects", params={"image": image, "model": 0, "least": 0}).json()
    assert len(every["found"]) > len(answer)
    none = client.get("/objects", params={"image": image, "model": 0, "least": 1}).json()
    assert none["found"] == []
    assert not same_picture(none, answer)


def test_a_label_map_is_that_of_predict(client: TestClient, image: str, files: list[str]) -> None:
    told = client.get("/objects", params={"image": image, "model": 1}).json()
    answer = right(files[1])
    assert isinstance(answer, Segmentation)
    assert len(answer.shares) > 1
    assert {one["name"]: one["share"] for one in told["found"]} == pytest.approx(answer.shares, abs=1e-3)
    numbers = [answer.classes.index(one["name"]) for one in told["found"]]
    assert [tuple(one["colour"]) for one in told["found"]] == [COLOURS[number] for number in numbers]
    assert same_picture(told, answer)


def test_the_page_is_told_of_them(client: TestClient, files: list[str]) -> None:
    detector, segmentor = client.get("/model").json()["also"]
    assert (detector["task"], segmentor["task"]) == ("detection", "segmentation")
    assert detector["name"] == f"{Path(files[0]).parent.name}/detector"
    assert detector["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"model": 2}, 404, "there is no further model 2, expected 0 to 1"),
        ({"model": -1}, 404, "there is no further model -1"),
        ({"model": "detector"}, 400, "model: Input should be a valid integer"),
        ({"model": 0, "least": 1.5}, 400, "least=1.5, expected a score from 0 to 1"),
        ({"model": 0, "least": "nan"}, 400, "least=nan"),
        ({"model": 0, "image": "unknown"}, 404, "Choose it again"),
    ],
    ids=str,
)
def test_mistakes(client: TestClient, image: str, asked: dict[str, Any], status: int, says: str) -> None:
    reply = client.get("/objects", params={"image": image} | asked)
    assert reply.status_code == status
    assert says in reply.json()["error"]


def test_without_further_models_there_are_none() -> None:
    model, card = load_model(weights.DEFAULT)
    with TestClient(create_app(model, card)) as client:
        assert client.get("/model").json()["also"] == []
        reply = client.get("/objects", params={"image": "any", "model": 0})
    assert reply.status_code == 404
    assert "--also" in reply.json()["error"]


def test_twenty_clients_at_once(client: TestClient, files: list[str]) -> None:
    """With two photographs and all models, in turns."""
    answers = {(photograph, file): right(file, photograph) for photograph in (PAVILION, CAT) for file in files}

    def visit(number: int) -> bool:
        photograph, model = (PAVILION, CAT)[number % 2], number // 2 % 2
        told = client.post("/answer", content=photograph.read_bytes()).json()
        found = client.get("/objects", params={"image": told["image"], "model": model, "least": LEAST}).json()["found"]
        answer = answers[photograph, files[model]]
        names = answer.names if isinstance(answer, Detections) else list(answer.shares)  # type: ignore[union-attr]
        return told["classes"] != [] and [one["name"] for one in found] == list(names)

    with ThreadPoolExecutor(20) as visitors:
        assert all(visitors.map(visit, range(20)))


def test_nothing_is_kept_on_disk(client: TestClient, image: str) -> None:
    with opened_for_writing() as opened:
        for model in range(2):
            assert client.get("/objects", params={"image": image, "model": model, "least": 0.3}).status_code == 200
    assert opened == []


def test_another_least_score_takes_no_second_look(files: list[str]) -> None:
    (further,) = given(files[:1])
    looks: list[object] = []
    further.model.register_forward_hook(lambda module, inputs, output: looks.append(module))
    photograph = open_image(PAVILION)
    some, all_of_them = further.told(photograph, LEAST)["found"], further.told(photograph, 0.0)["found"]
    assert 0 < len(some) < len(all_of_them)
    assert all_of_them[: len(some)] == some
    assert len(looks) == 1
    further.told(open_image(CAT), LEAST)
    further.told(photograph, LEAST)
    assert len(looks) == 3


def test_a_photograph_that_the_server_forgets_is_not_held_here(files: list[str]) -> None:
    (further,) = given(files[1:])
    photograph = open_image(PAVILION)
    seen = weakref.ref(photograph)
    further.told(photograph)
    del photograph
    assert seen() is None


def test_a_large_photograph_is_made_smaller_first(files: list[str]) -> None:
    for further in given(files):
        told = further.told(Image.new("RGB", (4000, 2000), "gray"))
        assert MOST_PIXELS / 1.01 < told["width"] * told["height"] <= MOST_PIXELS
        assert told["width"] / told["height"] == pytest.approx(2, rel=0.01)
        assert further.told(Image.new("RGB", (1, 1), "gray"))["width"] == 1


def test_shipped_ones_come_by_themselves(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.name for one in load_further([], "cpu")] == ["cascade_hvir_tiny.nuclei", "upernet_hvir_tiny.camvid"]
    monkeypatch.setattr(weights, "FOLDER", Path(files[0]).parent)
    assert [one.name for one in load_further([], "cpu")] == ["detector", "segmentor"]
    assert [one.name for one in load_further(["segmentor"], "cpu")] == ["segmentor", "detector"]


def test_a_classifier_is_refused() -> None:
    with pytest.raises(WrongTask, match="trained for classification, expected detection or segmentation"):
        Further(weights.DEFAULT, *load_model(weights.DEFAULT))
