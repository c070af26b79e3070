"""Training: from a recipe and a folder of images to checkpoints; it can be killed at any moment and goes on.

Every random number of a step comes from the seed, the epoch and the step, so that no state of a generator needs to be
kept, and a run that was broken ends with the very weights of an unbroken one.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from rich.console import Console
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor

from vir.checkpoint import Card, load_model, save_model
from vir.data.loading import Share
from vir.evaluate.measures import MEASURES
from vir.train.logs import Log, Told
from vir.train.place import beginning, check_start, the_only_one
from vir.train.recipes import Recipe
from vir.train.setup import CannotTrain, Run, check_batch, choose_form, plain, precision
from vir.train.state import FILE, forget, load_state, save_state, whole_weights
from vir.train.tasks import TASKS
from vir.train.tasks.base import Verdict

SHORT = 10.0  # seconds: an epoch that ends sooner after the last saved state is not worth another
CHECKED_STEPS = 20  # between looks at the loss, which make the host wait for the GPU


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
    check_start(run)
    with the_only_one(run.out):
        card = Trainer(recipe, run, console).run()
    gc.collect()  # a recorded step is freed here: a process that is forked later cannot free what is on a GPU
    return card


class Trainer:
    def __init__(self, recipe: Recipe, run: Run, console: Console) -> None:
        self.recipe, self.place = recipe, run
        # Without a GPU, each of several processes would else take itself for the only one.
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.accelerator = Accelerator(
            mixed_precision=precision(recipe), cpu=several and not torch.cuda.is_available()
        )  # fmt: skip
        self.main = self.accelerator.is_main_process
        self.device = self.accelerator.device
        self.share = Share(self.accelerator.process_index, self.accelerator.num_processes, recipe.accumulate)
        self.task = TASKS[recipe.task](recipe, run, self.device, self.share)
        self.steps = check_batch(recipe, len(self.task.sets["train"]), self.share)
        model, self.card = self.task.build()
        choose_form(model, recipe.form)
        self.measure = MEASURES[self.card.task]
        if recipe.checkpointing:
            model.set_grad_checkpointing()
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if self.device.type == "cuda" and not sharded:  # which takes weights in their usual order alone
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
        if recipe.ema and sharded:
            raise CannotTrain("averaged weights cannot be kept of a sharded model (FSDP): turn them off with --ema 0.")
        if recipe.ema:
            self.average = ModelEmaV3(self.accelerator.unwrap_model(self.model), recipe.ema, use_warmup=True)
        whole = self.share.processes == self.share.parts == 1 and not recipe.checkpointing
        if recipe.recorded and self.device.type == "cuda" and whole:
            self._record()
        self.saved = time.monotonic()  # when the state was
        self.kept: Standing | None = None  # what was saved last
        self.began_with, self.start = str(run.data), beginning(run)
        if run.restart and self.main:
            forget(run.out)  # not before all of this run is known to fit
        self.accelerator.wait_for_everyone()
        self.standing = self._resume()
        total = self.epochs * self.steps
        self.told = Told(console, total, silent=not self.main)
        run.out.mkdir(parents=True, exist_ok=True)
        self.log = Log(run.out, self.standing.epoch, self.task.columns) if self.main else None

    def _record(self) -> None:
        """Forward and backward as CUDA graphs; the steps that warm up leave no trace in running averages."""
        before = {name: x.clone() for name, x in self.model.state_dict().items()}
        images = torch.randn(self.task.input_shape, device=self.device).contiguous(memory_format=torch.channels_last)
        # Recording takes another stream than training, and torch would wonder at each run.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with self.task.as_trained(self.model):
            self.model = torch.cuda.make_graphed_callables(self.model.train(), (images,))
        self.model.load_state_dict(before)

    def _resume(self) -> Standing:
        file = self.place.out / FILE
        if not file.exists():
            return Standing()
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        average = self.average.module if self.average else None
        header = load_state(file, self.model, inner, average, self._check_same_run)
        standing = Standing(**header["standing"])
        self.began_with = header["data"]["path"]
        self.kept = replace(standing)
        self.scheduler.step_update(standing.epoch * self.steps + standing.step)
        if (scale := header["scale"]) is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scale)
        return standing

    def _check_same_run(self, stands: dict[str, Any]) -> None:
        mine, theirs = plain(asdict(self.recipe)), stands["recipe"]
        different = [name for name, value in mine.items() if name in theirs and value != theirs[name]]
        start = stands.get("start", self.start)  # not told by earlier versions either
        different += [name for name in start | self.start if start.get(name) != self.start.get(name)]
        different += ["classes"] if list(self.card.classes) != stands["classes"] else []
        different += [] if "data" in stands else ["data"]  # not told by earlier versions
        images, data = len(self.task.sets["train"]), stands.get("data", {})
        what = [f" with other settings ({', '.join(different)})"] * bool(different)
        if data and images != data["images"]:  # told too: settings that suit a set differ with it
            what.append(
                f" on other data: {data['images']:,} images of {data['path']}, where {self.place.data} has {images:,}"
            )
        if what:
            raise CannotTrain(
                f"{self.place.out} holds a run{''.join(what)}. Choose another --out, or start over with --restart."
            )

    def run(self) -> Card:
        try:
            return self._run()
        except KeyboardInterrupt:
            where = f"goes on from epoch {self.kept.epoch}, step {self.kept.step}" if self.kept else "begins anew"
            command = "Without --restart the same command" if self.place.restart and self.kept else "The same command"
            self.told.line(f"stopped. {command} {where}.")
            raise

    def _run(self) -> Card:
        with self.told:
            self._say_what_begins()
            count, unreadable = self.task.prepare()
            self._note_unreadable(unreadable)
            self.steps = check_batch(self.recipe, count, self.share)
            batches = self.task.batches(self.epochs, self.standing.epoch, self.standing.step)
            while self.standing.epoch < self.epochs:
                self._epoch(batches)
        return self._finish()

    def _say_what_begins(self) -> None:
        train_set, val_set = self.task.sets["train"], self.task.sets["val"]
        for remark in (*train_set.remarks, *val_set.remarks):
            self.told.line(f"note: {remark}")
        self.told.line(
            f"{self.card.model}: {len(train_set):,} images to learn from, {len(val_set):,} to judge by, "
            f"{len(self.card.classes)} classes, {self.epochs} epochs of {self.steps} steps, on "
            f"{self.accelerator.num_processes} x {self.device.type}"
        )
        if self.kept:
            self.told.line(
                f"going on from epoch {self.kept.epoch}, step {self.kept.step}, of a run on {self.began_with}"
            )
        if self.standing.epoch == self.epochs:
            self.told.line("it is at its end: nothing is learned anew. Another --out or --restart begins a new run.")

    def _epoch(self, batches: Iterator[Any]) -> None:
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

    def _step(self, batches: Iterator[Any], step: int, sums: Tensor) -> None:
        recipe, parts = self.recipe, self.share.parts
        for part in range(parts):
            batch = next(batches)
            self._note_unreadable(batch.unreadable)
            numbers = recipe.seed, self.standing.epoch, step, part, self.share.rank
            alone = self.accelerator.no_sync(self.model) if part < parts - 1 else nullcontext()
            with alone:
                loss, right = self.task.loss(self.model, batch, numbers)
                self.accelerator.backward(loss / parts)
            sums += torch.stack([loss.detach() * len(batch.images), right.to(loss.dtype)])
        if recipe.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _note_unreadable(self, unreadable: list[str]) -> None:
        if not unreadable:
            return
        file = self.place.out / "unreadable.txt"
        known = file.read_text().splitlines() if file.exists() else []
        names = {line.split(":")[0] for line in known}
        with file.open("a") as out:  # other processes write there too
            for line in unreadable:
                if (name := line.split(":")[0]) not in names:
                    names.add(name)
                    out.write(f"{line}\n")
                    self.told.line(f"left out: {line}")
        images = len(self.task.sets["train"])
        limit = max(1, self.place.most_unreadable * images)
        if len(names) > limit:
            raise CannotTrain(
                f"{len(names)} of {images} images cannot be read, more than the limit of {limit:.0f}. "
                f"They are listed in {file}. Repair them, or raise "
                "--most-unreadable; without them it is another set, which begins anew with --restart."
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
        memory = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if self.device.type == "cuda" else ""
        accuracy = f", top-1 {100 * at.right / at.seen:.1f} %" if self.task.counts_right else ""
        return f"loss {at.loss / at.seen:.3f}{accuracy}, {speed:,.0f} images/s{memory}"

    def _judge(self) -> Verdict:
        model = self.average.module if self.average is not None else self.accelerator.unwrap_model(self.model)
        with self.accelerator.autocast():
            mine = self.task.judge(model)
        return self.task.join(mine)

    def _end_epoch(self, speed: float, seconds: float, due: bool) -> None:
        at, done = self.standing, self.standing.epoch + 1
        judged = done % self.recipe.judged_every == 0 or done == self.epochs
        verdict = self._judge() if judged else None
        metrics = verdict.metrics() if verdict else {}
        score = self.measure.of(metrics) if verdict else -1.0
        better = score > at.best
        row = {
            "epoch": done, "step": done * self.steps, "lr": self.optimizer.param_groups[0]["lr"],
            "loss": at.loss / at.seen, "train_top1": 100 * at.right / at.seen if self.task.counts_right else None,
            **(self.task.row(verdict) if verdict else {}), "images_per_second": speed, "seconds": seconds,
        }  # fmt: skip
        said = f", validation {self.measure.told(metrics)}{' (best)' if better else ''}" if verdict else ""
        self.told.line(f"epoch {done}/{self.epochs}: loss {row['loss']:.3f}{said}, {speed:,.0f} images/s")
        self.standing = Standing(done, best=max(at.best, score))
        if self.log is not None:
            self.log.add(row)
        self._write(metrics, ["best"] * better + ["last"] * (due and judged))
        if due:
            self._save()

    def _write(self, metrics: dict[str, float], names: list[str]) -> None:
        """The model as it was judged, under these names."""
        if not names:
            return
        card = replace(self.card, metrics=metrics | {"epoch": float(self.standing.epoch)})
        weights = self.average.module if self.average is not None else whole_weights(self.model)
        for name in names if self.main else []:
            self._careful(partial(save_model, weights, card, self.place.out / f"{name}.safetensors"))

    def _save(self) -> None:
        stands = {
            "standing": asdict(self.standing), "recipe": plain(asdict(self.recipe)),
            "classes": list(self.card.classes), "start": self.start,
            "data": {"path": self.began_with, "images": len(self.task.sets["train"])},
            "scale": self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None,
        }  # fmt: skip
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        average = self.average.module if self.average is not None else None
        file = self.place.out / FILE
        if self._careful(lambda: save_state(file, self.model, inner, average, stands, write=self.main)):
            self.kept = replace(self.standing)
        self.saved = time.monotonic()

    def _careful(self, write: Callable[[], None]) -> bool:
        """A disk that is full costs a checkpoint, not the run: the one before is still whole."""
        try:
            write()
        except OSError as error:
            self.told.line(f"not saved: {error}. The last checkpoint is kept and training goes on.")
            return False
        return True

    def _finish(self) -> Card:
        if self.log is not None:
            self.log.close()
        self.accelerator.wait_for_everyone()
        _, card = load_model(self.place.out / "best.safetensors")
        self.accelerator.end_training()
        return card
