"""vir serve: a local page to explore a model."""

from typing import Annotated

import typer

from vir import weights
from vir.cli.shared import console, fail

LOOPBACK = "127.0.0.1"  # nobody but this machine
# Other sites could let their own name point to this machine, and so read the page's answers in a visitor's browser.
NAMES = (LOOPBACK, "localhost")


def serve(
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained classifier, or the name of weights that ship.")
    ] = weights.DEFAULT,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A checkpoint for detection or segmentation, which gets a tab of its own; repeat for several."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is seen by this machine alone.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    megabytes: Annotated[float, typer.Option("--most-megabytes", help="Largest file taken.", min=0.001)] = 20,
    megapixels: Annotated[
        float, typer.Option("--most-megapixels", help="Most pixels of a photograph.", min=0.001)
    ] = 64,
) -> None:
    """Open a local page: drop in a photograph, see the answer, click a patch and see what it retains."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.predict import best_device
    from vir.viz.style import CannotDraw

    try:
        import uvicorn

        from vir.serve.app import create_app
        from vir.serve.further import WrongTask, load_further
    except ImportError as error:
        fail(f"the page needs FastAPI and uvicorn ({error}): run pip install fastapi uvicorn.")
    from vir.serve.listening import CannotListen, address, listening

    try:
        model, card = load_model(checkpoint, best_device())
        names = NAMES if host in NAMES else ("*",)
        most_bytes, most_pixels = int(1e6 * megabytes), int(1e6 * megapixels)
        further = load_further(also or [], best_device())
        app = create_app(model, card, further, most_bytes=most_bytes, most_pixels=most_pixels, names=names)
        socket = listening(host, port)
    except (BadCheckpoint, CannotDraw, CannotListen, WrongTask) as error:
        fail(str(error))
    url = address(socket)
    console.print(
        f"{card.model} on {url} - Ctrl+C ends it. Photographs stay in memory, nothing is written.", highlight=False
    )
    if browser:
        typer.launch(url)  # the socket listens already: the browser waits for the answer
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[socket])
