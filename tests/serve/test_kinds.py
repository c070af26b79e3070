"""1D or 2D for the length of one question: right answers of both kinds, and the model as it was afterwards."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the page is an extra: pip install fastapi uvicorn")
from fastapi.testclient import TestClient

from tests.serve.photographs import PAVILION
from vir import weights
from vir.answers import Classes
from vir.checkpoint import load_model
from vir.data.images import open_image
from vir.predict import answer_to
from vir.serve.app import create_app
from vir.serve.explorer import Explorer
from vir.serve.kinds import retention_as
from vir.viz.style import CannotDraw

KINDS = ("1d", "2d")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    model, card = load_model(weights.DEFAULT)
    with TestClient(create_app(model, card), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def image(client: TestClient) -> str:
    return client.post("/answer", content=PAVILION.read_bytes()).json()["image"]


@pytest.fixture(scope="module")
def right() -> dict[str, dict[str, float]]:
    """The answers of two models that were built with one kind each, from the same weights."""
    shares = {}
    model, card = load_model(weights.DEFAULT)
    for kind in KINDS:
        built = replace(card, model_args={**card.model_args, "retention": kind}).build().eval()
        built.load_state_dict(model.state_dict())
        answer = answer_to(built, card, open_image(PAVILION), "photograph", top=10)
        assert isinstance(answer, Classes)
        shares[kind] = dict(zip(answer.names, answer.probabilities, strict=True))
    assert shares["1d"] != pytest.approx(shares["2d"], abs=1e-3)
    return shares


def shares_of(told: dict[str, Any]) -> dict[str, float]:
    return {one["name"]: one["probability"] for one in told["classes"]}


@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_answer_as_a_model_that_was_built_so(
    client: TestClient, image: str, right: dict[str, dict[str, float]], kind: str
) -> None:
    again = client.get("/answer", params={"image": image, "retention": kind}).json()
    sent = client.post("/answer", params={"retention": kind}, content=PAVILION.read_bytes()).json()
    for told in (again, sent):
        assert told["retention"] == kind
        assert shares_of(told) == pytest.approx(right[kind], abs=1e-5)


def test_without_a_word_it_is_the_kind_of_training(
    client: TestClient, image: str, right: dict[str, dict[str, float]]
) -> None:
    told = client.get("/answer", params={"image": image}).json()
    assert told["retention"] == client.get("/model").json()["retention"] == "2d"
    assert shares_of(told) == pytest.approx(right["2d"], abs=1e-5)


@pytest.mark.parametrize("layer", [0, -1])
def test_maps_show_what_the_kind_sees(client: TestClient, image: str, layer: int) -> None:
    """A patch below and left: in 1D it sees the rows above it to their ends, in 2D nothing right of itself."""
    row, col = 2, 1
    asked = {"image": image, "layer": layer, "row": row, "col": col}
    told = {kind: client.get("/retained", params=asked | {"retention": kind}).json() for kind in KINDS}
    assert [told[kind]["retention"] for kind in KINDS] == list(KINDS)
    in_1d, in_2d = (torch.tensor(told[kind]["heads"]) != 0 for kind in KINDS)
    assert in_1d[:, :row].all()
    assert in_1d[:, row, : col + 1].all()
    assert not in_1d[:, row, col + 1 :].any()
    assert in_2d[:, : row + 1, : col + 1].all()
    assert not in_2d[:, :, col + 1 :].any()
    for seen in (in_1d, in_2d):
        assert not seen[:, row + 1 :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_forms_of_either_kind_answer_alike(
    client: TestClient, image: str, right: dict[str, dict[str, float]], kind: str
) -> None:
    best = max(right[kind], key=lambda name: right[kind][name])
    for form in ("parallel", "recurrent", "chunkwise"):
        told = client.get("/forms", params={"image": image, "form": form, "retention": kind}).json()
        assert told["retention"] == kind
        assert told["difference"] < 1e-4
        assert told["answer"] == best
        assert told["probability"] == pytest.approx(right[kind][best], abs=1e-4)


@pytest.mark.parametrize("path", ["/answer", "/retained", "/forms"])
def test_another_kind_there_is_not(client: TestClient, image: str, path: str) -> None:
    reply = client.get(path, params={"image": image, "form": "chunkwise", "retention": "3d"})
    assert reply.status_code == 400
    assert reply.json()["error"] == "retention='3d', expected 1d or 2d."


def test_after_an_error_the_kind_is_that_of_training() -> None:
    model, card = load_model(weights.DEFAULT)
    explorer = Explorer(model, card)
    with pytest.raises(CannotDraw, match="no class token"):  # found out in the last layer, after all others
        explorer.retained(open_image(PAVILION), -1, "class", retention="1d")
    assert {layer.module.retention for layer in explorer.layers} == {"2d"}


def test_what_is_told_of_training_holds_while_somebody_asks_for_the_other_kind() -> None:
    model, card = load_model(weights.DEFAULT)
    explorer = Explorer(model, card)
    with retention_as(model, "1d"):
        assert {layer.module.retention for layer in explorer.layers} == {"1d"}
        assert explorer.described()["retention"] == explorer.kind() == "2d"


def test_twenty_clients_with_either_kind_at_once(
    client: TestClient, image: str, right: dict[str, dict[str, float]]
) -> None:
    def visit(number: int) -> bool:
        kind = KINDS[number % 2]
        told = client.get("/answer", params={"image": image, "retention": kind}).json()
        seen = client.get("/retained", params={"image": image, "row": 2, "col": 1, "retention": kind}).json()
        sees_right_of_itself = any(seen["mean"][0][2:])
        return shares_of(told) == pytest.approx(right[kind], abs=1e-5) and sees_right_of_itself == (kind == "1d")

    with ThreadPoolExecutor(20) as visitors:
        assert all(visitors.map(visit, range(20)))
