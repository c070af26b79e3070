"""A trained model to hand on: half the size, its accuracy measured on the very numbers it ships with, and a card."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vir.checkpoint import Card, load_model, save_half
from vir.data.sets import LabelledImages
from vir.evaluate.classification import judge_set
from vir.predict import best_device


def export(
    checkpoint: Path | str,
    images: Callable[[Card], LabelledImages],
    out: Path,
    workers: int = 4,
    command: str = "",
    terms: str = "",
) -> Card:
    """Write the halved weights, their card as JSON and as Markdown; `images` finds those to judge by."""
    save_half(checkpoint, out)
    try:
        model, card = load_model(out, best_device())
        verdict = judge_set(model, card, images(card), workers=workers, device=best_device())
    except BaseException:
        out.unlink(missing_ok=True)
        out.with_suffix(".json").unlink(missing_ok=True)
        raise
    kept = {name: card.metrics[name] for name in ("epoch",) if name in card.metrics}
    # Where the data lay is nobody else's business.
    data = card.data | {"path": Path(card.data.get("path", "")).name, "terms": terms or card.data.get("terms", "")}
    card = replace(card, metrics=verdict.metrics() | kept, data=data)
    save_half(checkpoint, out, card)
    out.with_suffix(".md").write_text(described(card, out.name, command))
    return card


def described(card: Card, file: str, command: str = "") -> str:
    """The card in words, for people."""
    data, origin, recipe = card.data, card.origin, card.recipe
    extra = f", {', '.join(f'{k}={v}' for k, v in card.model_args.items())}" if card.model_args else ""
    lines = [
        f"# {file.removesuffix('.safetensors')}",
        "",
        f"- **Model**: `{card.model}`{extra}, images of {card.size} px, fp16 weights; computed in float32.",
        f"- **Classes** ({len(card.classes)}): {', '.join(card.classes)}.",
        f"- **Accuracy**: top-1 {card.metrics['top1']:.2f} %, top-5 {card.metrics['top5']:.2f} % of "
        f"{int(card.metrics['images']):,} images that it did not learn from; the epoch was chosen by them.",
        f"- **Data**: {data.get('images', 0):,} images to learn from. Terms: {data.get('terms') or 'not stated'}.",
        f"- **Training**: {recipe.get('epochs')} epochs, batch {recipe.get('batch')}, {recipe.get('optimizer')}, rate "
        f"{recipe.get('lr')}, seed {recipe.get('seed')}." + (f" Command: `{command}`." if command else ""),
        f"- **Origin**: {', '.join(f'{key} {value}' for key, value in origin.items() if value)}.",
        "- **Limits**: it knows these classes alone, and calls everything by one of their names.",
    ]
    return "\n".join(lines) + "\n"
