"""A page of figures and tables: what each is, how it was made, and why it is not there where it is not."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2733; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.7rem; text-align: left; border-bottom: 1px solid #ccc; }
.table { overflow-x: auto; }
.missing { color: #666; border-left: 4px solid #ccc; padding-left: 1rem; }
"""


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Exhibit:
    """A figure or table of the paper, or one of ours."""

    title: str
    words: str  # what is shown and how it was made, or why nothing is
    pictures: tuple[str, ...] = ()  # files beside the page
    table: Table | None = None

    @property
    def there(self) -> bool:
        return bool(self.pictures) or self.table is not None


def page(title: str, words: str, exhibits: Sequence[Exhibit]) -> str:
    """The page as HTML; nothing of it comes from elsewhere but the pictures beside it."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(words)}</p>",
    ]
    for exhibit in exhibits:
        parts.append(f"<h2>{escape(exhibit.title)}</h2>")
        parts += [f'<a href="{escape(file)}"><img src="{escape(file)}" alt=""></a>' for file in exhibit.pictures]
        if exhibit.table is not None:
            parts.append(_table(exhibit.table))
        parts.append(f"<p{'' if exhibit.there else ' class=missing'}>{escape(exhibit.words)}</p>")
    return "\n".join([*parts, "</body></html>", ""])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="table"><table><tr>{head}</tr>\n{rows}</table></div>'
