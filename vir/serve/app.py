"""The page's server: a FastAPI app made from a loaded model.

FastAPI and not Gradio, because Gradio keeps every upload in a folder on disk. Photographs come as the bare body of a
request for the same reason: a form's parser puts files above a megabyte into temporary files.
"""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import nn

from vir.checkpoint import Card
from vir.data.images import TooManyPixels, UnreadableImage, open_image
from vir.demo.photographs import NoPhotographs, photographs
from vir.predict import LEAST
from vir.serve.explorer import CannotAnswer, Explorer
from vir.serve.further import Further
from vir.serve.kept import Forgotten, Kept
from vir.viz.fading import Query
from vir.viz.style import SIGNED, CannotDraw

MOST_BYTES = 20_000_000  # of a file
MOST_PIXELS = 64_000_000
AT_ONCE = 2  # photographs with their pixels in hand; the others wait as files, which are far smaller
LONGEST = 16  # times as long as wide: both ways of resizing bring the shorter side to a size, however long the other
SHOWN_SIDE = 1024  # pixels of the photograph on the page
COLOURS = 33  # of the scale that the page draws maps with
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "further.js": ("further.js", "text/javascript"),
}
HEADERS = {
    "Cache-Control": "no-store",  # a browser keeps no photograph on disk either
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class TooLarge(ValueError):
    """A file with too many bytes: what was given and what was expected."""


STATUS: dict[type[Exception], int] = {
    CannotAnswer: 400,
    CannotDraw: 400,
    UnreadableImage: 400,
    TooManyPixels: 413,
    Forgotten: 404,
    TooLarge: 413,
}


def create_app(
    model: nn.Module,
    card: Card,
    also: Sequence[Further] = (),
    *,
    most_bytes: int = MOST_BYTES,
    most_pixels: int = MOST_PIXELS,
    names: Sequence[str] = ("*",),
    kept: Kept | None = None,
) -> FastAPI:
    """The app that explores this model, with a tab for each further one; other hosts than `names` are refused."""
    explorer, images = Explorer(model, card), kept or Kept()
    decoding = threading.Semaphore(AT_ONCE)
    app = FastAPI(title="vir serve", docs_url=None, redoc_url=None, openapi_url=None)
    _answer_errors_in_words(app)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(names), www_redirect=False)

    @app.middleware("http")
    async def with_headers(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await go_on(request)
        response.headers.update(HEADERS)
        return response

    for path, (file, kind) in FILES.items():
        app.get(f"/{path}")(_shipped(file, kind))

    @app.get("/model")
    async def described() -> dict[str, Any]:
        scale = (255 * SIGNED(np.linspace(0, 1, COLOURS))).round().astype(int).tolist()
        limits = {"bytes": most_bytes, "pixels": most_pixels}
        return {
            **explorer.described(),
            "also": [one.described() for one in also],
            "colours": scale,
            "limits": limits,
            "examples": list(_examples()),
        }

    @app.get("/examples/{name}")
    async def example(name: str) -> Response:
        """A photograph that comes with scikit-image or scikit-learn."""
        found = _examples()
        if name not in found:
            raise HTTPException(404, f"no example is called {name!r}, expected one of: {', '.join(found) or 'none'}.")
        return Response(found[name], media_type="image/jpeg" if found[name][:2] == b"\xff\xd8" else "image/png")

    def told(image: Image.Image, name: str, size: int | None, retention: str | None) -> dict[str, Any]:
        width, height = explorer.fitted_size(image, size)
        kind = explorer.kind(retention)
        answer = explorer.answer(image, size, kind)
        return {
            "image": name,
            "size": size or card.size,
            "retention": kind,
            "width": image.width,
            "height": image.height,
            "fitted": [width, height],
            "classes": [
                {"name": one, "probability": share}
                for one, share in zip(answer.names, answer.probabilities, strict=True)
            ],
            "grids": [layer.grid(height, width) for layer in explorer.layers],
        }

    @app.post("/answer")
    async def answer(request: Request, size: int | None = None, retention: str | None = None) -> dict[str, Any]:
        """The classes of the photograph in the request's body, and the name under which it is kept for a while."""
        content = await _body(request, most_bytes)

        def work() -> dict[str, Any]:
            with decoding:
                image = _decoded(content, most_pixels)
                return told(image, images.add(image), size, retention)

        return await run_in_threadpool(work)

    @app.get("/answer")
    def answer_again(image: str, size: int | None = None, retention: str | None = None) -> dict[str, Any]:
        """The same of a photograph that is still kept, at another size or with the other kind of retention."""
        return told(images.get(image), image, size, retention)

    @app.get("/photograph")
    def photograph(image: str) -> Response:
        """As it was understood: upright, in RGB."""
        shown = images.get(image).copy()
        shown.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
        file = BytesIO()
        shown.save(file, "JPEG", quality=90)
        return Response(file.getvalue(), media_type="image/jpeg")

    @app.get("/retained")
    def retained(
        image: str,
        layer: int = -1,
        row: int | None = None,
        col: int | None = None,
        size: int | None = None,
        retention: str | None = None,
    ) -> dict[str, Any]:
        """What a patch retains from every patch; without one the class token, or the last patch where there is none."""
        if (row is None) != (col is None):
            raise CannotAnswer(f"row={row} and col={col}, expected both of a patch, or neither.")
        query: Query | None = None if row is None or col is None else (row, col)
        kind = explorer.kind(retention)
        found = explorer.retained(images.get(image), layer, query, size, kind)
        return {
            "layer": found.layer.number,
            "retention": kind,
            "query": found.query,
            "grid": found.weights.shape[1:],
            "heads": found.weights.tolist(),
            "mean": found.mean.tolist(),
            "own": None if found.own is None else found.own.tolist(),
        }

    @app.get("/forms")
    def forms(image: str, form: str, size: int | None = None, retention: str | None = None) -> dict[str, Any]:
        """The answer in another form of retention: what it costs, and how far its logits are from the others."""
        cost = explorer.cost(images.get(image), form, size, retention)
        return {
            "form": cost.form,
            "retention": cost.retention,
            "size": cost.size,
            "milliseconds": 1e3 * cost.seconds,
            "peak_bytes": cost.peak_bytes,
            "difference": cost.difference,
            "answer": cost.answer,
            "probability": cost.probability,
        }

    @app.get("/objects")
    def objects(image: str, model: int, least: float = LEAST) -> dict[str, Any]:
        """What a further model finds in the photograph, by its number among them, and a picture of that."""
        if not 0 <= model < len(also):
            known = f"0 to {len(also) - 1}" if also else "none: start vir serve with --also"
            raise HTTPException(404, f"there is no further model {model}, expected {known}.")
        kept_image = images.get(image)
        with explorer.one_at_a_time:
            return also[model].told(kept_image, least)

    return app


async def _body(request: Request, most_bytes: int) -> bytes:
    """What the request brings, given up as soon as it is known to be too much."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most_bytes:
        raise TooLarge(_too_many_bytes(int(said), most_bytes))
    content = bytearray()
    async for part in _parts(request):
        content += part
        if len(content) > most_bytes:
            raise TooLarge(_too_many_bytes(len(content), most_bytes))
    return bytes(content)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    async for part in request.stream():
        yield part


def _too_many_bytes(count: int, most: int) -> str:
    return f"the file has {count:,} bytes or more, expected at most {most:,}. Make the photograph smaller."


def _decoded(content: bytes, most_pixels: int) -> Image.Image:
    """The photograph, upright and in RGB, if it can be worked with; its pixels are counted before any is read."""
    image = open_image(content, most_pixels=most_pixels)
    if max(image.size) > LONGEST * min(image.size):
        raise CannotAnswer(
            f"the photograph is {image.width:,} x {image.height:,} px, expected it to be at most {LONGEST} times as "
            "long as wide. Cut it."
        )
    return image


def _examples() -> dict[str, bytes]:
    """None where the packages that ship them are not installed: the page does without."""
    try:
        return {name: file.read_bytes() for name, file in photographs().items() if file.is_file()}
    except NoPhotographs:
        return {}


def _shipped(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
    async def shipped() -> Response:
        return Response(files("vir.serve").joinpath(file).read_bytes(), media_type=f"{kind}; charset=utf-8")

    return shipped


def _answer_errors_in_words(app: FastAPI) -> None:
    """Whatever goes wrong, the body is {"error": words}."""

    async def in_words(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, STATUS[type(error)])

    for kind in STATUS:
        app.exception_handler(kind)(in_words)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def of_arguments(request: Request, error: RequestValidationError) -> Response:
        words = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
        return JSONResponse({"error": f"{words}. See what the page sends."}, 400)

    @app.exception_handler(Exception)
    async def of_us(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"the server failed ({type(error).__name__}). Its terminal says more."}, 500)
