"""Every benchmark of a GPU, one after the other, each in a process of its own: what it needs to be gone through again
on another machine or with other code. Killed, it goes on; what is measured already is left as it is.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vir.bench import plots, tables

SIZES = "--size 224 --size 384 --size 512 --size 768 --size 1024 --size 2048 --size 4096"
BATCHES = "--batch 1 --batch 16 --batch 128"
SIXTEEN = f"models --model B {SIZES} --batch 16 --no-forms --repeats 5"
DENSE = (
    "--model hvir_1 --model hvir_2 --peer convnext_tiny --peer convnext_small "
    "--peer swin_tiny_patch4_window7_224 --peer swin_small_patch4_window7_224"
)
LARGE, SQUARE = "--size 800x1280 --batch 8", "--size 512x512 --batch 32"


class Run(NamedTuple):
    arguments: str  # of vir bench
    shows: str


# B and L with their forms are the paper's two figures of throughput; HViR at 224 px is the column of its table 1.
RUNS = {
    "operators": Run("ops --repeats 11", "retention against attention and flash-linear-attention"),
    "models_B": Run(f"models --model B {SIZES} {BATCHES} --repeats 5", "ViR-B/16 against ViT-B/16, all forms"),
    "models_B_compiled": Run(f"{SIXTEEN} --how compiled", "the same by torch.compile"),
    "models_B_recorded": Run(
        f"models --model B {SIZES} --batch 1 --batch 16 --no-forms --repeats 5 --how recorded",
        "the same as CUDA graphs, few images at a time",
    ),
    "models_B_training": Run(f"{SIXTEEN} --training", "a training step of both"),
    "models_L": Run(f"models --model L {SIZES} {BATCHES} --repeats 5", "ViR-L/16 against ViT-L/16, all forms"),
    "models_S": Run(f"models --model S {SIZES} {BATCHES} --no-forms --repeats 5", "ViR-S/16 against ViT-S/16"),
    "hvir_224": Run("hvir --repeats 5", "HViR-0 to -4 against eight models of timm"),
    "hvir_224_compiled": Run("hvir --repeats 5 --how compiled", "the same by torch.compile"),
    "hvir_224_recorded": Run("hvir --repeats 5 --how recorded", "the same as CUDA graphs"),
    "hvir_512": Run(f"hvir {SQUARE} --repeats 5", "the same at 512 px"),
    "hvir_512_recorded": Run(f"hvir {SQUARE} --repeats 5 --how recorded", "the same as CUDA graphs"),
    "hvir_800x1280": Run(f"hvir {LARGE} --repeats 5", "the same at 800 x 1280"),
    "hvir_800x1280_recorded": Run(f"hvir {LARGE} --repeats 5 --how recorded", "the same as CUDA graphs"),
    "components": Run("components", "the variants of the paper's component study"),
    "dense_backbone_512": Run(f"hvir --under backbone {DENSE} {SQUARE}", "HViR and peers as backbones of four maps"),
    "dense_backbone_800x1280": Run(f"hvir --under backbone {DENSE} {LARGE}", "the same at 800 x 1280"),
    "dense_segmentor_512": Run(f"hvir --under segmentor {DENSE} {SQUARE}", "HViR and peers under UPerNet"),
    "dense_detector_800x1280": Run(f"hvir --under detector {DENSE} {LARGE}", "HViR and peers under Cascade Mask R-CNN"),
    "stream": Run("stream --patience 4", "streams against tiles and whole images"),
}


def command(name: str, folder: Path) -> list[str]:
    figures, picture = _unfinished(folder, name), folder / f"{name}.png"
    return ["bench", *shlex.split(RUNS[name].arguments), "--json", str(figures), "--plot", str(picture)]


def _unfinished(folder: Path, name: str) -> Path:
    """Runs write what they have as it comes: until they end, it has another name."""
    return folder / f"{name}.unfinished.json"


def finished(name: str, folder: Path, origin: dict[str, Any]) -> bool:
    """Whether a run's figures are there, and of this machine and code."""
    try:
        theirs = json.loads((folder / f"{name}.json").read_text())["origin"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(theirs.get(part) == value for part, value in origin.items() if part not in ("date", "dtype"))


def measure(name: str, folder: Path) -> bool:
    """Whether it went well; what it prints is shown as it comes."""
    done = subprocess.run([sys.executable, "-m", "vir", *command(name, folder)]).returncode == 0
    if done:
        _unfinished(folder, name).replace(folder / f"{name}.json")
    return done


def report(names: Iterable[str], folder: Path) -> str:
    """The tables and pictures of what is there, as Markdown beside them."""
    return "\n\n".join(("# Benchmarks", *_sections(names, folder))) + "\n"


def _sections(names: Iterable[str], folder: Path) -> Iterator[str]:
    for name in names:
        file = folder / f"{name}.json"
        if not file.is_file():
            continue
        yield f"## {name}\n\n{RUNS[name].shows}: `vir bench {RUNS[name].arguments}`"
        try:
            rows = tables.figures(file)["rows"]
            if rows and plots.kind(rows[0]).__name__ in tables.MAKES:
                table = tables.told(tables.parser().parse_args([str(file)]))
                yield table.replace(f"({file})", f"({file.name})")  # the report stands beside it
        except tables.NoTable as error:  # a file of another version costs its table, not the others
            yield f"{error} `--only {name} --again` measures it anew."
        if (folder / f"{name}.png").is_file():
            yield f"![{RUNS[name].shows}]({name}.png)"
