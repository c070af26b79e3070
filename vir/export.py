"""A trained model to hand on: half the size, judged on the very numbers it ships with, and a card."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vir.checkpoint import Card, check_apart, load_model, save_half
from vir.evaluate.by_task import judge_data
from vir.evaluate.measures import told
from vir.predict import best_device


def export(checkpoint: Path | str, data: str, out: Path, *, command: str = "", terms: str = "", **judging: Any) -> Card:
    """Write the halved weights, their card as JSON and as Markdown; further arguments are those of `judge_data`."""
    check_apart(checkpoint, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=out.parent) as aside:  # what fails leaves an earlier file as it was
        half = Path(aside) / out.name
        save_half(checkpoint, half)
        model, card = load_model(half, best_device())
        verdict = judge_data(model, card, data, device=best_device(), **judging)
    kept = {name: card.metrics[name] for name in ("epoch",) if name in card.metrics}
    # Where the data lay is nobody else's business.
    about = card.data | {"path": Path(card.data.get("path", "")).name, "terms": terms or card.data.get("terms", "")}
    card = replace(card, metrics=verdict.metrics() | kept, data=about)
    save_half(checkpoint, out, card)
    out.with_suffix(".md").write_text(described(card, out.name, command, judging.get("split", "val")))
    return card


def described(card: Card, file: str, command: str = "", split: str = "val") -> str:
    """The card in words, for people; an epoch is chosen by the validation images."""
    data, origin, recipe = card.data, card.origin, card.recipe
    extra = f", {', '.join(f'{k}={v}' for k, v in card.model_args.items())}" if card.model_args else ""
    chosen_by = "them" if split == "val" else "others"
    lines = [
        f"# {file.removesuffix('.safetensors')}",
        "",
        f"- **Model**: `{card.model}`{extra}, {card.task}, at {card.size} px, fp16 weights, computed in float32.",
        f"- **Classes** ({len(card.classes)}): {', '.join(card.classes)}.",
        f"- **Accuracy**: {told(card.task, card.metrics, len(card.classes))} of "
        f"{int(card.metrics['images']):,} images that it did not learn from; the epoch was chosen by {chosen_by}.",
        f"- **Data**: {data.get('images', 0):,} images to learn from. Terms: {data.get('terms') or 'not stated'}.",
        f"- **Training**: {recipe.get('epochs')} epochs, batch {recipe.get('batch')}, {recipe.get('optimizer')}, rate "
        f"{recipe.get('lr')}, seed {recipe.get('seed')}." + (f" Command: `{command}`." if command else ""),
        f"- **Origin**: {', '.join(f'{key} {value}' for key, value in origin.items() if value)}.",
        "- **Limits**: it knows these classes alone, and calls everything by one of their names.",
    ]
    return "\n".join(lines) + "\n"
