"""python -m vir: the command vir, as torchrun and accelerate start it."""

from vir.cli import app

app()
