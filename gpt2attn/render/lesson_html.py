"""A lesson as one self-contained HTML page: text, tables and pictures, no script and no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from ..lesson import Lesson
from .image import figure_bytes
from .lesson_blocks import Beside, Block, Chapter, Listing, Picture, Prose, Table, spans
from .lesson_words import document
from .look import visible

# The pictures style their parts one by one, so styles within the page must be allowed; nothing may
# be loaded and nothing run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
STYLE = """
:root {
  color-scheme: light dark;
  --paper: light-dark(#fcfcfb, #15171b); --panel: light-dark(#f3f4f3, #1d2026);
  --ink: light-dark(#1c1f24, #e8e9eb); --soft: light-dark(#5b6169, #a2a8b1);
  --line: light-dark(#d9dcdf, #343940); --accent: light-dark(#1f5fbf, #8db8ff);
  font: 17px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
}
body { max-width: 56rem; margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2rem) 4rem;
  background: var(--paper); color: var(--ink); }
h1, h2 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.75rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: 0.75rem 0; overflow-wrap: anywhere; }
a { color: var(--accent); }
nav ol { columns: 18rem; column-gap: 2.5rem; padding-left: 2rem; }
code, pre, .shapes { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.88em; }
code { padding: 0.05em 0.3em; border-radius: 4px; background: var(--panel);
  white-space: break-spaces; unicode-bidi: isolate; }
pre { padding: 0.9rem 1rem; border-radius: 8px; background: var(--panel); overflow-x: auto; }
.wide { overflow-x: auto; margin: 1rem 0; }
.beside { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.beside > .wide { flex: 1 1 25rem; min-width: 0; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: 0.3rem; color: var(--soft); }
th { font-weight: 600; border-bottom: 1px solid var(--line); vertical-align: bottom; }
th, td { padding: 0.2rem 0.6rem; text-align: right; white-space: nowrap; }
.beside :is(th, td) { padding: 0.2rem 0.35rem; }
.text { text-align: left; }
tr.marked > :first-child { box-shadow: inset 3px 0 var(--accent); }
td.share { background: color-mix(in oklab, var(--accent) calc(var(--share) * 45%), transparent); }
figure { margin: 1.25rem 0; padding: 0.5rem; border: 1px solid var(--line); border-radius: 8px;
  background: white; overflow-x: auto; }
figure svg { display: block; min-width: 30rem; max-width: 100%; height: auto; margin: 0 auto; }
.shapes { color: var(--soft); }
.shapes span { white-space: nowrap; }
@page { margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; print-color-adjust: exact; }
  tr, figure, pre { break-inside: avoid; }
  h2, caption { break-after: avoid; }
}
"""


def lesson_html(lesson: Lesson) -> str:
    """The lesson as a page in which everything is inside, pictures as SVG; all text is escaped."""
    written = document(lesson)
    title = _text(written.title)
    contents = "".join(
        f'<li value="{chapter.number}"><a href="#section-{chapter.number}">'
        f"{_text(chapter.title)}</a></li>"
        for chapter in written.chapters
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{title}</h1>",
        *_blocks(written.about, "about"),
        f'</header><nav aria-label="Sections"><ol>{contents}</ol></nav>',
        "<main>",
        *(line for chapter in written.chapters for line in _chapter(chapter)),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _chapter(chapter: Chapter) -> Iterator[str]:
    name = f"section-{chapter.number}"
    yield f'<section id="{name}"><h2>{chapter.number}. {_text(chapter.title)}</h2>'
    yield from _blocks(chapter.blocks, name)
    shapes = ", ".join(f"<span>{_text(shape)}</span>" for shape in chapter.shapes)
    yield f'<p class="shapes">Shapes: {shapes}</p></section>'


def _blocks(blocks: Sequence[Block], name: str) -> Iterator[str]:
    """`name` keeps the ids of one chapter's pictures apart from another's."""
    for number, block in enumerate(blocks):
        if isinstance(block, Prose):
            yield f"<p>{_prose(block.text)}</p>"
        elif isinstance(block, Listing):
            yield f"<pre>{html.escape(block.text)}</pre>"
        elif isinstance(block, Picture):
            yield f"<figure>{_picture(block, f'{name}-{number}')}</figure>"
        elif isinstance(block, Beside):
            yield f'<div class="beside">{_table(block.left)}{_table(block.right)}</div>'
        else:
            yield _table(block)


def _text(text: str) -> str:
    return html.escape(visible(text))


def _prose(text: str) -> str:
    return "".join(
        f"<code>{_text(piece)}</code>" if is_code else _text(piece)
        for is_code, piece in spans(text)
    )


def _table(table: Table) -> str:
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    head = "".join(
        f'<th scope="col"{_left(table, column)}>{_text(cell)}</th>'
        for column, cell in enumerate(table.headers)
    )
    body = "".join(_row(table, number) for number in range(len(table.rows)))
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(table: Table, number: int) -> str:
    row = table.rows[number]
    shares = table.shares[number] if table.shares is not None else []
    unshaded = len(row) - len(shares)
    cells = [f"<td{_left(table, at)}>{_text(cell)}</td>" for at, cell in enumerate(row[:unshaded])]
    cells += [
        f'<td class="share" style="--share: {share:.4f}">{_text(cell)}</td>'
        for cell, share in zip(row[unshaded:], shares, strict=True)
    ]
    mark = ' class="marked"' if number == table.marked else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def _left(table: Table, column: int) -> str:
    return ' class="text"' if column in table.text_columns else ""


def _picture(picture: Picture, name: str) -> str:
    """The picture as an svg element of the page, its ids made the page's own.

    Names lose their namespace, which an HTML parser gives back; the description of the file, with
    its addresses, is dropped, and so is the id of what stands there twice: matplotlib names an
    image by its content.
    """
    root = ElementTree.fromstring(figure_bytes(picture.draw(), "svg"))
    for metadata in root.findall("{*}metadata"):
        root.remove(metadata)
    known: set[str] = set()
    for element in root.iter():
        element.tag = _local(element.tag)
        if (id := element.get("id")) in known:
            del element.attrib["id"]
        elif id is not None:
            known.add(id)
        element.attrib = {
            _local(key): _renamed(_local(key), value, name) for key, value in element.attrib.items()
        }
    root.set("role", "img")
    root.set("aria-label", visible(picture.alt))
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}-{value[1:]}"
    return re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", value)
