"""The figures of a benchmark: where they come from, told and written."""

import json
from pathlib import Path
from typing import Any

from rich.status import Status

from vir.cli.shared import console


def report(rows: list[dict[str, Any]], out: Path | None, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """Say where the figures come from, and write them if asked."""
    origin = origin_of(device, dtype)
    write(rows, origin, out)
    tell(origin, out)
    return origin


def working(text: str = "") -> Status:
    """Drawn rarely: its thread takes turns with the one that is measured."""
    return console.status(text, refresh_per_second=2)


def origin_of(device: str, dtype: str) -> dict[str, Any]:
    from vir.bench.measure import provenance

    return provenance(device, dtype)


def write(rows: list[dict[str, Any]], origin: dict[str, Any], out: Path | None) -> None:
    """Write what is measured so far: a long run that is broken off keeps it."""
    if out is not None:
        out.write_text(json.dumps({"origin": origin, "rows": rows}, indent=1))


def tell(origin: dict[str, Any], out: Path | None, doubts: str = "") -> None:
    console.print(", ".join(f"{key} {value}" for key, value in origin.items() if value))
    if doubts:
        console.print(doubts)
    if out is not None:
        console.print(f"written to {out}")
