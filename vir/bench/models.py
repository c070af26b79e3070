"""Whole models on a GPU: images a second and peak memory against timm's, in inference and in training."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir.bench.gpu import peak_gpu_memory, recorded_later, time_on_gpu
from vir.bench.measure import SURE, in_a_fresh_process, timing
from vir.bench.plots import HOW
from vir.heads.builders import build_backbone, build_detector, build_segmentor
from vir.layers.blocks import ABLATIONS
from vir.layers.patches import Grid
from vir.layers.residual import scaled_linear
from vir.layers.retention import MultiHeadRetention, set_form

Mode = Literal["inference", "autocast", "training"]
How = Literal["eager", "recorded", "compiled", "graphs"]  # a model runs: in words, HOW
Under = Literal["classifier", "backbone", "detector", "segmentor"]
BY_COMPILER: dict[How, str | None] = {"compiled": None, "graphs": "reduce-overhead"}  # its mode
PATIENCE = 0.4  # seconds for the timed calls of a row: slow ones are repeated less often, fast ones more often
LEAST = 3  # timed calls of a row, however long they take, if so many are asked for
MORE_OF_FAST = 20  # times as many calls as asked for, if they fit
WARM_UP = 0.3  # seconds of calls before the timed ones: a GPU that was idle runs slowly at first
LONGEST = 4.0  # seconds of a call, foretold by the row of the smaller batch: longer ones are left out
Size = tuple[int, int]
Makers = dict[str, Callable[[], nn.Module]]  # of models: only one of them is on the GPU at a time
SIZES = {"S": "small", "B": "base", "L": "large"}
HIERARCHICAL = ("hvir_0", "hvir_1", "hvir_2", "hvir_3", "hvir_4")
PEERS = (
    "convnext_tiny",
    "convnext_small",
    "convnext_base",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "resnet50",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
)


@dataclass(frozen=True)
class Row:
    family: str  # of models of one size: they share a plot
    model: str
    size: Size
    batch: int
    mode: Mode
    how: How
    images_per_second: float | None
    spread: float | None
    peak_bytes: int | None
    repeats: int = 0
    missing: str = ""  # why there is no figure: "out of memory" or "too slow"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class WithoutMixing(nn.Module):
    """A retention layer with its token mixing taken out: v goes straight to the projection. No mixer can be faster."""

    def __init__(self, layer: MultiHeadRetention) -> None:
        super().__init__()
        self.qkv, self.proj = layer.qkv, layer.proj

    def forward(self, x: Tensor, grid: Grid, layer_scale: Tensor | None = None) -> Tensor:
        return scaled_linear(self.proj, self.qkv(x).chunk(3, -1)[2], layer_scale)


def ceiling(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, MultiHeadRetention):
                setattr(module, name, WithoutMixing(child))
    return model


def plain_models(kind: str, size: int, forms: bool = True) -> Makers:
    """ViR of one size beside timm's ViT of the same."""
    name = SIZES[kind]
    vir = partial(timm.create_model, f"vir_{name}_patch16_224", img_size=size)
    label = f"{kind}/16"
    in_pytorch = {
        f"ViR-{label} 1D parallel": lambda: in_form(vir(), "parallel"),
        f"ViR-{label} 1D chunkwise": lambda: in_form(vir(), "chunkwise"),
    }
    return {
        f"ViT-{label}": partial(timm.create_model, f"vit_{name}_patch16_224", img_size=size),
        f"ViR-{label} 1D": vir,
        f"ViR-{label} 2D": partial(vir, retention="2d"),
        **(in_pytorch if forms else {}),
        f"ceiling {label}": lambda: ceiling(vir()),
    }


def component_models(kind: str, size: int) -> Makers:
    """A ViR in 1D and the same with one part of it changed, as in the paper's table of components; the base first."""
    vir = partial(timm.create_model, f"vir_{SIZES[kind]}_patch16_224", img_size=size)
    return {"base": vir, **{ablation: partial(vir, ablation=ablation) for ablation in ABLATIONS}}


def hierarchical_models(names: list[str], peers: list[str], size: Size) -> Makers:
    """HViR, each with its ceiling, and timm's models; a ViT at another size than its own is left out."""
    makers: Makers = {}
    for name in names:
        make = partial(timm.create_model, name, retention="2d")
        makers[name] = make
        makers[f"{name} ceiling"] = lambda make=make: ceiling(make())  # type: ignore[misc]
    for name in peers:
        if size == (224, 224) or not name.startswith("vit"):
            options: dict[str, Any] = {"img_size": size} if name.startswith("swin") else {}
            makers[name] = partial(timm.create_model, name, **options)
    return makers


def dense_models(names: list[str], peers: list[str], size: Size, under: Under) -> Makers:
    """Backbones alone, or under the heads of the paper's dense tasks; weights are random, so that nothing is found and
    the heads of masks have no work."""
    build: dict[Under, Callable[..., nn.Module]] = {
        "backbone": build_backbone,
        "detector": lambda name, **args: TakesBatch(
            build_detector(name, 80, min_size=min(size), max_size=max(size), **args)
        ),
        "segmentor": lambda name, **args: build_segmentor(name, 150, **args),
    }
    makers: Makers = {name: partial(build[under], name, retention="2d") for name in names}
    return makers | {name: partial(build[under], name) for name in peers}


class TakesBatch(nn.Module):
    """A detector that takes images of one size as one tensor."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> Any:
        return self.detector(list(images))


def in_form(model: nn.Module, form: Any) -> nn.Module:
    set_form(model, form)
    return model


def compare(
    family: str,
    models: Callable[[], Makers],
    size: Size,
    batches: list[int],
    mode: Mode,
    how: How,
    repeats: int,
    say: Callable[[str], None] = lambda step: None,
    keep: Callable[[Row], None] = lambda row: None,
    warm_up: bool = True,
) -> Iterator[list[Row]]:
    """The rows of all models, batch by batch from the smallest; each is kept as it comes.

    A process's first figures are too low: `warm_up` takes one row that is not used. A compiled model has a process of
    its own, as for those who use it: compiled after others it costs its host more.
    """
    makers = models()
    seconds: dict[str, float] = {}  # of an image
    apart = how in BY_COMPILER
    if warm_up and not apart:
        first, make = next(iter(makers.items()))
        say("warming up")
        _row(Row(family, first, size, min(batches), mode, how, None, None, None), make, 1)
    for batch in sorted(batches):
        rows = []
        for name, make in makers.items():
            say(f"{name}, {size[0]} x {size[1]} px, batch {batch}, {mode}, {HOW[how]}")
            row = Row(family, name, size, batch, mode, how, None, None, None, missing="too slow")
            if batch * seconds.get(name, 0.0) <= LONGEST:
                row = in_a_fresh_process(_row_of, row, models, repeats) if apart else _row(row, make, repeats)
            if row.images_per_second:
                seconds[name] = 1 / row.images_per_second
            rows.append(row)
            keep(row)
        yield rows


def _row_of(nothing: Row, models: Callable[[], Makers], repeats: int) -> Row:
    return _row(nothing, models()[nothing.model], repeats)


def doubts(rows: Iterable[Row]) -> str:
    """What to think of figures that moved while they were measured; nothing where none did."""
    moved = [row for row in rows if row.spread is not None and row.spread > SURE]
    if not moved:
        return ""
    told = f"Spreads above {SURE:.0%}: {', '.join(dict.fromkeys(row.model for row in moved))}."
    if any(row.how == "eager" and row.mode == "inference" for row in moved):
        told += " Where a GPU waits for its host they tell of the host: --how recorded leaves it out."
    return told


def timed_calls(asked: int, seconds: float) -> int:
    """How often a call that takes so long is timed. With few calls of milliseconds, a moment in which the host is slow
    would be the median; and one call alone would tell nothing of its spread."""
    return max(min(asked, LEAST), min(asked * MORE_OF_FAST, int(PATIENCE / seconds)))


def _row(nothing: Row, make: Callable[[], nn.Module], repeats: int) -> Row:
    try:
        call = PREPARE[nothing.mode](make, nothing.size, nothing.batch, nothing.how)
        if nothing.how == "recorded":
            call = recorded_later(call)
        call()
        peak = peak_gpu_memory(call)  # of the second, which records if models run as CUDA graphs: later ones take none
        start = perf_counter()
        call()
        torch.cuda.synchronize()
        time = timing([perf_counter() - start])
        for _ in range(min(100, int(WARM_UP / time.median))):
            call()
        repeats = timed_calls(repeats, time.median)
        if repeats > 1:
            (time,) = time_on_gpu({"": call}, repeats).values()
    except torch.OutOfMemoryError:
        return replace(nothing, missing="out of memory")
    finally:
        call = None  # type: ignore[assignment]
        torch.compiler.reset()
        torch.cuda.empty_cache()
    speed = nothing.batch / time.median
    return replace(
        nothing, images_per_second=speed, spread=time.spread, peak_bytes=peak, repeats=repeats, missing=""
    )  # fmt: skip


def _made_on_gpu(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cuda"):  # random weights are made there much faster
        return make()


def as_asked(model: nn.Module, how: How) -> Any:
    return torch.compile(model, mode=BY_COMPILER[how]) if how in BY_COMPILER else model


def inference(make: Callable[[], nn.Module], size: Size, batch: int, how: How) -> Callable[[], Any]:
    model = _made_on_gpu(make).to(torch.bfloat16).to(memory_format=torch.channels_last).eval()
    images = torch.randn(batch, 3, *size, device="cuda", dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    run = as_asked(model, how)

    @torch.inference_mode()
    def call() -> Tensor:
        return run(images)

    return call


def autocast(make: Callable[[], nn.Module], size: Size, batch: int, how: How) -> Callable[[], Any]:
    """Inference with weights in float32 and products in bf16: boxes need more precision than bf16 has."""
    model = _made_on_gpu(make).to(memory_format=torch.channels_last).eval()
    images = torch.rand(batch, 3, *size, device="cuda").contiguous(memory_format=torch.channels_last)
    run = as_asked(model, how)

    @torch.inference_mode()
    def call() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return run(images)

    return call


def training(make: Callable[[], nn.Module], size: Size, batch: int, how: How) -> Callable[[], Any]:
    """A step of AdamW with bf16 autocast, as training runs."""
    model = _made_on_gpu(make).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, 3, *size, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device="cuda")
    run = as_asked(model, how)

    def call() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return call


PREPARE: dict[Mode, Callable[..., Callable[[], Any]]] = {
    "inference": inference,
    "autocast": autocast,
    "training": training,
}
