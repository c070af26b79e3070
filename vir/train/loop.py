"""Training: from a recipe and a folder of images to checkpoints; it can be killed at any moment and goes on.

Every random number of a step comes from the seed, the epoch and the step, so that no state of a generator needs to be
kept, and a run that was broken ends with the very weights of an unbroken one.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from rich.console import Console
from timm.data import create_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor

from vir.checkpoint import Card, load_model, save_model
from vir.data.held import held_batches, hold, on_device
from vir.data.loading import Batch, Examples, Share, judging_batches, seed_from, seeded, training_batches
from vir.data.sets import Split, open_sets
from vir.data.streams import PREFIX, StreamedImages, open_streams, streamed_batches, streamed_judging
from vir.evaluate.classification import Judgement, judge
from vir.train.logs import Log, Told
from vir.train.recipes import Recipe
from vir.train.setup import (
    CannotTrain,
    Run,
    build,
    check_batch,
    device_augment,
    mixing,
    plain,
    precision,
    training_transform,
)
from vir.train.state import FILE, load_state, save_state, whole_weights

SHORT = 10.0  # seconds: an epoch that ends sooner after the last saved state is not worth another
CHECKED_STEPS = 20  # between looks at the loss, which make the host wait for the GPU
DROPOUT, MIXING = 1, 2  # kinds of random numbers in a step


@dataclass
class Standing:
    """Where a run stands; what it needs to go on besides weights and optimizer."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0  # summed over the epoch's images
    right: float = 0.0
    seen: int = 0
    best: float = -1.0


def train(recipe: Recipe, run: Run, console: Console) -> Card:
    """Train to the end, or go on where a run in the same folder stopped; returns the card of the best model."""
    card = Trainer(recipe, run, console).run()
    gc.collect()  # a recorded step is freed here: a process that is forked later cannot free what is on a GPU
    return card


class Trainer:
    def __init__(self, recipe: Recipe, run: Run, console: Console) -> None:
        self.recipe, self.place = recipe, run
        self.accelerator = Accelerator(mixed_precision=precision(recipe))
        self.main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.sets: Any = open_streams(run.data) if run.data.startswith(PREFIX) else open_sets(run.data)
        self.streamed = isinstance(self.sets["train"], StreamedImages)
        self.share = Share(self.accelerator.process_index, self.accelerator.num_processes, recipe.accumulate)
        self.steps = check_batch(recipe, len(self.sets["train"]), self.share)
        model, self.card = build(recipe, run, self.sets["train"])
        if recipe.checkpointing:
            model.set_grad_checkpointing()
        if self.device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)
        optimizer = create_optimizer_v2(
            model, recipe.optimizer, lr=recipe.lr, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler, self.epochs = create_scheduler_v2(
            self.optimizer, "cosine", num_epochs=recipe.epochs, warmup_epochs=recipe.warmup_epochs,
            warmup_lr=recipe.warmup_lr, min_lr=recipe.min_lr, cooldown_epochs=recipe.cooldown_epochs,
            step_on_epochs=False, updates_per_epoch=self.steps,
        )  # fmt: skip
        self.average = None
        if recipe.ema and self.accelerator.distributed_type == DistributedType.FSDP:
            raise CannotTrain("averaged weights cannot be kept of a sharded model (FSDP): turn them off with --ema 0.")
        if recipe.ema:
            self.average = ModelEmaV3(self.accelerator.unwrap_model(self.model), recipe.ema, use_warmup=True)
        whole = self.share.processes == self.share.parts == 1 and not recipe.checkpointing
        if recipe.recorded and self.device.type == "cuda" and whole:
            self._record()
        self.mixing = mixing(recipe, len(self.card.classes))
        self.held: list[Batch] | None = None
        self.saved = time.monotonic()  # when the state was
        self.standing = self._resume()
        total = self.epochs * self.steps
        self.told = Told(console, total, silent=not self.main)
        run.out.mkdir(parents=True, exist_ok=True)
        self.log = Log(run.out, self.standing.epoch) if self.main else None

    def _record(self) -> None:
        """Forward and backward as CUDA graphs; the steps that warm up leave no trace in running averages."""
        before = {name: x.clone() for name, x in self.model.state_dict().items()}
        shape = self.recipe.batch, 3, self.recipe.size, self.recipe.size
        images = torch.randn(shape, device=self.device).contiguous(memory_format=torch.channels_last)
        # Recording takes another stream than training, and torch would wonder at each run.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self.model = torch.cuda.make_graphed_callables(self.model.train(), (images,))
        self.model.load_state_dict(before)

    def _resume(self) -> Standing:
        file = self.place.out / FILE
        if not file.exists():
            return Standing()
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        header = load_state(file, self.model, inner, self.average.module if self.average else None)
        mine, theirs = plain(asdict(self.recipe)), header["recipe"]
        different = [name for name, value in mine.items() if name in theirs and value != theirs[name]]
        different += ["classes"] if list(self.card.classes) != header["classes"] else []
        if different:
            raise CannotTrain(
                f"{self.place.out} holds a run with other settings ({', '.join(different)}). Choose another --out, or "
                "start over with --restart."
            )
        standing = Standing(**header["standing"])
        self.scheduler.step_update(standing.epoch * self.steps + standing.step)
        if (scale := header["scale"]) is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scale)
        return standing

    def run(self) -> Card:
        with self.told:
            self._say_what_begins()
            batches = self._batches()
            while self.standing.epoch < self.epochs:
                self._epoch(batches)
        return self._finish()

    def _batches(self) -> Iterator[Batch]:
        place = self.recipe.batch, self.epochs, self.share
        first = self.standing.epoch, self.standing.step
        if self.streamed:
            transform = training_transform(self.recipe, self.card)
            return streamed_batches(
                self.sets["train"], transform, self.recipe.seed, *place, self.place.workers, *first
            )  # fmt: skip
        if self.recipe.augment == "workers":
            return training_batches(self._examples("train"), *place, self.place.workers, *first)
        held = hold(self.sets["train"], self.recipe.size, self.place.workers, self.device)
        self._note_unreadable(held.unreadable)
        self.steps = check_batch(self.recipe, len(held.targets), self.share)
        return held_batches(held, device_augment(self.recipe, self.card), self.recipe.seed, *place, *first)

    def _examples(self, split: Split) -> Examples:
        if split == "train":
            return Examples(self.sets["train"], training_transform(self.recipe, self.card), self.recipe.seed)
        return Examples(self.sets["val"], create_transform(**self.card.preprocessing()), stand_in=False)

    def _say_what_begins(self) -> None:
        train_set, val_set = self.sets["train"], self.sets["val"]
        for remark in (*train_set.remarks, *val_set.remarks):
            self.told.line(f"note: {remark}")
        self.told.line(
            f"{self.card.model}: {len(train_set):,} images to learn from, {len(val_set):,} to judge by, "
            f"{len(self.card.classes)} classes, {self.epochs} epochs of {self.steps} steps, on "
            f"{self.accelerator.num_processes} x {self.device.type}"
        )
        if self.standing.epoch or self.standing.step:
            self.told.line(f"going on from epoch {self.standing.epoch}, step {self.standing.step}")

    def _epoch(self, batches: Iterator[Batch]) -> None:
        at, began = self.standing, time.monotonic()
        first, sums, due = at.step, torch.zeros(2, device=self.device), False
        self.model.train()
        for step in range(first, self.steps):
            self._step(batches, step, sums)
            at.step = step + 1
            done = at.epoch * self.steps + at.step
            self.scheduler.step_update(done)
            if self.average is not None:
                self.average.update(self.accelerator.unwrap_model(self.model), step=done)
            if at.step % CHECKED_STEPS == 0 or at.step == self.steps:
                ends = at.step == self.steps
                due = time.monotonic() - self.saved > (SHORT if ends else 60 * self.place.save_minutes)
                due = self._take(sums, at.step % CHECKED_STEPS or CHECKED_STEPS, due)
                images = (at.step - first) * self.recipe.batch
                self.told.step(done, f"epoch {at.epoch + 1}", self._state(images / (time.monotonic() - began)))
                if due and not ends:
                    self._save()
        seconds = time.monotonic() - began
        self._end_epoch((self.steps - first) * self.recipe.batch / seconds, seconds, due or at.epoch + 1 == self.epochs)

    def _step(self, batches: Iterator[Batch], step: int, sums: Tensor) -> None:
        recipe, parts = self.recipe, self.share.parts
        for part in range(parts):
            batch = next(batches)
            self._note_unreadable(batch.unreadable)
            numbers = recipe.seed, self.standing.epoch, step, part, self.share.rank
            images, targets = batch.images.to(self.device, non_blocking=True), batch.targets.to(self.device)
            labels = targets
            if self.mixing is not None:
                with seeded(*numbers, MIXING):
                    images, targets = self.mixing(images, targets)
            if images.is_cuda:
                images = images.contiguous(memory_format=torch.channels_last)
            torch.manual_seed(seed_from(*numbers, DROPOUT))
            alone = self.accelerator.no_sync(self.model) if part < parts - 1 else nullcontext()
            with alone:
                logits = self.model(images).float()
                smoothing = 0.0 if self.mixing is not None else recipe.smoothing
                loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
                self.accelerator.backward(loss / parts)
            with torch.no_grad():
                right = (logits.argmax(1) == labels).sum()
                sums += torch.stack([loss.detach() * len(labels), right.to(loss.dtype)])
        if recipe.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _note_unreadable(self, unreadable: list[str]) -> None:
        if not unreadable:
            return
        with (self.place.out / "unreadable.txt").open("a") as out:
            out.writelines(f"{line}\n" for line in unreadable)
        limit = max(1, self.place.most_unreadable * len(self.sets["train"]))
        names = {line.split(":")[0] for line in (self.place.out / "unreadable.txt").read_text().splitlines()}
        if len(names) > limit:
            raise CannotTrain(
                f"{len(names)} of {len(self.sets['train'])} images cannot be read, more than the limit of {limit:.0f}. "
                f"They are listed in {self.place.out / 'unreadable.txt'}. Remove or repair them, or raise "
                "--most-unreadable."
            )

    def _take(self, sums: Tensor, steps: int, due: bool) -> bool:
        """Add what the last steps of all processes gave to the epoch; stop if it is not a number.

        Returns whether a save is due, which the processes must agree upon: the first one's clock counts.
        """
        mine = torch.cat([sums, sums.new_tensor([float(due and self.main)])])
        loss, right, anyone = self.accelerator.reduce(mine, "sum").tolist()
        sums.zero_()
        if not math.isfinite(loss):
            kept = self.place.out / FILE
            raise CannotTrain(
                f"the loss is {loss} in epoch {self.standing.epoch + 1}, step {self.standing.step}. Try a lower --lr, "
                "a longer warm-up, --clip 1, or --precision bf16 instead of fp16. "
                + (f"The last good state is kept in {kept}." if kept.exists() else "No state was saved yet.")
            )
        self.standing.loss += loss
        self.standing.right += right
        self.standing.seen += steps * self.recipe.batch
        return anyone > 0

    def _state(self, speed: float) -> str:
        at = self.standing
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GB" if self.device.type == "cuda" else ""
        accuracy = "" if self.mixing is not None else f", top-1 {100 * at.right / at.seen:.1f} %"
        return f"loss {at.loss / at.seen:.3f}{accuracy}, {speed:,.0f} images/s{memory}"

    def _judge(self) -> Judgement:
        model = self.average.module if self.average is not None else self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            mine = judge(model, self._judged(), len(self.card.classes), self.device)
        if self.share.processes > 1 and not self.streamed:
            sums = torch.tensor([mine.loss, mine.in_five], dtype=torch.float64, device=self.device)
            loss, in_five = self.accelerator.reduce(sums, "sum").tolist()
            counts = self.accelerator.reduce(mine.counts.to(self.device), "sum").cpu()
            mine = replace(mine, counts=counts, loss=loss, in_five=int(in_five))
        return mine

    def _judged(self) -> Iterable[Batch]:
        """The images to judge by; held on the device as well, if those to learn from are."""
        if self.held is not None:
            return self.held
        batch = max(1, self.recipe.batch // (self.share.processes * self.share.parts))
        if self.streamed:
            return streamed_judging(self.sets["val"], create_transform(**self.card.preprocessing()), batch)
        batches = judging_batches(self._examples("val"), batch, self.share, self.place.workers)
        if self.recipe.augment == "device":
            self.held = on_device(list(batches), self.device)
        return self.held or batches

    def _end_epoch(self, speed: float, seconds: float, due: bool) -> None:
        at, done = self.standing, self.standing.epoch + 1
        judged = done % self.recipe.judged_every == 0 or done == self.epochs
        verdict = self._judge() if judged else None
        better = verdict is not None and verdict.top1 > at.best
        row = {
            "epoch": done, "step": done * self.steps, "lr": self.optimizer.param_groups[0]["lr"],
            "loss": at.loss / at.seen, "train_top1": None if self.mixing is not None else 100 * at.right / at.seen,
            "val_loss": verdict and verdict.mean_loss, "val_top1": verdict and verdict.top1,
            "images_per_second": speed, "seconds": seconds,
        }  # fmt: skip
        said = f", validation {verdict.top1:.2f} %{' (best)' if better else ''}" if verdict else ""
        self.told.line(f"epoch {done}/{self.epochs}: loss {row['loss']:.3f}{said}, {speed:,.0f} images/s")
        self.standing = Standing(done, best=max(at.best, verdict.top1 if verdict else -1.0))
        if self.log is not None:
            self.log.add(row)
        self._write(verdict, ["best"] * better + ["last"] * (due and verdict is not None))
        if due:
            self._save()

    def _write(self, verdict: Judgement | None, names: list[str]) -> None:
        """The model as it was judged, under these names."""
        if verdict is None or not names:
            return
        card = replace(self.card, metrics=verdict.metrics() | {"epoch": float(self.standing.epoch)})
        weights = self.average.module if self.average is not None else whole_weights(self.model)
        for name in names if self.main else []:
            self._careful(partial(save_model, weights, card, self.place.out / f"{name}.safetensors"))

    def _save(self) -> None:
        stands = {
            "standing": asdict(self.standing), "recipe": plain(asdict(self.recipe)),
            "classes": list(self.card.classes),
            "scale": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
        }  # fmt: skip
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        average = self.average.module if self.average is not None else None
        file = self.place.out / FILE
        self._careful(lambda: save_state(file, self.model, inner, average, stands, write=self.main))
        self.saved = time.monotonic()

    def _careful(self, write: Callable[[], None]) -> None:
        """A disk that is full costs a checkpoint, not the run: the one before is still whole."""
        try:
            write()
        except OSError as error:
            self.told.line(f"[red]not saved:[/] {error}. The last checkpoint is kept and training goes on.")

    def _finish(self) -> Card:
        if self.log is not None:
            self.log.close()
        self.accelerator.wait_for_everyone()
        _, card = load_model(self.place.out / "best.safetensors")
        self.accelerator.end_training()
        return card
