"""The page's server on the shipped weights: right answers, clear errors, nothing left behind."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the page is an extra: pip install fastapi uvicorn")
from fastapi.testclient import TestClient

from tests.serve.photographs import CAT, PAVILION, bomb, png
from tests.serve.writing import opened_for_writing
from vir import weights
from vir.answers import Classes
from vir.checkpoint import Card, load_model
from vir.data.images import open_image
from vir.predict import predict
from vir.serve.app import create_app
from vir.viz.inside import pixels_of, retention_layers, whole
from vir.viz.retained import retained
from vir.viz.style import CannotDraw

MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    model, card = load_model(weights.DEFAULT)
    with TestClient(create_app(model, card, most_bytes=MOST_BYTES), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def pavilion(client: TestClient) -> dict[str, Any]:
    reply = client.post("/answer", content=PAVILION.read_bytes())
    assert reply.status_code == 200, reply.text
    return reply.json()


def expected(path: Path) -> Classes:
    (answer,) = predict([path], weights.DEFAULT, top=10, device="cpu")
    assert isinstance(answer, Classes)
    return answer


def close(told: dict[str, Any], answer: Classes) -> bool:
    shares = {one["name"]: one["probability"] for one in told["classes"]}
    return shares == pytest.approx(dict(zip(answer.names, answer.probabilities, strict=True)), abs=1e-5)


def test_the_answer_is_that_of_predict(pavilion: dict[str, Any]) -> None:
    assert close(pavilion, expected(PAVILION))
    assert pavilion["classes"][0]["name"] == "church"
    assert [pavilion["width"], pavilion["height"]] == [640, 427]
    assert pavilion["grids"] == [[8, 12]] * 6 + [[4, 6]] * 4


@pytest.mark.parametrize(("layer", "query", "size"), [(-1, (2, 3), None), (0, (7, 11), None), (3, (5, 9), 256)])
def test_what_is_retained_is_that_of_viz(
    client: TestClient, pavilion: dict[str, Any], layer: int, query: tuple[int, int], size: int | None
) -> None:
    asked: dict[str, Any] = {"image": pavilion["image"], "layer": layer, "row": query[0], "col": query[1]}
    told = client.get("/retained", params=asked | ({"size": size} if size else {})).json()
    model, card = load_model(weights.DEFAULT)
    layers = retention_layers(model)
    fitted = whole(open_image(PAVILION), size or card.size, layers[-1].stride)
    (right,) = retained(model, pixels_of(fitted, card), [layers[layer]], query)
    assert told["layer"] == right.layer.number
    assert told["query"] == list(query)
    torch.testing.assert_close(torch.tensor(told["heads"]), right.weights)
    torch.testing.assert_close(torch.tensor(told["mean"]), right.mean)


def test_without_a_patch_the_last_one_looks(client: TestClient, pavilion: dict[str, Any]) -> None:
    told = client.get("/retained", params={"image": pavilion["image"]}).json()
    assert told["query"] == [3, 5]  # HViR has no class token


@pytest.mark.parametrize("size", [128, 256])
def test_forms_answer_alike(client: TestClient, pavilion: dict[str, Any], size: int) -> None:
    answers = set()
    for form in ("parallel", "recurrent", "chunkwise"):
        told = client.get("/forms", params={"image": pavilion["image"], "form": form, "size": size}).json()
        assert told["difference"] < 1e-4
        assert told["milliseconds"] > 0
        assert told["peak_bytes"] > 4 * 3 * size * size / 4
        answers.add((told["answer"], round(told["probability"], 4)))
    assert len(answers) == 1
    again = client.get("/answer", params={"image": pavilion["image"], "size": size}).json()
    assert answers.pop() == (again["classes"][0]["name"], round(again["classes"][0]["probability"], 4))


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"I am a text file called holiday.jpg", 400, "is not an image that can be read"),
        (b"", 400, "is empty"),
        (PAVILION.read_bytes()[:50_000], 400, "damaged or cut short"),
        (bomb(), 413, "too large, expected at most 64,000,000 pixels"),
        (b"x" * (MOST_BYTES + 1), 413, "expected at most 1,000,000"),
        (png(20_000, 1), 400, "at most 16 times as long as wide"),
    ],
    ids=["text", "empty", "cut", "bomb", "large", "long"],
)
def test_what_cannot_be_answered(client: TestClient, content: bytes, status: int, says: str) -> None:
    reply = client.post("/answer", content=content)
    assert reply.status_code == status
    assert says in reply.json()["error"]


def test_a_body_that_does_not_tell_its_length_is_counted(client: TestClient) -> None:
    reply = client.post("/answer", content=(b"x" * 100_000 for _ in range(11)))
    assert reply.status_code == 413
    assert "expected at most 1,000,000" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "asked", "status", "says"),
    [
        ("/retained", {"image": "unknown"}, 404, "no longer, in the server's memory. Choose it again"),
        ("/retained", {"row": 4, "col": 0}, 400, "the patch 4,0 lies outside the grid of 4 x 6 patches"),
        ("/retained", {"row": -1, "col": 0}, 400, "outside the grid"),
        ("/retained", {"row": 1}, 400, "expected both of a patch"),
        ("/retained", {"row": "one", "col": 1}, 400, "row: Input should be a valid integer"),
        ("/retained", {"layer": 10}, 400, "layer 10 of 10 retention layers"),
        ("/retained", {"size": 513}, 400, "size=513, expected 32 to 512 pixels"),
        ("/answer", {"size": 0}, 400, "size=0, expected 32 to 512"),
        ("/forms", {"form": "diagonal"}, 400, "expected one of parallel, recurrent, chunkwise"),
        ("/forms", {}, 400, "form: Field required"),
        ("/examples/a dog", {}, 404, "no example is called 'a dog'"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
    ids=str,
)
def test_mistakes(
    client: TestClient, pavilion: dict[str, Any], path: str, asked: dict[str, Any], status: int, says: str
) -> None:
    reply = client.get(path, params={"image": pavilion["image"]} | asked)
    assert reply.status_code == status
    assert says in reply.json()["error"]


def test_twenty_clients_at_once(client: TestClient) -> None:
    """Every second one with another photograph; and they look into it in other forms meanwhile."""
    right = {path: expected(path) for path in (PAVILION, CAT)}

    def visit(number: int) -> bool:
        path = (PAVILION, CAT)[number % 2]
        told = client.post("/answer", content=path.read_bytes()).json()
        form = ("parallel", "chunkwise")[number // 2 % 2]
        cost = client.get("/forms", params={"image": told["image"], "form": form}).json()
        seen = client.get("/retained", params={"image": told["image"]})
        return (
            close(told, right[path])
            and cost["difference"] < 1e-4
            and cost["answer"] == right[path].best
            and seen.status_code == 200
        )

    with ThreadPoolExecutor(20) as visitors:
        assert all(visitors.map(visit, range(20)))


def test_nothing_is_kept_on_disk(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    with opened_for_writing() as opened:
        told = client.post("/answer", content=CAT.read_bytes()).json()
        for path in ("/retained", "/photograph", "/forms"):
            assert client.get(path, params={"image": told["image"], "form": "chunkwise"}).status_code == 200
        assert client.post("/answer", content=b"no image").status_code == 400
    assert opened == []
    assert list(tmp_path.iterdir()) == []


def test_the_page_and_its_parts_come_from_here_alone(client: TestClient) -> None:
    parts = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript", "further.js": "text/javascript"}
    for path, kind in parts.items():
        reply = client.get(f"/{path}")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
        assert "//" not in reply.text.replace("// ", ""), "an address of somewhere else"
        assert reply.headers["cache-control"] == "no-store"
        assert "default-src 'self'" in reply.headers["content-security-policy"]


def test_examples_can_be_answered(client: TestClient) -> None:
    names = client.get("/model").json()["examples"]
    assert "a cat" in names
    photograph = client.get("/examples/a cat")
    assert photograph.content == CAT.read_bytes()
    assert photograph.headers["content-type"] == "image/png"


def test_the_photograph_comes_back_as_it_was_understood(client: TestClient, pavilion: dict[str, Any]) -> None:
    shown = open_image(client.get("/photograph", params={"image": pavilion["image"]}).content)
    assert shown.size == (640, 427)


def test_a_vir_is_asked_for_its_class_token() -> None:
    sizes = {"depth": 2, "embed_dim": 48, "heads": 3, "img_size": 64, "init_values": 1.0, "retention": "1d"}
    card = Card("vir_tiny_patch16_224", ("day", "night"), 64, model_args=sizes)
    model = card.build().eval()
    with TestClient(create_app(model, card)) as client:
        told = client.post("/answer", content=PAVILION.read_bytes()).json()
        seen = client.get("/retained", params={"image": told["image"]}).json()
        patch = client.get("/retained", params={"image": told["image"], "row": 0, "col": 1}).json()
        costs = [
            client.get("/forms", params={"image": told["image"], "form": form, "size": 128}).json()
            for form in ("parallel", "recurrent", "chunkwise")
        ]
    assert seen["query"] == "class"
    assert len(seen["own"]) == len(seen["heads"]) == 3
    assert patch["own"] is None
    assert patch["mean"][0][2:] == [0.0] * (len(patch["mean"][0]) - 2), "it sees nothing after itself"
    assert all(cost["difference"] < 1e-4 for cost in costs)


def test_what_is_no_classifier_is_refused() -> None:
    model, card = load_model(weights.DEFAULT)
    with pytest.raises(CannotDraw, match="expected a classifier"):
        create_app(model, replace(card, task="segmentation"))
