"""The pictures of the benchmarks, drawn from rows like those of a run."""

from pathlib import Path

from PIL import Image

from vir.bench import plots

ORIGIN = {"hardware": "some GPU", "dtype": "bf16"}


def looks_drawn(file: Path) -> bool:
    with Image.open(file) as picture:
        return min(picture.size) > 300 and len(set(picture.convert("L").resize((64, 64)).get_flattened_data())) > 10


def test_operators(tmp_path: Path) -> None:
    times = {"attention": 1.8, "fla chunk": 0.4, "fla parallel": 0.9, "kernel 1D": 0.12, "kernel 2D": 0.4}
    rows = [
        {"tokens": n, "batch": b, "limit": 0.09, "forward": times, "backward": times}
        for n, b in ((196, 128), (4096, 16))
    ]
    plots.operators(rows, ORIGIN, tmp_path / "ops.png")
    assert looks_drawn(tmp_path / "ops.png")


def test_models_that_ran_out_of_memory_are_shown(tmp_path: Path) -> None:
    speeds = {"ViT-B/16": [2000.0, 30.0, None], "ViR-B/16 1D": [2100.0, 120.0, 30.0]}
    rows = [
        {
            "family": "B",
            "model": name,
            "size": (px, px),
            "batch": 16,
            "mode": "inference",
            "compiled": False,
            "images_per_second": s,
        }
        for name, some in speeds.items()
        for px, s in zip((224, 1024, 4096), some, strict=True)
    ]
    plots.models(rows, ORIGIN, tmp_path / "models.png")
    assert looks_drawn(tmp_path / "models.png")


def test_hierarchy(tmp_path: Path) -> None:
    rows = [
        {"model": name, "size": (224, 224), "compiled": compiled, "images_per_second": speed}
        for compiled in (False, True)
        for name, speed in (("hvir_1", 16000.0), ("hvir_1 ceiling", 17000.0), ("convnext_tiny", 10000.0))
    ]
    plots.hierarchy(rows, ORIGIN, tmp_path / "hvir.png")
    assert looks_drawn(tmp_path / "hvir.png")
